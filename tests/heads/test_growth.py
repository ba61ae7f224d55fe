"""Growing trees: EAGLE-2's dynamic tree against a plain reading of the paper, and fixed shapes."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.core.choices import Choices, full_tree
from slipstream.drafters._growth import (
    ROOT,
    DynamicGrowth,
    Growth,
    Level,
    SampledChain,
    StaticGrowth,
    likeliest,
)
from slipstream.drafters._growth import grow as grow_all

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
        growth.add(Level([[0, 1, 2, 3]] * len(rows), rows))
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


def paths_of(growth: Growth) -> set[tuple[int, ...]]:
    tree = growth.draft(9, "").tree
    return {tree.path_tokens(n) for n in range(1, len(tree))}


@given(tables, st.integers(1, 4), st.integers(1, 5), st.integers(1, 20))
def test_a_kept_greedy_path_and_the_best_of_the_rest(
    table: list[list[float]], top_k: int, depth: int, nodes: int
) -> None:
    """The chain of that depth is in it, as far as there are nodes; the others are the likeliest scored."""
    growth = grow(DynamicGrowth(top_k, depth, nodes, greedy_path=True), table)
    draft = growth.draft(9, "")
    chain = [(0,) * d for d in range(1, min(depth, nodes) + 1)]
    paths = [draft.tree.path_tokens(n) for n in range(1, len(draft.tree))]
    assert paths[: len(chain)] == chain  # in front, so that no cut to fewer nodes loses it
    assert len(paths) == len(set(paths)) <= nodes and draft.tree.depth <= depth
    others = paths[len(chain) :]
    values = {
        p: v for p, v in zip(map(path_to(growth), range(len(growth.tokens))), growth.values, strict=True)
    }
    left_out = set(values) - set(paths)
    assert not others or not left_out or min(values[p] for p in others) >= max(values[p] for p in left_out)
    # Nothing was left out for want of being scored: the full tree of that width has no better ones.
    wide = grow(DynamicGrowth(top_k, depth, 10_000, greedy_path=True), table)
    every = sorted((v for p, v in scored_paths(wide).items() if p not in chain), reverse=True)
    assert sorted((values[p] for p in others), reverse=True) == every[: nodes - len(chain)]


def path_to(growth: Growth):  # type: ignore[no-untyped-def]
    def path(node: int) -> tuple[int, ...]:
        return () if node == ROOT else (*path(growth.parents[node]), growth.tokens[node])

    return path


def scored_paths(growth: Growth) -> dict[tuple[int, ...], float]:
    return dict(zip(map(path_to(growth), range(len(growth.tokens))), growth.values, strict=True))


def test_the_greedy_path_is_expanded_even_where_others_are_likelier() -> None:
    def logs(*rows: list[float]) -> list[list[float]]:
        return [[math.log(p) for p in row] for row in rows]

    kept, papers = DynamicGrowth(2, 3, 6, greedy_path=True), DynamicGrowth(2, 3, 6)
    for growth, expanded in ((kept, {(0, 2), (1, 4)}), (papers, {(1, 4), (1, 5)})):
        growth.add(Level([[0, 1]], logs([0.5, 0.45])))
        growth.add(Level([[2, 3], [4, 5]], logs([0.2, 0.2], [0.6, 0.4])))
        assert set(map(path_to(growth), growth.frontier)) == expanded
        growth.add(Level([[6, 7], [8, 9]], logs([0.9, 0.1], [0.9, 0.1])))
    assert paths_of(kept) == {(0,), (0, 2), (0, 2, 6), (1,), (1, 4), (1, 4, 8)}
    assert (0, 2, 6) not in paths_of(papers)


def test_a_greedy_path_that_stops_leaves_its_nodes_to_others() -> None:
    """Token 0 is followed by nothing likely, token 1 by something certain."""
    growth = DynamicGrowth(2, 4, 5, stop_below=0.3, greedy_path=True)
    growth.add(Level([[0, 1]], [[math.log(0.5), math.log(0.4)]]))
    growth.add(Level([[5, 6], [7, 8]], [[math.log(0.2), math.log(0.1)], [0.0, -9.0]]))
    growth.add(Level([[7, 8]], [[0.0, -9.0]]))
    growth.add(Level([[7, 8]], [[0.0, -9.0]]))
    assert growth.frontier == [] and paths_of(growth) == {(0,), (1,), (1, 7), (1, 7, 7), (1, 7, 7, 7)}


def test_a_chain_budget_is_a_chain_and_computes_no_more() -> None:
    growth = DynamicGrowth(3, 4, 4, greedy_path=True)
    for _ in range(4):
        assert len(growth.frontier) == 1
        growth.add(Level([[3, 2, 1]], [[math.log(0.5), math.log(0.3), math.log(0.2)]]))
    assert growth.frontier == [] and paths_of(growth) == {(3,) * d for d in range(1, 5)}


@given(tables, st.integers(1, 4), st.integers(1, 5), st.integers(1, 20))
def test_scores_are_told_where_they_are_wanted_and_change_no_tree(
    table: list[list[float]], top_k: int, depth: int, nodes: int
) -> None:
    for greedy in (False, True):
        told = grow(DynamicGrowth(top_k, depth, nodes, scored=True, greedy_path=greedy), table).draft(9, "")
        kept = grow(DynamicGrowth(top_k, depth, nodes, scored=False, greedy_path=greedy), table).draft(9, "")
        assert told.tree == kept.tree
        assert told.scores is not None and (kept.scores is None) == (top_k == 1)
        for node in range(1, len(told.tree)):  # what the rows of the table multiply to
            value, token = 1.0, 0
            for level, following in enumerate(told.tree.path_tokens(node)):
                value *= table[(level + 2 * token) % len(table)][following]
                token = following
            assert told.scores[node] == pytest.approx(value)


def test_the_impossible_is_never_drafted() -> None:
    growth = DynamicGrowth(3, 2, 9)
    growth.add(Level([[4, 5, 6]], [[0.0, -math.inf, math.nan]]))
    assert growth.frontier == [0] and paths_of(growth) == {(4,)}


def test_a_fixed_shape_leaves_out_what_is_unlikely_and_what_follows_it() -> None:
    shape = Choices(((0,), (1,), (0, 0), (1, 0), (0, 1)))
    table = [[0.5, 0.25, 0.125, 0.125]] * 5
    assert paths_of(grow(StaticGrowth(shape, 0.3), table)) == {(0,), (0, 0)}
    draft = grow(StaticGrowth(shape, scored=True), table).draft(9, "")
    assert draft.scores == pytest.approx((1.0, 0.5, 0.25, 0.25, 0.125, 0.125))
    assert grow(StaticGrowth(shape, scored=False), table).draft(9, "").scores is None


def test_a_sampled_chain_asks_before_it_draws_and_keeps_what_it_drew() -> None:
    drawn: list[int] = []

    def draw(logits: torch.Tensor, before: int) -> tuple[int, torch.Tensor]:
        assert before == len(drawn)
        drawn.append(int(logits.argmin()))  # never the likeliest: that is not what decides
        return drawn[-1], logits.softmax(0)

    rows = torch.tensor([[2.0, 0.0], [0.0, 3.0], [0.1, 0.0]])
    chain = SampledChain(9, 0.6, draw)
    for row in rows:
        assert len(chain.frontier) == 1
        chain.add(Level([[0]], [[float(row.log_softmax(0).max())]], row[None]))
    assert chain.frontier == [] and drawn == [1, 0]  # the third law is not sure enough
    draft = chain.draft(9, "me")
    assert draft.tree.tokens == (9, 1, 0) and draft.q is not None and draft.scores is None
    assert [None if q is None else q.tolist() for q in draft.q] == [
        rows[0].softmax(0).tolist(),
        rows[1].softmax(0).tolist(),
        None,
    ]
    short = SampledChain(1, 0.0, draw)
    assert not short.scored
    drawn.clear()
    short.add(Level([[0]], None, rows[:1]))
    assert short.frontier == [] and SampledChain(0, 0.0, draw).frontier == []


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_sampled_chain_ends_where_the_draft_gives_no_numbers(bad: float) -> None:
    def draw(logits: torch.Tensor, before: int) -> tuple[int, torch.Tensor]:
        assert before == 0 and bool(logits.isfinite().all())
        return 1, logits.softmax(0)

    chain = SampledChain(9, 0.0, draw)
    chain.add(Level([[0]], None, torch.tensor([[2.0, 0.0]])))
    chain.add(Level([[0]], None, torch.tensor([[bad, 0.0]])))
    assert chain.frontier == [] and chain.draft(9, "me").tree.tokens == (9, 1)


def test_rows_grow_together_as_each_alone() -> None:
    """What one row wants (more ranks, probabilities) changes nothing for another."""
    table = torch.randn(40, 7, generator=torch.Generator().manual_seed(1))

    def build() -> list[Growth]:
        return [
            DynamicGrowth(1, 5, 5, scored=False),
            DynamicGrowth(3, 4, 9),
            StaticGrowth(full_tree([4, 2])),
            DynamicGrowth(1, 2, 2, stop_below=0.2),
        ]

    def expand(live, width, scored):  # type: ignore[no-untyped-def]
        at = [
            sum(r.growth.tokens[n] + 3 * r.growth.depths[n] for n in [node] if n != ROOT)
            for r in live
            for node in r.growth.frontier
        ]
        ids, logprobs = likeliest(table[at], width, scored)
        return Level(ids.tolist(), None if logprobs is None else logprobs.tolist())

    together = [SimpleNamespace(growth=g) for g in build()]
    grow_all(together, expand)
    alone = [SimpleNamespace(growth=g) for g in build()]
    for row in alone:
        grow_all([row], expand)
    assert [r.growth.draft(9, "") for r in together] == [r.growth.draft(9, "") for r in alone]
    assert all(len(r.growth.tokens) for r in alone)


def test_the_likeliest_begin_with_the_argmax_and_a_softmax_is_computed_on_demand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0, 2.0], [0.0, -1.0, -2.0, -3.0, -4.0]])
    for width in (1, 2, 5, 9):
        ids, logprobs = likeliest(logits, width, True)
        assert ids[:, 0].tolist() == logits.argmax(-1).tolist() and ids.shape[1] == min(width, 5)
        assert all(len(set(row)) == len(row) for row in ids.tolist())
        assert logprobs is not None
        torch.testing.assert_close(logprobs, logits.log_softmax(-1).gather(-1, ids))
    monkeypatch.setattr(torch.Tensor, "log_softmax", None)
    monkeypatch.setattr(torch.Tensor, "topk", None)
    ids, logprobs = likeliest(logits, 1, False)
    assert logprobs is None and ids.tolist() == [[1], [0]]
