"""The linter: every fault of a speculative-decoding configuration, with the fix, for an engine of a given
version.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from slipstream.errors import ParameterError
from slipstream.export import lint_others
from slipstream.export.engines import Engine, parse_engine
from slipstream.export.lint_fault import Context, Fault
from slipstream.export.lint_read import Document, read
from slipstream.export.lint_vllm import NAME_RULES
from slipstream.export.lint_vllm_models import MODEL_RULES
from slipstream.export.lint_vllm_values import VALUE_RULES

_ROUNDS = 12


@dataclass(frozen=True)
class Report:
    """faults: what was found. fixed: the repaired text, None unless asked for. left: faults that --fix
    cannot mend.
    """

    engine: Engine
    kind: str
    faults: list[Fault]
    fixed: str | None = None
    left: list[Fault] = field(default_factory=list)

    @property
    def errors(self) -> list[Fault]:
        return [fault for fault in self.faults if fault.severity == "error"]

    def as_dict(self) -> dict[str, Any]:
        return {
            "engine": self.engine.name,
            "version": self.engine.version,
            "kind": self.kind,
            "clean": not self.errors,
            "faults": [fault.as_dict() for fault in self.faults],
        }


def lint(
    text: str,
    engine: str | None = None,
    *,
    target: str | None = None,
    draft: str | None = None,
    repair: bool = False,
) -> Report:
    """Check a configuration given as text.

    engine: `vllm==0.32.0`; None takes what the text names, else the newest vLLM. target: the model it is
    for, where the text does not say. draft: the draft model that repairs may fill in. Folders are looked
    into; names of the hub are not fetched. Raises ParameterError for text that cannot be read.
    """
    plain = text.removeprefix("\ufeff").replace("\r\n", "\n")
    try:
        report = _lint(plain, engine, target, draft, repair)
    except (RecursionError, MemoryError):  # parsers of Python give up with the latter
        raise ParameterError("the configuration is nested too deeply to be read") from None
    if report.fixed == plain:
        return replace(report, fixed=text)
    if report.fixed is not None and "\r\n" in text:
        return replace(report, fixed=report.fixed.replace("\n", "\r\n"))
    return report


def _lint(text: str, engine: str | None, target: str | None, draft: str | None, repair: bool) -> Report:
    document = read(text, parse_engine(engine).name if engine else "vllm")
    named = parse_engine(engine or document.engine or "vllm")
    if document.engine and document.engine.partition("==")[0] != named.name:
        raise ParameterError(
            f"this is a configuration of {document.engine}, not of {named}: give --engine {document.engine},"
            " or none"
        )
    context = Context(named, target or document.target, draft)
    faults = list(_check(document, context))
    if not repair:
        return Report(named, document.kind, faults)
    kind, fixed, left = document.kind, text, faults
    for _ in range(_ROUNDS):
        if not _mend(document, context):
            break
        fixed = document.render()
        document = read(fixed, named.name)  # what was written is what counts
        left = list(_check(document, context))
    return Report(named, kind, faults, fixed, left)


def _mend(document: Document, context: Context) -> bool:
    """Whether there was something to repair."""
    for done in range(_ROUNDS):
        repair = next((f.repair for f in _check(document, context) if f.repair is not None), None)
        if repair is None:
            return done > 0
        repair(document)
        document.damage.clear()
    return True


def _check(document: Document, context: Context) -> Iterator[Fault]:
    for damage in document.damage:
        yield Fault("syntax", damage.where, damage.message, damage.fix, repair=lambda d: d.damage.clear())
    rules = {
        "vllm": (*NAME_RULES, *VALUE_RULES, *MODEL_RULES),
        "sglang": lint_others.SGLANG_RULES,
        "llama.cpp": lint_others.LLAMACPP_RULES,
    }[context.engine.name]
    for rule in rules:
        yield from rule(document, context)
