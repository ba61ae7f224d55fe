"""Growing drafts with a causal LM: all rows and all nodes of a level in one forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from slipstream.drafters._growth import Growth, Level, grow, likeliest
from slipstream.model.pack import PackRow
from slipstream.model.runner import Runner


@dataclass(frozen=True)
class Reading:
    """One row that is drafted for. read: the tokens to compute first, the root last."""

    slot: int
    read: Sequence[int]
    growth: Growth


def grow_with(
    runner: Runner,
    rows: Sequence[Reading],
    vocab: int,
    *,
    names: torch.Tensor | None = None,
    banned: torch.Tensor | None = None,
    after_reading: Callable[[Reading], None] | None = None,
) -> None:
    """Grow the rows that have anything to grow; the others are not read either.

    A computed node stays in its slot while the levels below it are computed; in the end the slot is rolled
    back and the nodes lie behind its length. vocab: ids that may be drafted. names: the tokens
    [vocab] that the model's logits stand for, where these are not 0, 1, …. banned: of the ids, which may not,
    bool [vocab]. after_reading: called once for each row when its `read` tokens are in the slot, which
    then keeps them; without it the slot is left with the length it had.
    """
    cache = runner.cache
    lengths = {row.slot: cache.length(row.slot) for row in rows if row.growth.frontier}
    reading = True

    def expand(live: Sequence[Reading], width: int, scored: bool) -> Level:
        nonlocal reading
        packs = [
            PackRow(row.slot, row.read) if reading else PackRow(row.slot, *row.growth.place()) for row in live
        ]
        output = runner.forward(packs, logits="last" if reading else "all", taps=False)
        for row, pack in zip(live, packs, strict=True):
            cache.commit(row.slot, range(len(pack.tokens)))
            if reading and after_reading is not None:
                lengths[row.slot] += len(pack.tokens)
                after_reading(row)
        reading = False
        assert output.logits is not None
        logits = output.logits[:, :vocab]  # [nodes, vocab]
        if banned is not None:
            logits = logits.masked_fill(banned, float("-inf"))
        ids, logprobs = likeliest(logits, width, scored)  # [nodes, width]
        tokens = ids if names is None else names[ids]
        return Level(tokens.tolist(), None if logprobs is None else logprobs.tolist(), logits)

    try:
        grow(rows, expand)
    finally:
        for slot, length in lengths.items():
            cache.rollback(slot, length)
