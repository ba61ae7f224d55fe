"""The linter's rules for vLLM about names: arguments, methods, keys. Each reads the document and yields
what is wrong in it.

Facts come from `engines.vllm()` (extracted from the releases); checks in vLLM's code are quoted by file in
the rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from slipstream.export.engines import (
    NAME_PARTS,
    NEEDS_NO_MODEL,
    Facts,
    closest,
    model_config,
    vllm,
)
from slipstream.export.lint_fault import (
    Context,
    Fault,
    Repair,
    drop_arg,
    drop_key,
    move_arg,
    rename_arg,
    rename_key,
    set_key,
)
from slipstream.export.lint_python import Source
from slipstream.export.lint_read import Document

Rule = Callable[[Document, Context], Iterator[Fault]]

METHOD_NAMES = {
    "draft": "draft_model",
    "draft-model": "draft_model",
    "draftmodel": "draft_model",
    "standalone": "draft_model",
    "speculative": "draft_model",
    "eagle2": "eagle",
    "eagle-2": "eagle",
    "eagle1": "eagle",
    "eagle-3": "eagle3",
    "eagle_3": "eagle3",
    "n-gram": "ngram",
    "n_gram": "ngram",
    "[ngram]": "ngram",
    "prompt_lookup": "ngram",
    "lookup": "ngram",
    "nextn": "mtp",
}
# Arguments of old releases, and the key they became; None: what they did is gone.
OLD_ARGUMENTS = {
    "speculative_model": "model",
    "num_speculative_tokens": "num_speculative_tokens",
    "speculative_max_model_len": "max_model_len",
    "speculative_draft_tensor_parallel_size": "draft_tensor_parallel_size",
    "speculative_model_quantization": "quantization",
    "speculative_disable_by_batch_size": "disable_by_batch_size",
    "speculative_method": "method",
    "ngram_prompt_lookup_max": "prompt_lookup_max",
    "ngram_prompt_lookup_min": "prompt_lookup_min",
    "speculative_disable_mqa_scorer": None,
    "spec_decoding_acceptance_method": None,
    "typical_acceptance_sampler_posterior_threshold": None,
    "typical_acceptance_sampler_posterior_alpha": None,
    "disable_logprobs_during_spec_decoding": None,
    "qlora_adapter_name_or_path": None,
    "use_v2_block_manager": None,
    "num_lookahead_slots": None,
}
SHORTCUTS = {"spec_method": "method", "spec_model": "model", "spec_tokens": "num_speculative_tokens"}
DEFAULT_LENGTH = 3


def _facts(context: Context) -> tuple[Facts, str]:
    return vllm(), context.engine.version


def old_arguments(document: Document, context: Context) -> Iterator[Fault]:
    """Arguments that the speculative config replaced (gone since 0.8.5 at the latest)."""
    facts, version = _facts(context)
    for name, key in OLD_ARGUMENTS.items():
        if name not in document.args or facts.has(facts.args, name, version):
            continue
        fix = f"give it as {key!r} of the speculative config" if key else "leave it out: nothing replaces it"
        yield Fault(
            "removed-argument",
            _option(document, name),
            f"{context.engine} has no argument {name}",
            fix,
            repair=move_arg(name, key),
        )


def shortcuts(document: Document, context: Context) -> Iterator[Fault]:
    """A shortcut and the same key exclude each other (create_speculative_config, engine/arg_utils.py)."""
    facts, version = _facts(context)
    for name, key in SHORTCUTS.items():
        if name not in document.args:
            continue
        if not facts.has(facts.args, name, version):
            when = facts.when(facts.args, name)
            yield Fault(
                "unknown-argument",
                _option(document, name),
                f"{context.engine} has no argument {name} (it is in {when})",
                f"give it as {key!r} of the speculative config",
                repair=move_arg(name, key),
            )
        elif key in (document.speculative or {}):
            yield Fault(
                "given-twice",
                _option(document, name),
                f"{key} is given by {name} and in the speculative config, which exclude each other",
                f"keep the one in {document.place}",
                repair=drop_arg(name),
            )


def unknown_arguments(document: Document, context: Context) -> Iterator[Fault]:
    """Options that this version's parser does not know."""
    facts, version = _facts(context)
    known = facts.names(facts.args, version)
    for name in document.args:
        base = name.partition(".")[0]
        bare = base.removeprefix("no_")
        if base in OLD_ARGUMENTS or base in SHORTCUTS or base in ("model", "help") or {base, bare} & {*known}:
            continue
        guess = closest(base, known, 0.8)
        when = facts.when(facts.args, base)
        reason = f"(it is in {when})" if when else "in any version that was read"
        yield Fault(
            "unknown-argument",
            _option(document, name),
            f"{context.engine} has no argument {base} {reason}",
            f"write {guess}" if guess else "leave it out, or check the engine's version",
            repair=rename_arg(name, guess) if guess else None,
        )


def method_name(document: Document, context: Context) -> Iterator[Fault]:
    """A method that no release, or not this one, has; or none at all."""
    facts, version = _facts(context)
    config = document.speculative
    if config is None:
        return
    method, model = config.get("method"), config.get("model")
    if method is None:
        if model in ("ngram", "[ngram]") or "spec_method" in document.args or not config:
            return
        if not isinstance(model, str):
            return
        guessed = _named_like(model) or "draft_model"
        yield Fault(
            "method-missing",
            f"{document.place}: method",
            f"no method is given, so vLLM guesses it from the draft's name ({guessed})",
            f'write "method": "{guessed}"',
            "warning",
            set_key("method", guessed),
        )
        return
    if isinstance(method, Source):
        return
    if not isinstance(method, str):
        yield Fault(
            "method-name",
            f"{document.place}: method",
            f"a method is a name in quotes, not {method!r}",
            f"use one of {', '.join(facts.names(facts.methods, version)[:8])}, …",
        )
        return
    if method in facts.names(facts.methods, version):
        yield from _deprecated(document, method)
        return
    meant = _meant(method, facts)
    if method in facts.methods:
        when = facts.when(facts.methods, method)
        replace, repair = without_weights(document, context)
        note = " (draft_model is in its list of names, and refused)" if method == "draft_model" else ""
        yield Fault(
            "method-version",
            f"{document.place}: method",
            f"{context.engine} has no method {method!r}{note}; it is in {when}",
            f"use one of those versions, or another drafter (an EAGLE head or a draft model): {replace}",
            repair=repair,
        )
    else:
        yield Fault(
            "method-name",
            f"{document.place}: method",
            f"there is no method {method!r}",
            f'write "{meant}"'
            if meant
            else f"use one of {', '.join(facts.names(facts.methods, version)[:8])}, …",
            repair=set_key("method", meant) if meant else None,
        )


def _deprecated(document: Document, method: str) -> Iterator[Fault]:
    if method.endswith("_mtp") and method != "mtp":
        yield Fault(
            "deprecated-method",
            f"{document.place}: method",
            f"{method!r} is deprecated and means mtp",
            'write "mtp"',
            "warning",
            set_key("method", "mtp"),
        )


def keys(document: Document, context: Context) -> Iterator[Fault]:
    """Keys that this version's SpeculativeConfig forbids (pydantic extra="forbid", config/utils.py)."""
    facts, version = _facts(context)
    config = document.speculative or {}
    known = facts.names(facts.keys, version)
    for name, value in config.items():
        where = f"{document.place}: {name}"
        if name == "tensor_parallel_size":
            yield Fault(
                "draft-parallelism",
                where,
                "the draft's parallelism is draft_tensor_parallel_size; tensor_parallel_size is refused here",
                "rename it",
                repair=rename_key(name, "draft_tensor_parallel_size"),
            )
        elif name in known:
            continue
        elif name == "disable_by_batch_size":
            yield _batch_switch(document, context, value)
        elif name in OLD_ARGUMENTS and OLD_ARGUMENTS[name] in known:
            new = str(OLD_ARGUMENTS[name])
            yield Fault(
                "removed-key", where, f"it is called {new} here", "rename it", repair=rename_key(name, new)
            )
        elif name in facts.keys:
            when = facts.when(facts.keys, name)
            yield Fault(
                "removed-key",
                where,
                f"{context.engine} has no key {name}; it is in {when}",
                _instead(name),
                repair=drop_key(name),
            )
        else:
            guess = closest(name, known, 0.75)
            guess = None if guess in config else guess
            yield Fault(
                "unknown-key",
                where,
                f"{context.engine} forbids keys that it does not know, and does not know {name}",
                f"write {guess}" if guess else "leave it out",
                repair=rename_key(name, guess) if guess else drop_key(name),
            )


def _instead(name: str) -> str:
    return {
        "speculative_token_tree": "leave it out: vLLM serves chains",
        "num_speculative_tokens_per_batch_size": "leave it out: the length is fixed here",
        "use_heterogeneous_vocab": "leave it out, and use a draft with the target's vocabulary",
        "synthetic_acceptance_rate": "give synthetic_acceptance_rates, one rate a position",
    }.get(name, "leave it out")


def _batch_switch(document: Document, context: Context, value: Any) -> Fault:
    """disable_by_batch_size, in the words of versions that have it no more."""
    facts, version = _facts(context)
    config = document.speculative or {}
    length = config.get("num_speculative_tokens", DEFAULT_LENGTH)
    table = "num_speculative_tokens_per_batch_size"
    can = facts.has(facts.keys, table, version) and isinstance(value, int) and value > 0
    schedule = (
        [[1, value, length], [value + 1, value + 1, 0]] if can else None
    )  # it switched off above the value

    def repair(changed: Document) -> None:
        if changed.speculative is not None:
            changed.speculative.pop("disable_by_batch_size", None)
            if schedule is not None:
                changed.speculative.setdefault(table, schedule)

    return Fault(
        "removed-key",
        f"{document.place}: disable_by_batch_size",
        f"{context.engine} has no key disable_by_batch_size;"
        f" it is in {facts.when(facts.keys, 'disable_by_batch_size')}",
        f'write "{table}": {schedule}'
        if schedule
        else f"leave it out: {table} is in {facts.when(facts.keys, table)}",
        repair=repair,
    )


def _meant(method: str, facts: Facts) -> str | None:
    text = method.lower()
    return METHOD_NAMES.get(text) or closest(text, facts.methods, 0.75)


def effective_method(document: Document) -> str | None:
    """The method that is meant: as written, or as its wrong name shows, or as vLLM guesses it."""
    config = document.speculative or {}
    method = config.get("method", document.args.get("spec_method"))
    if method is None:
        model = config.get("model", document.args.get("spec_model"))
        if model in ("ngram", "[ngram]"):
            return "ngram"
        return (_named_like(model) or "draft_model") if isinstance(model, str) else None
    if not isinstance(method, str):
        return None
    return method if method in vllm().methods else _meant(method, vllm())


def _named_like(model: str) -> str | None:
    return next((method for part, method in NAME_PARTS if part in model.lower()), None)


def without_weights(document: Document, context: Context) -> tuple[str, Repair]:
    """What --fix does where the draft cannot be used: the one that was named, else n-grams, which need
    none.
    """
    config = document.speculative or {}
    length = config.get("num_speculative_tokens")

    if context.draft is not None:
        draft = context.draft
        method = _named_like(draft) or "draft_model"
        kind = model_config(draft) or {}
        if any("eagle3" in str(a).lower() for a in kind.get("architectures") or []):
            method = "eagle3"

        def use_draft(changed: Document) -> None:
            changed.speculative = {**(changed.speculative or {}), "method": method, "model": draft}

        return f"--fix writes --draft {draft}", use_draft

    def use_ngram(changed: Document) -> None:
        changed.speculative = {
            "method": "ngram",
            "num_speculative_tokens": length if isinstance(length, int) and length > 0 else DEFAULT_LENGTH,
            "prompt_lookup_min": 2,
            "prompt_lookup_max": 4,
        }
        for name in SHORTCUTS:
            changed.args.pop(name, None)

    return "--fix writes n-gram drafting, which needs no weights; --draft MODEL names another", use_ngram


def _option(document: Document, name: str) -> str:
    return "--" + name.replace("_", "-") if document.kind in ("command", "manifest") else name


def missing_model(document: Document, context: Context) -> Iterator[Fault]:
    """ "num_speculative_tokens was provided but without speculative model" (config/speculative.py)."""
    config = document.speculative
    if (
        not config
        or config.get("model") not in (None, "")
        or "spec_model" in document.args
        or "speculative_model" in document.args
    ):
        return
    method = effective_method(document)
    if method is None or method in NEEDS_NO_MODEL or method.endswith("_mtp"):
        return
    replace, repair = without_weights(document, context)
    if context.draft is not None:
        repair = set_key("model", context.draft)
    yield Fault(
        "missing-model",
        f"{document.place}: model",
        f"method {method!r} needs a draft, and no model is given",
        f'add "model": the folder or hub name of the draft; {replace}',
        repair=repair,
    )


NAME_RULES: tuple[Rule, ...] = (
    old_arguments,
    shortcuts,
    unknown_arguments,
    method_name,
    keys,
    missing_model,
)
