"""What the loop makes of a controller's budget and a drafter's draft before it verifies."""

from __future__ import annotations

from slipstream.core.draft import Budget, Draft, DraftRequest
from slipstream.errors import DrafterError


def cut_budget(budget: Budget, room: int) -> Budget:
    """At most `room` tokens deep; without room a plain step."""
    depth = max(min(budget.depth, room), 0)
    return Budget(depth, budget.nodes if depth else 0, budget.stop_below)


def fit_draft(request: DraftRequest, draft: Draft, vocab_size: int, name: str) -> Draft:
    """Cut a draft to its budget and to tokens that exist; `name` is the drafter's, for the errors.

    The budget is cut without looking at tokens. Ids outside the vocabulary are dropped, which is exact
    for point masses; a sampled draft that holds one was not drawn from its q. Raises DrafterError.
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
    return draft
