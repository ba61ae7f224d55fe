"""What the loop makes of a controller's budget and a drafter's draft before it verifies."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.core.draft import Budget, Draft, DraftRequest
from slipstream.core.sequence import Sequence
from slipstream.core.tree import TokenTree
from slipstream.errors import DrafterError
from slipstream.logits.grammar import Grammar

MOST_FORCED = 32  # tokens a pass: beyond, one row of a step would hold up the others


@dataclass(frozen=True)
class Work:
    """One row of a step."""

    sequence: Sequence
    draft: Draft


def cut_budget(budget: Budget, room: int) -> Budget:
    """At most `room` tokens deep; without room a plain step."""
    depth = max(min(budget.depth, room), 0)
    return Budget(depth, budget.nodes if depth else 0, budget.stop_below)


def forced_draft(request: DraftRequest, grammar: Grammar | None, room: int) -> Draft | None:
    """The tokens that the grammar leaves no choice about, whatever the budget: one pass instead of one each.

    Decided before anything else is drawn, so it replaces a sampled draft without a change of its law.
    """
    if grammar is None:
        return None
    output = request.tokens[request.prompt_length :]
    tokens = grammar.forced(output, min(room, MOST_FORCED))
    return Draft(TokenTree.chain(request.root, tokens), source="grammar") if tokens else None


def fit_draft(
    request: DraftRequest, draft: Draft, vocab_size: int, name: str, grammar: Grammar | None = None
) -> Draft:
    """Cut a draft to its budget and to tokens that exist; `name` is the drafter's, for the errors.

    The budget is cut without looking at tokens. Ids outside the vocabulary are dropped, which is exact
    for point masses; a sampled draft that holds one was not drawn from its q. So are point masses that the
    grammar forbids: they could not be accepted. Raises DrafterError.
    """
    tree = draft.tree
    if tree.tokens[0] != request.root:
        raise DrafterError(
            f"drafter {name!r} rooted its draft at token {tree.tokens[0]}, the root is {request.root}"
        )
    draft = draft.truncate(request.budget.depth, request.budget.nodes)
    inside = [n for n, t in enumerate(draft.tree.tokens) if n == 0 or 0 <= t < vocab_size]
    if len(inside) < len(draft.tree):
        if draft.q is not None:
            raise DrafterError(f"drafter {name!r} drew a token outside the target's vocabulary")
        draft = draft.select(inside)
    if grammar is not None and draft.q is None and draft.tree.num_drafted:
        draft = draft.select(_grammatical(request, draft.tree, grammar))
    return draft


def _grammatical(request: DraftRequest, tree: TokenTree, grammar: Grammar) -> list[int]:
    """Nodes that the grammar allows, with all before them. Every leaf's path is looked at once."""
    output = tuple(request.tokens[request.prompt_length :])
    kept: set[int] = set()
    for node in range(1, len(tree)):
        if not tree.children(node):
            path = tree.path(node)
            kept.update(path[: grammar.accepts(output, [tree.tokens[n] for n in path])])
    return sorted(kept)
