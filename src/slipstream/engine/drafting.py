"""What the loop makes of a controller's budget and a drafter's draft before it verifies."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch

from slipstream.control import Controller, RowState
from slipstream.core.ask import ask_plan, label
from slipstream.core.draft import Budget, Draft, Drafter, DraftRequest
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


def room_of(sequence: Sequence, context: int) -> int:
    """Tokens that may be drafted: the last one that a row may emit is never worth it, verification gives it
    for free."""
    return min(sequence.remaining - 1, context - len(sequence.tokens))


def plan(rows: Items[Sequence], controller: Controller, drafter: Drafter, context: int) -> list[Budget]:
    """The controller's budgets, cut to what can still be emitted or fits the context."""
    states = [RowState(s.id, len(s.tokens), s.remaining) for s in rows]
    budgets = []
    for sequence, budget in zip(rows, ask_plan(controller, states), strict=True):
        room = room_of(sequence, context)
        if drafter.needs.reads_prompt and sequence.num_output == 0:
            room = 0  # the first token must not wait until the drafter has read the prompt
        budgets.append(cut_budget(budget, room))
    return budgets


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
    request: DraftRequest, draft: Draft, vocab_size: int, drafter: Drafter, grammar: Grammar | None = None
) -> Draft:
    """Cut a draft of `drafter` to its budget and to tokens that exist.

    The budget is cut without looking at tokens. Ids outside the vocabulary are dropped, which is exact
    for point masses; a sampled draft that holds one was not drawn from its q. So are point masses that the
    grammar forbids: they could not be accepted. Raises DrafterError.
    """
    tree = draft.tree
    if tree.tokens[0] != request.root:
        raise DrafterError(
            f"{_maker(drafter, draft)} rooted its draft at token {tree.tokens[0]}, the root is {request.root}"
        )
    if draft.q is not None:
        _check_laws(draft, vocab_size, drafter)
    draft = draft.truncate(request.budget.depth, request.budget.nodes)
    inside = [n for n, t in enumerate(draft.tree.tokens) if n == 0 or 0 <= t < vocab_size]
    if len(inside) < len(draft.tree):
        if draft.q is not None:
            raise DrafterError(
                f"{_maker(drafter, draft)} drew a token outside the target's vocabulary of {vocab_size}"
            )
        draft = draft.select(inside)
    if grammar is not None and draft.q is None and draft.tree.num_drafted:
        draft = draft.select(_grammatical(request, draft.tree, grammar))
    return draft


def _maker(drafter: Drafter, draft: Draft) -> str:
    """Who made the draft; of a drafter with parts, which."""
    part = f", its part {draft.source!r}," if draft.source and draft.source != drafter.name else ""
    return f"{label(drafter)}{part}"


def _check_laws(draft: Draft, vocab_size: int, drafter: Drafter) -> None:
    """That q has the right shape. Whether it is a law, the verification finds where it looks at it."""
    for node, row in enumerate(draft.q or ()):
        if not draft.tree.children(node):
            continue
        if not isinstance(row, torch.Tensor):
            found = f"of type {type(row).__name__}"
        elif row.shape != (vocab_size,):
            found = f"of shape {list(row.shape)}"
        else:
            continue
        raise DrafterError(
            f"{_maker(drafter, draft)} gave a q row {found} for node {node}: it must be a tensor"
            f" [{vocab_size}], as wide as the target's vocabulary"
        )


def _grammatical(request: DraftRequest, tree: TokenTree, grammar: Grammar) -> list[int]:
    """Nodes that the grammar allows, with all before them. Every leaf's path is looked at once."""
    output = tuple(request.tokens[request.prompt_length :])
    kept: set[int] = set()
    for node in range(1, len(tree)):
        if not tree.children(node):
            path = tree.path(node)
            kept.update(path[: grammar.accepts(output, [tree.tokens[n] for n in path])])
    return sorted(kept)
