"""What a linter's rule sees and says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from slipstream.export.engines import Engine, model_config
from slipstream.export.lint_read import Document

Repair = Callable[[Document], None]


@dataclass(frozen=True)
class Fault:
    """rule: its name in the documentation. where: the option or key. severity: an engine refuses or
    silently ignores an error; a warning is taken, but rarely meant. repair: None where a person must
    decide.
    """

    rule: str
    where: str
    message: str
    fix: str
    severity: Literal["error", "warning"] = "error"
    repair: Repair | None = None

    def as_dict(self) -> dict[str, Any]:
        return {
            "rule": self.rule,
            "where": self.where,
            "message": self.message,
            "fix": self.fix,
            "severity": self.severity,
            "fixable": self.repair is not None,
        }


@dataclass(frozen=True)
class Context:
    """The engine, the target model and the draft that a repair may fill in, as far as they are known."""

    engine: Engine
    target: str | None
    draft: str | None

    @cached_property
    def target_config(self) -> dict[str, Any] | None:
        return model_config(self.target)


def set_key(name: str, value: Any) -> Repair:
    """A repair: this key of the speculative config gets this value."""

    def repair(document: Document) -> None:
        document.speculative = {} if document.speculative is None else document.speculative
        document.speculative[name] = value

    return repair


def drop_key(*names: str) -> Repair:
    def repair(document: Document) -> None:
        for name in names:
            if document.speculative is not None:
                document.speculative.pop(name, None)

    return repair


def rename_key(old: str, new: str) -> Repair:
    def repair(document: Document) -> None:
        if document.speculative is not None and old in document.speculative:
            value = document.speculative.pop(old)
            document.speculative.setdefault(new, value)

    return repair


def set_arg(name: str, value: Any) -> Repair:
    def repair(document: Document) -> None:
        document.args[name] = value

    return repair


def drop_arg(name: str) -> Repair:
    def repair(document: Document) -> None:
        document.args.pop(name, None)

    return repair


def move_arg(old: str, key: str | None) -> Repair:
    """A repair: the argument becomes a key of the speculative config; without a key it goes."""

    def repair(document: Document) -> None:
        value = document.args.pop(old, None)
        if key is not None and value is not None:
            document.speculative = {} if document.speculative is None else document.speculative
            document.speculative.setdefault(key, value)

    return repair


def rename_arg(old: str, new: str) -> Repair:
    def repair(document: Document) -> None:
        value = document.args.pop(old, None)
        if new not in document.args:
            document.args[new] = value

    return repair
