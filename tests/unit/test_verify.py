"""Views and rules at their edges: laziness, batches, ties, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slipstream.core.draft import Draft
from slipstream.core.params import SamplingParams
from slipstream.core.tree import TokenTree
from slipstream.errors import DrafterError, ParameterError
from slipstream.logits.pipeline import LogitsPipeline
from slipstream.verify import (
    RULES,
    LogitsView,
    Rule,
    Verdict,
    ViewRow,
    block,
    build_views,
    check_rule,
    choose_rule,
    multi_candidate,
    point_mass,
    rejection,
    typical,
)
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
    assert choose_rule(Draft(tree, (q, None, None))) is multi_candidate
    twice = TokenTree((1, 2, 2), (-1, 0, 0), allow_duplicates=True)
    assert choose_rule(Draft(twice, (q, None, None))) is multi_candidate


def test_block_is_for_sampled_chains_and_leaves_the_others_alone() -> None:
    q = torch.full((V,), 1 / V)
    chain, tree = TokenTree.chain(1, [2]), TokenTree.from_paths(1, [[2], [3]])
    assert choose_rule(Draft(chain, (q, None)), "block") is block
    assert choose_rule(Draft(chain, (q, None)), "rejection") is rejection
    assert choose_rule(Draft(tree, (q, None, None)), "block") is multi_candidate
    assert choose_rule(Draft(chain), "block") is point_mass


def test_typical_acceptance_is_refused_unless_lossy_output_is_allowed() -> None:
    chain = Draft(TokenTree.chain(1, [2]))
    with pytest.raises(ParameterError, match="changes the output.*lossy=True"):
        choose_rule(chain, "typical")
    assert choose_rule(chain, "typical", lossy=True) is typical
    assert choose_rule(chain, "auto", lossy=True) is point_mass  # a permission, not a wish
    with pytest.raises(ParameterError, match="rule must be one of"):
        check_rule("medusa", lossy=True)
    with pytest.raises(ParameterError, match="lossy=True"):
        check_rule("typical", lossy="false")  # type: ignore[arg-type]
    assert [check_rule(rule, lossy=True) for rule in RULES] == [False, False, False, True]


def typical_view(tree: TokenTree, laws: list[list[float]], **params: Any) -> LogitsView:
    return LogitsView(torch.tensor(laws).log(), pipeline(temperature=1.0, **params), [4, 4, 1], tree, 0)


SURE = [0.79, 0.07, 0.07, 0.07, 0.0, 0.0]
UNSURE = [0.186, 0.07, 0.186, 0.186, 0.186, 0.186]


def test_typical_acceptance_passes_what_is_above_the_threshold() -> None:
    """min(0.09, 0.3 exp(-H)): 0.09 where the target is sure, about 0.3/6 where six are about as likely."""
    tree = TokenTree.from_paths(1, [[0], [1], [4]])
    view = typical_view(tree, [SURE] + [UNSURE] * 3)
    assert typical(Draft(tree), view).path == (1,)
    only_unlikely = TokenTree.chain(1, [1])
    assert typical(Draft(only_unlikely), typical_view(only_unlikely, [SURE] * 3)).path == ()
    assert typical(Draft(only_unlikely), typical_view(only_unlikely, [UNSURE] * 3)).path == (1,)
    assert typical(Draft(only_unlikely), typical_view(only_unlikely, [SURE] * 3), epsilon=0.06).path == (1,)


def test_typical_acceptance_takes_the_longest_path_then_the_likelier() -> None:
    tree = TokenTree.from_paths(1, [[0], [1, 2], [3, 4]])
    level = [0.3, 0.3, 0.1, 0.3, 0.0, 0.0]
    laws = [level, level, [0.1, 0.1, 0.2, 0.3, 0.2, 0.1], level, [0.1, 0.1, 0.1, 0.1, 0.4, 0.2], level]
    verdict = typical(Draft(tree), typical_view(tree, laws))
    assert verdict.path == (4, 5)
    assert verdict.token == typical_view(tree, laws).token(5)


def test_typical_acceptance_of_a_greedy_target_is_greedy() -> None:
    torch.manual_seed(2)
    tree, logits = TokenTree.from_paths(1, [[2, 3], [4], [0]]), torch.randn(5, V)
    logits[0, 2] = logits[1, 3] = 9.0
    view = LogitsView(logits, pipeline(), [4, 4, 1], tree, 0)
    assert typical(Draft(tree), view) == point_mass(Draft(tree), view)


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
@pytest.mark.parametrize("rule", [rejection, block, multi_candidate])
def test_a_q_that_is_no_law_over_the_vocabulary_is_refused(rule: Rule, row: torch.Tensor, match: str) -> None:
    tree = TokenTree.chain(1, [2])
    view = LogitsView(torch.zeros(2, V), pipeline(temperature=1.0), [4, 4, 1], tree, 0)
    with pytest.raises(DrafterError, match=match) as error:
        rule(Draft(tree, (row, None)), view)
    assert "\n" not in str(error.value)


def test_residual_of_equal_laws_is_the_law() -> None:
    p = torch.tensor([0.3, 0.7, 0.0], dtype=torch.float64)
    assert torch.equal(residual(p, p), p)
    assert residual(p, torch.tensor([0.7, 0.3, 0.0]).double()).tolist() == [0.0, 1.0, 0.0]


@pytest.mark.parametrize("rule", [rejection, block, multi_candidate])
def test_greedy_target_under_a_ratio_test_gives_the_argmax(rule: Rule) -> None:
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
        assert rule(Draft(tree, (q, q, None)), view) == expected


def test_siblings_whose_q_has_nothing_else_are_not_tried() -> None:
    """A float32 row may have lost what the second child was drawn from; what is left of p is exact."""
    logits = torch.zeros(3, V)
    logits[0, 3] = 1.0
    sharp = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    tree = TokenTree.from_paths(1, [[0], [3]])
    view = LogitsView(logits, pipeline(), [4, 4, 1], tree, 0)
    assert multi_candidate(Draft(tree, (sharp, None, None)), view) == Verdict((), 3)


def test_uniforms_and_residual_draws_are_new_in_every_pass_and_the_targets_draws_are_not() -> None:
    """One position seen from two roots: what block verification and the law rest on."""
    torch.manual_seed(3)
    row = torch.randn(V)
    law = torch.full((V,), 1 / V, dtype=torch.float64)
    near = TokenTree.root(1)
    far = TokenTree.chain(4, [1])
    drawn: set[tuple[int, ...]] = set()
    for seed in range(20):
        here = LogitsView(row[None], pipeline(temperature=1.0), [4, 4, 1], near, seed)
        there = LogitsView(torch.stack([row, row]), pipeline(temperature=1.0), [4, 4], far, seed)
        assert here.token(0) == there.token(1)
        assert here.uniform(0) != there.uniform(1)
        drawn.add((here.draw(0, law), there.draw(1, law)))
    assert any(a != b for a, b in drawn)
