"""`PrefixCache`, and what it takes from and gives to slots: found by tokens, bounded, evicted by use."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from slipstream.core.params import SamplingParams
from slipstream.core.sequence import Sequence as Row
from slipstream.engine.scheduler import Scheduler
from slipstream.model.cache import SlotCache
from slipstream.model.prefix import PrefixCache

SIZE = 4


def slot_with(cache: SlotCache, slot: int, tokens: Sequence[int], layers: int = 2) -> None:
    """A slot whose keys tell its tokens and everything before them, as a model's do."""
    cache.open(slot)
    width = cache.reserve(slot, len(tokens))
    marks = torch.tensor(tokens, dtype=torch.float64).cumsum(0)
    new = marks.view(1, -1, 1).expand(2, -1, 3)  # [kv_heads, n, head_dim]
    for layer in range(layers):
        cache.write(slot, layer, new + layer, -new - layer, width)
    cache.commit(slot, range(len(tokens)))


def keys_of(cache: SlotCache, slot: int) -> list[list[float]]:
    layers = cache._slots[slot].layers
    return [layers[i][0][0, : cache.length(slot), 0].tolist() for i in range(2)]


@pytest.fixture
def prefixes() -> PrefixCache:
    made = PrefixCache()
    made.resize(100, SIZE)
    return made


def park(prefixes: PrefixCache, tokens: Sequence[int], room: int = 1000) -> None:
    cache = SlotCache()
    slot_with(cache, 0, tokens)
    prefixes.keep(cache, 0, tokens, room)
    assert len(cache) == 0


def found(prefixes: PrefixCache, tokens: Sequence[int], limit: int | None = None) -> int:
    return SIZE * len(prefixes.find(tokens, len(tokens) if limit is None else limit))


def test_the_longest_beginning_in_whole_blocks_is_found(prefixes: PrefixCache) -> None:
    park(prefixes, range(11))
    assert prefixes.tokens == 8
    for length, want in ((3, 0), (4, 4), (7, 4), (8, 8), (11, 8)):
        assert found(prefixes, range(length)) == want
        assert found(prefixes, range(11), limit=length) == want
    assert found(prefixes, [0, 1, 2, 3, 4, 5, 6, 9]) == 4
    assert found(prefixes, [9, 1, 2, 3, 4, 5, 6, 7]) == 0
    assert found(prefixes, [4, 5, 6, 7]) == 0  # known, but behind other tokens


def test_equal_blocks_behind_different_ones_are_different(prefixes: PrefixCache) -> None:
    same = [5, 5, 5, 5]
    park(prefixes, [1, 1, 1, 1, *same])
    park(prefixes, [2, 2, 2, 2, *same])
    cache = SlotCache()
    for slot, first in ((0, 1), (1, 2)):
        tokens = [first] * 4 + same
        slot_with(cache, slot + 10, tokens)
        cache.open(slot)
        prefixes.fill(cache, slot, prefixes.find(tokens, 8))
        assert keys_of(cache, slot) == keys_of(cache, slot + 10)


def test_what_many_share_is_held_once(prefixes: PrefixCache) -> None:
    park(prefixes, [*range(8), 20, 21, 22, 23])
    one = prefixes.memory_bytes
    park(prefixes, [*range(8), 30, 31, 32, 33])
    park(prefixes, range(8))
    assert prefixes.tokens == 16 and prefixes.memory_bytes == one // 3 * 4
    assert one == 12 * 2 * 2 * 2 * 3 * 8  # tokens, layers, k and v, heads, dim, float64


def test_a_slot_gets_copies_behind_what_it_has(prefixes: PrefixCache) -> None:
    tokens = list(range(12))
    park(prefixes, tokens)
    cache = SlotCache()
    slot_with(cache, 9, tokens)
    for have in (0, 3, 4, 6, 12):
        if have:
            slot_with(cache, 0, tokens[:have])
        else:
            cache.open(0)
        prefixes.fill(cache, 0, prefixes.find(tokens, 12))
        assert keys_of(cache, 0) == keys_of(cache, 9) and cache.in_order(0) == 12
        with torch.inference_mode():
            cache._slots[0].layers[0][0].zero_()  # whoever has it may write to it
        cache.close(0)
    assert found(prefixes, tokens) == 12


def test_what_was_not_used_for_longest_goes_first_and_of_one_text_the_end(prefixes: PrefixCache) -> None:
    prefixes.resize(5 * SIZE, SIZE)
    a, b = list(range(12)), list(range(50, 58))
    park(prefixes, a)
    park(prefixes, b)
    assert prefixes.tokens == 5 * SIZE
    found(prefixes, a[:8])  # its third block was not used
    park(prefixes, [70, 71, 72, 73])
    assert (found(prefixes, b), found(prefixes, a)) == (8, 8) and prefixes.tokens == 5 * SIZE
    park(prefixes, [80, 81, 82, 83, 84, 85, 86, 87])  # 70… was used last before b and a: it goes, and an end
    assert found(prefixes, [70, 71, 72, 73]) == 0
    assert prefixes.tokens == 5 * SIZE and found(prefixes, a) + found(prefixes, b) == 3 * SIZE


def test_no_block_outlives_the_one_it_stands_behind(prefixes: PrefixCache) -> None:
    for start in range(0, 60, 20):
        park(prefixes, [1, 2, 3, 4, *range(start, start + 12)])
    while prefixes.tokens:
        numbers = {b.number for b in prefixes._blocks.values()} | {0}
        assert all(b.key[0] in numbers for b in prefixes._blocks.values())
        prefixes.shrink(prefixes.tokens - 1)
    assert prefixes.memory_bytes == 0


@pytest.mark.parametrize(
    ("limit", "room", "kept"), [(100, 1000, 12), (9, 1000, 8), (100, 7, 4), (100, -5, 0)]
)
def test_neither_the_limit_nor_the_room_is_exceeded(
    prefixes: PrefixCache, limit: int, room: int, kept: int
) -> None:
    park(prefixes, range(200, 220))
    prefixes.resize(limit, SIZE)
    park(prefixes, range(12), room)
    assert found(prefixes, range(12)) == kept and prefixes.tokens <= max(min(limit, room), 0)


def test_without_a_limit_nothing_is_kept(prefixes: PrefixCache) -> None:
    park(prefixes, range(12))
    prefixes.resize(0, SIZE)
    assert prefixes.tokens == prefixes.memory_bytes == 0
    park(prefixes, range(12))
    assert prefixes.tokens == found(prefixes, range(12)) == 0


def test_other_blocks_are_forgotten(prefixes: PrefixCache) -> None:
    park(prefixes, range(12))
    prefixes.resize(100, 3)
    assert prefixes.tokens == 0


# -- slots ------------------------------------------------------------------------------------------------


def test_a_slot_tells_how_much_of_it_stands_where_it_was_computed() -> None:
    cache = SlotCache()
    slot_with(cache, 0, range(5))

    def put(keep: Sequence[int]) -> int:
        width = cache.reserve(0, 4)
        new = torch.zeros(2, 4, 3, dtype=torch.float64)
        for layer in range(2):
            cache.write(0, layer, new, new, width)
        cache.commit(0, keep)
        return cache.in_order(0)

    assert cache.in_order(0) == 5
    assert put(()) == 5
    assert put((0, 1)) == 7
    assert put((0, 1, 3)) == 9  # the third was moved
    assert put((0, 1)) == 9 and cache.length(0) == 12  # it has looked at the moved one
    cache.open(1)
    cache.copy_prefix(0, 1, 11)
    assert cache.in_order(1) == 9
    cache.rollback(0, 8)
    assert cache.in_order(0) == 8 and put((0,)) == 9


def test_columns_of_a_closed_slot_are_copies() -> None:
    cache = SlotCache()
    slot_with(cache, 0, range(6))
    keys = cache._slots[0].layers[1][0]
    want = keys[:, 1:4].clone()
    (part,) = cache.release(0, [range(1, 4)])
    with torch.inference_mode():
        keys.zero_()
    assert torch.equal(part[1][0], want) and set(part) == {0, 1} and len(cache) == cache.capacity(0) == 0


# -- who reads --------------------------------------------------------------------------------------------


def test_pieces_end_at_the_same_places_whatever_was_found() -> None:
    def read(there: dict[int, int]) -> list[list[tuple[int, int, int]]]:
        scheduler = Scheduler(4, 10)
        for i, length in enumerate((26, 8, 14)):
            scheduler.add(Row(i, tuple(range(length)), SamplingParams(max_tokens=1), 0, frozenset(), room=99))
        scheduler.admit()
        steps = []
        while scheduler.reading:
            pieces = scheduler.chunks(lambda row, start, _: max(start, there.get(row.id, 0)))
            steps.append([(row.id, start, end) for row, start, end in pieces])
            for row, _, end in pieces:
                scheduler.read(row, end)
        return steps

    assert read({}) == [[(0, 0, 10)], [(0, 10, 20)], [(0, 20, 25)], [(1, 0, 7)], [(2, 0, 10)], [(2, 10, 13)]]
    assert read({0: 13, 1: 7}) == [[(0, 13, 20), (1, 7, 7)], [(0, 20, 25)], [(2, 0, 10)], [(2, 10, 13)]]


def test_who_waits_for_a_piece_that_is_being_read_does_not_hold_up_others() -> None:
    scheduler = Scheduler(4, 10)
    for i in range(3):
        scheduler.add(Row(i, tuple(range(5)), SamplingParams(max_tokens=1), 0, frozenset(), room=99))
    scheduler.admit()
    pieces = scheduler.chunks(lambda row, start, before: None if row.id == 1 and before else start)
    assert [row.id for row, _, _ in pieces] == [0, 2]
    assert set(scheduler.reading) == {0, 1, 2}
