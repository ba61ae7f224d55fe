"""The linter's rules for SGLang and llama.cpp, as far as their sources and help texts were read (see
engines.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from slipstream.export.engines import (
    LLAMACPP_REMOVED,
    LLAMACPP_TYPES,
    SGLANG_ALGORITHMS,
    SGLANG_NEEDS_MODEL,
    closest,
    model_config,
    sglang_options,
)
from slipstream.export.lint_fault import Context, Fault, Repair, drop_arg, rename_arg, set_arg
from slipstream.export.lint_read import Document
from slipstream.export.lint_vllm import Rule

_THREE = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
_ALGORITHM = "speculative_algorithm"
_SGLANG_NAMES = {
    "EAGLE-3": "EAGLE3",
    "EAGLE2": "EAGLE",
    "EAGLE-2": "EAGLE",
    "EAGLE1": "EAGLE",
    "MTP": "NEXTN",
    "DRAFT": "STANDALONE",
    "DRAFT_MODEL": "STANDALONE",
    "N-GRAM": "NGRAM",
    "LOOKAHEAD": "NGRAM",
}
# server_args defaults: (steps, topk, draft tokens), chosen when none of the three is given
_AUTO = (3, 1, 4)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def sglang_names(document: Document, context: Context) -> Iterator[Fault]:
    """Speculative options that are not SGLang's; vLLM's way of giving them."""
    if document.speculative is not None:
        yield Fault(
            "other-engine",
            "--speculative-config",
            "SGLang has no speculative config; that is vLLM's",
            "give --speculative-algorithm and its options; `slipstream config sglang` writes them",
        )
    for name in document.args:
        if name.startswith("speculative") and name not in sglang_options():
            guess = closest(name, sglang_options(), 0.7)
            yield Fault(
                "unknown-argument",
                _flag(name),
                f"SGLang has no option {_flag(name)}",
                f"write {_flag(guess)}" if guess else "leave it out",
                repair=rename_arg(name, guess) if guess else drop_arg(name),
            )


def sglang_algorithm(document: Document, context: Context) -> Iterator[Fault]:
    """An algorithm that SGLang has, and its draft."""
    name = document.args.get(_ALGORITHM)
    given = [k for k in document.args if k in sglang_options() and k != _ALGORITHM]
    if name is None:
        if given:
            yield Fault(
                "method-missing",
                _flag(_ALGORITHM),
                f"{_flag(given[0])} without --speculative-algorithm does nothing",
                "say which: EAGLE, EAGLE3, STANDALONE, NGRAM",
            )
        return
    upper = str(name).upper()
    meant = _SGLANG_NAMES.get(upper) or closest(upper, SGLANG_ALGORITHMS, 0.7)
    if upper not in SGLANG_ALGORITHMS:
        reason = "; it has no Medusa" if "MEDUSA" in upper else ""
        yield Fault(
            "method-name",
            _flag(_ALGORITHM),
            f"SGLang has no algorithm {name}{reason}",
            f"write {meant}" if meant else f"use one of {', '.join(SGLANG_ALGORITHMS)}",
            repair=set_arg(_ALGORITHM, meant) if meant else None,
        )
        upper = meant or upper
    path = document.args.get("speculative_draft_model_path", document.args.get("speculative_draft_model"))
    if upper in SGLANG_NEEDS_MODEL and path is None:
        repair: Repair | None = (
            set_arg("speculative_draft_model_path", context.draft) if context.draft else None
        )
        yield Fault(
            "missing-model",
            "--speculative-draft-model-path",
            f"{upper} needs a draft",
            "name it; --draft MODEL lets --fix write it",
            repair=repair,
        )


def sglang_shape(document: Document, context: Context) -> Iterator[Fault]:
    """Steps, top-k and draft tokens: all three or none; a chain has steps + 1 draft tokens (the root
    counts).
    """
    given = {name: document.args[name] for name in _THREE if name in document.args}
    if str(document.args.get(_ALGORITHM)).upper() in ("NGRAM", "DFLASH", "DSPARK", "UNO"):
        return
    if 0 < len(given) < 3:
        missing = [name for name in _THREE if name not in given]
        steps = given.get(_THREE[0], _AUTO[0])
        topk = given.get(_THREE[1], _AUTO[1])
        tokens = given.get(_THREE[2], steps + 1 if isinstance(steps, int) and topk == 1 else 2 * _AUTO[2])
        whole = dict(zip(_THREE, (steps, topk, tokens), strict=True))

        def repair(changed: Document) -> None:
            changed.args.update(whole)

        yield Fault(
            "three-or-none",
            ", ".join(map(_flag, missing)),
            "steps, top-k and draft tokens are given all three or not at all",
            ", ".join(f"{_flag(k)} {whole[k]}" for k in missing),
            repair=repair,
        )
    elif len(given) == 3 and all(isinstance(v, int) for v in given.values()):
        steps, topk, tokens = given.values()
        if topk == 1 and tokens != steps + 1:
            yield Fault(
                "chain-length",
                _flag(_THREE[2]),
                f"with top-k 1 SGLang sets draft tokens to steps + 1 = {steps + 1}, whatever {tokens} says",
                f"write {steps + 1}",
                "warning",
                set_arg(_THREE[2], steps + 1),
            )
    if document.args.get("speculative_adaptive") and given.get(_THREE[1], 1) != 1:
        yield Fault(
            "combination",
            "--speculative-adaptive",
            "adaptive lengths need top-k 1",
            "write --speculative-eagle-topk 1",
            repair=set_arg(_THREE[1], 1),
        )


def sglang_lossy(document: Document, context: Context) -> Iterator[Fault]:
    """Thresholds below 1 accept what the target would not have said."""
    for name in ("speculative_accept_threshold_single", "speculative_accept_threshold_acc"):
        value = document.args.get(name)
        try:
            lossy = value is not None and float(value) < 1.0
        except (TypeError, ValueError):
            continue
        if lossy:
            yield Fault(
                "lossy",
                _flag(name),
                f"{value} changes the text: 1.0 is exact",
                "leave it out for an unchanged text",
                "warning",
                drop_arg(name),
            )


def sglang_fit(document: Document, context: Context) -> Iterator[Fault]:
    """The draft's sizes against the target's. Local folders only."""
    draft = model_config(document.args.get("speculative_draft_model_path"))
    target = context.target_config
    algorithm = str(document.args.get(_ALGORITHM)).upper()
    if draft is None or target is None:
        return
    if algorithm == "STANDALONE" and draft.get("vocab_size") != target.get("vocab_size"):
        yield Fault(
            "vocabulary",
            "--speculative-draft-model-path",
            f"the draft has {draft.get('vocab_size')} tokens, the target {target.get('vocab_size')}",
            "use a draft of the same family",
        )
    size = draft.get("target_hidden_size", draft.get("hidden_size"))
    if algorithm in ("EAGLE", "EAGLE3") and size not in (None, target.get("hidden_size")):
        yield Fault(
            "hidden-size",
            "--speculative-draft-model-path",
            f"the head is for targets of hidden size {size}, this one has {target.get('hidden_size')}",
            "use a head trained for this target",
        )


SGLANG_RULES: tuple[Rule, ...] = (sglang_names, sglang_algorithm, sglang_shape, sglang_lossy, sglang_fit)


def llamacpp_removed(document: Document, context: Context) -> Iterator[Fault]:
    """Options that llama-server parses only to refuse them."""
    for old, new in LLAMACPP_REMOVED.items():
        name = old.lstrip("-").replace("-", "_")
        if name in document.args:
            yield Fault(
                "removed-argument",
                old,
                f"llama.cpp removed {old}, and ends with an error",
                f"write {new}",
                repair=rename_arg(name, new.lstrip("-").replace("-", "_")),
            )


def llamacpp_type(document: Document, context: Context) -> Iterator[Fault]:
    """--spec-type is a comma-separated list of known types; a draft model needs one that uses it."""
    value = document.args.get("spec_type")
    model = document.args.get("model_draft")
    if value is None:
        if model is not None:
            yield Fault(
                "method-missing",
                "--spec-type",
                "a draft model is given, and no type says how it is used",
                "write --spec-type draft-simple",
                "warning",
                set_arg("spec_type", "draft-simple"),
            )
        return
    words = str(value).split(",")
    for word in words:
        if word not in LLAMACPP_TYPES:
            guess = {
                "draft": "draft-simple",
                "mtp": "draft-mtp",
                "eagle3": "draft-eagle3",
                "ngram": "ngram-mod",
            }.get(word) or closest(word, LLAMACPP_TYPES)
            mended = ",".join(guess if w == word and guess else w for w in words)
            yield Fault(
                "method-name",
                "--spec-type",
                f"there is no type {word!r}",
                f"write {guess}" if guess else f"use some of {', '.join(LLAMACPP_TYPES)}",
                repair=set_arg("spec_type", mended) if guess else None,
            )
    if model is None and {"draft-simple", "draft-eagle3"} & {*words}:
        repair = set_arg("model_draft", context.draft) if context.draft else None
        yield Fault(
            "missing-model",
            "--spec-draft-model",
            f"{value} needs a draft",
            "name the GGUF file; --draft FILE lets --fix write it",
            repair=repair,
        )


LLAMACPP_RULES: tuple[Rule, ...] = (llamacpp_removed, llamacpp_type)
