"""Block verification keeps the law, yields at least what rejection does, and faults that must be caught."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from slipstream.core.draft import Draft
from slipstream.testing.branching import LawAt, Prefix
from slipstream.testing.exact import (
    EXACT,
    Choose,
    Propose,
    block_expectation,
    chain_expectation,
    emitted,
    sampled_chain,
    violations,
)
from slipstream.testing.laws import WARPS, drafter_law, naive_law, pipeline_law
from slipstream.testing.table_lm import TableLM
from slipstream.verify import Rule, TargetView, Verdict, block, rejection
from slipstream.verify.rejection import residual

PAIRS = 30
ORDER = 2


def shape(pair: int) -> tuple[int, int]:
    """Vocabulary and depth: depth 3 is the first with a prefix between the first and the last."""
    return ((3, 2), (3, 3), (3, 1), (2, 4), (4, 2))[pair // 5 % 5]


def pair_laws(pair: int) -> tuple[int, LawAt, LawAt, LawAt]:
    vocab, depth = shape(pair)
    params, drafting = WARPS[pair % len(WARPS)], WARPS[(pair * 3 + 1) % len(WARPS)]
    target = pipeline_law(vocab, pair, params, ORDER)
    q = drafter_law(vocab, 1000 + pair, drafting, ORDER)
    truth = naive_law(vocab, pair, params, ORDER)
    return depth, *(by_ending(law) for law in (target, truth, q))  # type: ignore[return-value]


def by_ending(law: LawAt) -> LawAt:
    return lambda prefix: law(prefix[-ORDER:])


def block_violations(pair: int, rule: Rule = block) -> list[str]:
    depth, target, truth, q = pair_laws(pair)
    expected = block_expectation(truth, q, depth)
    return violations(target, truth, sampled_chain(q, depth), rule, expected, depth + 2, ORDER)


@pytest.mark.parametrize("pair", range(PAIRS))
def test_block_keeps_the_law(pair: int) -> None:
    assert block_violations(pair) == []


def test_block_keeps_the_law_where_target_and_draft_agree_in_places() -> None:
    """P = Q at some prefixes: there h is 0/0, and what is left is empty."""
    law, other = TableLM(3, 5, order=1).law, TableLM(3, 6, order=1).law
    targets: list[LawAt] = [law]
    for agrees in range(3):
        targets.append(lambda prefix, at=agrees: law(prefix) if prefix[-1] == at else other(prefix))  # type: ignore[misc]
    for target in targets:
        expected = block_expectation(target, law, 3)
        assert violations(target, target, sampled_chain(law, 3), block, expected, 5, 1) == []
    assert block_expectation(law, law, 3) == pytest.approx(4.0)


def test_a_draft_that_stops_at_a_drawn_token_is_exact_when_it_keeps_that_token() -> None:
    """The chain's length may depend on what was drawn, for block verification too."""
    for pair in range(5):
        _, target, truth, q = pair_laws(pair)
        whole = sampled_chain(q, 3)

        def propose(prefix: Prefix, choose: Choose, whole: Propose = whole) -> Draft:
            draft = whole(prefix, choose)
            return draft.truncate(1 + draft.tree.tokens[1] % 3)

        first = emitted(target, propose, block, 1).first_pass
        assert violations(target, truth, propose, block, first, 5, ORDER) == []


def test_block_never_yields_fewer_tokens_than_rejection() -> None:
    gains = []
    for pair in range(PAIRS):
        depth, target, _, q = pair_laws(pair)
        propose = sampled_chain(q, depth)
        by_block, by_token = (emitted(target, propose, rule, 1).first_pass for rule in (block, rejection))
        assert by_token == pytest.approx(chain_expectation(target, q, depth), abs=EXACT)
        assert by_block >= by_token - EXACT
        if depth == 1:
            assert by_block == pytest.approx(by_token, abs=EXACT)
        gains.append(by_block - by_token)
    assert sum(gain > 0.01 for gain in gains) >= 5


def test_nothing_drafted_is_a_plain_step() -> None:
    law = TableLM(3, 1).law
    assert violations(law, law, sampled_chain(law, 0), block, 1.0, 3) == []


# -- planted faults ---------------------------------------------------------------------------------


def block_rule(
    stop_at_failure: bool = False,
    weigh_residual: bool = True,
    last: Callable[[float, float, float], float] = lambda weight, p, q: weight,
    capped: bool = True,
    middle: Callable[[float, float], float] = lambda s, weight: s / (s + 1.0 - weight) if s else 0.0,
    one_uniform: bool = False,
) -> Rule:
    """Block verification as the paper writes it, with replaceable parts."""

    def rule(draft: Draft, view: TargetView) -> Verdict:
        assert draft.q is not None
        n, weights, ratio = draft.tree.num_drafted, [1.0], (1.0, 1.0)
        for node in range(n):
            p, q = view.probs(node), draft.q[node]
            assert q is not None
            ratio = float(p[draft.tree.tokens[node + 1]]), float(q[draft.tree.tokens[node + 1]])
            weight = weights[-1] * ratio[0] / ratio[1]
            weights.append(min(1.0, weight) if capped else weight)
        tau = 0
        for node in range(1, n + 1):
            u = view.uniform(0 if one_uniform else node - 1)
            if node == n:
                passed = u < last(weights[n], *ratio)
            else:
                q = draft.q[node]
                assert q is not None
                s = float((weights[node] * view.probs(node) - q).clamp(min=0.0).sum())
                passed = u < middle(s, weights[node])
            if passed:
                tau = node
            elif stop_at_failure:
                break
        path = tuple(range(1, tau + 1))
        if tau == n:
            return Verdict(path, view.token(n))
        q = draft.q[tau]
        assert q is not None
        factor = weights[tau] if weigh_residual else 1.0
        return Verdict(path, view.draw(tau, _or_target(residual(factor * view.probs(tau), q))))

    return rule


def _or_target(law: torch.Tensor) -> torch.Tensor:
    return law / law.sum()


FAULTS = {
    "stop at the first failure": block_rule(stop_at_failure=True),
    "residual without w": block_rule(weigh_residual=False),
    "last position: the ratio of its own token": block_rule(last=lambda weight, p, q: min(1.0, p / q)),
    "last position: always": block_rule(last=lambda weight, p, q: 1.0),
    "middle: h is the weight": block_rule(middle=lambda s, weight: weight),
    "middle: 1 - w left out": block_rule(middle=lambda s, weight: float(s > 0.0)),
    "weight not capped at 1": block_rule(capped=False),
    "one uniform for all positions": block_rule(one_uniform=True),
}


def test_the_rule_the_faults_are_made_from_is_right() -> None:
    assert [block_violations(pair, block_rule()) for pair in range(10)] == [[]] * 10


@pytest.mark.parametrize("name", FAULTS)
def test_block_fault_is_caught(name: str) -> None:
    assert any("law" in block_violations(pair, FAULTS[name]) for pair in range(10))
