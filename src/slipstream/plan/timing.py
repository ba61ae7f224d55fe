"""Seconds of steps and of drafts, measured by computing them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from slipstream.control.fixed import fixed_spec, tree_nodes
from slipstream.core.params import SamplingParams
from slipstream.cost.bundle import DraftSeconds, StepSeconds
from slipstream.engine.session import Session
from slipstream.model.cache import WIDTH, round_up
from slipstream.model.pack import PackRow
from slipstream.model.runner import Runner

WARM = 2  # steps of a run that are not timed: a drafter reads the prompt in the first


def timed(device: torch.device, work: Callable[[], object]) -> float:
    """Seconds until it is done."""
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def step_seconds(
    runner: Runner,
    grid: Sequence[tuple[int, int, int]],
    rounds: int,
    *,
    seed: int = 0,
    limit: float | None = None,
) -> list[StepSeconds]:
    """Up to `rounds` repeats of every step (rows, nodes, context). Nothing is committed, so contexts stay.

    limit: seconds it may take. Then only those steps are measured, the smallest first, that the first round
    reaches in half of it, and rounds end with the time.
    """
    rng, began = random.Random(seed), time.perf_counter()
    order = sorted(set(grid), key=lambda point: (point[0] * point[1], point))
    most = {context: max(r for r, _, c in order if c == context) for _, _, context in order}
    slots = {
        (context, row): -1 - i
        for i, (context, row) in enumerate((c, r) for c in sorted(most) for r in range(most[c]))
    }

    def tokens(count: int) -> list[int]:
        return [rng.randrange(runner.vocab_size) for _ in range(count)]

    def once(rows: int, nodes: int, context: int) -> float:
        chain = tuple(range(-1, nodes - 1))
        pack = [PackRow(slots[context, row], tokens(nodes), chain) for row in range(rows)]
        return timed(runner.device, lambda: runner.forward(pack))

    def late(share: float) -> bool:
        return limit is not None and time.perf_counter() - began > share * limit

    told: dict[tuple[int, int, int], list[float]] = {}
    try:
        for (context, row), slot in slots.items():
            runner.cache.open(slot)
            if row == 0:
                runner.extend(slot, tokens(context))
            else:  # what is in there does not change how long a step takes
                runner.cache.copy_prefix(slots[context, 0], slot, context)
        for point in order:
            if told and late(0.5):
                break
            told[point] = [once(*point)]
        for _ in range(rounds):
            for point in rng.sample(list(told), len(told)):
                if late(1.0):
                    break
                told[point].append(once(*point))
    finally:
        for slot in slots.values():
            runner.cache.close(slot)
    # The first one warmed up; it counts where there was time for no other.
    return [StepSeconds(rows=r, nodes=n, context=c, seconds=s[1:] or s) for (r, n, c), s in told.items()]


def prefill_seconds(runner: Runner, tokens: int, rounds: int, seed: int = 0) -> list[float]:
    """Repeats of reading a prompt of so many tokens."""
    rng, found = random.Random(seed), []
    ids = [rng.randrange(runner.vocab_size) for _ in range(tokens)]
    for _ in range(rounds + 1):
        runner.cache.open(-1)
        try:
            found.append(timed(runner.device, lambda: runner.extend(-1, ids)))
        finally:
            runner.cache.close(-1)
    return found[1:]


@dataclass
class DraftRun:
    """drafts: one with all repeats, none where they could not be taken. overhead: the loop's own seconds.
    grown: bytes that the drafter has come to hold, a cached token."""

    drafts: list[DraftSeconds] = field(default_factory=list)
    overhead: list[float] = field(default_factory=list)
    grown: float = 0.0


def draft_seconds(
    session: Session, asked: Sequence[Sequence[int]], name: str, rows: int, depth: int, rounds: int
) -> DraftRun:
    """Repeats of the drafter's part of a step with so many rows, each asked for drafts of `depth`.

    It is the session's drafter. asked: prompts as tokens, taken in turn. name: what the measurement calls it.
    """
    engine, run, seconds = session.engine, DraftRun(), list[float]()
    nodes = tree_nodes(engine.drafter, depth)
    engine.set_drafter(engine.drafter, fixed_spec(depth, nodes))
    # Long enough that the budget is never cut by what remains.
    tokens = 2 * (rounds + WARM + 1) * (depth + 1)
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    before = engine.drafter.memory_bytes
    live = [engine.find(engine.add(list(asked[i % len(asked)]), params)) for i in range(rows)]
    try:
        step = 0
        while len(seconds) < rounds:
            then = engine.seconds.copy()
            engine.step()
            passed = engine.seconds - then
            if any(row is None or row.finished for row in live):
                break  # too few rows fit at once, or the context is full
            step += all(row is not None and row.counts.passes for row in live)
            if passed.prefill or step <= WARM:
                continue
            seconds.append(max(passed.drafter, 1e-9))
            run.overhead.append(passed.other)
        held = engine.drafter.memory_bytes - before
        kept = sum(round_up(len(row.tokens) + depth, WIDTH) for row in live if row is not None)
        run.grown = max(held, 0) / kept if kept else 0.0
    finally:
        engine.abandon()
    if seconds:
        run.drafts.append(DraftSeconds(drafter=name, rows=rows, depth=depth, nodes=nodes, seconds=seconds))
    return run
