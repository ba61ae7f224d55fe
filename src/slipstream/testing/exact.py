"""Exact enumeration of what a draft-and-verify loop emits. No sampling, no statistics.

The rule under test runs unchanged, on a view in which every random choice, the drafter's included, is
a branch (`testing.branching`). All branches are walked, so the result is the law itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from slipstream.core.draft import Draft
from slipstream.core.tree import TokenTree
from slipstream.testing.branching import Branches, BranchingView, LawAt, Prefix
from slipstream.verify import Rule, Verdict

Choose = Callable[[torch.Tensor], int]  # a law [V] -> a token; one branch a token
Propose = Callable[[Prefix, Choose], Draft]
OutputLaw = dict[Prefix, float]

EXACT = 1e-12  # what float64 sums of a few thousand terms may be off by


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


def emitted(
    target: LawAt, propose: Propose, rule: Rule, n: int, start: Prefix = (0,), order: int | None = None
) -> Emitted:
    """Run the loop after `start`, drafting again after each verdict, until n tokens are out.

    Take n above the draft's depth + 1, so that more than one pass is needed and a bias that one pass
    hands to the next shows. order: laws and drafts look at no more than that many last tokens, so that
    passes after equal endings need not be walked again.
    """
    known: dict[Prefix, list[tuple[float, Prefix]]] = {}

    def after(prefix: Prefix) -> list[tuple[float, Prefix]]:
        prefix = prefix if order is None else prefix[-order:]
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


def violations(
    target: LawAt,
    truth: LawAt,
    propose: Propose,
    rule: Rule,
    first_pass: float,
    n: int,
    order: int | None = None,
) -> list[str]:
    """What is wrong: "law", the law of n tokens; "first pass", the number of tokens a pass yields.

    target: what the rule is shown. truth: what it should be.
    """
    found = emitted(target, propose, rule, n, order=order)
    checks = {
        "law": distance(found.law, plain(truth, n)) > EXACT,
        "first pass": abs(found.first_pass - first_pass) > EXACT,
    }
    return [name for name, wrong in checks.items() if wrong]


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


def sampled_tree(law: LawAt, parents: Sequence[int], duplicates: bool = False) -> Propose:
    """A drafter that draws a tree of a fixed shape; see `draw_tree`."""

    def propose(prefix: Prefix, choose: Choose) -> Draft:
        return draw_tree(prefix, law, parents, lambda row, depth, node: choose(row), duplicates)

    return propose


def draw_tree(
    prefix: Prefix,
    law: LawAt,
    parents: Sequence[int],
    draw: Callable[[torch.Tensor, int, int], int],
    duplicates: bool = False,
) -> Draft:
    """The shape `parents`, drawn node by node: siblings without replacement, or each from q (duplicates).

    draw: a law [V], the depth and the number of the node it is for. A node for which the support holds no
    further token is left out, with what hangs on it.
    """
    tokens, links, rows = [prefix[-1]], [-1], list[torch.Tensor | None]([None])
    placed: dict[int, int] = {0: 0}  # node of the shape -> node of the tree
    paths: list[Prefix] = [()]
    left: dict[int, torch.Tensor] = {}
    for shape_node, shape_parent in enumerate(parents[1:], start=1):
        node = placed.get(shape_parent)
        if node is None:
            continue
        if node not in left:
            left[node] = rows[node] = law((*prefix, *paths[node]))  # [V]
        rest = left[node]  # [V]
        if not float(rest.sum()) > 0.0:
            continue
        token = draw(rest, len(paths[node]) + 1, shape_node)
        if not duplicates:
            rest = rest.clone()  # [V]
            rest[token] = 0.0
            left[node] = rest / rest.sum().clamp(min=1e-300)  # [V]
        placed[shape_node] = len(tokens)
        tokens.append(token)
        links.append(node)
        rows.append(None)
        paths.append((*paths[node], token))
    return Draft(TokenTree(tuple(tokens), tuple(links), duplicates), tuple(rows))


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


def block_expectation(target: LawAt, law: LawAt, depth: int, prefix: Prefix = (0,)) -> float:
    """Tokens a pass emits with block verification: 1 + sum over prefixes x of Q(x) w(x).

    w(x_1..x_i) = min(1, w(x_1..x_{i-1}) P(x_i) / Q(x_i)) is the probability that x_1..x_i are accepted.
    """

    def following(weight: float, reach: float, prefix: Prefix, depth: int) -> float:
        if depth == 0:
            return 0.0
        total = 0.0
        for token, (p, q) in enumerate(zip(target(prefix).tolist(), law(prefix).tolist(), strict=True)):
            if q > 0.0 and p > 0.0:
                longer = min(1.0, weight * p / q)
                total += reach * q * longer + following(longer, reach * q, (*prefix, token), depth - 1)
        return total

    return 1.0 + following(1.0, 1.0, prefix, depth)


def sampled_tree_expectation(
    target: LawAt, law: LawAt, parents: Sequence[int], duplicates: bool = False, prefix: Prefix = (0,)
) -> float:
    """Tokens a pass emits with a sampled tree, from the definition, candidate by candidate."""
    children = [[c for c, p in enumerate(parents) if p == node] for node in range(len(parents))]

    def below(node: int, prefix: Prefix) -> float:
        return 1.0 + trials(children[node], target(prefix).tolist(), law(prefix).tolist(), prefix)

    def trials(waiting: list[int], r: list[float], s: list[float], prefix: Prefix) -> float:
        if not waiting or not sum(s):
            return 0.0
        kept = [max(0.0, a - b) for a, b in zip(r, s, strict=True)]
        left = [k / (sum(kept) or 1.0) for k in kept]
        total = 0.0
        for token, drawn in enumerate(s):
            accepted = min(drawn, r[token])
            if accepted > 0.0:
                total += accepted * below(waiting[0], (*prefix, token))
            if drawn - accepted > 1e-15:
                others = s if duplicates else [0.0 if t == token else x for t, x in enumerate(s)]
                rest = [x / (sum(others) or 1.0) for x in others]
                total += (drawn - accepted) * trials(waiting[1:], left, rest, prefix)
        return total

    return below(0, prefix)
