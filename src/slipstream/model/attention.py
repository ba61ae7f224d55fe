"""Attention over slots, plugged into unmodified transformers models.

transformers lets a named function stand in for every attention layer, and hands it whatever extra
keyword arguments the model was called with (vLLM's transformers backend rests on the same two
facts). Ours receives the step's pack and cache that way: it stores the new keys and values in each
row's slot and lets PyTorch's scaled-dot-product attention run over the slot, row by row. A row's
result therefore depends on that row alone, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface

from slipstream.errors import ModelError
from slipstream.model.cache import SlotCache, round_up
from slipstream.model.pack import ROWS, Pack

NAME = "slipstream"


@dataclass
class AttentionStep:
    """What one forward's attention layers share."""

    pack: Pack
    cache: SlotCache
    masks: dict[tuple[int, int | None], torch.Tensor] = field(default_factory=dict)
    layers_seen: set[int] = field(default_factory=set)

    def mask(self, index: int, rows: int, window: int | None, like: torch.Tensor) -> torch.Tensor:
        """The row's mask; equal for all layers of one window, so built once."""
        key = (index, window)
        if key not in self.masks:
            self.masks[key] = self.pack.spans[index].mask(rows, window, like.dtype, like.device)
        return self.masks[key]


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    slipstream: AttentionStep | None = None,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """query [1, H, T, D], key and value [1, kv_heads, T, D] -> [1, T, H, D]."""
    if slipstream is None:
        raise ModelError(
            "this model is held by a Slipstream engine; close the engine before calling the model itself"
        )
    for name in ("softcap", "s_aux"):
        if unused.get(name) is not None:
            raise ModelError(f"the model's attention uses {name!r}, which Slipstream does not compute")
    step, layer = slipstream, int(module.layer_idx)  # type: ignore[arg-type]
    step.layers_seen.add(layer)
    heads, total = query.shape[1], query.shape[2]
    kv_heads = key.shape[1]
    grouped = query[0].view(kv_heads, heads // kv_heads, total, -1)  # [kv_heads, G, T, D]
    spans = step.pack.spans
    output = query.new_zeros(total, kv_heads, heads // kv_heads, value.shape[-1])  # [T, kv_heads, G, D]
    for index, span in enumerate(spans):
        keys, values = step.cache.write(
            span.slot, layer, key[0, :, span.start : span.end], value[0, :, span.start : span.end], span.width
        )  # [kv_heads, W, D]
        rows = round_up(span.count, ROWS)
        part = grouped[:, :, span.start : span.start + rows]  # [kv_heads, G, rows, D]
        if len(spans) > 1:  # the next row's tokens must not stand in for padding
            part = torch.nn.functional.pad(grouped[:, :, span.start : span.end], (0, 0, 0, rows - span.count))
        result = torch.nn.functional.scaled_dot_product_attention(
            part,
            keys[:, None].expand(-1, part.shape[1], -1, -1),
            values[:, None].expand(-1, part.shape[1], -1, -1),
            attn_mask=step.mask(index, rows, sliding_window, query),
            scale=scaling,
        )  # [kv_heads, G, rows, D]
        output[span.start : span.end] = result[:, :, : span.count].permute(2, 0, 1, 3)
    return output.flatten(1, 2)[None], None


def register() -> None:
    """Make the function known to transformers under `NAME`; doing it again changes nothing."""
    AttentionInterface.register(NAME, slot_attention)
