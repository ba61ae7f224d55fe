"""Draft as much as pays now: the depths with the most expected tokens a second, or none (`goodput`).

Each step's budgets maximise  Σ_rows E[tokens] / (T(rows, drafted tokens) + T_draft),  with the measured
curves and each row's own acceptance of late (the objective of TurboSpec, arXiv 2406.14066, by row instead of
one length for all). A row's next drafted token is worth the product of its acceptances so far, which falls
with depth, so the best k drafted tokens of a batch are the k largest of these products: every k is looked at,
and a curve with kinks needs no other treatment. Nothing is shared between controllers.

Evidence is exponentially forgotten. A row that drafts nothing learns nothing, so such rows are probed with
one token each whenever `probe_share` of the time that passed without drafting pays for it; a probe that was
accepted is followed by another at once. Where not even perfect drafts would pay, nothing is probed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from slipstream.control.base import Controller, RowOutcome, RowState
from slipstream.core.draft import Budget
from slipstream.cost.accept import add_all
from slipstream.cost.curve import DraftTime, StepTime
from slipstream.errors import ParameterError

Floats = NDArray[np.float64]
Ints = NDArray[np.int_]
_FIRST = 2.0  # a new row's prior counts as so many tested tokens
_LEAN = 6.0  # a position leans on the one before it as on so many tested tokens
_STEADY = 8.0  # steady evidence lives so many times as long as fresh
_CHANGE = 2.5  # standard deviations between them that chance does not explain
_KEPT = 4.0  # evidence that waiting alone does not take away
_ROWS = 4.0  # finished rows after which one's evidence counts half in the prior of new ones
_BLOCK = 256  # contexts are told apart in steps of so many tokens


@dataclass(frozen=True, slots=True)
class GoodputConfig:
    """curve: the file that `slipstream measure` wrote. drafter: its name in there, if there are several.

    max_depth: longest draft; 0: as long as was measured. nodes_per_level: drafted tokens of a tree a level;
    1 is a chain. half_life: steps after which fresh evidence counts half. prior: acceptance of a row of
    which nothing is known; 0: as measured, else 0.6. probe_share: share of the time that probes may cost.
    """

    curve: str
    drafter: str = ""
    max_depth: int = 0
    nodes_per_level: float = 1.0
    half_life: float = 8.0
    prior: float = 0.0
    probe_share: float = 0.01

    def __post_init__(self) -> None:
        for name, low, high in (
            ("max_depth", 0, 256),
            ("nodes_per_level", 1, 256),
            ("half_life", 1, 1e6),
            ("prior", 0, 1),
            ("probe_share", 0, 1),
        ):
            if not low <= getattr(self, name) <= high:
                raise ParameterError(
                    f"goodput needs {name} from {low:g} to {high:g}, not {getattr(self, name)}"
                )


@dataclass(frozen=True)
class Curves:
    """What a step costs. prior: measured acceptance of first tokens. max_depth: longest measured draft."""

    step: StepTime
    draft: DraftTime
    max_depth: int
    overhead: float = 0.0
    prior: float = 0.6

    @classmethod
    def read(cls, path: Path, drafter: str = "") -> Curves:
        """From a measurement. ParameterError where the drafter is not in it or not named among several."""
        from slipstream.cost.bundle import read_bundle  # pydantic is not needed for anything else here

        bundle = read_bundle(path)
        timed = list(dict.fromkeys(d.drafter for d in bundle.drafts))
        if not drafter and len(timed) != 1:
            raise ParameterError(
                f"{path} has measured {len(timed)} drafters ({', '.join(timed) or 'none'}): name one with"
                " goodput:drafter=NAME"
            )
        name = drafter or timed[0]
        draft = bundle.draft_curve(name)
        seen = add_all(sample.total for sample in bundle.samples(name).values())
        prior = float(seen.conditional(1)[0]) if sum(seen.tested) else 0.6
        return cls(bundle.step_curve, draft, draft.max_depth, bundle.overhead_seconds, prior)


class _Counts:
    """Tested and accepted tokens by position, [2, max_depth], forgotten by half in `half_life` steps."""

    def __init__(self, size: int, prior: float, half_life: float) -> None:
        self.at = np.zeros((2, size))
        self.at[:, 0] = _FIRST, _FIRST * prior
        self._half_life = half_life

    def fade(self, steps: int) -> None:
        """Waiting alone leaves a little."""
        self.at *= max(0.5 ** (steps / self._half_life), min(1.0, _KEPT / self.at[0, 0]))

    def rates(self) -> Floats:
        """Conditional acceptance; a thinly tested position leans on the one before it."""
        rates = np.empty(self.at.shape[1])
        before, lean = 0.0, 0.0
        for i, (tested, accepted) in enumerate(self.at.T.tolist()):
            before = (accepted + lean * before) / (tested + lean)
            rates[i], lean = before, _LEAN
        return rates


class _Row:
    """A row's evidence, and how often it drafted when asked to.

    Kept twice: the steady counts are precise, the fresh ones follow. Where these contradict those, the text
    has changed its kind, and the steady counts begin again from the fresh ones.
    """

    def __init__(self, size: int, prior: float, half_life: float) -> None:
        self.fresh = _Counts(size, prior, half_life)
        self.steady = _Counts(size, prior, _STEADY * half_life)
        self.asked = self.answered = _FIRST
        self.waited = 0  # steps since anything was learned
        self.seen = 0  # steps in which it was asked
        self.hot = True  # try once more whatever the estimate: it is new, or its last probe was accepted
        self.budget = 0  # what it was given this step
        self._half_life = half_life

    @property
    def reach(self) -> float:
        """Share of the times it was asked that it drafted."""
        return self.answered / self.asked

    def values(self) -> Floats:
        """Expected tokens that each further drafted token adds, [max_depth]."""
        return np.asarray(np.cumprod(self.steady.rates()) * self.reach)

    def learn(self, outcome: RowOutcome) -> None:
        kept = max(0.5 ** (self.waited / self._half_life), min(1.0, _KEPT / self.asked))
        self.asked = self.asked * kept + 1
        self.answered = self.answered * kept + (outcome.depth > 0)
        for counts in (self.fresh, self.steady):
            counts.fade(self.waited)
            for i in range(min(outcome.depth, counts.at.shape[1])):
                counts.at[0, i] += outcome.accepted >= i and outcome.emitted > i
                counts.at[1, i] += outcome.accepted > i
        self.waited, self.hot = 0, outcome.accepted > 0
        if self._changed():
            self.steady.at = self.fresh.at.copy()

    def _changed(self) -> bool:
        """Whether the fresh rate of some position is too far from the steady one to be chance."""
        tested, accepted = self.fresh.at
        steady = np.clip(self.steady.rates(), 0.05, 0.95)
        off = accepted - steady * tested
        return bool(np.any(off * off > _CHANGE**2 * tested * steady * (1 - steady)))


@dataclass
class _Tables:
    """Seconds of steps and drafts, asked of the curves once."""

    curves: Curves
    per_level: float
    _steps: dict[tuple[int, int], Floats] = field(default_factory=dict)
    _drafts: dict[tuple[int, int], float] = field(default_factory=dict)

    def step(self, rows: int, drafted: Floats, context: float) -> Floats:
        """drafted: tokens beside the roots, all rows together, before the width of a tree."""
        block = round(context / _BLOCK)
        key = (rows, block)
        if key not in self._steps:
            most = np.arange(rows * self.curves.max_depth + 1)
            nodes = 1 + most * self.per_level / rows
            self._steps[key] = self.curves.step.seconds(rows, nodes, block * _BLOCK) + self.curves.overhead
        table = self._steps[key]
        return np.interp(drafted, np.arange(len(table)), table)

    def draft(self, rows: int, depth: int) -> float:
        if (rows, depth) not in self._drafts:
            nodes = round(depth * self.per_level)
            self._drafts[rows, depth] = self.curves.draft.draft_seconds(rows, depth, nodes) if depth else 0.0
        return self._drafts[rows, depth]


@dataclass(frozen=True)
class _Step:
    """What is expected of the rows of a step: worth of each drafted token [rows, max_depth], reach [rows],
    how many tokens each may draft [rows]; and their mean context."""

    values: Floats
    reach: Floats
    room: Ints
    context: float


class Goodput(Controller):
    """See the module. `curves` stands in for the file that the configuration names."""

    name = "goodput"
    Config = GoodputConfig

    def __init__(self, config: GoodputConfig, curves: Curves | None = None) -> None:
        curves = curves or Curves.read(Path(config.curve), config.drafter)
        self.max_depth = config.max_depth or curves.max_depth
        self._config = config
        self._prior = config.prior or curves.prior
        depth = max(self.max_depth, curves.max_depth)
        self._tables = _Tables(
            Curves(curves.step, curves.draft, depth, curves.overhead), config.nodes_per_level
        )
        self._rows: dict[int, _Row] = {}
        self._finished = [0.0, 0.0]  # tested and accepted first tokens of rows that are gone
        self._credit = 0.0  # seconds that probes may cost

    # -- planning -------------------------------------------------------------------------------

    def plan(self, rows: Sequence[RowState]) -> list[Budget]:
        if not rows:
            return []
        states = [self._row(row.seq_id) for row in rows]
        step = _Step(
            values=np.array([state.values() for state in states]),
            reach=np.array([state.reach for state in states]),
            room=np.array([max(min(row.remaining - 1, self.max_depth), 0) for row in rows]),
            context=sum(row.position for row in rows) / len(rows),
        )
        depths, pace = self._best(step)
        depths = self._probe(step, depths, pace, [state.hot for state in states])
        budgets = []
        for state, depth in zip(states, depths.tolist(), strict=True):
            state.budget = depth
            budgets.append(Budget(depth, round(depth * self._config.nodes_per_level)))
        return budgets

    def _best(self, step: _Step) -> tuple[Ints, float]:
        """Depth of each row and the tokens a second that these are expected to give."""
        rows = len(step.values)
        row_of, depth_of = np.nonzero(np.arange(step.values.shape[1]) < step.room[:, None])
        worth = step.values[row_of, depth_of]
        order = np.lexsort((depth_of, -worth))  # the most valuable first, of equal ones the shallower
        row_of, depth_of = row_of[order], depth_of[order] + 1
        tokens = rows + np.concatenate([[0.0], np.cumsum(worth[order])])
        drafted = np.concatenate([[0.0], np.cumsum(step.reach[row_of])])
        seconds = self._tables.step(rows, drafted, step.context)
        drafting, longest = np.cumsum(depth_of == 1).tolist(), np.maximum.accumulate(depth_of).tolist()
        seconds[1:] += [self._tables.draft(r, d) for r, d in zip(drafting, longest, strict=True)]
        best = int(np.argmax(tokens / seconds))
        return np.bincount(row_of[:best], minlength=rows), float(tokens[best] / seconds[best])

    def _probe(self, step: _Step, depths: Ints, pace: float, hot: Sequence[bool]) -> Ints:
        """Depths with a token for rows that would draft nothing and are worth another look."""
        idle = (depths == 0) & (step.room > 0)
        if not idle.any():
            return depths
        hopeful = _Step(
            np.where(idle[:, None], 1.0, step.values),
            np.where(idle, 1.0, step.reach),
            step.room,
            step.context,
        )
        if self._best(hopeful)[1] <= pace:
            return depths  # not even perfect drafts would pay
        now = self._seconds(step, depths)
        probed = np.where(idle, 1, depths)
        self._credit += self._config.probe_share * now
        if self._credit >= self._seconds(step, probed) - now:
            self._credit = 0.0
            return probed
        return np.where(idle & np.array(hot), 1, depths)

    def _seconds(self, step: _Step, depths: Ints) -> float:
        drafting = int(np.count_nonzero(depths))
        drafted = np.array(float(depths @ step.reach))
        target = float(self._tables.step(len(depths), drafted, step.context))
        return target + self._tables.draft(drafting, int(depths.max()))

    # -- learning -------------------------------------------------------------------------------

    def _row(self, seq_id: int) -> _Row:
        if seq_id not in self._rows:
            tested, accepted = self._finished
            prior = (accepted + _FIRST * self._prior) / (tested + _FIRST)
            size = max(self.max_depth, 1)
            self._rows[seq_id] = _Row(size, prior, self._config.half_life)
        return self._rows[seq_id]

    def record(self, outcomes: Sequence[RowOutcome], seconds: float) -> None:
        for outcome in outcomes:
            row = self._row(outcome.seq_id)
            row.waited += 1
            if not row.budget:
                continue
            row.seen += 1
            if not outcome.depth and row.seen == 1:
                continue  # a drafter may have had to read the prompt first
            row.learn(outcome)

    def forget(self, seq_id: int) -> None:
        row = self._rows.pop(seq_id, None)
        if row is not None and row.seen:
            keep = 0.5 ** (1 / _ROWS)
            self._finished = [
                f * keep + float(c) for f, c in zip(self._finished, row.steady.at[:, 0], strict=True)
            ]
