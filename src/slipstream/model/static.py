"""A step of fixed shape: its inputs in one buffer that stays where it is, attention over all rows at once.

`Runner`'s own step (`attention.AttentionStep`) looks at its rows one by one and is made anew each time. This
one has the same shape for many steps: every row of a `StaticCache` up to a power of two has the same number
of tokens, and what is missing is padding, which writes to a column that nobody reads. Everything else, the
mask included, follows on the device from one buffer of whole numbers, so that its operators can be recorded
once and run again (`graphs`).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import scaled_dot_product_attention

from slipstream.core.draft import Needs
from slipstream.model.cache import WIDTH, round_up
from slipstream.model.pack import NODES, Pack
from slipstream.model.static_cache import StaticCache, power_of_two
from slipstream.model.transfer import put


@dataclass(frozen=True, slots=True)
class Shape:
    """Of which steps are alike: the rows of the cache from `first` on, tokens of each, columns that attention
    reads, what is computed (`Runner.forward`'s logits, the features, `Runner.variant`)."""

    first: int
    rows: int
    width: int
    columns: int
    logits: str
    needs: Needs | None
    variant: Hashable


def fits(pack: Pack) -> bool:
    """Whether a step of fixed shape can compute this: not a long piece of a prompt, nor a huge tree."""
    slots = {span.slot for span in pack.spans}
    return len(slots) == len(pack.spans) and all(s.earlier + s.count <= NODES for s in pack.spans)


def bucket(columns: int) -> int:
    """Columns of a step, of so many that are needed (a multiple of `WIDTH`): a quarter more at most."""
    return round_up(columns, max(WIDTH, power_of_two(columns + 1) // 8))


class Inputs:
    """What a step of `rows` times `width` tokens is told, int64 on the device; T = rows · width.

    ids, positions [1, T]. places [rows, width]: the column where a token's key goes. sees [rows, width]: see
    `Span.ancestors`. trunk [rows, 1]: tokens in front of the tree. nodes [rows, NODES]: the tree's positions.
    order [T]: where the pack's tokens are. last [rows]: where the pack's rows end.
    """

    def __init__(self, rows: int, width: int, device: torch.device) -> None:
        self.rows, self.width = rows, width
        total = rows * width
        self._shapes: dict[str, tuple[int, ...]] = {
            "ids": (1, total),
            "positions": (1, total),
            "places": (rows, width),
            "sees": (rows, width),
            "trunk": (rows, 1),
            "nodes": (rows, NODES),
            "order": (total,),
            "last": (rows,),
        }
        self._sizes = [int(np.prod(shape)) for shape in self._shapes.values()]
        self._buffer = torch.zeros(sum(self._sizes), dtype=torch.int64, device=device)
        parts = self._buffer.split(self._sizes)  # type: ignore[no-untyped-call]
        cut = {name: part.view(self._shapes[name]) for name, part in zip(self._shapes, parts, strict=True)}
        self.ids, self.positions = cut["ids"], cut["positions"]
        self.places, self.sees = cut["places"], cut["sees"]
        self.trunk, self.nodes = cut["trunk"], cut["nodes"]
        self.order, self.last = cut["order"], cut["last"]

    def fill(self, pack: Pack, cache: StaticCache, first: int) -> None:
        """Tell of this pack, whose ids and positions lie in main memory. One copy, which nobody waits for."""
        line = np.zeros(sum(self._sizes), dtype=np.int64)
        parts = np.split(line, np.cumsum(self._sizes)[:-1])
        at: dict[str, NDArray[np.int64]] = {
            name: part.reshape(shape) for (name, shape), part in zip(self._shapes.items(), parts, strict=True)
        }
        ids, positions = pack.input_ids[0].numpy(), pack.position_ids[0].numpy()
        at["places"][:] = cache.tokens
        for index, span in enumerate(pack.spans):
            row = cache.row(span.slot) - first
            begin, count = row * self.width, span.count
            at["ids"][0, begin : begin + count] = ids[span.start : span.end]
            at["positions"][0, begin : begin + count] = positions[span.start : span.end]
            at["places"][row, :count] = range(span.length, span.length + count)
            at["sees"][row, :count] = span.ancestors()
            at["trunk"][row] = span.trunk
            at["nodes"][row, : len(span.depths)] = [span.trunk + depth for depth in span.depths]
            at["order"][span.start : span.end] = range(begin, begin + count)
            at["last"][index] = begin + count - 1
        self._buffer.copy_(put(torch.from_numpy(line), self._buffer.device))


class StaticStep:
    """A `Step` over rows of a cache that lie together; its operators depend on the shape alone."""

    def __init__(self, shape: Shape, inputs: Inputs, cache: StaticCache) -> None:
        self.layers_seen: set[int] = set()
        self._first, self._columns = shape.first, shape.columns
        self._inputs, self._cache = inputs, cache
        self._rows = torch.arange(inputs.rows, device=inputs.ids.device)[:, None]  # [rows, 1]
        self._masks: dict[tuple[int, int | None], torch.Tensor] = {}

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
        window: int | None,
    ) -> torch.Tensor:
        rows, width, kv_heads = self._inputs.rows, self._inputs.width, key.shape[1]
        group = query.shape[1] // kv_heads
        planes = [plane[self._first : self._first + rows] for plane in self._cache.planes(layer)]
        for plane, new in zip(planes, (key, value), strict=True):
            by_token = new[0].view(kv_heads, rows, width, -1).permute(1, 2, 0, 3)
            plane[self._rows, :, self._inputs.places] = by_token  # [rows, width, kv_heads, D]
        lines = query[0].view(kv_heads, group, rows, width, -1).permute(2, 0, 3, 1, 4)
        keys, values = (plane[:, :, : self._columns] for plane in planes)  # each [rows, kv_heads, W, D]
        output = scaled_dot_product_attention(
            lines.reshape(rows, kv_heads, width * group, -1),
            keys,
            values,
            attn_mask=self._mask(group, window, query.dtype),
            scale=scaling,
        ).view(rows, kv_heads, width, group, -1)
        return output.permute(0, 2, 1, 3, 4).reshape(1, rows * width, kv_heads * group, -1)

    def _mask(self, group: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """Additive [rows, 1, width · group, columns], as `Span.mask`; a token's line `group` times."""
        if (group, window) not in self._masks:
            seen = self._seen(window)
            # The most negative number, not -inf: padding may see nothing at all.
            mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
            mask.masked_fill_(~seen, torch.finfo(dtype).min)
            self._masks[group, window] = mask[:, None].repeat_interleave(group, 2)
        return self._masks[group, window]

    def _seen(self, window: int | None) -> torch.Tensor:
        """Which columns each token sees, bool [rows, width, columns]."""
        inputs = self._inputs
        columns = torch.arange(self._columns, device=inputs.ids.device)  # [W]
        node = columns - inputs.trunk  # [rows, W], below 0 in front of the tree
        number = node.clamp(0, NODES - 1)
        in_tree = ((node >= 0) & (node < NODES))[:, None]  # [rows, 1, W]
        ancestor = ((inputs.sees[:, :, None] >> number[:, None]) & 1) == 1  # [rows, width, W]
        seen: torch.Tensor = (node < 0)[:, None] | (in_tree & ancestor)
        if window is not None:
            stands = torch.where(node < 0, columns, inputs.nodes.gather(1, number))  # [rows, W]
            own = inputs.positions.view(inputs.rows, inputs.width, 1)
            seen = seen & (stands[:, None] > own - window)
        return seen
