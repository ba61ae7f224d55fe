"""Growing trees: EAGLE-2's dynamic tree against a plain reading of the paper, and fixed shapes."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from slipstream.core.choices import Choices, full_tree
from slipstream.drafters._growth import ROOT, DynamicGrowth, Growth, StaticGrowth

# Few and coarse probabilities, certainty included, so that ties happen all the time.
PROBABILITIES = st.sampled_from([1.0, 0.5, 0.25, 0.125])
tables = st.lists(
    st.lists(PROBABILITIES, min_size=4, max_size=4).map(lambda row: sorted(row, reverse=True)),
    min_size=5,
    max_size=5,
)


def grow(growth: Growth, table: list[list[float]]) -> Growth:
    """Children of a node depend on its depth and token; a child of rank r carries the token r."""
    while growth.frontier:
        rows = []
        for node in growth.frontier:
            depth, token = (0, 0) if node == ROOT else (growth.depths[node], growth.tokens[node])
            rows.append([math.log(p) for p in table[(depth + 2 * token) % len(table)]])
        growth.add([[0, 1, 2, 3]] * len(rows), rows)
    return growth


def paper(table: list[list[float]], top_k: int, depth: int, nodes: int) -> set[tuple[int, ...]]:
    """Expand top_k paths a level, rerank all; by values that are never pruned early."""
    beams: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    scored: list[tuple[float, int, int, tuple[int, ...]]] = []
    for level in range(depth):
        found = []
        for value, path in beams:
            row = table[(level + 2 * (path[-1] if path else 0)) % len(table)]
            found += [(value + math.log(row[r]), (*path, r)) for r in range(min(top_k, 4))]
        scored += [(-v, level, i, path) for i, (v, path) in enumerate(found)]
        best = sorted(range(len(found)), key=lambda i: (-found[i][0], i))[:top_k]
        beams = [found[i] for i in best]
    return {path for *_, path in sorted(scored)[:nodes]}


@given(tables, st.integers(1, 4), st.integers(1, 5), st.integers(1, 20))
def test_dynamic_trees_are_the_papers(table: list[list[float]], top_k: int, depth: int, nodes: int) -> None:
    growth = grow(DynamicGrowth(top_k, depth, nodes), table)
    draft = growth.draft(9, "eagle")
    tree = draft.tree
    assert {tree.path_tokens(n) for n in range(1, len(tree))} == paper(table, top_k, depth, nodes)
    assert tree.depth <= depth and tree.num_drafted <= nodes
    scores = draft.scores
    assert scores is not None and list(scores) == sorted(scores, reverse=True)
    for node in range(1, len(tree)):
        assert scores[node] <= scores[tree.parents[node]]
    for keep in range(nodes):  # any front part is the best smaller tree
        smaller = {tree.path_tokens(n) for n in range(1, len(draft.truncate(depth, keep).tree))}
        assert smaller == {tree.path_tokens(n) for n in range(1, min(keep, tree.num_drafted) + 1)}


@given(tables, st.integers(1, 4), st.integers(1, 5), st.integers(1, 20), st.integers(0, 20))
def test_a_larger_budget_contains_the_smaller_tree(
    table: list[list[float]], top_k: int, depth: int, nodes: int, more: int
) -> None:
    def paths(growth: Growth) -> set[tuple[int, ...]]:
        tree = grow(growth, table).draft(9, "").tree
        return {tree.path_tokens(n) for n in range(1, len(tree))}

    assert paths(DynamicGrowth(top_k, depth, nodes)) <= paths(DynamicGrowth(top_k, depth, nodes + more))


@given(tables, st.integers(1, 5))
def test_top_k_of_one_is_the_greedy_chain(table: list[list[float]], depth: int) -> None:
    tree = grow(DynamicGrowth(1, depth, depth), table).draft(9, "").tree
    assert tree.is_chain and tree.tokens == (9,) + (0,) * depth


def test_unlikely_continuations_are_left_out() -> None:
    table = [[0.5, 0.25, 0.125, 0.125]] * 5
    tree = grow(DynamicGrowth(4, 2, 99, stop_below=0.25), table).draft(9, "").tree
    assert {tree.path_tokens(n) for n in range(1, len(tree))} == {(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)}
    assert len(grow(DynamicGrowth(4, 2, 99, stop_below=0.6), table).draft(9, "").tree) == 1


def test_nothing_to_grow() -> None:
    for growth in (DynamicGrowth(4, 0, 9), DynamicGrowth(4, 3, 0), StaticGrowth(Choices(()))):
        assert growth.frontier == [] and len(growth.draft(9, "").tree) == 1


@given(tables)
def test_fixed_shapes(table: list[list[float]]) -> None:
    shape = Choices(((0,), (2,), (0, 1), (0, 1, 3), (2, 0), (1,)))
    tree = grow(StaticGrowth(shape), table).draft(9, "").tree
    assert [tree.path_tokens(n) for n in range(1, len(tree))] == list(shape.paths)
    full = grow(StaticGrowth(full_tree([2, 2])), table).draft(9, "").tree
    assert full.num_drafted == 6 and full.depth == 2


def test_ranks_that_do_not_exist_are_left_out() -> None:
    growth = StaticGrowth(Choices(((0,), (7,), (7, 0))))
    grow(growth, [[0.5, 0.25, 0.125, 0.125]] * 5)
    assert growth.draft(9, "").tree.tokens == (9, 0)
