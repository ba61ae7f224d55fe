"""The linter's rules for vLLM that look into the folders a configuration names: do draft and target fit?"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slipstream.export.engines import NAME_PARTS, OWN_NAMES, model_config, vllm
from slipstream.export.lint_fault import Context, Fault, set_key
from slipstream.export.lint_read import Document
from slipstream.export.lint_vllm import Rule, effective_method, without_weights
from slipstream.export.lint_vllm_values import LENGTH, spec_fault


def fit(document: Document, context: Context) -> Iterator[Fault]:
    """Draft and target fit: vocabulary for a draft model, hidden size for an EAGLE head. Local folders
    only.
    """
    config = document.speculative or {}
    draft, target = model_config(config.get("model")), context.target_config
    if draft is None or target is None:
        return
    method = effective_method(document)
    if method == "draft_model" and draft.get("vocab_size") != target.get("vocab_size"):
        if config.get("use_heterogeneous_vocab"):
            return
        facts = vllm()
        can = facts.has(facts.keys, "use_heterogeneous_vocab", context.engine.version)
        replace, repair = without_weights(document, context)
        yield spec_fault(
            document,
            "vocabulary",
            "model",
            f"the draft has {draft.get('vocab_size')} tokens and the target {target.get('vocab_size')}; vLLM"
            " wants the same number",
            'add "use_heterogeneous_vocab": true (slower; greedy drafts)'
            if can
            else f"use another draft: {replace}",
            repair=set_key("use_heterogeneous_vocab", True) if can else repair,
        )
    elif method in ("eagle", "eagle3", "medusa"):
        kind = "target_hidden_size" if "target_hidden_size" in draft else "hidden_size"
        if kind in draft and draft[kind] != target.get("hidden_size"):
            replace, repair = without_weights(document, context)
            yield spec_fault(
                document,
                "hidden-size",
                "model",
                f"the head is for targets of hidden size {draft[kind]}, this one has"
                f" {target.get('hidden_size')}",
                f"use a head trained for this target: {replace}",
                repair=repair,
            )
        elif method == "eagle3" and "vocab_size" in draft and draft["vocab_size"] != target.get("vocab_size"):
            replace, repair = without_weights(document, context)
            yield spec_fault(
                document,
                "vocabulary",
                "model",
                f"the head is for {draft['vocab_size']} tokens, the target has {target.get('vocab_size')}",
                f"use a head trained for this target: {replace}",
                repair=repair,
            )


def head_config(document: Document, context: Context) -> Iterator[Fault]:
    """A head of another kind than the method; an EAGLE-3 head that leaves to the engine what it taps, which
    may silently give near zero acceptance (vllm PR 50170).
    """
    config = document.speculative or {}
    head = model_config(config.get("model"))
    method = effective_method(document)
    if head is None or method not in ("draft_model", "eagle", "eagle3", "medusa"):
        return
    kind = _kind(head)
    if kind is not None and kind != method:
        yield spec_fault(
            document,
            "head-config",
            "method",
            f"{config['model']} holds heads of the kind {kind}, and the method is {method}",
            f'write "{kind}"',
            severity="warning",
            repair=set_key("method", kind),
        )
    if method != "eagle3":
        return
    name = "eagle_aux_hidden_state_layer_ids"
    if not head.get(name) and not (head.get("eagle_config") or {}).get(name):
        yield spec_fault(
            document,
            "head-config",
            "model",
            f"{config['model']}/config.json names no {name}, so the engine guesses which layers to tap",
            "export it with `slipstream export vllm`, which writes them",
            severity="warning",
        )
    if "speculators_model_type" in head and "norm_before_residual" not in head:
        yield spec_fault(
            document,
            "head-config",
            "model",
            f"{config['model']}/config.json does not say norm_before_residual: vLLM assumes true, its"
            " trainer false",
            "write it out",
            severity="warning",
        )


def _kind(head: dict[str, Any]) -> str | None:
    """What a head's config tells; None: nothing, as EAGLE-1's, which is a plain model's."""
    named = " ".join(map(str, head.get("architectures") or [])).lower()
    if head.get("model_type") == "medusa" or "medusa" in named:
        return "medusa"
    told = head.get("speculators_model_type") == "eagle3" or "eagle3" in named
    return "eagle3" if told else None


def names(document: Document, context: Context) -> Iterator[Fault]:
    """A path that contains eagle-, eagle3, dflash or dspark overrides the method (vllm#47486)."""
    config = document.speculative or {}
    model, method = config.get("model"), config.get("method")
    if not isinstance(model, str) or not isinstance(method, str) or method in OWN_NAMES:
        return
    if method in ("ngram", "ngram_gpu", "suffix", "custom_class"):
        return
    for part, kind in NAME_PARTS:
        if part in model.lower():
            yield spec_fault(
                document,
                "draft-name",
                "model",
                f"the path contains {part!r}, so vLLM takes the draft for {kind!r} whatever the method says",
                f"rename {Path(model).name!r} to something neutral",
            )
            return


def medusa_heads(document: Document, context: Context) -> Iterator[Fault]:
    """vLLM builds as many heads as tokens are asked for, and leaves those random that the checkpoint lacks.

    (MedusaConfig.num_lookahead_tokens, transformers_utils/configs/medusa.py.)
    """
    config = document.speculative or {}
    if effective_method(document) != "medusa":
        return
    own, wanted = model_config(config.get("model")) or {}, config.get(LENGTH)
    heads = own.get("num_heads", own.get("medusa_num_heads"))
    if isinstance(heads, int) and isinstance(wanted, int) and wanted > heads:
        yield spec_fault(
            document,
            "medusa-heads",
            LENGTH,
            f"{wanted} tokens are asked of {heads} heads: vLLM makes up the others",
            f"write {heads}",
            repair=set_key(LENGTH, heads),
        )


MODEL_RULES: tuple[Rule, ...] = (fit, head_config, names, medusa_heads)
