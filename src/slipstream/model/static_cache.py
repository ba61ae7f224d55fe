"""`StaticCache`: a `SlotCache` whose slots are rows of a few tensors that stay where they are.

What a CUDA graph has recorded reads and writes fixed addresses. So all rows have the same capacity, a slot
is a row of one tensor [layers, rows, kv_heads, capacity + 1, head_dim] (one for each shape that layers
have), and the tensors are replaced, which `epoch` tells, only when there are more slots or longer ones than
they hold: then the number of rows, or the capacity, is doubled, and under a limit the other one is cut to
what is needed. The last column is nobody's: what padding computes is written there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slipstream.model.cache import WIDTH, Columns, SlotCache, columns
from slipstream.model.transfer import put

_Kind = tuple[int, int, torch.dtype]  # key/value heads, head_dim, dtype


def power_of_two(n: int) -> int:
    """The lowest that is n or more, 1 at least."""
    return 1 << max(n - 1, 0).bit_length()


def _capacity(tokens: int) -> int:
    return WIDTH * power_of_two(columns(tokens) // WIDTH)


class StaticCache(SlotCache):
    """like: columns of every layer, whose shapes, dtype and device are taken. rows and tokens: what to have
    room for at first, slots and tokens of each."""

    def __init__(self, like: Columns, rows: int = 1, tokens: int = WIDTH) -> None:
        super().__init__()
        self.epoch = 0
        self.rows = power_of_two(rows)
        self.tokens = _capacity(tokens)
        self._row: dict[int, int] = {}  # of each open slot
        self._width: dict[int, int] = {}  # columns that each has come to need
        self._most: int | None = None
        self._places: dict[int, list[tuple[_Kind, int]]] = {}  # layer -> where its keys and its values are
        counts: dict[_Kind, int] = {}
        for layer, pair in like.items():
            self._places[layer] = []
            for tensor in pair:
                self._device = tensor.device
                kind = (tensor.shape[0], tensor.shape[2], tensor.dtype)
                self._places[layer].append((kind, counts.get(kind, 0)))
                counts[kind] = counts.get(kind, 0) + 1
        self._stacks = {kind: self._new(kind, count) for kind, count in counts.items()}

    @property
    def memory_bytes(self) -> int:
        """Of the slots that are open; free rows wait beside them."""
        return sum(stack.nbytes for stack in self._stacks.values()) // self.rows * len(self._row)

    def held(self, tokens: Sequence[int]) -> int:
        """All rows are as long as the longest."""
        return power_of_two(len(tokens)) * _capacity(max(tokens)) if tokens else 0

    def limit(self, tokens: int | None) -> None:
        self._most = tokens

    def row(self, slot: int) -> int:
        """Where the slot lies now."""
        return self._row[slot]

    def planes(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer's keys and values of all rows [rows, kv_heads, tokens + 1, head_dim]."""
        keys, values = (self._stacks[kind][index] for kind, index in self._places[layer])
        return keys, values

    @torch.inference_mode()
    def open(self, slot: int) -> None:
        super().open(slot)
        if len(self._row) == self.rows:
            self._resize(2 * self.rows, self.tokens)
        taken = set(self._row.values())
        self._width[slot] = WIDTH
        self._row[slot] = next(row for row in range(self.rows) if row not in taken)
        for stack in self._stacks.values():  # a masked column is multiplied by 0, and 0·NaN is NaN
            stack[:, self._row[slot]].zero_()
        self._show(slot)

    def close(self, slot: int) -> None:
        """Free the slot's row; the memory is kept for the next."""
        super().close(slot)
        self._row.pop(slot, None)
        self._width.pop(slot, None)

    def release(self, slot: int, ranges: Sequence[range]) -> list[Columns]:
        kept = super().release(slot, ranges)
        self.close(slot)
        return kept

    @torch.inference_mode()
    def reserve(self, slot: int, new: int) -> int:
        width = columns(self.length(slot) + new)
        self._width[slot] = max(self._width[slot], width)
        if width > self.tokens:
            self._resize(self.rows, _capacity(width))
        return width

    @torch.inference_mode()
    def settle(self, slots: Sequence[int]) -> tuple[int, int]:
        """The first of the rows among which these slots are, and how many rows that are: a power of two, and
        the first a multiple of it.

        Slots that lie far behind move to free rows in front, so that what is left of many does not cost what
        many did.
        """
        enough = power_of_two(len(slots))
        for slot in slots:
            if self._row[slot] >= enough:
                taken = set(self._row.values())
                free = next((row for row in range(enough) if row not in taken), None)
                if free is None:
                    break
                for stack in self._stacks.values():
                    stack[:, free].copy_(stack[:, self._row[slot]])
                self._row[slot] = free
                self._show(slot)
        rows = [self._row[slot] for slot in slots]
        while min(rows) // enough != max(rows) // enough:
            enough *= 2
        return min(rows) // enough * enough, enough

    def _gather(self, slot: int, index: torch.Tensor) -> None:
        length, row = self.length(slot), self._row[slot]
        index = put(index, self._device)
        for stack in self._stacks.values():
            held = stack[:, row]  # [layers, kv_heads, tokens + 1, head_dim]
            held[:, :, length : length + len(index)] = held.index_select(2, index)

    def _resize(self, rows: int, tokens: int) -> None:
        """At least so many rows of so many columns, of which one is more than there were."""
        if self._most is not None and rows * tokens > self._most:
            rows, tokens = power_of_two(len(self._slots)), _capacity(max(self._width.values(), default=1))
        self.rows, self.tokens = rows, tokens
        order = sorted(self._row, key=self._row.__getitem__)
        before = [self._row[slot] for slot in order]
        for kind, old in list(self._stacks.items()):
            new = self._new(kind, len(old))
            kept = min(old.shape[3] - 1, tokens)
            for row, was in enumerate(before):
                new[:, row, :, :kept] = old[:, was, :, :kept]
            self._stacks[kind] = new
        self._row = {slot: row for row, slot in enumerate(order)}
        self.epoch += 1
        for slot in self._row:
            self._show(slot)

    def _show(self, slot: int) -> None:
        """Let the slot's columns be views of its row."""
        entry, row = self._slots[slot], self._row[slot]
        entry.capacity = self.tokens
        for layer in self._places:
            keys, values = self.planes(layer)
            entry.layers[layer] = keys[row, :, : self.tokens], values[row, :, : self.tokens]

    @torch.inference_mode()
    def _new(self, kind: _Kind, count: int) -> torch.Tensor:
        kv_heads, width, dtype = kind
        shape = (count, self.rows, kv_heads, self.tokens + 1, width)
        return torch.zeros(shape, dtype=dtype, device=self._device)
