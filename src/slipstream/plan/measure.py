"""Measuring what advice rests on: step times of the target, the drafters' costs, and what is accepted.

Steps are measured by computing them, in an order that is shuffled anew in every round, so that a machine
that drifts hurts all alike; the first round warms up and is dropped. Drafters are measured at work: the
engine decodes real prompts with a fixed length, and the time a step spends in the drafter, its reading of
what was committed included, is a repeat. What is accepted is counted over whole answers; a drafter that needs
no target is replayed on the answers that another one's run has left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

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
)
from slipstream.cost.shape import ModelShape, shape_of
from slipstream.engine.inputs import question_ids
from slipstream.engine.session import Session
from slipstream.errors import CapacityError, DrafterError, ParameterError
from slipstream.model.cache import columns
from slipstream.model.identity import versions
from slipstream.model.progress import Progress, Silent, size
from slipstream.model.runner import Runner
from slipstream.plan.here import load_reasons, this_machine
from slipstream.plan.memory import available
from slipstream.plan.rates import bandwidth, int8_rate, matrix_rate
from slipstream.plan.replay import Recorded, replay
from slipstream.plan.timing import (
    WARM,
    draft_seconds,
    prefill_seconds,
    step_seconds,
)
from slipstream.prompts.rows import Row


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
        for name, least in (("rounds", 3), ("tokens", max(self.depths) + WARM + 1), ("most_tokens", 1)):
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
    _check_room(session, name, plan)  # what cannot be measured is told before an hour has passed
    asked = questions(session, prompts) if drafters else []
    session.use("none")
    progress.stage("measuring memory and arithmetic", 0)
    dtype, kept = next(runner.model.parameters()).dtype, kept_as(session)
    read = bandwidth(runner.device)
    rate = int8_rate() if kept == "int8" else matrix_rate(runner.device, dtype)
    progress.stage(f"measuring {len(plan.grid)} steps", 0)
    steps = step_seconds(runner, plan.grid, plan.rounds, seed=plan.seed)
    rounds = min(plan.rounds, 3)
    prefill = [
        PrefillSeconds(model="target", tokens=t, seconds=prefill_seconds(runner, t, rounds, plan.seed))
        for t in plan.prefill
        if t <= session.engine.context
    ]
    found = _drafters(session, drafters, prompts, asked, plan, progress) if drafters else _Found()
    session.use("none")
    return bundle_of(
        session,
        name,
        machine=this_machine(runner.device, bandwidth=read, flops={kept: rate}),
        busy=bool(before),
        busy_because=before,
        steps=steps,
        drafts=found.drafts,
        acceptance=found.acceptance,
        prefill=[*prefill, *found.prefill],
        drafters=found.drafters,
        overhead=found.overhead,
    )


def target_shape(runner: Runner, name: str) -> ModelShape:
    """ParameterError for a model whose sizes cannot be told from its configuration."""
    return shape_of(runner.config.to_dict(), name, dtype_of(runner))


def dtype_of(runner: Runner) -> str:
    """As files name it, such as bfloat16."""
    return str(next(runner.model.parameters()).dtype).removeprefix("torch.")


def kept_as(session: Session) -> str:
    """How the target's weights are kept: int8, or their dtype."""
    return "int8" if session.info.weights == "int8" else dtype_of(session.engine.runner)


def bundle_of(session: Session, name: str, **measured: Any) -> Bundle:
    """What was measured of a session's target (fields of `Bundle`), and what it is. name: see `measure`."""
    runner = session.engine.runner
    shape = target_shape(runner, name)
    return Bundle(
        kind="slipstream-measure",
        version=1,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        model=name,
        dtype=kept_as(session),
        parameters=shape.parameters,
        weight_bytes=runner.weight_bytes,
        kv_bytes=round(shape.kv_bytes),
        block=runner.block,
        versions=versions(),
        **measured,
    )


def require_cache(session: Session, shape: ModelShape, rows: int, tokens: int, fix: str) -> None:
    """CapacityError unless the memory holds so many rows of so many tokens, and the logits of a step."""
    device = session.engine.runner.device
    needed = rows * (columns(tokens) * shape.kv_bytes + 4 * shape.vocab)
    there = available(str(device))
    if needed > there:
        raise CapacityError(
            f"{rows} rows of {tokens} tokens need {size(round(needed))} of memory and {size(there)} are"
            f" available: {fix}"
        )


def _check_room(session: Session, name: str, plan: Plan) -> None:
    """Errors for a model whose sizes cannot be told, and for steps that the session, the model's context or
    the memory has no room for."""
    shape = target_shape(session.engine.runner, name)
    slots, context = session.engine.load.slots, session.engine.context
    if max(plan.rows) > slots:
        raise ParameterError(
            f"{max(plan.rows)} rows need a session of as many, this one has {slots}: load it with"
            f" max_rows={max(plan.rows)}"
        )
    longest = max(c + n for _, n, c in plan.grid)
    if longest > context:
        raise ParameterError(
            f"a step of {longest} tokens, those in the cache included, does not fit the model's context of"
            f" {context}: ask for less with --contexts and --nodes"
        )
    rows = len(plan.contexts) * max(plan.rows)  # all are cached at once
    require_cache(session, shape, rows, longest, "ask for less with --rows and --contexts")


def questions(session: Session, prompts: Sequence[Row], room: int = WARM + 1) -> list[list[int]]:
    """The prompts as tokens. ParameterError where there are none, or one leaves no room for `room` tokens of
    an answer, by its place."""
    if not prompts:
        raise ParameterError("there are no prompts, so nothing can be drafted: give --prompts FILE")
    asked, context = [question_ids(session.tokenizer, p.asked) for p in prompts], session.engine.context
    for prompt, ids in zip(prompts, asked, strict=True):
        if len(ids) + room > context:
            raise ParameterError(
                f"{prompt.where}: the prompt has {len(ids)} tokens and the model's context holds {context}:"
                " shorten it, or leave it out"
            )
    return asked


# -- drafters ---------------------------------------------------------------------------------------


def _drafters(
    session: Session,
    specs: Sequence[str],
    prompts: Sequence[Row],
    asked: Sequence[Sequence[int]],
    plan: Plan,
    progress: Progress,
) -> _Found:
    found = _Found()
    answers: list[Recorded] | None = None
    for spec in specs:
        before = session.engine.memory_bytes
        drafter = session.use(spec)
        added = max(session.engine.memory_bytes - before, 0)
        progress.stage(f"measuring {spec}", 0)
        runs = [
            draft_seconds(session, asked, spec, rows, depth, plan.rounds)
            for rows in plan.rows
            for depth in plan.depths
        ]
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
        width = torch.finfo(next(session.engine.runner.model.parameters()).dtype).bits // 8
        found.drafters.append(
            DrafterInfo(
                drafter=spec,
                parameters=added // width,
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
        while not row.finished and row.counts.passes < WARM:
            engine.step()
        reading.append((len(prompt), engine.seconds.drafter - drafting))
        while not row.finished:
            engine.step()
        counts.append(row.counts)
        told.append(Recorded(tuple(prompt), tuple(row.output), plan.tokens))
    return counts, told, reading
