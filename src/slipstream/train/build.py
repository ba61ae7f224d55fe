"""New drafters for a target: shapes that fit it, and weights to begin with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch

from slipstream.errors import CapacityError, ParameterError
from slipstream.heads.eagle import EagleConfig, EagleHead
from slipstream.heads.medusa import MedusaConfig, MedusaHeads
from slipstream.model import memory
from slipstream.model.parts import ModelParts
from slipstream.model.progress import size
from slipstream.model.rope import rope_parameters
from slipstream.train.samples import Batch


def answer_counts(batches: Iterable[Batch], vocab_size: int) -> torch.Tensor:
    """How often each token comes in the answers, int64 [V]."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for batch in batches:
        counts += torch.bincount(batch.tokens[batch.loss].cpu(), minlength=vocab_size)[:vocab_size]
    return counts


def ranked_tokens(counts: torch.Tensor) -> torch.Tensor:
    """All ids [V], the commonest first; ties and what never came: the smaller ids first."""
    # stable, so that equal counts keep the order of the ids
    return counts.sort(descending=True, stable=True).indices


def frequent_tokens(batches: Iterable[Batch], size: int, vocab_size: int) -> torch.Tensor:
    """The `size` commonest answer tokens, ascending; ties as `ranked_tokens`."""
    return ranked_tokens(answer_counts(batches, vocab_size))[:size].sort().values


def coverage(batches: Iterable[Batch], ids: torch.Tensor) -> float:
    """The share of answer tokens that are among the ids."""
    inside = total = 0
    for batch in batches:
        answers = batch.tokens[batch.loss].cpu()
        inside += int(torch.isin(answers, ids).sum())
        total += len(answers)
    return inside / total if total else 0.0


def _require_memory(parameters: int) -> None:
    """CapacityError unless so many float32 weights can be made here at all."""
    needed, free = 4 * parameters, memory.available()
    if needed > free:
        raise CapacityError(
            f"a drafter of {parameters:,} parameters needs {size(needed)} of memory and {size(free)} are"
            " free: give it fewer heads or layers, a smaller --mlp or a smaller --draft-vocab"
        )


def new_medusa(
    parts: ModelParts,
    *,
    heads: int = 4,
    layers: int = 1,
    output: Literal["own", "target"] = "own",
    ids: torch.Tensor | None = None,
) -> MedusaHeads:
    """Heads that say at first what the target's LM head says; ids: the draft vocabulary."""
    if heads < 1 or layers < 1:
        raise ParameterError(f"Medusa needs at least one head of one layer, not {heads} of {layers}")
    draft = None if ids is None else len(ids)
    config = MedusaConfig(parts.hidden_size, parts.vocab_size, heads, layers, output, draft)
    outputs = (draft or parts.vocab_size) if output == "own" else 0
    _require_memory(heads * parts.hidden_size * (layers * (parts.hidden_size + 1) + outputs))
    made = MedusaHeads(config)
    if ids is not None and made.vocab.reduced:
        made.vocab.set_ids(ids)
    return made.start(_lm_weight(parts))


def aux_layers(num_layers: int) -> tuple[int, ...]:
    """EAGLE-3 taps the streams that enter layers 2, L // 2 and L - 3 (arXiv 2503.01840); of few layers three
    evenly spaced ones, the last included."""
    usual = (2, num_layers // 2, num_layers - 3)
    if usual[0] < usual[1] < usual[2]:
        return usual
    return tuple(sorted({max(1, num_layers // 3), max(1, 2 * num_layers // 3), num_layers}))


def new_eagle(
    parts: ModelParts,
    target_config: Mapping[str, Any],
    version: Literal[1, 3] = 3,
    *,
    ids: torch.Tensor | None = None,
    layers: int = 1,
    intermediate_size: int | None = None,
    taps: tuple[int, ...] | None = None,
    seed: int = 0,
) -> EagleHead:
    """A head with the target's attention shape and rotary positions. target_config: its config.json.

    EAGLE-3 starts with the target's rows in its LM head, and passes the deepest tapped stream on as it is.
    intermediate_size: of the MLP, the target's if None.
    """
    heads = int(target_config["num_attention_heads"])
    config = EagleConfig(
        version=version,
        hidden_size=parts.hidden_size,
        intermediate_size=intermediate_size or int(target_config["intermediate_size"]),
        num_attention_heads=heads,
        num_key_value_heads=int(target_config.get("num_key_value_heads") or heads),
        head_dim=int(target_config.get("head_dim") or parts.hidden_size // heads),
        vocab_size=parts.vocab_size,
        target_hidden_size=parts.hidden_size,
        num_layers=layers,
        draft_vocab_size=None if ids is None else len(ids),
        aux_layers=(taps or aux_layers(parts.num_layers)) if version == 3 else (),
        rms_norm_eps=float(target_config.get("rms_norm_eps", 1e-6)),
        context=int(target_config.get("max_position_embeddings", 2048)),
        rope=rope_parameters(target_config),
    )
    if min(config.aux_layers, default=0) < 0 or max(config.aux_layers, default=0) > parts.num_layers:
        raise ParameterError(
            f"the target has {parts.num_layers} layers, it cannot be tapped at {config.aux_layers}"
        )
    if list(config.aux_layers) != sorted(set(config.aux_layers)):  # other engines join them in this order
        raise ParameterError(f"the tapped layers must ascend, each once, not {config.aux_layers}")
    width = config.hidden_size
    attention = 2 * width * config.head_dim * (heads + config.num_key_value_heads)
    outputs = (config.draft_vocab_size or config.vocab_size) if version == 3 else 0
    _require_memory(layers * (attention + 3 * width * config.intermediate_size) + outputs * width)
    head = EagleHead(config)
    if ids is not None and head.vocab.reduced:
        head.vocab.set_ids(ids)
    head.start(seed)
    if version == 3:
        with torch.no_grad():
            head.body["lm_head"].weight.copy_(_lm_weight(parts)[head.vocab.target_ids()])  # type: ignore[union-attr,operator]
            _pass_deepest_on(head)
    head.target = parts
    return head


def _pass_deepest_on(head: EagleHead) -> None:
    """Start the fusing layer as the identity on its deepest tap and little of the others: what noise alone
    makes of the streams has to be unlearned first, and with little text that is most of the training."""
    config, size = head.config, head.config.hidden_size
    fc: Any = head.body["fc"].weight
    fc.mul_(0.1)
    if config.target_hidden_size == size:
        at = config.aux_layers.index(max(config.aux_layers)) * size
        fc[:, at : at + size] += torch.eye(size)


def _lm_weight(parts: ModelParts) -> torch.Tensor:
    """The target's LM head [V, H], packed or not."""
    return parts.lm_head_rows(torch.arange(parts.vocab_size)).weight.float().cpu()
