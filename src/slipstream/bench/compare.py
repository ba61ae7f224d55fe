"""Two bundles: what changed beyond noise.

Paired by cell and by what was asked. Of a setting the logarithm of its decoding rate over plain decoding's in
the same round is compared, so that a machine which is faster today changes nothing; of plain decoding, the
logarithm of its rate. A model with an effect of each unit and one of the cell between the bundles is fitted
to these by least squares; what is left over is the noise, pooled over the cells of one batch size. Intervals
come from redrawing that noise, and are simultaneous: with no change at all, in 19 of 20 comparisons not one
of all cells is called changed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from slipstream.bench.bundle import BenchBundle, Run, Setting, TargetNote
from slipstream.bench.summary import Summary
from slipstream.core.sequence import first_difference
from slipstream.core.stats import DraftCounts
from slipstream.cost.bundle import BUSY_SPREAD
from slipstream.errors import ParameterError

Floats = NDArray[np.float64]
Verdict = Literal["faster", "slower", "same", "unclear"]

LEAST = 0.02  # a smaller change is not told
BUSY = BUSY_SPREAD / 1.349  # noise of a run; the interquartile range of a normal law is 1.349 of it
WIDE = 0.10  # where the interval is wider to either side, nothing can be said of smaller changes
FALSE_ALARMS = 0.05  # of a whole comparison in which nothing changed
DRAWS, _SEED = 4000, 0
_DEGREES = 4  # of freedom, below which noise is not known well enough


@dataclass(frozen=True)
class Change:
    """One cell. of: what was compared, the speed-up over plain decoding or the rate itself; before, after:
    its geometric means. change: after / before − 1 of paired units, low and high its interval. taus: before
    and after. other_tokens: answers whose tokens are other ones, of `answers`."""

    setting: Setting
    task: str
    of: Literal["speed-up", "tokens/s"]
    before: float
    after: float
    change: float
    low: float
    high: float
    taus: tuple[float, float]
    other_tokens: int
    answers: int

    @property
    def verdict(self) -> Verdict:
        if self.low > 0 and self.change >= LEAST:
            return "faster"
        if self.high < 0 and self.change <= -LEAST:
            return "slower"
        return "unclear" if max(self.high - self.change, self.change - self.low) > WIDE else "same"

    @property
    def changed(self) -> bool:
        return self.verdict in ("faster", "slower")

    @property
    def drafts_changed(self) -> bool:
        """Whether as much of the drafts is accepted as before: no clock is in that, so there is no noise."""
        before, after = self.taus
        return abs(after - before) > 0.005 * before

    @property
    def name(self) -> str:
        return f"{self.setting.label} on {self.task} ({self.setting.where})"


@dataclass(frozen=True)
class Comparison:
    """All cells that both bundles have. noise: of one run by batch size, as a share of its rate, None where
    it cannot be told. notes: what is not alike in the two."""

    changes: tuple[Change, ...]
    noise: dict[int, float | None]
    notes: tuple[str, ...]

    @property
    def changed(self) -> list[Change]:
        return [c for c in self.changes if c.changed]

    @property
    def verdict(self) -> str:
        """A sentence or some."""
        drafting = [c for c in self.changes if not c.setting.plain]
        told = []
        for name in ("slower", "faster"):
            found = [c for c in drafting if c.verdict == name]
            if found:
                told.append(f"{len(found)} of {len(drafting)} cells are {name}")
        said = [
            f"{' and '.join(told)} against plain decoding." if told else "No speed-up changed beyond noise."
        ]
        plain = [c for c in self.changes if c.setting.plain and c.changed]
        if plain:
            mean = sum(c.change for c in plain) / len(plain)
            said.append(f"Plain decoding itself changed by {mean:+.0%}: the machine, or the engine.")
        drafts = [c for c in drafting if c.drafts_changed]
        if drafts:
            said.append(f"What is accepted changed in {len(drafts)} cells.")
        unclear = [c for c in self.changes if c.verdict == "unclear"]
        busy = [c for c in unclear if (self.noise[c.setting.batch] or 0.0) > BUSY]
        for why, found in (
            ("busy machine: repeats scatter too much", busy),
            ("too few rounds or prompts for the noise there is", [c for c in unclear if c not in busy]),
        ):
            if found:
                said.append(f"Of {len(found)} cells it cannot be told ({why}).")
        return " ".join(said)


def compare(after: BenchBundle, before: BenchBundle) -> Comparison:
    """What changed from `before` to `after`. ParameterError where they are of different models, or have no
    cell in common."""
    require_same_target(before, after.target)
    now, then = _by_cell(after), _by_cell(before)
    cells = [_Cell(key, now[key], then[key]) for key in now if key in then]
    cells = [cell for cell in cells if cell.units]
    if not cells:
        raise ParameterError(
            "the baseline has no cell in common with this bench (drafter, length, temperature, batch and"
            " prompts): nothing can be compared"
        )
    families: dict[tuple[int, bool], list[_Cell]] = {}
    for cell in cells:
        families.setdefault((cell.setting.batch, cell.setting.plain), []).append(cell)
    noise: dict[int, float | None] = {}
    changes: dict[_Key, Change] = {}
    for (batch, _), family in sorted(families.items(), key=lambda item: item[0]):
        found, scatter = _bounded(family, FALSE_ALARMS / len(families))
        changes.update(found)
        known = [n for n in (noise.get(batch), scatter) if n is not None]
        noise[batch] = max(known, default=None)
    notes = tuple(_notes(after, before))
    return Comparison(tuple(changes[cell.key] for cell in cells), noise, notes)


def require_same_target(before: BenchBundle, target: TargetNote) -> None:
    """ParameterError where a baseline is of another model."""
    for name in ("fingerprint", "weights", "tokenizer"):
        then, now = getattr(before.target, name), getattr(target, name)
        if then != now:
            raise ParameterError(
                f"the baseline is of another model ({before.model}, {name} {then}; this is {target.name},"
                f" {name} {now}): compare benches of one model"
            )


def _notes(after: BenchBundle, before: BenchBundle) -> list[str]:
    pairs: list[tuple[str, object, object]] = [
        ("dtype", before.target.dtype, after.target.dtype),
        ("tokens an answer", before.plan.tokens, after.plan.tokens),
        ("seed", before.plan.seed, after.plan.seed),
    ]
    old, new = before.sessions[-1], after.sessions[-1]
    pairs += [
        ("machine", old.machine.name, new.machine.name),
        ("threads", old.machine.threads, new.machine.threads),
    ]
    names = [*dict.fromkeys([*old.versions, *new.versions])]
    pairs += [(name, old.versions.get(name), new.versions.get(name)) for name in names]
    notes = [f"{name}: {was} before, {is_} now" for name, was, is_ in pairs if was != is_]
    for when, bundle in (("before", before), ("now", after)):
        notes += [f"{when}: {reason}" for reason in Summary(bundle).busy]
    return notes


# -- pairing ----------------------------------------------------------------------------------------

_Key = tuple[Setting, str]
_Asked = tuple[tuple[int, ...], ...]  # the tokens of a unit's prompts
_Units = dict[_Asked, list[tuple[float, Run]]]  # values of its rounds


def _by_cell(bundle: BenchBundle) -> dict[_Key, _Units]:
    """Values are logarithms of what is compared, see the module."""
    plain = {(r.round, r.unit): r for r in bundle.runs if bundle.of(r).plain}
    found: dict[_Key, _Units] = {}
    for run in bundle.runs:
        setting, unit, beside = bundle.of(run), bundle.units[run.unit], plain.get((run.round, run.unit))
        if beside is None:
            continue
        value = math.log(run.tokens / run.decoding)
        if not setting.plain:
            value -= math.log(beside.tokens / beside.decoding)
        units = found.setdefault((setting, unit.task), {})
        asked = tuple(tuple(bundle.prompts[i].ids) for i in unit.prompts)
        units.setdefault(asked, []).append((value, run))
    return found


class _Cell:
    """What both bundles have of one cell: values [unit][round] of each."""

    def __init__(self, key: _Key, now: _Units, then: _Units) -> None:
        self.key = key
        self.setting, self.task = key
        self.units = [name for name in now if name in then]
        self.now = [np.array([v for v, _ in now[name]]) for name in self.units]
        self.then = [np.array([v for v, _ in then[name]]) for name in self.units]
        self.runs = [([r for _, r in now[n]], [r for _, r in then[n]]) for n in self.units]

    @property
    def change(self) -> float:
        """The mean over units, of logarithms."""
        return float(np.mean([a.mean() - b.mean() for a, b in zip(self.now, self.then, strict=True)]))

    @property
    def weights(self) -> Floats:
        """Of each value in `change`: all of now, then all of before."""
        signed = ((self.now, 1.0), (self.then, -1.0))
        return np.concatenate(
            [np.full(len(v), sign / len(v) / len(self.units)) for values, sign in signed for v in values]
        )

    @property
    def residuals(self) -> Floats:
        """What an effect of each unit and the change leave over."""
        shift, left = self.change, []
        for a, b in zip(self.now, self.then, strict=True):
            # The unit's own effect is the mean of its values with the change taken out.
            level = float(np.mean(np.concatenate([a - shift, b])))
            left += [a - shift - level, b - level]
        return np.concatenate(left)

    @property
    def degrees(self) -> int:
        """Of freedom that the residuals have."""
        return sum(len(a) + len(b) for a, b in zip(self.now, self.then, strict=True)) - len(self.units) - 1


def _bounded(cells: Sequence[_Cell], alarms: float) -> tuple[dict[_Key, Change], float | None]:
    """Each cell's change with its interval, which all cells together leave with probability `alarms`; and the
    noise of one value, None: not known."""
    degrees = sum(cell.degrees for cell in cells)
    if degrees < _DEGREES:
        return {cell.key: _change(cell, math.inf) for cell in cells}, None
    pool = np.concatenate([cell.residuals for cell in cells])
    # Least squares takes some of the noise away with every effect that it fits.
    pool = (pool - pool.mean()) * math.sqrt(len(pool) / degrees)
    noise = float(np.sqrt(np.mean(pool**2)))
    if noise == 0:
        return {cell.key: _change(cell, 0.0) for cell in cells}, 0.0
    rng = np.random.default_rng(_SEED)
    widths = [noise * float(np.linalg.norm(cell.weights)) for cell in cells]
    worst = np.zeros(DRAWS)
    for cell, width in zip(cells, widths, strict=True):
        drawn = rng.choice(pool, size=(DRAWS, len(cell.weights))) @ cell.weights
        worst = np.maximum(worst, np.abs(drawn) / width)
    times = _for_few(float(np.percentile(worst, 100 * (1 - alarms))), degrees)
    return {c.key: _change(c, times * width) for c, width in zip(cells, widths, strict=True)}, noise


def _for_few(z: float, degrees: int) -> float:
    """A normal quantile widened because the noise is estimated from few values: Student's quantile by the
    first terms of its series in 1/degrees (Abramowitz and Stegun 26.7.5)."""
    first, second = (z**2 + 1) / 4, (5 * z**4 + 16 * z**2 + 3) / 96
    return z * (1 + first / degrees + second / degrees**2)


def _change(cell: _Cell, half: float) -> Change:
    before, after = (math.exp(float(np.mean([v.mean() for v in part]))) for part in (cell.then, cell.now))
    counts, other, answers = (DraftCounts(), DraftCounts()), 0, 0
    for now, then in cell.runs:
        for total, runs in zip(counts, (then, now), strict=True):
            for run in runs:
                for answer in run.answers:
                    total.add(answer.counts.counts)
        for ours, theirs in zip(now[0].answers, then[0].answers, strict=True):
            answers += 1
            other += first_difference(ours.ids, theirs.ids) is not None
    return Change(
        setting=cell.setting,
        task=cell.task,
        of="tokens/s" if cell.setting.plain else "speed-up",
        before=before,
        after=after,
        change=math.expm1(cell.change),
        low=math.expm1(cell.change - half),
        high=math.expm1(cell.change + half),
        taus=(counts[0].tau, counts[1].tau),
        other_tokens=other,
        answers=answers,
    )
