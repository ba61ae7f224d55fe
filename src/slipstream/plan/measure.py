"""Measuring what advice rests on: step times of the target, the drafters' costs, and what is accepted.

Steps are measured by computing them, in an order that is shuffled anew in every round, so that a machine
that drifts hurts all alike; the first round warms up and is dropped. Drafters are measured at work: the
engine decodes real prompts with a fixed length, and the time a step spends in the drafter, its reading of
what was committed included, is a repeat. What is accepted is counted over whole answers; a drafter that needs
no target is replayed on the answers that another one's run has left.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone

import torch

from slipstream.control.fixed import fixed_spec, tree_nodes
from slipstream.core.draft import Drafter
from slipstream.core.params import SamplingParams
from slipstream.core.stats import DraftCounts
from slipstream.cost.bundle import (
    AcceptanceCounts,
    Bundle,
    DrafterInfo,
    DraftSeconds,
    PrefillSeconds,
    StepSeconds,
)
from slipstream.cost.shape import shape_of
from slipstream.engine.inputs import question_ids
from slipstream.engine.session import Session
from slipstream.errors import DrafterError, ParameterError
from slipstream.model.cache import WIDTH, round_up
from slipstream.model.identity import versions
from slipstream.model.pack import PackRow
from slipstream.model.progress import Progress, Silent
from slipstream.model.runner import Runner
from slipstream.plan.here import load_reasons, this_machine
from slipstream.plan.rates import bandwidth, matrix_rate
from slipstream.plan.replay import Recorded, replay
from slipstream.prompts.rows import Row

_WARM = 2  # steps of a run that are not timed: a drafter reads the prompt in the first


@dataclass(frozen=True)
class Plan:
    """What to measure. rows × nodes × contexts is the grid of steps; depths and rows that of drafts.

    rounds: repeats of each. tokens: of each answer. most_tokens: grid points with more tokens are left out.
    """

    rows: tuple[int, ...] = (1, 2, 4, 8)
    nodes: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17)
    contexts: tuple[int, ...] = (256,)
    depths: tuple[int, ...] = (1, 4, 8)
    prefill: tuple[int, ...] = (128, 512)
    rounds: int = 7
    tokens: int = 64
    most_tokens: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("rows", "nodes", "contexts", "depths", "prefill"):
            values = getattr(self, name)
            if not values or min(values) < 1:
                raise ParameterError(f"--{name} must be whole numbers from 1 on, such as 1,2,4")
        if 1 not in self.nodes:
            raise ParameterError("--nodes must hold 1, the plain step that all is compared with")
        for name, least in (("rounds", 3), ("tokens", max(self.depths) + _WARM + 1), ("most_tokens", 1)):
            if getattr(self, name) < least:
                raise ParameterError(
                    f"--{name.replace('_', '-')} must be at least {least}, not {getattr(self, name)}"
                )

    @property
    def grid(self) -> list[tuple[int, int, int]]:
        """(rows, nodes, context) of every step; every number of rows has its plain step."""
        return [
            (r, n, c)
            for c in self.contexts
            for r in self.rows
            for n in self.nodes
            if n == 1 or r * n <= max(self.most_tokens, r)
        ]


@dataclass
class _Found:
    drafts: list[DraftSeconds] = field(default_factory=list)
    acceptance: list[AcceptanceCounts] = field(default_factory=list)
    prefill: list[PrefillSeconds] = field(default_factory=list)
    drafters: list[DrafterInfo] = field(default_factory=list)
    overhead: list[float] = field(default_factory=list)


def measure(
    session: Session,
    name: str,
    drafters: Sequence[str],
    prompts: Sequence[Row],
    plan: Plan | None = None,
    progress: Progress | None = None,
) -> Bundle:
    """Everything for one target. name: what it was loaded as. drafters: as --drafter takes them.

    The session needs room for the most rows that are asked for. Its drafter is plain decoding afterwards.
    """
    plan, progress = plan or Plan(), progress or Silent()
    before = load_reasons()
    runner = session.engine.runner
    dtype = next(runner.model.parameters()).dtype
    shape = shape_of(runner.config.to_dict(), name, str(dtype).removeprefix("torch."))
    session.use("none")
    progress.stage("measuring memory and arithmetic", 0)
    read, rate = bandwidth(runner.device), matrix_rate(runner.device, dtype)
    steps = step_seconds(runner, plan, progress)
    prefill = [
        PrefillSeconds(model="target", tokens=t, seconds=_prefill(runner, t, plan)) for t in plan.prefill
    ]
    found = _drafters(session, drafters, prompts, plan, progress) if drafters else _Found()
    session.use("none")
    return Bundle(
        kind="slipstream-measure",
        version=1,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        model=name,
        dtype=shape.dtype,
        parameters=shape.parameters,
        weight_bytes=runner.weight_bytes,
        kv_bytes=round(shape.kv_bytes),
        machine=this_machine(runner.device, bandwidth=read, flops={shape.dtype: rate}),
        versions=versions(),
        busy=bool(before),
        busy_because=before,
        steps=steps,
        drafts=found.drafts,
        acceptance=found.acceptance,
        prefill=[*prefill, *found.prefill],
        drafters=found.drafters,
        overhead=found.overhead,
    )


def _timed(device: torch.device, work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


# -- the target -------------------------------------------------------------------------------------


def step_seconds(runner: Runner, plan: Plan, progress: Progress) -> list[StepSeconds]:
    """Repeats of every step of the grid. Tokens are random; nothing is committed, so contexts stay."""
    rng = random.Random(plan.seed)
    slots = {
        (context, row): -1 - i
        for i, (context, row) in enumerate((c, r) for c in plan.contexts for r in range(max(plan.rows)))
    }

    def tokens(count: int) -> list[int]:
        return [rng.randrange(runner.vocab_size) for _ in range(count)]

    grid = plan.grid
    told: dict[tuple[int, int, int], list[float]] = {point: [] for point in grid}
    progress.stage(f"measuring {len(grid)} steps", 0)
    try:
        for (context, _), slot in slots.items():
            runner.cache.open(slot)
            runner.extend(slot, tokens(context))
        for round_ in range(plan.rounds + 1):
            for rows, nodes, context in rng.sample(grid, len(grid)):
                chain = tuple(range(-1, nodes - 1))
                pack = [PackRow(slots[context, row], tokens(nodes), chain) for row in range(rows)]
                seconds = _timed(runner.device, lambda pack=pack: runner.forward(pack))  # type: ignore[misc]
                if round_:
                    told[rows, nodes, context].append(seconds)
    finally:
        for slot in slots.values():
            runner.cache.close(slot)
    return [StepSeconds(rows=r, nodes=n, context=c, seconds=s) for (r, n, c), s in told.items()]


def _prefill(runner: Runner, tokens: int, plan: Plan) -> list[float]:
    rng, found = random.Random(plan.seed), []
    ids = [rng.randrange(runner.vocab_size) for _ in range(tokens)]
    for _ in range(min(plan.rounds, 3) + 1):
        runner.cache.open(-1)
        try:
            found.append(_timed(runner.device, lambda: runner.extend(-1, ids)))
        finally:
            runner.cache.close(-1)
    return found[1:]


# -- drafters ---------------------------------------------------------------------------------------


def _drafters(
    session: Session, specs: Sequence[str], prompts: Sequence[Row], plan: Plan, progress: Progress
) -> _Found:
    if not prompts:
        raise ParameterError("there are no prompts, so nothing can be drafted: give --prompts FILE")
    asked = [question_ids(session.tokenizer, p.asked) for p in prompts]
    found = _Found()
    answers: list[Recorded] | None = None
    for spec in specs:
        before = session.engine.memory_bytes
        drafter = session.use(spec)
        added = max(session.engine.memory_bytes - before, 0)
        progress.stage(f"measuring {spec}", 0)
        runs = [_run(session, asked, rows, depth, plan, spec) for rows in plan.rows for depth in plan.depths]
        grown = max((run.grown for run in runs), default=0.0)
        for run in runs:
            found.drafts += run.drafts
            found.overhead += run.overhead
        for depth in _counted_depths(drafter, plan):
            if drafter.learns:  # what it knows of these prompts by now, it would not know in earnest
                drafter = session.use(spec)
            nodes = tree_nodes(drafter, depth)
            progress.stage(f"counting what {spec} gets accepted on {len(asked)} prompts", 0)
            counts = _replayed(session, drafter, answers, fixed_spec(depth, nodes))
            if counts is None:
                session.use(drafter, fixed_spec(depth, nodes))
                counts, told, reading = _answers(session, asked, plan)
                answers = answers or told
                found.prefill += [
                    PrefillSeconds(model=spec, tokens=t, seconds=[s]) for t, s in reading if s > 0
                ]
            found.acceptance += [
                AcceptanceCounts.of(c, drafter=spec, task=p.task, prompt=p.name, depth=depth, nodes=nodes)
                for p, c in zip(prompts, counts, strict=True)
                if c.passes
            ]
        size = torch.finfo(next(session.engine.runner.model.parameters()).dtype).bits // 8
        found.drafters.append(
            DrafterInfo(
                drafter=spec,
                parameters=added // size,
                memory_bytes=added,
                kv_bytes=round(grown),
                same_vocabulary=True,  # it was built for this target, so its drafts are in these tokens
            )
        )
    return found


def _counted_depths(drafter: Drafter, plan: Plan) -> tuple[int, ...]:
    """A shorter chain is a front part of the longest; a smaller tree is not one of a larger."""
    return plan.depths if tree_nodes(drafter, 16) > 16 else (max(plan.depths),)


def _replayed(
    session: Session, drafter: Drafter, answers: Sequence[Recorded] | None, controller: str
) -> list[DraftCounts] | None:
    """Counts without the target; None where there are no answers yet or the drafter needs the target."""
    if answers is None:
        return None
    session.use("none")
    try:
        return replay(drafter, answers, controller)
    except DrafterError:
        return None


@dataclass
class _Run:
    drafts: list[DraftSeconds] = field(default_factory=list)
    overhead: list[float] = field(default_factory=list)
    grown: float = 0.0


def _run(
    session: Session, asked: Sequence[Sequence[int]], rows: int, depth: int, plan: Plan, spec: str
) -> _Run:
    """Repeats of the drafter's part of a step with so many rows, each asked for drafts of `depth`."""
    engine, run, seconds = session.engine, _Run(), list[float]()
    nodes = tree_nodes(engine.drafter, depth)
    engine.set_drafter(engine.drafter, fixed_spec(depth, nodes))
    # Long enough that the budget is never cut by what remains.
    tokens = 2 * (plan.rounds + _WARM + 1) * (depth + 1)
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    before = engine.drafter.memory_bytes
    live = [engine.find(engine.add(list(asked[i % len(asked)]), params)) for i in range(rows)]
    try:
        step = 0
        while len(seconds) < plan.rounds:
            then = engine.seconds.copy()
            engine.step()
            passed = engine.seconds - then
            if any(row is None or row.finished for row in live):
                break  # too few rows fit at once, or the context is full
            step += all(row is not None and row.counts.passes for row in live)
            if passed.prefill or step <= _WARM:
                continue
            seconds.append(max(passed.drafter, 1e-9))
            run.overhead.append(passed.other)
        held = engine.drafter.memory_bytes - before
        kept = sum(round_up(len(row.tokens) + depth, WIDTH) for row in live if row is not None)
        run.grown = max(held, 0) / kept if kept else 0.0
    finally:
        engine.abandon()
    if seconds:
        run.drafts.append(DraftSeconds(drafter=spec, rows=rows, depth=depth, nodes=nodes, seconds=seconds))
    return run


def _answers(
    session: Session, asked: Sequence[Sequence[int]], plan: Plan
) -> tuple[list[DraftCounts], list[Recorded], list[tuple[int, float]]]:
    """Counts and answer of every prompt, one after the other, and what the drafter took to read it."""
    engine = session.engine
    counts, told, reading = [], [], []
    params = SamplingParams(max_tokens=plan.tokens)
    for prompt in asked:
        (row,) = session.submit(list(prompt), params)
        drafting = engine.seconds.drafter
        while not row.finished and row.counts.passes < _WARM:
            engine.step()
        reading.append((len(prompt), engine.seconds.drafter - drafting))
        while not row.finished:
            engine.step()
        counts.append(row.counts)
        told.append(Recorded(tuple(prompt), tuple(row.output), plan.tokens))
    return counts, told, reading


def estimate_steps(plan: Plan) -> int:
    """Target steps that a measurement computes, so that a person can be told how long it may take."""
    return (plan.rounds + 1) * len(plan.grid) + math.ceil(len(plan.rows) * len(plan.depths) * plan.rounds)
