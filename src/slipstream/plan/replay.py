"""Replay: what a drafter that needs no target would have drafted for answers that are already there.

The answers were recorded from the target, so which drafted tokens it would have accepted is known without
running it: the counts are those of a real run. (What a step would have cost is another measurement.)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from slipstream.control import Controller, RowOutcome, RowState, build_controller
from slipstream.core.draft import Budget, Draft, Drafter, DraftRequest, Observation
from slipstream.core.params import SamplingParams
from slipstream.core.stats import DraftCounts
from slipstream.core.tree import TokenTree
from slipstream.errors import DrafterError


@dataclass(frozen=True, slots=True)
class Recorded:
    """A prompt and the target's answer, its end token included.

    room: the most tokens that could have been generated, which bounds the last drafts; None: so many as were.
    """

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    room: int | None = None


def replay(
    drafter: Drafter,
    records: Iterable[Recorded],
    controller: Controller | str | None = None,
    *,
    params: SamplingParams | None = None,
) -> list[DraftCounts]:
    """The counts of each answer, one after the other as an engine with `max_rows=1` would have made them.

    Sampled answers may be replayed as well as greedy ones: point masses are accepted where they meet the
    recorded token. Raises DrafterError for a drafter that must see the target's states or draws its drafts.
    The drafter is not shut down.
    """
    needs = drafter.needs
    if needs.hidden_layers or needs.last_hidden or needs.node_logits:
        raise DrafterError(
            f"drafter {drafter.name!r} cannot be replayed: it needs states or logits of the target;"
            " measure it with the target"
        )
    control = build_controller(controller, drafter.num_speculative_tokens, drafter.draft_nodes)
    params = params or SamplingParams()
    return [_one(drafter, control, record, seq_id, params) for seq_id, record in enumerate(records)]


def _one(
    drafter: Drafter, controller: Controller, record: Recorded, seq_id: int, params: SamplingParams
) -> DraftCounts:
    counts, tokens, end = DraftCounts(), list(record.prompt), len(record.prompt) + len(record.output)
    answer = (*record.prompt, *record.output)
    limit = len(record.prompt) + (len(record.output) if record.room is None else record.room)
    drafter.open(seq_id, record.prompt)
    if len(record.prompt) > 1:
        drafter.observe([Observation(seq_id, 0, record.prompt[:-1], next_token=record.prompt[-1])])
    try:
        while len(tokens) < end:
            start = len(tokens)
            (budget,) = controller.plan([RowState(seq_id, start, limit - start)])
            depth = min(budget.depth, limit - start - 1)
            if drafter.needs.reads_prompt and start == len(record.prompt):
                depth = 0
            draft = Draft(TokenTree.root(tokens[-1]))
            if depth > 0:
                budget = Budget(depth, budget.nodes, budget.stop_below)
                request = DraftRequest(seq_id, tokens, len(record.prompt), budget, params, params.seed or 0)
                (draft,) = drafter.propose([request])
                draft = draft.truncate(budget.depth, budget.nodes)
            if draft.q is not None:
                raise DrafterError(
                    f"drafter {drafter.name!r} drew its draft, so a record does not tell what is accepted;"
                    " measure it with the target"
                )
            tree, path = draft.tree, _accepted(draft.tree, answer, start)
            tokens.extend(answer[start : start + len(path) + 1])
            emitted = len(tokens) - start
            kept = (0, *path)[:emitted]
            sources = draft.counts_by_source(path[:emitted])
            counts.record(tree.depth, tree.num_drafted, len(path), emitted, sources=sources)
            seen = tuple(tree.tokens[n] for n in kept)
            drafter.observe(
                [Observation(seq_id, start - 1, seen, draft=draft, accepted=kept[1:], next_token=tokens[-1])]
            )
            controller.record(
                [
                    RowOutcome(
                        seq_id,
                        tree.depth,
                        tree.num_drafted,
                        min(len(path), emitted),
                        emitted,
                        len(tokens) == end,
                    )
                ],
                0.0,
            )
    finally:
        drafter.close(seq_id)
        controller.forget(seq_id)
    return counts


def _accepted(tree: TokenTree, answer: tuple[int, ...], start: int) -> tuple[int, ...]:
    """The drafted nodes that carry the recorded tokens from position `start` on."""
    node, path = 0, list[int]()
    for token in answer[start:]:
        child = tree.find_child(node, token)
        if child is None:
            break
        path.append(child)
        node = child
    return tuple(path)
