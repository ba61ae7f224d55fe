"""Attention over slots, plugged into unmodified transformers models.

transformers lets a named function stand in for every attention layer, and hands it whatever extra
keyword arguments the model was called with (vLLM's transformers backend rests on the same two
facts). Ours receives the step's pack and cache that way: it stores the new keys and values in each
row's slot and lets PyTorch's scaled-dot-product attention run over the slot, row by row. A row's
result therefore depends on that row alone, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface

from slipstream.errors import ModelError
from slipstream.model.cache import SlotCache, round_up
from slipstream.model.pack import Pack

NAME = "slipstream"
# Queries come in multiples of so many lines: with others PyTorch's kernel may add up in another order.
LINES = 8
# Rows of up to so many tokens let the query heads that share a key head be more lines of one matrix: the
# keys are read once for all of them, and one token is no longer padded to `LINES`. A longer row's mask would
# grow too large. Both ways give the same bits (tests/model/test_attention.py).
FOLDED = 64


class Step(Protocol):
    """What one forward's attention layers share, and how they attend."""

    layers_seen: set[int]

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
        window: int | None,
    ) -> torch.Tensor:
        """Store key and value [1, kv_heads, T, D]; query [1, H, T, D] -> [1, T, H, D]."""


@dataclass
class AttentionStep:
    """A `Step` over any pack, row by row."""

    pack: Pack
    cache: SlotCache
    masks: dict[tuple[int, int, int | None], torch.Tensor] = field(default_factory=dict)
    layers_seen: set[int] = field(default_factory=set)

    def mask(self, index: int, group: int, window: int | None, like: torch.Tensor) -> torch.Tensor:
        """[1, 1, M, W]: each line of the row's mask `group` times; M is a multiple of `LINES`.

        Equal for all layers of one window, so built once.
        """
        key = (index, group, window)
        if key not in self.masks:
            span = self.pack.spans[index]
            lines = span.mask(round_up(span.count, LINES), window, like.dtype, like.device)
            if group > 1:
                lines = lines.repeat_interleave(group, 2)[:, :, : round_up(span.count * group, LINES)]
            self.masks[key] = lines
        return self.masks[key]

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
        window: int | None,
    ) -> torch.Tensor:
        kv_heads, total = key.shape[1], query.shape[2]
        group = query.shape[1] // kv_heads
        grouped = query[0].view(kv_heads, group, total, -1)  # [kv_heads, G, T, D]
        folded = query.new_zeros(
            kv_heads, total * group + LINES, query.shape[-1]
        )  # the last rows are padding
        folded[:, : total * group].view(kv_heads, total, group, -1).copy_(grouped.transpose(1, 2))
        output = query.new_zeros(kv_heads, total, group, value.shape[-1])
        for index, span in enumerate(self.pack.spans):
            keys, values = self.cache.write(
                span.slot,
                layer,
                key[0, :, span.start : span.end],
                value[0, :, span.start : span.end],
                span.width,
            )  # [kv_heads, W, D]
            if span.count <= FOLDED:
                begin, lines = span.start * group, span.count * group
                result = scaled_dot_product_attention(
                    folded[None, :, begin : begin + round_up(lines, LINES)],
                    keys[None],
                    values[None],
                    attn_mask=self.mask(index, group, window, query),
                    scale=scaling,
                )[0, :, :lines].view(kv_heads, span.count, group, -1)  # [kv_heads, count, G, D]
            else:
                part = pad(grouped[:, :, span.start : span.end], (0, 0, 0, -span.count % LINES))
                result = scaled_dot_product_attention(
                    part,
                    keys[:, None].expand(-1, group, -1, -1),
                    values[:, None].expand(-1, group, -1, -1),
                    attn_mask=self.mask(index, 1, window, query),
                    scale=scaling,
                )[:, :, : span.count].transpose(1, 2)
            output[:, span.start : span.end] = result
        return output.transpose(0, 1).flatten(1, 2)[None]  # [1, T, H, D]


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    slipstream: Step | None = None,
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
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    slipstream.layers_seen.add(layer)
    return slipstream.attend(layer, query, key, value, scaling, sliding_window), None


def register() -> None:
    """Make the function known to transformers under `NAME`; doing it again changes nothing."""
    AttentionInterface.register(NAME, slot_attention)
