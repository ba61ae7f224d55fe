"""Exact enumeration of what a draft-and-verify loop emits. No sampling, no statistics.

The rule under test runs unchanged, on a view in which every random choice, the drafter's included, is
a branch (`testing.branching`). All branches are walked, so the result is the law itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from slipstream.core.draft import Draft
from slipstream.core.tree import TokenTree
from slipstream.testing.branching import Branches, BranchingView, LawAt, Prefix
from slipstream.verify import Rule, Verdict

Choose = Callable[[torch.Tensor], int]  # a law [V] -> a token; one branch a token
Propose = Callable[[Prefix, Choose], Draft]
OutputLaw = dict[Prefix, float]


def passes(target: LawAt, propose: Propose, rule: Rule, prefix: Prefix) -> Iterator[tuple[float, Prefix]]:
    """One draft and its verification: every outcome's probability and the tokens it emits."""
    branches = Branches()
    trees: list[TokenTree] = []

    def choose(law: torch.Tensor) -> int:
        return branches.choose(law.tolist())

    def run() -> Verdict:
        draft = propose(prefix, choose)
        trees[:] = [draft.tree]
        return rule(draft, BranchingView(target, prefix, draft.tree, branches))

    for probability, verdict in branches.walk(run):
        yield probability, (*(trees[0].tokens[node] for node in verdict.path), verdict.token)


@dataclass(frozen=True)
class Emitted:
    """The law of the first n emitted tokens, and the tokens a first pass is expected to emit."""

    law: OutputLaw
    first_pass: float


def emitted(target: LawAt, propose: Propose, rule: Rule, n: int, start: Prefix = (0,)) -> Emitted:
    """Run the loop after `start`, drafting again after each verdict, until n tokens are out.

    Take n above the draft's depth + 1, so that more than one pass is needed and a bias that one pass
    hands to the next shows.
    """
    known: dict[Prefix, list[tuple[float, Prefix]]] = {}

    def after(prefix: Prefix) -> list[tuple[float, Prefix]]:
        if prefix not in known:
            known[prefix] = list(passes(target, propose, rule, prefix))
        return known[prefix]

    law: OutputLaw = {}
    running: OutputLaw = {(): 1.0}
    while running:
        longer: OutputLaw = {}
        for output, mass in running.items():
            for probability, tokens in after((*start, *output)):
                grown = (*output, *tokens)[:n]
                into = law if len(grown) == n else longer
                into[grown] = into.get(grown, 0.0) + mass * probability
        running = longer
    return Emitted(law, sum(probability * len(tokens) for probability, tokens in after(start)))


def plain(target: LawAt, n: int, start: Prefix = (0,)) -> OutputLaw:
    """The law of n tokens of plain decoding: the product of the target's conditionals."""
    law: OutputLaw = {(): 1.0}
    for _ in range(n):
        law = {
            (*output, token): mass * p
            for output, mass in law.items()
            for token, p in enumerate(target((*start, *output)).tolist())
            if p > 0.0
        }
    return law


def distance(one: OutputLaw, other: OutputLaw) -> float:
    """The largest difference of any output's probability."""
    return max(abs(one.get(key, 0.0) - other.get(key, 0.0)) for key in {*one, *other})


# -- drafters and what they must achieve ------------------------------------------------------------


def sampled_chain(law: LawAt, depth: int) -> Propose:
    """A drafter that draws `depth` tokens from `law` and says so."""

    def propose(prefix: Prefix, choose: Choose) -> Draft:
        tokens: list[int] = []
        rows: list[torch.Tensor | None] = []
        for _ in range(depth):
            row = law((*prefix, *tokens))  # [V]
            rows.append(row)
            tokens.append(choose(row))
        return Draft(TokenTree.chain(prefix[-1], tokens), (*rows, None))

    return propose


def fixed_tree(tree_at: Callable[[Prefix], TokenTree]) -> Propose:
    """A drafter that chooses without chance: point masses."""

    def propose(prefix: Prefix, choose: Choose) -> Draft:
        return Draft(tree_at(prefix))

    return propose


def chain_expectation(target: LawAt, law: LawAt, depth: int, prefix: Prefix = (0,)) -> float:
    """Tokens a pass emits with a sampled chain: 1 + sum over paths of prod min(p, q)."""
    if depth == 0:
        return 1.0
    both: list[float] = torch.minimum(target(prefix), law(prefix)).tolist()  # [V]
    following: list[float] = [
        accepted * chain_expectation(target, law, depth - 1, (*prefix, token))
        for token, accepted in enumerate(both)
        if accepted > 0.0
    ]
    return 1.0 + sum(following)


def tree_expectation(target: LawAt, tree: TokenTree, prefix: Prefix = (0,)) -> float:
    """Tokens a pass emits with point masses: 1 + sum over drafted nodes of P(the path to it)."""
    reach = [1.0]
    for node in range(1, len(tree)):
        parent = tree.parents[node]
        p = target((*prefix, *tree.path_tokens(parent)))  # [V]
        reach.append(reach[parent] * float(p[tree.tokens[node]]))
    return sum(reach)
