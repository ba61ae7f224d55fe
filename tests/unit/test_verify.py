"""Views and rules at their edges: laziness, batches, ties, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slipstream.core.draft import Draft
from slipstream.core.params import SamplingParams
from slipstream.core.tree import TokenTree
from slipstream.errors import DrafterError
from slipstream.logits.pipeline import LogitsPipeline
from slipstream.verify import LogitsView, Verdict, ViewRow, build_views, choose_rule, point_mass, rejection
from slipstream.verify.rejection import residual

V = 6


def pipeline(**params: Any) -> LogitsPipeline:
    return LogitsPipeline(SamplingParams().with_(**params), V, frozenset({0}), 2)


def test_views_of_packed_rows_read_their_own_nodes() -> None:
    torch.manual_seed(0)
    logits = torch.randn(16, V + 3).bfloat16()
    logits[:, V:] = 100.0  # padding of the head
    trees = [TokenTree.chain(1, [2, 3]), TokenTree.root(4), TokenTree.from_paths(0, [[1, 2], [3]])]
    kinds = [pipeline(), pipeline(temperature=1.0), pipeline(frequency_penalty=0.5)]
    rows = [ViewRow(kinds[i], [5, 4, trees[i].tokens[0]], trees[i], 9, (0, 3, 4)[i]) for i in range(3)]
    for row, view in zip(rows, build_views(rows, logits), strict=True):
        for node in range(len(row.tree)):
            raw = logits[row.start + node]
            prefix = [*row.tokens, *row.tree.path_tokens(node)]
            assert view.token(node) == row.pipeline.token(raw, prefix, 9, len(prefix)) < V
            assert torch.equal(view.probs(node), row.pipeline.probs(raw, prefix))


def test_no_rows_no_views() -> None:
    assert build_views([], torch.zeros(8, V)) == []


def test_only_visited_nodes_are_processed() -> None:
    """A NaN row that nobody asks about does no harm."""
    tree = TokenTree.chain(1, [2, 3])
    logits = torch.zeros(3, V)
    logits[0, 5] = 1.0
    logits[1:] = float("nan")
    view = LogitsView(logits, pipeline(frequency_penalty=0.5), [4, 4, 1], tree, 0)
    assert point_mass(Draft(tree), view) == Verdict((), 5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("params", [{}, {"logit_bias": {1: 0.0}}])
def test_the_lowest_id_wins_a_tie(dtype: torch.dtype, params: dict[str, Any]) -> None:
    logits = torch.zeros(1, V, dtype=dtype)
    logits[0, 2] = logits[0, 4] = 3.0
    row = ViewRow(pipeline(**params), [5, 4, 1], TokenTree.root(1), 0, 0)
    assert build_views([row], logits)[0].token(0) == 2


def test_a_view_answers_the_same_whenever_asked() -> None:
    torch.manual_seed(1)
    tree, logits = TokenTree.chain(1, [2, 3]), torch.randn(3, V)
    views = [LogitsView(logits, pipeline(temperature=1.0), [4, 4, 1], tree, 3) for _ in range(2)]
    law = torch.full((V,), 1 / V, dtype=torch.float64)
    first = [(views[0].token(n), views[0].uniform(n), views[0].draw(n, law)) for n in (0, 1, 2)]
    later = [(views[1].token(n), views[1].uniform(n), views[1].draw(n, law)) for n in (2, 1, 0)]
    assert first == later[::-1]
    assert len({views[0].uniform(n, i) for n in (0, 1) for i in (0, 1)}) == 4


def test_rule_by_kind_of_draft() -> None:
    q = torch.full((V,), 1 / V)
    chain, tree = TokenTree.chain(1, [2]), TokenTree.from_paths(1, [[2], [3]])
    assert choose_rule(Draft(chain)) is choose_rule(Draft(tree)) is point_mass
    assert choose_rule(Draft(chain, (q, None))) is rejection
    assert choose_rule(Draft(TokenTree.root(1), (None,))) is rejection
    with pytest.raises(DrafterError, match="multi-candidate"):
        choose_rule(Draft(tree, (q, None, None)))


@pytest.mark.parametrize(
    ("row", "match"),
    [
        (torch.full((V - 1,), 1 / (V - 1)), "has 5 tokens, the target 6"),
        (torch.full((V + 1,), 1 / (V + 1)), "has 7 tokens, the target 6"),
        (torch.full((1, V), 1 / V), r"one q row \[V\]"),
        (torch.zeros(V), "not a law"),
        (torch.full((V,), float("nan")), "not a law"),
        (torch.tensor([-0.5, 0.5, 0.5, 0.5, 0.0, 0.0]), "not a law"),
    ],
)
def test_a_q_that_is_no_law_over_the_vocabulary_is_refused(row: torch.Tensor, match: str) -> None:
    tree = TokenTree.chain(1, [2])
    view = LogitsView(torch.zeros(2, V), pipeline(temperature=1.0), [4, 4, 1], tree, 0)
    with pytest.raises(DrafterError, match=match) as error:
        rejection(Draft(tree, (row, None)), view)
    assert "\n" not in str(error.value)


def test_residual_of_equal_laws_is_the_law() -> None:
    p = torch.tensor([0.3, 0.7, 0.0], dtype=torch.float64)
    assert torch.equal(residual(p, p), p)
    assert residual(p, torch.tensor([0.7, 0.3, 0.0]).double()).tolist() == [0.0, 1.0, 0.0]


def test_greedy_target_under_rejection_gives_the_argmax() -> None:
    """Temperature 0 is a one-hot law: accepted iff the drafted token is the argmax."""
    logits = torch.zeros(3, V)
    logits[0, 2] = logits[1, 3] = logits[2, 5] = 1.0
    q = torch.full((V,), 1 / V)
    for drafted, expected in (
        ([2, 3], Verdict((1, 2), 5)),
        ([2, 4], Verdict((1,), 3)),
        ([1, 3], Verdict((), 2)),
    ):
        tree = TokenTree.chain(1, drafted)
        view = LogitsView(logits, pipeline(), [4, 4, 1], tree, 0)
        assert rejection(Draft(tree, (q, q, None)), view) == expected
