"""`SlotCache`: keys and values of many rows, each in a slot with its own length.

A slot holds, for each layer, keys and values [kv_heads, capacity, head_dim]. A forward writes its new
tokens *behind* the slot's length; nothing is kept until `commit` moves the length. So rolling back
is assigning a length, keeping a tree's accepted path is one gather, and stale columns are never
cleared, only masked. Keys are rotated by depth position, which is the position a kept token ends
up at, so they can be moved as they are.

Capacity and the width shown to attention are multiples of `WIDTH`: the order in which keys are
summed depends on the width, so this makes a row's bits independent of how far it has grown.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

WIDTH = 512


def round_up(n: int, step: int) -> int:
    return -(-n // step) * step


def columns(tokens: int) -> int:
    """Columns a slot has for so many tokens."""
    return round_up(tokens, WIDTH)


class _Slot:
    def __init__(self) -> None:
        self.length = 0
        self.capacity = 0
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}


class SlotCache:
    """Per-row key/value storage. Slots are plain integers chosen by the caller."""

    def __init__(self) -> None:
        self._slots: dict[int, _Slot] = {}

    def __contains__(self, slot: int) -> bool:
        return slot in self._slots

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def memory_bytes(self) -> int:
        return sum(t.nbytes for s in self._slots.values() for kv in s.layers.values() for t in kv)

    def open(self, slot: int) -> None:
        if slot in self._slots:
            raise ValueError(f"slot {slot} is already in use")
        self._slots[slot] = _Slot()

    def close(self, slot: int) -> None:
        """Free the slot's memory at once."""
        self._slots.pop(slot, None)

    def length(self, slot: int) -> int:
        """Committed tokens of the slot."""
        return self._slots[slot].length

    def rollback(self, slot: int, length: int) -> None:
        """Forget everything from position `length` on."""
        if not 0 <= length <= self._slots[slot].length:
            raise ValueError(f"cannot roll slot {slot} back from {self._slots[slot].length} to {length}")
        self._slots[slot].length = length

    @torch.inference_mode()
    def reserve(self, slot: int, new: int) -> int:
        """Make room for `new` tokens behind the length; gives the width attention will see."""
        entry = self._slots[slot]
        width = columns(entry.length + new)
        if width > entry.capacity:
            for layer, pair in entry.layers.items():
                entry.layers[layer] = (
                    _grown(pair[0], entry.length, width),
                    _grown(pair[1], entry.length, width),
                )
            entry.capacity = width
        return width

    @torch.inference_mode()
    def write(
        self, slot: int, layer: int, keys: torch.Tensor, values: torch.Tensor, width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Put keys and values [kv_heads, n, head_dim] behind the length; gives [.., width, head_dim]."""
        entry = self._slots[slot]
        pair = entry.layers.get(layer)
        if pair is None:
            pair = entry.layers[layer] = (_empty(keys, entry.capacity), _empty(values, entry.capacity))
        end = entry.length + keys.shape[1]
        pair[0][:, entry.length : end] = keys
        pair[1][:, entry.length : end] = values
        return pair[0][:, :width], pair[1][:, :width]

    @torch.inference_mode()  # what a forward stored may only be moved in its own mode
    def commit(self, slot: int, keep: Sequence[int]) -> None:
        """Keep these of the last written tokens, in this order (node numbers, ascending)."""
        entry = self._slots[slot]
        count = len(keep)
        if list(keep) != list(range(count)):
            index = torch.as_tensor(keep) + entry.length  # [count]
            for keys, values in entry.layers.values():
                for stored in (keys, values):
                    chosen = stored.index_select(1, index.to(stored.device))  # a copy, so no overlap
                    stored[:, entry.length : entry.length + count] = chosen
        entry.length += count

    @torch.inference_mode()
    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Give slot `target` (empty) the first `length` committed tokens of `source`."""
        old, new = self._slots[source], self._slots[target]
        if new.length or length > old.length:
            raise ValueError(f"cannot copy {length} of {old.length} tokens onto {new.length}")
        new.capacity = columns(length)
        for layer, (keys, values) in old.layers.items():
            new.layers[layer] = (_grown(keys, length, new.capacity), _grown(values, length, new.capacity))
        new.length = length


def _empty(like: torch.Tensor, capacity: int) -> torch.Tensor:
    # Zeros, not uninitialised memory: masked columns are multiplied by an exact 0, and 0·NaN is NaN.
    return torch.zeros(like.shape[0], capacity, like.shape[2], dtype=like.dtype, device=like.device)


def _grown(stored: torch.Tensor, length: int, capacity: int) -> torch.Tensor:
    grown = _empty(stored, capacity)
    grown[:, :length] = stored[:, :length]
    return grown
