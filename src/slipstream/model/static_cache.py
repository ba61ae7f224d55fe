"""`StaticCache`: a `SlotCache` whose slots are rows of a few tensors that stay where they are.

What a CUDA graph has recorded reads and writes fixed addresses. So all rows have the same capacity, a slot
is a row of one tensor [layers, rows, kv_heads, capacity + 1, head_dim] (one for each shape that layers
have), and the tensors are replaced, which `epoch` tells, only when there are more slots or longer ones than
they hold: then the number of rows, or the capacity, is doubled. The last column is nobody's: what padding
computes is written there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slipstream.model.cache import WIDTH, Columns, SlotCache, columns
from slipstream.model.transfer import put

_Kind = tuple[int, int, torch.dtype]  # key/value heads, head_dim, dtype


def power_of_two(n: int) -> int:
    """The lowest that is n or more."""
    return 1 << (n - 1).bit_length()


class StaticCache(SlotCache):
    """like: columns of every layer, whose shapes, dtype and device are taken. rows and tokens: what to have
    room for at first, slots and tokens of each."""

    def __init__(self, like: Columns, rows: int = 1, tokens: int = WIDTH) -> None:
        super().__init__()
        self.epoch = 0
        self.rows = power_of_two(rows)
        self.tokens = WIDTH * power_of_two(columns(tokens) // WIDTH)
        self._row: dict[int, int] = {}  # of each open slot
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
        return sum(stack.nbytes for stack in self._stacks.values())

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
            self._grow(2 * self.rows, self.tokens)
        taken = set(self._row.values())
        self._row[slot] = next(row for row in range(self.rows) if row not in taken)
        for stack in self._stacks.values():  # a masked column is multiplied by 0, and 0·NaN is NaN
            stack[:, self._row[slot]].zero_()
        self._show(slot)

    def close(self, slot: int) -> None:
        """Free the slot's row; the memory is kept for the next."""
        super().close(slot)
        self._row.pop(slot, None)

    def release(self, slot: int, ranges: Sequence[range]) -> list[Columns]:
        kept = super().release(slot, ranges)
        self._row.pop(slot)
        return kept

    @torch.inference_mode()
    def reserve(self, slot: int, new: int) -> int:
        width = columns(self.length(slot) + new)
        if width > self.tokens:
            self._grow(self.rows, WIDTH * power_of_two(width // WIDTH))
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

    def _grow(self, rows: int, tokens: int) -> None:
        old_rows, old_tokens = self.rows, self.tokens
        self.rows, self.tokens = rows, tokens
        for kind in list(self._stacks):
            old = self._stacks[kind]
            new = self._new(kind, len(old))
            new[:, :old_rows, :, :old_tokens] = old[:, :, :, :old_tokens]
            self._stacks[kind] = new
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
