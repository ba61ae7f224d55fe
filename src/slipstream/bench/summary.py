"""What a bench bundle says: speed-ups by setting and task, acceptance, tau, where the time went.

Everything is relative to plain decoding in the same units and rounds. The tokens of a unit are the same in
every round, so of its rounds the middle one says how long they take, and what held up one run of three does
not count; ratios are of the tokens of all units over these seconds. Their intervals come from resampling
units, and the rounds of each (of a single pair there is none).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from slipstream.bench.bundle import BenchBundle, Parts, Run, Setting
from slipstream.bench.exact import Difference, differences
from slipstream.core.stats import DraftCounts
from slipstream.cost.accept import Acceptance, add_all
from slipstream.cost.bundle import BUSY_SPREAD
from slipstream.cost.curve import spread
from slipstream.plan.setup import ALL

DRAWS, _SEED = 1000, 0
_LEVEL = (2.5, 97.5)

Floats = NDArray[np.float64]
Amount = Callable[[Run], tuple[float, float]]
Pair = tuple[Run, Run]  # a setting's run, and plain decoding's of the same unit and round


def whole(run: Run) -> tuple[float, float]:
    """Tokens and seconds of the requests."""
    return float(run.tokens), run.seconds


def decoding(run: Run) -> tuple[float, float]:
    """Likewise without the target's reading of the prompts."""
    return float(run.tokens), run.decoding


def steady(run: Run) -> tuple[float, float]:
    """Likewise of steady steps, which a prediction is about; (0, 0) where there were none."""
    return float(run.steady.tokens), run.steady.seconds.total if run.steady.tokens else 0.0


@dataclass(frozen=True)
class Ratio:
    """How many times as fast as plain decoding; low, high: 95 % interval, the value itself without one."""

    value: float
    low: float
    high: float

    @property
    def certain(self) -> bool:
        """Whether there is an interval."""
        return self.low < self.high


@dataclass(frozen=True)
class Cell:
    """A setting on one task, or on all of them (task "all"). pairs: with plain decoding beside."""

    setting: Setting
    task: str
    pairs: tuple[Pair, ...]

    @cached_property
    def speedup(self) -> Ratio:
        """Of whole requests."""
        found = ratio(self.pairs, whole)
        assert found is not None
        return found

    @cached_property
    def decoding(self) -> Ratio:
        """Of decoding."""
        found = ratio(self.pairs, decoding)
        assert found is not None
        return found

    @cached_property
    def steady(self) -> Ratio | None:
        """Of steady steps; None where there were too few."""
        return ratio(self.pairs, steady)

    @cached_property
    def counts(self) -> DraftCounts:
        total = DraftCounts()
        for run, _ in self.pairs:
            for answer in run.answers:
                total.add(answer.counts.counts)
        return total

    @property
    def rate(self) -> float:
        """Tokens a second of whole requests, all rows together."""
        return _rate([run for run, _ in self.pairs], whole)

    @property
    def acceptance(self) -> Acceptance:
        return add_all(
            answer.counts.acceptance(len(answer.counts.drafted_at))
            for run, _ in self.pairs
            for answer in run.answers
        )

    @property
    def split(self) -> dict[str, float]:
        """Seconds a token by where they went: target, drafter, prefill, other."""
        return split([run for run, _ in self.pairs])

    @property
    def answers(self) -> int:
        return sum(len(run.answers) for run, _ in self.pairs)

    @property
    def same(self) -> int:
        """Answers with plain decoding's tokens."""
        return sum(
            ours.ids == theirs.ids
            for run, plain in self.pairs
            for ours, theirs in zip(run.answers, plain.answers, strict=True)
        )


def split(runs: Sequence[Run]) -> dict[str, float]:
    """Seconds a token by where they went."""
    tokens = sum(run.tokens for run in runs)
    return {name: sum(getattr(r.parts, name) for r in runs) / tokens for name in Parts.model_fields}


def ratio(pairs: Sequence[Pair], amount: Amount) -> Ratio | None:
    """How many times as fast as plain decoding, see the module; None where either has no tokens."""
    rounds: dict[int, list[tuple[float, ...]]] = {}
    for run, plain in pairs:
        both = (*amount(run), *amount(plain))
        if both[1] > 0 and both[3] > 0:
            rounds.setdefault(run.unit, []).append(both)
    if not rounds:
        return None
    counts = np.array([len(found) for found in rounds.values()])
    table = np.full((len(rounds), counts.max(), 4), np.nan)
    for row, found in zip(table, rounds.values(), strict=True):
        row[: len(found)] = found
    value = float(_quotient(table))
    if counts.sum() == 1:
        return Ratio(value, value, value)
    chance = np.random.default_rng(_SEED)
    units = chance.integers(0, len(table), (DRAWS, len(table)))
    there = counts[units][..., None]  # [draws, units, 1]
    picks = (chance.random((*units.shape, table.shape[1])) * there).astype(int)
    drawn = table[units[..., None], picks]  # [draws, units, rounds, 4]
    drawn[np.arange(table.shape[1]) >= there] = np.nan
    low, high = (float(v) for v in np.percentile(_quotient(drawn), _LEVEL))
    return Ratio(value, min(low, value), max(high, value))


def _quotient(table: Floats) -> Floats:
    """table [..., units, rounds, 4]: tokens and seconds of a setting, and of plain decoding; nan where there
    was no such round."""
    return np.asarray(_pace(table[..., :2]) / _pace(table[..., 2:]))


def _pace(table: Floats) -> Floats:
    """Tokens a second of all units, each at the pace of its middle round; table [..., units, rounds, 2]."""
    tokens = np.nanmean(table[..., 0], axis=-1)
    seconds = tokens / np.nanmedian(table[..., 0] / table[..., 1], axis=-1)
    return np.asarray(tokens.sum(-1) / seconds.sum(-1))


def _rate(runs: Iterable[Run], amount: Amount) -> float:
    tokens, seconds = (sum(v) for v in zip(*map(amount, runs), strict=True))
    return tokens / seconds if seconds else 0.0


class Summary:
    """A bundle with what follows from it."""

    def __init__(self, bundle: BenchBundle) -> None:
        self.bundle = bundle
        self.plain = {(r.round, r.unit): r for r in bundle.runs if bundle.of(r).plain}
        self._places = {setting: place for place, setting in enumerate(bundle.settings)}
        self._pairs: dict[int, list[Pair]] = {}
        for run in bundle.runs:
            beside = self.plain.get((run.round, run.unit))
            if beside is not None:
                self._pairs.setdefault(run.setting, []).append((run, beside))

    @property
    def tasks(self) -> list[str]:
        """ "all" is not one of them."""
        return self.bundle.tasks

    def cell(self, place: int, task: str = ALL) -> Cell | None:
        """Of the setting at this place; None where nothing of it was measured."""
        units = self.bundle.units
        pairs = [p for p in self._pairs.get(place, ()) if task == ALL or units[p[0].unit].task == task]
        return Cell(self.bundle.settings[place], task, tuple(pairs)) if pairs else None

    @cached_property
    def cells(self) -> list[Cell]:
        """Every setting on every task, plain decoding included."""
        return [c for i in range(len(self.bundle.settings)) for t in self.tasks if (c := self.cell(i, t))]

    @cached_property
    def totals(self) -> list[Cell]:
        """Every setting on all tasks together, plain decoding included."""
        return [c for i in range(len(self.bundle.settings)) if (c := self.cell(i))]

    @cached_property
    def conditions(self) -> list[tuple[int, float]]:
        """(batch, temperature) of which something was measured."""
        found = {(c.setting.batch, c.setting.temperature) for c in self.totals}
        return sorted(found)

    def at(self, batch: int, temperature: float) -> list[Cell]:
        """Totals under one condition, plain decoding first."""
        return [c for c in self.totals if (c.setting.batch, c.setting.temperature) == (batch, temperature)]

    def of(self, setting: Setting, task: str = ALL) -> Cell | None:
        """The cell of a setting by its value."""
        place = self._places.get(setting)
        return None if place is None else self.cell(place, task)

    @cached_property
    def differences(self) -> list[Difference]:
        return differences(self.bundle)

    @property
    def broken(self) -> list[Difference]:
        """Differences from plain decoding where the same tokens were promised."""
        return [d for d in self.differences if d.broken]

    @cached_property
    def spread(self) -> float | None:
        """How much plain decoding's rate scatters between rounds of one unit, as a share of its median, the
        middle one of all units; None of one round."""
        rates: dict[int, list[float]] = {}
        for (_, unit), run in self.plain.items():
            rates.setdefault(unit, []).append(run.tokens / run.decoding)
        known = sorted(spread(values) for values in rates.values() if len(values) > 1)
        return known[len(known) // 2] if known else None

    @property
    def busy(self) -> list[str]:
        """Why these numbers should not be trusted."""
        found = [reason for note in self.bundle.sessions for reason in note.busy_because]
        if self.spread is not None and self.spread > BUSY_SPREAD:
            found.append(
                f"rounds of plain decoding differ by {self.spread:.0%} (quiet: below {BUSY_SPREAD:.0%})"
            )
        return list(dict.fromkeys(found))
