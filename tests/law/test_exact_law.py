"""The law of the output is the target's: exact enumeration, and planted faults that it must catch."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from slipstream.core.draft import Draft
from slipstream.core.tree import TokenTree
from slipstream.engine.faults import RULES
from slipstream.testing.branching import LawAt, Prefix
from slipstream.testing.exact import (
    EXACT,
    Choose,
    Propose,
    chain_expectation,
    distance,
    emitted,
    fixed_tree,
    plain,
    sampled_chain,
    tree_expectation,
    violations,
)
from slipstream.testing.laws import WARPS, drafter_law, naive_law, pipeline_law, table
from slipstream.verify import Rule, TargetView, Verdict, point_mass, rejection
from slipstream.verify.rejection import residual

PAIRS = 30


def shape(pair: int) -> tuple[int, int]:
    """Vocabulary and chain depth of a random pair."""
    return (4, 2) if pair % 5 == 4 else (3, 2)


# -- point masses -----------------------------------------------------------------------------------


def greedy_chain(pair: int) -> Callable[[Prefix], TokenTree]:
    vocab, depth = shape(pair)
    law = table(vocab, 1000 + pair)

    def tree_at(prefix: Prefix) -> TokenTree:
        tokens: list[int] = []
        for _ in range(depth):
            tokens.append(int(law((*prefix, *tokens)).argmax()))
        return TokenTree.chain(prefix[-1], tokens)

    return tree_at


def random_tree(pair: int) -> Callable[[Prefix], TokenTree]:
    """Some paths in any order, of any length up to 3, so children come in any order."""
    vocab, _ = shape(pair)

    def tree_at(prefix: Prefix) -> TokenTree:
        dice = random.Random(f"{pair} {prefix}")
        paths = [
            [dice.randrange(vocab) for _ in range(dice.randint(0, 3))] for _ in range(dice.randint(0, 4))
        ]
        return TokenTree.from_paths(prefix[-1], paths)

    return tree_at


SHAPES = {"chain": greedy_chain, "tree": random_tree}


def point_mass_violations(pair: int, trees: str, rule: Rule) -> list[str]:
    target, tree_at = table(shape(pair)[0], pair), SHAPES[trees](pair)
    expected = tree_expectation(target, tree_at((0,)))
    return violations(target, target, fixed_tree(tree_at), rule, expected, n=5)


@pytest.mark.parametrize("trees", SHAPES)
@pytest.mark.parametrize("pair", range(PAIRS))
def test_point_mass_keeps_the_law(pair: int, trees: str) -> None:
    assert point_mass_violations(pair, trees, point_mass) == []


def redraw_what_no_child_carries(draft: Draft, view: TargetView) -> Verdict:
    verdict = point_mass(draft, view)
    node = verdict.path[-1] if verdict.path else 0
    if draft.tree.children(node):  # the draw is dropped for its value
        return Verdict(verdict.path, view.draw(node, view.probs(node)))
    return verdict


def descend_to_a_child_not_drawn(draft: Draft, view: TargetView) -> Verdict:
    verdict = point_mass(draft, view)
    node = verdict.path[-1] if verdict.path else 0
    children = draft.tree.children(node)
    if children and float(view.probs(node)[draft.tree.tokens[children[0]]]) > 0.2:
        return Verdict((*verdict.path, children[0]), view.token(children[0]))
    return verdict


def bonus_from_the_root(draft: Draft, view: TargetView) -> Verdict:
    return Verdict(point_mass(draft, view).path, view.token(0))


def leaf_as_bonus(draft: Draft, view: TargetView) -> Verdict:
    verdict = point_mass(draft, view)
    if verdict.path and not draft.tree.children(verdict.path[-1]):
        return Verdict(verdict.path[:-1], draft.tree.tokens[verdict.path[-1]])
    return verdict


@pytest.mark.parametrize(
    ("fault", "caught_by"),
    [
        (redraw_what_no_child_carries, "law"),
        (descend_to_a_child_not_drawn, "law"),
        (bonus_from_the_root, "law"),
        (leaf_as_bonus, "first pass"),
    ],
)
@pytest.mark.parametrize("trees", SHAPES)
def test_point_mass_fault_is_caught(fault: Rule, caught_by: str, trees: str) -> None:
    assert any(caught_by in point_mass_violations(pair, trees, fault) for pair in range(6))


# -- rejection --------------------------------------------------------------------------------------


Fault = Callable[[Propose, LawAt], Propose]


def rejection_violations(pair: int, rule: Rule, fault: Fault | None = None) -> list[str]:
    vocab, depth = shape(pair)
    params, drafting = WARPS[pair % len(WARPS)], WARPS[(pair * 3 + 1) % len(WARPS)]
    target, truth = pipeline_law(vocab, pair, params), naive_law(vocab, pair, params)
    q = drafter_law(vocab, 1000 + pair, drafting)
    propose = sampled_chain(q, depth)
    if fault:
        propose = fault(propose, table(vocab, 1000 + pair))
    return violations(target, truth, propose, rule, chain_expectation(truth, q, depth), n=depth + 2)


@pytest.mark.parametrize("pair", range(PAIRS))
def test_rejection_keeps_the_law(pair: int) -> None:
    assert rejection_violations(pair, rejection) == []


def chain_rule(
    accepts: Callable[[float, float, float], bool] = lambda u, p, q: u * q < p,
    after_rejection: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = residual,
    temper: float = 1.0,
) -> Rule:
    """Rejection with replaceable parts, from which the faulty ones are made."""

    def rule(draft: Draft, view: TargetView) -> Verdict:
        assert draft.q is not None
        for node in range(draft.tree.num_drafted):
            p, q = view.probs(node), draft.q[node]
            assert q is not None
            token = draft.tree.tokens[node + 1]
            tested_p, tested_q = (row**temper / (row**temper).sum() for row in (p, q))
            if not accepts(view.uniform(node), float(tested_p[token]), float(tested_q[token])):
                return Verdict(tuple(range(1, node + 1)), view.draw(node, after_rejection(p, q)))
        leaf = draft.tree.num_drafted
        return Verdict(tuple(range(1, leaf + 1)), view.token(leaf))

    return rule


def dropped_bonus(draft: Draft, view: TargetView) -> Verdict:
    verdict = rejection(draft, view)
    if len(verdict.path) == draft.tree.num_drafted:
        return Verdict(verdict.path[:-1], draft.tree.tokens[verdict.path[-1]])
    return verdict


def accepted_after_a_rejection(draft: Draft, view: TargetView) -> Verdict:
    assert draft.q is not None
    passed = 0
    for node in range(draft.tree.num_drafted):
        q = draft.q[node]
        assert q is not None
        token = draft.tree.tokens[node + 1]
        passed += bool(view.uniform(node) * float(q[token]) < float(view.probs(node)[token]))
    path, row = tuple(range(1, passed + 1)), draft.q[passed]
    if row is None:
        return Verdict(path, view.token(passed))
    return Verdict(path, view.draw(passed, residual(view.probs(passed), row)))


RULE_FAULTS: dict[str, tuple[Rule, str]] = {
    "non-strict comparison": (chain_rule(accepts=lambda u, p, q: u * q <= p), "law"),
    "non-strict, written as a refusal": (chain_rule(accepts=lambda u, p, q: not u * q > p), "law"),
    "p/q turned over": (chain_rule(accepts=lambda u, p, q: u * p < q), "law"),
    "residual without renormalisation": (
        chain_rule(after_rejection=lambda p, q: (p - q).clamp(min=0)),
        "law",
    ),
    "target's law after a rejection": (chain_rule(after_rejection=lambda p, q: p), "law"),
    "temperature applied after the test": (chain_rule(temper=0.5), "law"),
    "dropped bonus": (dropped_bonus, "first pass"),
    "accepted after a rejection": (accepted_after_a_rejection, "law"),
}


def test_the_rule_the_faults_are_made_from_is_right() -> None:
    assert [rejection_violations(pair, chain_rule()) for pair in range(6)] == [[]] * 6


@pytest.mark.parametrize("name", RULE_FAULTS)
def test_rejection_fault_is_caught(name: str) -> None:
    rule, caught_by = RULE_FAULTS[name]
    assert any(caught_by in rejection_violations(pair, rule) for pair in range(10))


@pytest.mark.parametrize("name", ["threshold", "bonus", "residual"])
def test_a_fault_that_can_be_planted_in_the_engine_is_caught(name: str) -> None:
    """Those of `engine.faults` that are in a rule and can be enumerated."""
    rule = RULES[name](rejection)
    assert any("law" in rejection_violations(pair, rule) for pair in range(10))


def unwarped_q(propose: Propose, raw: LawAt) -> Propose:
    """Drafts from the warped law, hands over the raw one."""

    def lie(prefix: Prefix, choose: Choose) -> Draft:
        tree = propose(prefix, choose).tree
        rows = [raw((*prefix, *tree.path_tokens(node))) for node in range(tree.num_drafted)]
        return Draft(tree, (*rows, None))

    return lie


def dropped_for_its_value(propose: Propose, raw: LawAt) -> Propose:
    """Draws a token and leaves it out because it is unlikely: the submitted one has another law."""

    def lie(prefix: Prefix, choose: Choose) -> Draft:
        draft = propose(prefix, choose)
        assert draft.q is not None and draft.q[0] is not None
        if float(draft.q[0][draft.tree.tokens[1]]) < 0.6:
            return draft.truncate(0)
        return draft

    return lie


def greedy_with_soft_q(propose: Propose, raw: LawAt) -> Propose:
    """Takes the best token but hands over the law it was the best of."""

    def lie(prefix: Prefix, choose: Choose) -> Draft:
        return propose(prefix, lambda law: int(law.argmax()))

    return lie


@pytest.mark.parametrize("fault", [unwarped_q, dropped_for_its_value, greedy_with_soft_q])
def test_untruthful_draft_is_caught(fault: Fault) -> None:
    assert any("law" in rejection_violations(pair, rejection, fault) for pair in range(10))


def test_a_sampled_draft_without_q_is_exact_as_point_masses() -> None:
    """Its law does not matter, as long as it is independent of the target's noise."""
    for pair in range(6):
        vocab, depth = shape(pair)
        target, q = table(vocab, pair), table(vocab, 500 + pair)
        chain = sampled_chain(q, depth)

        def propose(prefix: Prefix, choose: Choose, chain: Propose = chain) -> Draft:
            return Draft(chain(prefix, choose).tree)

        found = emitted(target, propose, point_mass, depth + 2)
        assert distance(found.law, plain(target, depth + 2)) < EXACT
