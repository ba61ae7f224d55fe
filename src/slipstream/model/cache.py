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

from slipstream.model.transfer import put

WIDTH = 512
Columns = dict[int, tuple[torch.Tensor, torch.Tensor]]  # layer -> keys and values [kv_heads, n, head_dim]


def round_up(n: int, step: int) -> int:
    return -(-n // step) * step


def columns(tokens: int) -> int:
    """Columns a slot has for so many tokens."""
    return round_up(tokens, WIDTH)


class _Slot:
    def __init__(self) -> None:
        self.length = 0
        self.in_order = 0
        self.capacity = 0
        self.layers: Columns = {}


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

    def in_order(self, slot: int) -> int:
        """Committed tokens before the first that was moved: all before it were computed where they stand, as
        a prompt's are. What a tree moved has summed its keys in another order, and so has all behind it."""
        return self._slots[slot].in_order

    def capacity(self, slot: int) -> int:
        """Columns there is memory for; 0 for a slot that is not open."""
        return self._slots[slot].capacity if slot in self._slots else 0

    def held(self, tokens: Sequence[int]) -> int:
        """Columns there is memory for once the only slots hold so many tokens, in whole widths."""
        return sum(tokens)

    def limit(self, tokens: int | None) -> None:
        """Nobody will open slots of which more than so many are `held`. None: anybody may."""

    def rollback(self, slot: int, length: int) -> None:
        """Forget everything from position `length` on."""
        entry = self._slots[slot]
        if not 0 <= length <= entry.length:
            raise ValueError(f"cannot roll slot {slot} back from {entry.length} to {length}")
        entry.length, entry.in_order = length, min(entry.in_order, length)

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
        moved = next((i for i, node in enumerate(keep) if node != i), count)
        if entry.in_order == entry.length:
            entry.in_order += moved
        if moved < count:
            self._gather(slot, torch.as_tensor(keep) + entry.length)
        entry.length += count

    def _gather(self, slot: int, index: torch.Tensor) -> None:
        """Put these columns [n] directly behind the length."""
        entry = self._slots[slot]
        for keys, values in entry.layers.values():
            for stored in (keys, values):
                chosen = stored.index_select(1, put(index, stored.device))  # a copy, so no overlap
                stored[:, entry.length : entry.length + len(index)] = chosen

    @torch.inference_mode()
    def append(self, slot: int, parts: Sequence[Columns]) -> None:
        """Put copies of these columns behind the length, one part after the other, for good."""
        entry = self._slots[slot]
        counts = [next(iter(part.values()))[0].shape[1] for part in parts]
        self.reserve(slot, sum(counts))
        straight = entry.in_order == entry.length
        for part, count in zip(parts, counts, strict=True):
            end = entry.length + count
            for layer, new in part.items():
                pair = entry.layers.get(layer)
                if pair is None:
                    pair = _empty(new[0], entry.capacity), _empty(new[1], entry.capacity)
                    entry.layers[layer] = pair
                for stored, given in zip(pair, new, strict=True):
                    stored[:, entry.length : end] = given
            entry.length = end
        if straight:
            entry.in_order = entry.length

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Make the first `length` committed tokens of `source` those of `target`, which has some of them."""
        old, new = self._slots[source], self._slots[target]
        if not new.length <= length <= old.length:
            raise ValueError(f"cannot copy {length} of {old.length} tokens onto {new.length}")
        if length > new.length:
            self.append(target, [cut(old.layers, new.length, length)])
        new.in_order = min(new.in_order, old.in_order)

    @torch.inference_mode()
    def release(self, slot: int, ranges: Sequence[range]) -> list[Columns]:
        """Close the slot, but give copies of these columns. A layer at a time: little is held twice."""
        entry = self._slots.pop(slot)
        kept: list[Columns] = [{} for _ in ranges]
        while entry.layers:
            layer, (keys, values) = entry.layers.popitem()
            for part, where in zip(kept, ranges, strict=True):
                inside = slice(where.start, where.stop)
                part[layer] = keys[:, inside].clone(), values[:, inside].clone()
        return kept


def cut(layers: Columns, start: int, end: int) -> Columns:
    """Columns `start` to `end`, as views."""
    return {layer: (keys[:, start:end], values[:, start:end]) for layer, (keys, values) in layers.items()}


def _empty(like: torch.Tensor, capacity: int) -> torch.Tensor:
    # Zeros, not uninitialised memory: masked columns are multiplied by an exact 0, and 0·NaN is NaN.
    return torch.zeros(like.shape[0], capacity, like.shape[2], dtype=like.dtype, device=like.device)


def _grown(stored: torch.Tensor, length: int, capacity: int) -> torch.Tensor:
    grown = _empty(stored, capacity)
    grown[:, :length] = stored[:, :length]
    return grown
