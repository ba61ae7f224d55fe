"""Draft as much as pays now: the depths with which rows get on fastest, or none (`goodput`).

Each step's budgets maximise the tokens a second that the rows will have made when they are done, with the
measured curves and each row's own acceptance of late. With E_i tokens expected of row i and R rows that is

    R / (T(R, drafted tokens) + T_draft)  ·  R / Σ_i 1/E_i :

the harmonic mean of the E_i, because a row is there for 1/E_i steps a token. The tokens of the next step
alone, Σ E_i / T (the objective of TurboSpec, arXiv 2406.14066), would draft for the rows that are fast
already; these leave soon, and all the others stay longer: with drafts of a model that was up to a fifth
slower than the best single length. For one row both are the same.

A row's next drafted token adds the product of its acceptances so far, which falls with depth, and so do the
steps that it saves; so the best k drafted tokens of a batch are the k that save most: every k is looked at,
and a curve with kinks needs no other treatment. Rows may have different drafters: then all of these are
weighed together, and each alone. Nothing is shared between controllers.

Evidence is exponentially forgotten. A row that drafts nothing learns nothing, so such rows are probed with
one token each whenever `probe_share` of the time that passed pays for what that is expected to lose: near to
break-even next to nothing, so a row with bad luck is soon given another chance. Where not even perfect drafts
would pay, nothing is probed.

The curves are held against the seconds that steps really take (`control.clock`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.control.base import Controller, RowOutcome, RowState
from slipstream.control.clock import Clock
from slipstream.control.curves import Curves
from slipstream.control.evidence import FIRST, Evidence
from slipstream.core.draft import Budget
from slipstream.errors import ParameterError

Floats = NDArray[np.float64]
Ints = NDArray[np.int_]
_ROWS = 4.0  # finished rows after which one's evidence counts half in the prior of new ones
_WORTH = 10.0  # tested tokens of finished rows that are worth one in the prior of new ones …
_MOST = 8.0  # … which is worth no more than this
_APART = 16  # steps between two in which it is not done what seems best, to see what that takes
_AT_ONCE = 0.25  # steps' worth of time that probes may lose at once


@dataclass(frozen=True, slots=True)
class GoodputConfig:
    """curve: the file that `slipstream measure` wrote. drafter: its name in there, if there are several.

    max_depth: longest draft; 0: as long as was measured. nodes_per_level: drafted tokens of a tree a level;
    1 is a chain. half_life: steps after which fresh evidence counts half. prior: acceptance of a row of
    which nothing is known; 0: as measured, else 0.6. probe_share: share of the time that probes may lose.
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


class _Kind:
    """One drafter: what its drafts cost, and what rows of it that are gone had accepted."""

    def __init__(self, name: str, curves: Curves, config: GoodputConfig) -> None:
        self.name = name
        self.depth = max(config.max_depth or curves.max_depth, 0)
        self.width = curves.per_level or config.nodes_per_level
        self._draft = curves.draft
        self._prior = config.prior or curves.prior
        self._half_life = config.half_life
        self._seconds: dict[tuple[int, int], float] = {}
        self._finished = np.zeros(4)  # tested and accepted first tokens; times asked and answered

    def seconds(self, rows: int, depth: int) -> float:
        """Of drafts for so many rows, the longest so deep; asked of the curve once."""
        if (rows, depth) not in self._seconds:
            nodes = round(depth * self.width)
            self._seconds[rows, depth] = (
                self._draft.draft_seconds(rows, depth, nodes) if rows and depth else 0.0
            )
        return self._seconds[rows, depth]

    def open(self) -> Evidence:
        """Of a new row."""
        tested, accepted, asked, answered = self._finished.tolist()
        prior = (accepted + FIRST * self._prior) / (tested + FIRST)
        reach = (answered + FIRST) / (asked + FIRST)
        weight = min(FIRST + tested / _WORTH, _MOST)
        return Evidence(max(self.depth, 1), prior, reach, weight, self._half_life)

    def close(self, row: Evidence) -> None:
        if row.seen:
            self._finished *= 0.5 ** (1 / _ROWS)
            self._finished += np.array([*row.steady.at[:, 0], row.asked, row.answered])


@dataclass(frozen=True)
class _Step:
    """What is expected of the rows of a step.

    values [rows, depth]: expected tokens that each drafted token adds. reach [rows]: probability of a draft
    when asked. room [rows]: tokens that may be asked for. kind [rows]: whose draft it would be, -1 without.
    width [rows]: tokens a level. fixed: by kind, rows that draft whatever is decided and their longest depth;
    given: their tokens in all.
    """

    values: Floats
    reach: Floats
    room: Ints
    kind: Ints
    width: Floats
    fixed: Mapping[int, tuple[int, int]]
    given: int
    context: float


@dataclass(frozen=True)
class _Choice:
    """Depth of each row, and the pace (tokens a second, see the module) and seconds of such a step."""

    depths: Ints
    pace: float
    seconds: float


class Goodput(Controller):
    """See the module. `curves` stands in for the file that the configuration names.

    Curves by the name of a drafter serve rows of several drafters (`RowState.drafter`); they share a step
    curve. Rows of others, and those with a fixed budget, are counted in and left as they are.
    """

    name = "goodput"
    Config = GoodputConfig

    def __init__(self, config: GoodputConfig, curves: Curves | Mapping[str, Curves] | None = None) -> None:
        curves = curves or Curves.read(Path(config.curve), config.drafter)
        by_name = {"": curves} if isinstance(curves, Curves) else dict(curves)
        first = next(iter(by_name.values()))
        self._config = config
        self._step, self._overhead, self._block = first.step, first.overhead, first.block
        self._kinds = [_Kind(name, own, config) for name, own in by_name.items()]
        self._index = {kind.name: i for i, kind in enumerate(self._kinds)}
        self._clock = Clock(first.measured)
        self._rows: dict[int, tuple[_Kind, Evidence]] = {}
        self._credit: float | None = None  # seconds that probes may lose; None: before the first step
        self._probed: set[int] = set()  # seq_ids of the rows that are probed in this step
        self._token = 0.0  # seconds that a token of theirs gives back
        self._since_look = 0
        self._context = 0.0

    # -- planning -------------------------------------------------------------------------------

    def plan(self, rows: Sequence[RowState]) -> list[Budget]:
        if not rows:
            return []
        step = self._look_at(rows)
        depths = self._check(step, self._probe(step, self._best(step), rows))
        budgets = []
        for row, depth, width in zip(rows, depths.tolist(), step.width.tolist(), strict=True):
            if row.seq_id in self._rows:
                self._rows[row.seq_id][1].budget = depth
            budgets.append(row.fixed or Budget(depth, round(depth * width)))
        return budgets

    def depth_at(self, rows: int, drafter: str = "") -> int:
        """How deep so many new rows of a drafter would draft, by curves and prior; 0: it does not pay."""
        states = [RowState(-1 - i, 0, 1 << 30, drafter) for i in range(rows)]
        try:
            return int(self._best(self._look_at(states)).depths.max())
        finally:
            for state in states:
                self._rows.pop(state.seq_id, None)

    def _look_at(self, rows: Sequence[RowState]) -> _Step:
        deepest = max((kind.depth for kind in self._kinds), default=0)
        values, reach = np.zeros((len(rows), max(deepest, 1))), np.zeros(len(rows))
        room, kinds = np.zeros(len(rows), dtype=int), np.full(len(rows), -1)
        width = np.ones(len(rows))
        fixed: dict[int, tuple[int, int]] = {}
        for i, row in enumerate(rows):
            index = self._index.get(row.drafter, -1)
            if row.fixed is not None:
                if row.fixed.depth:
                    count, longest = fixed.get(index, (0, 0))
                    fixed[index] = count + 1, max(longest, row.fixed.depth)
                continue
            if index < 0:
                continue
            kind, state = self._row(row.seq_id, index)
            own = state.values()
            values[i, : len(own)], reach[i] = own, state.reach
            room[i] = max(min(row.remaining - 1, kind.depth), 0)
            kinds[i], width[i] = index, kind.width
        self._context = sum(row.position for row in rows) / len(rows)
        given = sum(row.fixed.nodes for row in rows if row.fixed is not None)
        return _Step(values, reach, room, kinds, width, fixed, given, self._context)

    def _best(self, step: _Step) -> _Choice:
        """What gives the best pace."""
        found = [self._best_within(step, step.room)]
        able = set(step.kind[step.room > 0].tolist())
        if len(able) > 1:  # a cheap drafter may pay where a costly one beside it does not
            found += [self._best_within(step, np.where(step.kind == kind, step.room, 0)) for kind in able]
        return max(found, key=lambda one: one.pace)

    def _best_within(self, step: _Step, room: Ints) -> _Choice:
        rows = len(room)
        row_of, depth_of = np.nonzero(np.arange(step.values.shape[1]) < room[:, None])
        saved = _saved(step.values)[row_of, depth_of]
        order = np.lexsort((depth_of, -saved))  # what saves most first, of equals the shallower
        row_of, depth_of = row_of[order], depth_of[order] + 1
        seconds = self._seconds(step, row_of, depth_of)
        pace = _pace(rows, _running(saved[order]), seconds)
        best = int(np.argmax(pace))
        depths = np.bincount(row_of[:best], minlength=rows)
        return _Choice(depths, float(pace[best]), float(seconds[best]))

    def _seconds(self, step: _Step, row_of: Ints, depth_of: Ints) -> Floats:
        """Of a step without drafts, with the first of these tokens drafted, the first two …, [tokens + 1]."""
        rows, reach = len(step.room), step.reach[row_of]
        begun = depth_of == 1
        # Some drafter may have no draft, and then it is a plain step: `share` is how likely it is not.
        share = np.minimum(_running(reach * begun) + (step.given > 0), 1.0)
        drafted = (step.given + _running(reach * step.width[row_of])) / np.maximum(share, 1e-9)
        drafts, who = np.zeros(len(drafted)), list[str]()
        for index, kind in enumerate(self._kinds):
            own, (count, longest) = step.kind[row_of] == index, step.fixed.get(index, (0, 0))
            if count or own.any():
                who.append(kind.name)
                counts = count + _running(own & begun).astype(int)
                depths = np.maximum.accumulate([longest, *np.where(own, depth_of, 0)])
                drafts += [kind.seconds(c, d) for c, d in zip(counts.tolist(), depths.tolist(), strict=True)]
        target = self._target(rows, np.concatenate([[0.0], drafted]), step.context)
        plain = self._clock.plain(rows) * (target[0] + drafts)
        drafting = self._clock.drafting(rows, rows + drafted, who) * (target[1:] + drafts)
        return np.asarray((1 - share) * plain + share * drafting)

    def _target(self, rows: int, drafted: Floats, context: float) -> Floats:
        """Seconds of the target's part of a step, by the curve; drafted: tokens beside the roots."""
        tokens = rows + drafted
        whole = np.ceil(tokens / self._block - 1e-3) * self._block
        nodes = np.where(drafted > 0, np.maximum(whole, tokens), rows) / rows
        return self._step.seconds(rows, nodes, context) + self._overhead

    def _total(self, step: _Step, depths: Ints) -> float:
        row_of, depth_of = np.nonzero(np.arange(step.values.shape[1]) < depths[:, None])
        return float(self._seconds(step, row_of, depth_of + 1)[-1])

    def _probe(self, step: _Step, best: _Choice, rows: Sequence[RowState]) -> Ints:
        """Depths with a token for rows that would draft nothing, if it is time for another look at them."""
        depths, now = best.depths, best.seconds
        self._probed = set()
        idle = (depths == 0) & (step.room > 0)
        if not idle.any():
            return depths
        probed = np.where(idle, 1, depths)
        loss = self._total(step, probed) - self._worth(step, probed) / best.pace
        at_once = _AT_ONCE * now
        before = at_once if self._credit is None else self._credit
        self._credit = min(before + self._config.probe_share * now, max(loss, at_once))
        if loss > self._credit or not self._hopeful(step, idle, best.pace):
            return depths
        self._credit -= self._total(step, probed) - now
        self._probed = {row.seq_id for row, probe in zip(rows, idle, strict=True) if probe}
        self._token = 1 / best.pace
        return probed

    def _worth(self, step: _Step, depths: Ints) -> float:
        """Tokens of a step with these depths, as the pace counts them."""
        row_of, depth_of = np.nonzero(np.arange(step.values.shape[1]) < depths[:, None])
        return float(_pace(len(depths), _saved(step.values)[row_of, depth_of].sum(), 1.0))

    def _hopeful(self, step: _Step, idle: NDArray[np.bool_], pace: float) -> bool:
        """Whether drafting for these rows would pay if their drafts were perfect."""
        values, reach = np.where(idle[:, None], 1.0, step.values), np.where(idle, 1.0, step.reach)
        return self._best(replace(step, values=values, reach=reach)).pace > pace

    def _check(self, step: _Step, depths: Ints) -> Ints:
        """These depths, or for once others, where the clock has not seen for too long what they take."""
        self._since_look += 1
        if step.given or self._since_look < _APART:
            return depths
        for other in self._others(step, depths):
            tokens = self._tokens(step, other) if other.any() else None
            if self._clock.stale(len(depths), tokens):
                self._since_look = 0
                return other
        return depths

    def _others(self, step: _Step, depths: Ints) -> Iterator[Ints]:
        """Depths that make a step of another size: none, and the next larger and smaller one."""
        if not depths.any():
            yield np.minimum(step.room, 1)
            return
        yield np.zeros_like(depths)
        size = (self._tokens(step, depths) - 1).bit_length()
        larger = smaller = depths
        while self._tokens(step, larger) <= 1 << size and np.any(larger < step.room):
            larger = np.minimum(larger + 1, step.room)
        yield larger
        while self._tokens(step, smaller) > 1 << (size - 1) and smaller.any():
            smaller = np.maximum(smaller - 1, 0)
        yield smaller

    @staticmethod
    def _tokens(step: _Step, depths: Ints) -> int:
        """All that are computed in a step with such drafts."""
        return len(depths) + round(float(depths @ step.width))

    # -- learning -------------------------------------------------------------------------------

    def _row(self, seq_id: int, index: int) -> tuple[_Kind, Evidence]:
        if seq_id not in self._rows:
            self._rows[seq_id] = self._kinds[index], self._kinds[index].open()
        return self._rows[seq_id]

    def record(self, outcomes: Sequence[RowOutcome], seconds: float) -> None:
        reading = False
        if self._credit is not None:
            self._credit += self._token * sum(o.accepted for o in outcomes if o.seq_id in self._probed)
        for outcome in outcomes:
            if outcome.seq_id not in self._rows:
                continue
            _, row = self._rows[outcome.seq_id]
            row.waited += 1
            if not row.budget:
                continue
            row.seen += 1
            reading |= row.seen == 1
            if not outcome.depth and row.seen == 1:
                continue  # a drafter may have had to read the prompt first
            row.learn(outcome)
        if outcomes and seconds > 0 and not reading:  # reading the prompt is not what a step takes
            self._time(outcomes, seconds)

    def _time(self, outcomes: Sequence[RowOutcome], seconds: float) -> None:
        """Tell the clock of a step."""
        rows, drafted = len(outcomes), sum(o.nodes for o in outcomes)
        predicted = float(self._target(rows, np.array(float(drafted)), self._context))
        depths: dict[str, list[int]] = {}
        for outcome in outcomes:
            if outcome.depth and outcome.seq_id in self._rows:
                depths.setdefault(self._rows[outcome.seq_id][0].name, []).append(outcome.depth)
        for name, own in depths.items():
            predicted += self._kinds[self._index[name]].seconds(len(own), max(own))
        if drafted == sum(o.nodes for o in outcomes if o.seq_id in self._rows):  # else others drafted as well
            who = [kind.name for kind in self._kinds if kind.name in depths]
            self._clock.record(rows, rows + drafted, who, seconds, predicted)

    def forget(self, seq_id: int) -> None:
        kind, row = self._rows.pop(seq_id, (None, None))
        if kind is not None and row is not None:
            kind.close(row)


def _saved(values: Floats) -> Floats:
    """Steps a token that each further drafted token saves its row, [rows, depth]; values: expected tokens."""
    steps = 1 / (1 + np.cumsum(np.pad(values, ((0, 0), (1, 0))), axis=1))
    return np.asarray(steps[:, :-1] - steps[:, 1:])


def _pace(rows: int, saved: Floats | float, seconds: Floats | float) -> Floats:
    """Tokens a second of rows that were all to take a step a token and are saved so many together."""
    return np.asarray(rows * rows / (rows - saved) / seconds)


def _running(values: NDArray[Any]) -> Floats:
    """Sums of the first none, one, two … of them."""
    return np.concatenate([[0.0], np.cumsum(values)])
