"""`SlotCache`: lengths, growth, gathers, copies."""

from __future__ import annotations

import pytest
import torch

from slipstream.model.cache import WIDTH, SlotCache


def put(cache: SlotCache, slot: int, values: list[float]) -> torch.Tensor:
    """Write one layer with these values behind the length; gives what attention sees."""
    new = torch.tensor(values).view(1, -1, 1).expand(2, -1, 3)  # [kv_heads, n, head_dim]
    width = cache.reserve(slot, len(values))
    keys, negated = cache.write(slot, 0, new, -new, width)
    assert torch.equal(keys, -negated)
    return keys[0, :, 0]


def test_nothing_counts_until_it_is_committed() -> None:
    cache = SlotCache()
    cache.open(4)
    put(cache, 4, [1, 2, 3])
    assert cache.length(4) == 0
    cache.commit(4, range(2))
    assert cache.length(4) == 2
    assert put(cache, 4, [9])[:3].tolist() == [1, 2, 9]


def test_commit_keeps_a_path_in_order() -> None:
    cache = SlotCache()
    cache.open(0)
    put(cache, 0, [1, 2])
    cache.commit(0, range(2))
    put(cache, 0, [10, 11, 12, 13, 14])
    cache.commit(0, (0, 2, 4))
    assert cache.length(0) == 5
    assert put(cache, 0, [7])[:6].tolist() == [1, 2, 10, 12, 14, 7]
    cache.commit(0, ())
    assert cache.length(0) == 5


def test_commit_works_on_what_a_forward_wrote() -> None:
    """Tensors made in inference mode may be changed there only."""
    cache = SlotCache()
    cache.open(0)
    with torch.inference_mode():
        put(cache, 0, [1, 2, 3])
    cache.commit(0, (0, 2))
    cache.open(1)
    cache.copy_prefix(0, 1, 2)
    assert put(cache, 1, [5])[:3].tolist() == [1, 3, 5]


def test_rollback_forgets_the_end() -> None:
    cache = SlotCache()
    cache.open(0)
    put(cache, 0, [1, 2, 3])
    cache.commit(0, range(3))
    cache.rollback(0, 1)
    assert put(cache, 0, [8])[:2].tolist() == [1, 8]
    for length in (-1, 2):
        with pytest.raises(ValueError, match="cannot roll"):
            cache.rollback(0, length)


def test_growth_keeps_what_is_there_and_widths_are_multiples() -> None:
    cache = SlotCache()
    cache.open(0)
    first = [float(i) for i in range(WIDTH - 1)]
    assert len(put(cache, 0, first)) == WIDTH
    cache.commit(0, range(WIDTH - 1))
    seen = put(cache, 0, [5, 6])
    assert len(seen) == 2 * WIDTH and seen[: WIDTH + 1].tolist() == [*first, 5, 6]
    assert not seen[WIDTH + 1 :].any()
    assert cache.memory_bytes == 2 * 2 * 2 * WIDTH * 3 * 4  # k and v, heads, columns, dim, fp32


def test_slots_do_not_meet_and_a_closed_one_is_free() -> None:
    cache = SlotCache()
    for slot in (0, 7):
        cache.open(slot)
    put(cache, 0, [1])
    cache.commit(0, [0])
    put(cache, 7, [2, 3])
    assert (cache.length(0), cache.length(7), len(cache)) == (1, 0, 2)
    with pytest.raises(ValueError, match="already in use"):
        cache.open(7)
    for _ in range(2):
        cache.close(7)
    cache.close(0)
    assert cache.memory_bytes == 0 and 7 not in cache
    cache.open(7)
    assert put(cache, 7, [4]).tolist()[:2] == [4, 0]


def test_a_prefix_is_copied_not_shared() -> None:
    cache = SlotCache()
    for slot in (0, 1):
        cache.open(slot)
    put(cache, 0, [1, 2, 3])
    cache.commit(0, range(3))
    cache.copy_prefix(0, 1, 2)
    put(cache, 1, [9])
    assert put(cache, 0, [4])[:4].tolist() == [1, 2, 3, 4]
    assert cache.length(1) == 2
    with pytest.raises(ValueError, match="cannot copy"):
        cache.copy_prefix(0, 1, 1)
