"""`TokenTree` and `Draft`: structure, transforms, refusals."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.core.draft import Budget, Draft
from slipstream.core.tree import TokenTree

paths_ = st.lists(st.lists(st.integers(0, 3), max_size=4), max_size=6)


def test_plain_decoding_is_a_tree_of_one_node() -> None:
    tree = TokenTree.root(7)
    assert (len(tree), tree.num_drafted, tree.depth, tree.is_chain) == (1, 0, 0, True)
    assert tree == TokenTree.chain(7, []) == TokenTree.from_paths(7, [])
    assert tree.children(0) == () and tree.path(0) == ()


def test_chain() -> None:
    tree = TokenTree.chain(7, [1, 1, 2])
    assert tree.parents == (-1, 0, 1, 2) and tree.depths == (0, 1, 2, 3) and tree.is_chain
    assert tree.path(3) == (1, 2, 3) and tree.path_tokens(2) == (1, 1)
    assert tree.find_child(1, 1) == 2 and tree.find_child(1, 2) is None


@pytest.mark.parametrize(
    ("tokens", "parents", "match"),
    [
        ((), (), "needs a root"),
        ((1, 2), (-1,), "one parent a node"),
        ((1,), (0,), "must be -1"),
        ((1, 2), (-1, 1), "before children"),
        ((1, 2), (-1, -1), "before children"),
        ((1, 2, 2), (-1, 0, 0), "repeats token 2"),
    ],
)
def test_bad_trees_are_refused(tokens: tuple[int, ...], parents: tuple[int, ...], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        TokenTree(tokens, parents)


def test_duplicates_only_on_request() -> None:
    tree = TokenTree((1, 2, 2), (-1, 0, 0), allow_duplicates=True)
    assert tree.children(0) == (1, 2) and tree.find_child(0, 2) == 1


@given(paths_)
def test_from_paths_holds_every_path_once(paths: list[list[int]]) -> None:
    tree = TokenTree.from_paths(9, paths)
    prefixes = {tuple(path[:n]) for path in paths for n in range(1, len(path) + 1)}
    found = [tree.path_tokens(node) for node in range(1, len(tree))]
    assert len(found) == len(set(found)) and set(found) == prefixes
    assert tree.depth == max((len(path) for path in paths), default=0)
    for node in range(1, len(tree)):
        assert node in tree.children(tree.parents[node])
        assert tree.depths[node] == len(tree.path(node))


@given(paths_, paths_)
def test_merge_is_the_union(one: list[list[int]], other: list[list[int]]) -> None:
    merged = TokenTree.from_paths(9, one).merge(TokenTree.from_paths(9, other))
    assert merged == TokenTree.from_paths(9, one).merge(TokenTree.from_paths(9, [*other, *one]))
    both = TokenTree.from_paths(9, [*one, *other])
    assert {merged.path_tokens(n) for n in range(len(merged))} == {
        both.path_tokens(n) for n in range(len(both))
    }


def test_merge_needs_one_root() -> None:
    with pytest.raises(ValueError, match="different roots"):
        TokenTree.root(1).merge(TokenTree.root(2))


@given(paths_, st.sets(st.integers(0, 12)))
def test_keep_gives_a_tree_and_the_old_numbers(paths: list[list[int]], nodes: set[int]) -> None:
    tree = TokenTree.from_paths(9, paths)
    kept, old = tree.keep(nodes)
    assert old[0] == 0 and list(old) == sorted(old)
    for node, before in enumerate(old):
        assert kept.path_tokens(node) == tree.path_tokens(before)
    whole = {n for n in nodes if n < len(tree) and set(tree.path(n)) <= nodes}
    assert set(old) == whole | {0}


@given(paths_, st.integers(0, 5), st.integers(0, 8))
def test_truncate_keeps_the_limits_and_the_truth(paths: list[list[int]], depth: int, nodes: int) -> None:
    tree = TokenTree.from_paths(9, paths)
    rows = tuple(torch.full((4,), float(n)) if tree.children(n) else None for n in range(len(tree)))
    draft = Draft(tree, rows, tuple(float(n) for n in range(len(tree))), "me")
    cut = draft.truncate(depth, nodes)
    assert cut.tree.depth <= depth and cut.tree.num_drafted <= nodes and cut.source == "me"
    assert cut.q is not None and cut.scores is not None
    for node in range(len(cut.tree)):
        old = int(cut.scores[node])
        assert tree.path_tokens(old) == cut.tree.path_tokens(node)
        if cut.tree.children(node):
            assert cut.q[node] is rows[old]


def test_draft_must_bring_q_for_every_node_with_children() -> None:
    tree = TokenTree.chain(1, [2, 3])
    q = torch.ones(4)
    with pytest.raises(ValueError, match="node 1 has children but no q row"):
        Draft(tree, (q, None, None))
    with pytest.raises(ValueError, match="q has 2 entries for 3 nodes"):
        Draft(tree, (q, q))
    with pytest.raises(ValueError, match="scores has 1 entries"):
        Draft(tree, scores=(0.5,))


def test_budget_of_a_chain() -> None:
    assert Budget.chain(4, 0.2) == Budget(4, 4, 0.2)
    assert Budget() == Budget(0, 0, 0.0)
