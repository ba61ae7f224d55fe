"""Running a bench: every setting answers every unit of prompts, plain decoding beside them, round by round.

All settings answer a unit before the next one begins, in an order that rotates, so a machine that drifts
hurts all alike. A drafter that learns is built anew for every unit: what it knows is what this unit's prompts
taught it. Nothing of the warm-up is timed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

from slipstream.bench.bundle import (
    Answer,
    BenchBundle,
    Counts,
    DrafterNote,
    Head,
    Parts,
    Plan,
    PromptInfo,
    Run,
    SessionNote,
    Setting,
    Steady,
    TargetNote,
)
from slipstream.bench.exact import part
from slipstream.bench.journal import Journal
from slipstream.bench.plan import check_plan, make_settings, make_units
from slipstream.control import build_controller
from slipstream.control.fixed import fixed_spec
from slipstream.core.draft import Drafter
from slipstream.core.params import SamplingParams
from slipstream.core.sequence import Sequence as Row
from slipstream.core.stats import DraftCounts, Seconds
from slipstream.drafters import build_drafter
from slipstream.drafters.draft_model import ModelDrafter
from slipstream.engine.session import Session
from slipstream.errors import ParameterError
from slipstream.model.identity import identity, versions, weights_hash
from slipstream.model.progress import Progress, Silent
from slipstream.plan.here import load_average, load_reasons, this_machine
from slipstream.plan.measure import questions, require_cache, target_shape
from slipstream.prompts.rows import Row as Prompt

_WARM = 2  # passes of a row that are not steady: a drafter reads the prompt in the first
_WARM_TOKENS = 8


def bench(
    session: Session,
    name: str,
    plan: Plan,
    prompts: Sequence[Prompt],
    *,
    keep: Path | None = None,
    minutes: float | None = None,
    command: Sequence[str] = (),
    progress: Progress | None = None,
) -> BenchBundle:
    """Measure it all; gives the bundle.

    name: what the target was loaded as; the session needs room for the largest batch. keep: a file in which
    results survive the process, see `Journal`; what is in there is not measured again. minutes: no unit is
    begun that would probably end later. Raises ParameterError for a plan that cannot be measured. The session
    decodes plainly afterwards.
    """
    check_plan(plan)
    if not prompts:
        raise ParameterError("there are no prompts, so nothing can be answered: give --prompts FILE")
    slots = session.engine.load.slots
    if max(plan.batches) > slots:
        raise ParameterError(
            f"batch {max(plan.batches)} needs a session of as many rows, this one has {slots}: load it with"
            f" max_rows={max(plan.batches)}"
        )
    with suppress(ParameterError):  # of a model whose sizes cannot be told
        shape = target_shape(session.engine.runner, name)
        require_cache(session, shape, max(plan.batches), plan.tokens, "ask for a smaller --batch or --tokens")
    return _Bench(session, name, plan, prompts, keep, progress or Silent()).run(minutes, command)


def target_note(session: Session, name: str) -> TargetNote:
    """Which target this is; name: what it was loaded as."""
    return TargetNote(**identity(session.engine.runner.model, session.tokenizer, name))


class _Bench:
    """One process's part of a bench."""

    def __init__(
        self,
        session: Session,
        name: str,
        plan: Plan,
        prompts: Sequence[Prompt],
        keep: Path | None,
        progress: Progress,
    ) -> None:
        self._session = session
        self._progress = progress
        session.engine.set_drafter(None)
        asked = questions(session, prompts)
        progress.stage("loading the drafters", 0)
        self._built: dict[str, Drafter] = {}
        self._notes: list[DrafterNote] = []
        for spec in plan.drafters:
            self._built[spec] = drafter = build_drafter(spec, session.info)
            self._notes.append(
                DrafterNote(drafter=spec, memory_bytes=drafter.memory_bytes, weights=_weights(drafter))
            )
        head = Head(
            kind="slipstream-bench",
            version=1,
            model=name,
            target=target_note(session, name),
            plan=plan,
            prompts=[
                PromptInfo(name=p.name, task=p.task, ids=ids) for p, ids in zip(prompts, asked, strict=True)
            ],
            settings=make_settings(plan, self._built),
            units=make_units(plan, [p.task for p in prompts]),
        )
        self._head = head
        self._journal = Journal(keep, head)
        self._warmed: set[tuple[str, int]] = set()
        self._place = 0  # this process's, among the sessions

    def run(self, minutes: float | None, command: Sequence[str]) -> BenchBundle:
        began, took = time.monotonic(), dict[int, float]()
        try:
            todo = list(self._todo())
            if todo:
                self._place = self._journal.start(self._note(command), self._notes)
            for i, (round_, unit, settings) in enumerate(todo):
                batch, now = self._head.units[unit].batch, time.monotonic() - began
                if minutes is not None and now + took.get(batch, 0.0) > 60 * minutes:
                    continue
                rest = [took.get(self._head.units[u].batch) for _, u, _ in todo[i:]]
                self._say(f"{i + 1} of {len(todo)}", rest, round_, unit, len(settings))
                for done, setting in enumerate(settings):
                    self._progress.at(done)
                    self._one(round_, unit, setting)
                took[batch] = time.monotonic() - began - now
                self._compare(round_, unit)
        except KeyboardInterrupt:
            self._progress.note(f"stopped{self._onward}")
            raise
        finally:
            self._session.engine.abandon()
            self._session.engine.set_drafter(None)
            for drafter in self._built.values():
                drafter.shutdown()
        if not self._journal.complete:
            self._progress.note(f"the time is over{self._onward}")
        return self._journal.bundle()

    @property
    def _onward(self) -> str:
        return ": the same command goes on from here" if self._journal.path is not None else ""

    def _todo(self) -> Iterator[tuple[int, int, list[int]]]:
        """(round, unit, settings) that are not measured yet. A unit that a killed process has left half
        done is done again, so that what is compared was measured together."""
        head, done = self._head, self._journal.runs
        for round_ in range(head.plan.rounds):
            for u, unit in enumerate(head.units):
                where = (unit.batch, unit.temperature)
                here = [s for s, x in enumerate(head.settings) if (x.batch, x.temperature) == where]
                first = (u + round_) % len(here)
                if any((round_, u, s) not in done for s in here):
                    yield round_, u, [*here[first:], *here[:first]]

    def _note(self, command: Sequence[str]) -> SessionNote:
        return SessionNote(
            started=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            command=list(command),
            load=load_average(),
            busy_because=load_reasons(),
            versions=versions(),
            machine=this_machine(self._session.engine.runner.device),
        )

    def _say(self, at: str, rest: list[float | None], round_: int, unit: int, settings: int) -> None:
        """rest: seconds that each unit still to come will probably take, None: not known."""
        told = self._head.units[unit]
        warm = f", temperature {told.temperature:g}" if told.temperature else ""
        where = f"round {round_ + 1} of {self._head.plan.rounds}, batch {told.batch}{warm}, {told.task}"
        known = [seconds for seconds in rest if seconds is not None]
        left = f", about {sum(known) / 60:.0f} minutes left" if len(known) == len(rest) else ""
        self._progress.stage(f"{at}: {where}{left}", settings, "runs")

    def _compare(self, round_: int, unit: int) -> None:
        """Tell at once where a setting's tokens are not plain decoding's."""
        runs = [r for (n, u, _), r in self._journal.runs.items() if (n, u) == (round_, unit)]
        plain = next(r for r in runs if self._head.settings[r.setting].plain)
        for run in runs:
            setting = self._head.settings[run.setting]
            for found in part(setting, self._head.prompts, run, plain):
                self._progress.note(str(found))

    # -- one run --------------------------------------------------------------------------------

    def _one(self, round_: int, unit: int, place: int) -> None:
        setting, told = self._head.settings[place], self._head.units[unit]
        prompts = [self._head.prompts[i].ids for i in told.prompts]
        if (setting.drafter, setting.batch) not in self._warmed:
            self._warmed.add((setting.drafter, setting.batch))
            # Backwards: the same lengths take the same kernels, and nothing is learned from them.
            with self._drafting(setting):
                _answer(self._session, setting, [p[::-1] for p in prompts], [0] * len(prompts), _WARM_TOKENS)
        plan = self._head.plan
        with self._drafting(setting):
            load = load_average()
            seeds = [plan.seed + i for i in told.prompts]
            found = _answer(self._session, setting, prompts, seeds, plan.tokens)
        where = {"setting": place, "unit": unit, "round": round_, "session": self._place}
        self._journal.add(found.run(prompts=told.prompts, load=load, **where))

    @contextmanager
    def _drafting(self, setting: Setting) -> Iterator[None]:
        """With the setting's drafter in the engine; one that learns knows nothing yet."""
        engine = self._session.engine
        if setting.plain:
            engine.set_drafter(None)
            yield
            return
        drafter = self._built[setting.drafter]
        fresh = build_drafter(setting.drafter, self._session.info) if drafter.learns else drafter
        spec = setting.controller or fixed_spec(setting.depth, setting.nodes)
        sizes = (fresh.num_speculative_tokens, fresh.draft_nodes)
        engine.set_drafter(fresh, build_controller(spec, *sizes, drafter=setting.drafter))
        try:
            yield
        finally:
            engine.abandon()
            engine.set_drafter(None)
            if fresh is not drafter:
                fresh.shutdown()


def _weights(drafter: Drafter) -> str:
    """A hash of a draft model's own weights."""
    return weights_hash(drafter.runner.model) if isinstance(drafter, ModelDrafter) else ""


@dataclass
class _Found:
    """What one run gave, as it is gathered. steady: counts by row; steps, positions (rows' lengths), spent:
    likewise of steady steps."""

    rows: list[Row]
    steady: list[DraftCounts]
    seconds: float = 0.0
    parts: Seconds = field(default_factory=Seconds)
    steps: int = 0
    positions: int = 0
    spent: Seconds = field(default_factory=Seconds)

    def run(
        self, *, setting: int, unit: int, round: int, session: int, prompts: Sequence[int], load: float
    ) -> Run:
        mean = self.positions / (self.steps * len(self.rows)) if self.steps else 0.0
        return Run(
            setting=setting,
            unit=unit,
            round=round,
            session=session,
            seconds=self.seconds,
            parts=Parts.of(self.parts),
            steady=Steady(
                steps=self.steps,
                tokens=sum(counts.emitted for counts in self.steady),
                context=mean,
                seconds=Parts.of(self.spent),
            ),
            answers=[
                Answer(prompt=p, ids=row.output, counts=Counts.of(row.counts), steady=Counts.of(counts))
                for p, row, counts in zip(prompts, self.rows, self.steady, strict=True)
            ],
            load=load,
        )


def _answer(
    session: Session, setting: Setting, prompts: Sequence[Sequence[int]], seeds: Sequence[int], tokens: int
) -> _Found:
    """All prompts at once, step by step, so that steady steps can be told from the others."""
    engine = session.engine
    before, began = engine.seconds.copy(), time.perf_counter()
    rows = []
    for prompt, seed in zip(prompts, seeds, strict=True):
        params = SamplingParams(max_tokens=tokens, temperature=setting.temperature, seed=seed)
        rows += session.submit(list(prompt), params)
    found = _Found(rows, [DraftCounts() for _ in rows])
    uncut = max(setting.depth, 1)  # with no more than this to come, a draft is cut
    while not all(row.finished for row in rows):
        steady = all(not r.finished and r.counts.passes >= _WARM and r.remaining > uncut for r in rows)
        if not steady:
            engine.step()
            continue
        then, counted = engine.seconds.copy(), [row.counts.copy() for row in rows]
        found.steps += 1
        found.positions += sum(len(row.tokens) for row in rows)
        engine.step()
        found.spent += engine.seconds - then
        for total, row, earlier in zip(found.steady, rows, counted, strict=True):
            total.add(row.counts - earlier)
    found.seconds = time.perf_counter() - began
    found.parts = engine.seconds - before
    return found
