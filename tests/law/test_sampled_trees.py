"""Sampled trees: multi-candidate verification keeps the law, and planted faults that must be caught."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from slipstream.core.draft import Draft
from slipstream.core.tree import TokenTree
from slipstream.testing.branching import LawAt, Prefix
from slipstream.testing.exact import (
    EXACT,
    Choose,
    Propose,
    chain_expectation,
    emitted,
    sampled_tree,
    sampled_tree_expectation,
    violations,
)
from slipstream.testing.laws import WARPS, drafter_law, naive_law, pipeline_law
from slipstream.verify import Rule, TargetView, Verdict, multi_candidate, rejection
from slipstream.verify.rejection import residual

PAIRS = 30
ORDER = 2  # how many tokens the laws look at
SHAPES: dict[str, tuple[int, ...]] = {
    "two children": (-1, 0, 0),
    "three children": (-1, 0, 0, 0),
    "fork, then a chain each": (-1, 0, 0, 1, 2),
    "chain, then a fork": (-1, 0, 1, 1),
    "bushy on the left": (-1, 0, 0, 1, 1),
}
WAYS = {"without replacement": False, "independent": True}

Fault = Callable[[LawAt, tuple[int, ...], bool], Propose]


def pair_laws(pair: int) -> tuple[int, LawAt, LawAt, LawAt]:
    """Vocabulary; the target's law as the pipeline gives it, and from its definition; the drafter's."""
    vocab = 4 if pair % 5 == 4 else 3
    params, drafting = WARPS[pair % len(WARPS)], WARPS[(pair * 3 + 1) % len(WARPS)]
    target = pipeline_law(vocab, 100 + pair, params, ORDER)
    q = drafter_law(vocab, 1100 + pair, drafting, ORDER)
    truth = naive_law(vocab, 100 + pair, params, ORDER)
    return vocab, *(by_ending(law) for law in (target, truth, q))  # type: ignore[return-value]


def by_ending(law: LawAt) -> LawAt:
    """The law as a function of the last tokens, so that it is computed once for each ending."""
    return lambda prefix: law(prefix[-ORDER:])


def tree_violations(
    pair: int, shape: str, duplicates: bool, rule: Rule = multi_candidate, fault: Fault | None = None
) -> list[str]:
    vocab, target, truth, q = pair_laws(pair)
    parents = SHAPES[shape]
    propose = (fault or sampled_tree)(q, parents, duplicates)
    expected = sampled_tree_expectation(truth, q, parents, duplicates, (0,))
    depth = TokenTree(tuple(range(len(parents))), parents).depth
    return violations(target, truth, propose, rule, expected, depth + 2, ORDER)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("pair", range(PAIRS))
def test_multi_candidate_keeps_the_law(pair: int, way: str) -> None:
    shape = list(SHAPES)[pair // 5 % len(SHAPES)]  # every shape meets all warps
    assert tree_violations(pair, shape, WAYS[way]) == []


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", SHAPES)
def test_multi_candidate_keeps_the_law_for_every_shape(shape: str, way: str) -> None:
    assert [tree_violations(pair, shape, WAYS[way]) for pair in (0, 1, 3)] == [[]] * 3


def test_a_chain_under_multi_candidate_is_rejection() -> None:
    for pair in range(10):
        _, target, _, q = pair_laws(pair)
        propose = sampled_tree(q, (-1, 0, 1))
        found, same = (
            emitted(target, propose, rule, 4, order=ORDER) for rule in (multi_candidate, rejection)
        )
        assert found == same


# -- more candidates are never worse ----------------------------------------------------------------


NESTED = [(-1, 0, 1), (-1, 0, 1, 0), (-1, 0, 1, 0, 3), (-1, 0, 1, 0, 3, 1)]


@pytest.mark.parametrize("way", WAYS)
def test_a_tree_yields_no_fewer_tokens_than_the_tree_or_chain_inside_it(way: str) -> None:
    gained = [0.0] * len(NESTED)
    for pair in range(PAIRS):
        _, target, _, q = pair_laws(pair)
        yields = [sampled_tree_expectation(target, q, parents, WAYS[way]) for parents in NESTED]
        assert yields[0] == pytest.approx(chain_expectation(target, q, 2), abs=EXACT)
        for i, (less, more) in enumerate(zip(yields, yields[1:], strict=False)):
            assert more >= less - EXACT
            gained[i] += more - less
    assert min(gained[:-1]) > 0.1


def test_the_rule_itself_yields_no_fewer_tokens_with_the_tree() -> None:
    for pair in range(8):
        _, target, _, q = pair_laws(pair)
        chain, tree = (
            emitted(target, sampled_tree(q, parents), multi_candidate, 1).first_pass for parents in NESTED[:2]
        )
        assert tree >= chain - EXACT


# -- planted faults in the rule ---------------------------------------------------------------------


Step = Callable[[torch.Tensor, int, torch.Tensor], torch.Tensor]


def without(s: torch.Tensor, token: int) -> torch.Tensor:
    rest = s.clone()  # [V]
    rest[token] = 0.0
    return rest


def next_law(s: torch.Tensor, token: int, q: torch.Tensor) -> torch.Tensor:
    rest = without(s, token)
    return rest / rest.sum() if rest.sum() > 0.0 else rest


def candidate_rule(
    after: Step = next_law,
    left: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] = lambda r, s, new: residual(
        r, s
    ),
    index: Callable[[int], int] = lambda trial: trial,
    skip_repeated: bool = False,
    backwards: bool = False,
) -> Rule:
    """Multi-candidate verification with replaceable parts, from which the faulty ones are made."""

    def rule(draft: Draft, view: TargetView) -> Verdict:
        assert draft.q is not None
        node, path = 0, list[int]()
        while children := draft.tree.children(node):
            q = draft.q[node]
            assert q is not None
            r, s, tried, accepted = view.probs(node), q, set[int](), None
            for trial, child in enumerate(children[::-1] if backwards else children):
                token = draft.tree.tokens[child]
                if skip_repeated and token in tried:
                    continue
                tried.add(token)
                if view.uniform(node, index(trial)) * float(s[token]) < float(r[token]):
                    accepted = child
                    break
                new = after(s, token, q)
                r, s = left(r, s, new), new
                if not float(s.sum()) > 0.0:
                    break
            if accepted is None:
                return Verdict(tuple(path), view.draw(node, r))
            path.append(accepted)
            node = accepted
        return Verdict(tuple(path), view.token(node))

    return rule


def same_law(s: torch.Tensor, token: int, q: torch.Tensor) -> torch.Tensor:
    return q


RULE_FAULTS: dict[str, tuple[Rule, bool]] = {
    "second candidate: q not renormalised": (
        candidate_rule(after=lambda s, token, q: without(s, token)),
        False,
    ),
    "second candidate: q with the first still in it": (candidate_rule(after=same_law), False),
    "residual with the new s": (candidate_rule(left=lambda r, s, new: residual(r, new)), False),
    "residual not updated": (candidate_rule(left=lambda r, s, new: r), False),
    "residual: the refused token is taken out and no more": (
        candidate_rule(left=lambda r, s, new: residual(r, (s - new).clamp(min=0.0))),
        False,
    ),
    "one uniform for all siblings": (candidate_rule(index=lambda trial: 0), False),
    "one uniform for all siblings, independent": (
        candidate_rule(after=same_law, index=lambda trial: 0),
        True,
    ),
    "siblings tried in another order": (candidate_rule(backwards=True), False),
    "duplicate child taken for a fresh one": (candidate_rule(), True),
    "duplicate child skipped, its trial too": (candidate_rule(after=same_law, skip_repeated=True), True),
}


def test_the_rule_the_faults_are_made_from_is_right() -> None:
    for shape in ("two children", "chain, then a fork"):
        assert [tree_violations(pair, shape, False, candidate_rule()) for pair in range(4)] == [[]] * 4
        independent = candidate_rule(after=same_law)
        assert [tree_violations(pair, shape, True, independent) for pair in range(4)] == [[]] * 4


@pytest.mark.parametrize("name", RULE_FAULTS)
def test_multi_candidate_fault_is_caught(name: str) -> None:
    rule, duplicates = RULE_FAULTS[name]
    assert any("law" in tree_violations(pair, "three children", duplicates, rule) for pair in range(10))


# -- planted faults in the draft --------------------------------------------------------------------


def dropped_by_value(law: LawAt, parents: tuple[int, ...], duplicates: bool) -> Propose:
    """The first child is left out when it is unlikely."""
    honest = sampled_tree(law, parents, duplicates)

    def lie(prefix: Prefix, choose: Choose) -> Draft:
        draft = honest(prefix, choose)
        assert draft.q is not None and draft.q[0] is not None
        if float(draft.q[0][draft.tree.tokens[1]]) < 0.5:
            return draft.select(range(2, len(draft.tree)))
        return draft

    return lie


def pruned_by_score(law: LawAt, parents: tuple[int, ...], duplicates: bool) -> Propose:
    """The likelier half of the sampled nodes is kept: EAGLE-2's reranking, on sampled nodes."""
    honest = sampled_tree(law, parents, duplicates)

    def lie(prefix: Prefix, choose: Choose) -> Draft:
        draft = honest(prefix, choose)
        assert draft.q is not None
        scores = [1.0]
        for node, parent in enumerate(draft.tree.parents[1:], start=1):
            q = draft.q[parent]
            assert q is not None
            scores.append(scores[parent] * float(q[draft.tree.tokens[node]]))
        ranked = sorted(range(1, len(draft.tree)), key=lambda n: (-scores[n], n))
        return draft.select(ranked[: (len(ranked) + 1) // 2])

    return lie


def likeliest_first(law: LawAt, parents: tuple[int, ...], duplicates: bool) -> Propose:
    """All that were drawn, but sorted by q instead of in the order they were drawn."""
    honest = sampled_tree(law, parents, duplicates)

    def lie(prefix: Prefix, choose: Choose) -> Draft:
        draft = honest(prefix, choose)
        assert draft.q is not None and draft.q[0] is not None
        q = draft.q[0]
        tokens = sorted(draft.tree.tokens[1:], key=lambda t: -float(q[t]))
        return Draft(TokenTree((prefix[-1], *tokens), draft.tree.parents, duplicates), draft.q)

    return lie


def best_tokens_with_soft_q(law: LawAt, parents: tuple[int, ...], duplicates: bool) -> Propose:
    """The k best tokens, handed over as if they had been drawn."""
    honest = sampled_tree(law, parents, duplicates)
    return lambda prefix, choose: honest(prefix, lambda row: int(row.argmax()))


DRAFT_FAULTS: dict[str, Fault] = {
    "dropped by value": dropped_by_value,
    "pruned by score": pruned_by_score,
    "sorted by likelihood": likeliest_first,
    "best tokens with a soft q": best_tokens_with_soft_q,
}


@pytest.mark.parametrize("name", DRAFT_FAULTS)
def test_untruthful_tree_is_caught(name: str) -> None:
    fault = DRAFT_FAULTS[name]
    assert any("law" in tree_violations(p, "two children", False, fault=fault) for p in range(10))


def test_cutting_a_tree_by_count_is_exact() -> None:
    """What the engine does to fit a budget: it looks at no token."""
    for pair in range(6):
        _, target, truth, q = pair_laws(pair)
        whole = sampled_tree(q, SHAPES["fork, then a chain each"])

        def cut(prefix: Prefix, choose: Choose, whole: Propose = whole) -> Draft:
            return whole(prefix, choose).truncate(2, 1 + prefix[-1])

        first = emitted(target, cut, multi_candidate, 1).first_pass
        assert violations(target, truth, cut, multi_candidate, first, 4, ORDER) == []
