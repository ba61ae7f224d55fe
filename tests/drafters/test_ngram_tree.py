"""Prompt lookup with branches."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.core.draft import Budget, DraftRequest
from slipstream.core.params import SamplingParams
from slipstream.core.tree import TokenTree
from slipstream.drafters import build_drafter
from slipstream.drafters.base import TargetInfo
from slipstream.errors import ParameterError

INFO = TargetInfo(24, 2048)
texts = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def ngram(tokens: list[int], depth: int, nodes: int, **options: int) -> TokenTree:
    spec = "ngram:" + ",".join(f"{k}={v}" for k, v in options.items())
    request = DraftRequest(0, tokens, 1, Budget(depth, nodes), SamplingParams(), 0)
    return build_drafter(spec, INFO).propose([request])[0].tree


@pytest.mark.parametrize("branches", [1, 3])
def test_the_sample_is_that_of_plain_decoding(bench: Any, branches: int) -> None:
    counts = bench.assert_same_sample(lambda: build_drafter(f"ngram:min_n=1,branches={branches}", INFO))
    assert counts.accepted_tokens > 0


@pytest.mark.parametrize("branches", [1, 3])
def test_a_shorter_row_of_the_same_number_is_read_anew(branches: int) -> None:
    """Two sessions that share a drafter count their rows alike."""
    shared, texts = build_drafter(f"ngram:min_n=1,branches={branches}", INFO), ([1, 2, 3] * 5, [2, 1, 2], [1])
    for text in texts:
        request = DraftRequest(0, text, 1, Budget(4, 4), SamplingParams(), 0)
        fresh = build_drafter(f"ngram:min_n=1,branches={branches}", INFO)
        assert shared.propose([request]) == fresh.propose([request])


def by_hand(tokens: list[int], depth: int, max_n: int, min_n: int) -> list[int]:
    """The chain of one branch: the latest earlier occurrence of the longest suffix."""
    for n in range(min(max_n, len(tokens)), min_n - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == tokens[len(tokens) - n :]:
                copied = list(tokens)
                for i in range(depth):
                    copied.append(copied[end + i])
                return copied[len(tokens) :]
    return []


@given(tokens=texts, depth=st.integers(1, 9))
def test_one_branch_is_the_chain_it_always_was(tokens: list[int], depth: int) -> None:
    tree = ngram(tokens, depth, depth, max_n=3, min_n=1)
    assert tree == TokenTree.chain(tokens[-1], by_hand(tokens, depth, 3, 1))


@given(tokens=texts, depth=st.integers(1, 6), nodes=st.integers(1, 12), branches=st.integers(2, 4))
def test_branches_keep_the_budget_and_begin_with_the_chain(
    tokens: list[int], depth: int, nodes: int, branches: int
) -> None:
    tree = ngram(tokens, depth, nodes, max_n=3, min_n=1, branches=branches)
    chain = by_hand(tokens, depth, 3, 1)
    assert tree.num_drafted <= nodes and tree.depth <= depth
    assert bool(tree.num_drafted) == bool(chain)
    leaves = [n for n in range(len(tree)) if not tree.children(n)]
    assert len(leaves) <= branches
    if chain:
        first = max(n for n in range(len(tree)) if tree.path(n) == tuple(range(1, n + 1)))
        assert list(tree.path_tokens(first)) == chain[: len(tree.path(first))]


def test_older_and_shorter_matches_become_branches() -> None:
    tokens = [1, 2, 5, 9, 3, 2, 6, 9, 1, 2, 7, 9, 1, 2]
    tree = ngram(tokens, 3, 8, max_n=2, min_n=1, branches=3)
    assert [tree.path_tokens(n) for n in tree.children(0)] == [(7,), (5,), (6,)]
    assert tree.num_drafted == 3 + 3 + 2  # half of 8 but no more than the depth, half of 5, the rest


def test_a_long_loop_with_branches_is_still_one_chain() -> None:
    tree = ngram([1, 2, 3] * 500, 5, 20, branches=4)
    assert tree.tokens == (3, 1, 2, 3, 1, 2)


def test_no_branch_is_refused() -> None:
    with pytest.raises(ParameterError, match="ngram:branches"):
        build_drafter("ngram:branches=0", INFO)
