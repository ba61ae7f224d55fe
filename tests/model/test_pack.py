"""Packing rows, and masks against their definition."""

from __future__ import annotations

import random

import pytest
import torch

from slipstream.model.pack import ROWS, PackRow, build_pack, tree_depths

CPU = torch.device("cpu")


def test_rows_lie_end_to_end_at_their_positions() -> None:
    pack = build_pack(
        [
            (PackRow(3, [10, 11]), 5, 512),
            (PackRow(8, [20, 21, 22, 23], [-1, 0, 0, 1]), 0, 512),
            (PackRow(1, [30], [-1]), 9, 512),
        ],
        CPU,
    )
    assert pack.input_ids.tolist() == [[10, 11, 20, 21, 22, 23, 30, 0]]
    assert pack.position_ids.tolist() == [[5, 6, 0, 1, 1, 2, 9, 0]]
    assert [(s.slot, s.start, s.end) for s in pack.spans] == [(3, 0, 2), (8, 2, 6), (1, 6, 7)]
    assert pack.count == 7


@pytest.mark.parametrize("count", [1, 3, 4, 5, 16])
def test_the_line_is_a_multiple_of_rows(count: int) -> None:
    pack = build_pack([(PackRow(0, list(range(count))), 0, 512)], CPU)
    assert pack.input_ids.shape == (1, -(-count // ROWS) * ROWS) and pack.count == count


def test_a_chain_given_as_a_tree_is_a_causal_run() -> None:
    pack = build_pack([(PackRow(0, [1, 2, 3], [-1, 0, 1]), 4, 512)], CPU)
    assert pack.spans[0].parents is None and list(pack.spans[0].depths) == [0, 1, 2]


def test_depths_follow_parents() -> None:
    assert tree_depths([-1, 0, 0, 2, 3, 1]) == [0, 1, 1, 2, 3, 2]


@pytest.mark.parametrize("window", [None, 1, 2, 3, 5, 40])
@pytest.mark.parametrize("seed", range(8))
def test_a_node_sees_committed_tokens_its_ancestors_and_itself_within_the_window(
    seed: int, window: int | None
) -> None:
    chance = random.Random(seed)
    count, length = chance.randint(1, 12), chance.choice((0, 1, 4, 9))
    parents = [-1, *(chance.randrange(n) for n in range(1, count))]
    if seed % 3 == 0:
        parents = list(range(-1, count - 1))
    span = build_pack([(PackRow(0, [0] * count, parents), length, 24)], CPU).spans[0]
    rows = count + 2
    mask = span.mask(rows, window, torch.float32, CPU)[0, 0]
    assert mask.shape == (rows, 24)
    depths = tree_depths(parents)
    for node in range(count):
        line, at = set(), node
        while at >= 0:
            line.add(at)
            at = parents[at]
        here = length + depths[node]
        for column in range(24):
            there = (
                column
                if column < length
                else length + depths[column - length]
                if column - length < count
                else 0
            )
            seen = column < length or column - length in line
            if window is not None:
                seen = seen and here - there < window
            assert (mask[node, column] == 0) == seen, (node, column)
            assert seen or mask[node, column] == torch.finfo(torch.float32).min
    assert torch.equal(mask[count:], mask[count - 1].expand(2, -1))


@pytest.mark.parametrize("window", [None, 3])
def test_a_tree_computed_level_by_level_sees_what_the_whole_tree_sees(window: int | None) -> None:
    """Two trees side by side, nodes in level order; each level behind the ones that are committed."""
    parents, ends, trunk = [-1, -1, 0, 0, 1, 2, 4, 4], [2, 5, 8], 6
    whole = build_pack([(PackRow(0, list(range(8)), parents), trunk, 512)], CPU)
    full = whole.spans[0].mask(8, window, torch.float32, CPU)[0, 0]
    start = 0
    for end in ends:
        row = PackRow(0, list(range(start, end)), parents[:end])
        part = build_pack([(row, trunk + start, 512)], CPU)
        positions = part.position_ids[0, : end - start]
        assert positions.tolist() == whole.position_ids[0, start:end].tolist()
        assert torch.equal(part.spans[0].mask(end - start, window, torch.float32, CPU)[0, 0], full[start:end])
        start = end
