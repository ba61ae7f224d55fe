"""Acceptance as raw counts per position, and what follows from them: rates, intervals, expected tokens.

Position i is the i-th drafted token of a path (from 0). It is *tested* in a step whose draft reaches it and
whose earlier positions were all accepted, so accepted / tested is the conditional acceptance a_i, the one
the expected length of a step needs: E[L] = 1 + Σ_i Π_{j≤i} r_j·a_j. The reach r_i is the share of steps that
draft position i at all, given that everything before it was accepted: 1 for a drafter that always drafts,
less for one that looks things up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from slipstream.core.stats import DraftCounts
from slipstream.errors import ParameterError

Floats = NDArray[np.float64]
_PRIOR = 0.5  # Jeffreys: Beta(½, ½)
_THIN = 20  # a position tested less often borrows from its neighbours


def wilson(successes: float, trials: float, z: float = 1.959963984540054) -> tuple[float, float]:
    """Wilson's score interval of a proportion (Wilson 1927); (0, 1) without trials. z: normal quantile."""
    if trials <= 0:
        return 0.0, 1.0
    share, square = successes / trials, z * z / trials
    middle = (share + square / 2) / (1 + square)
    half = z / (1 + square) * math.sqrt(share * (1 - share) / trials + square / (4 * trials))
    # At 0 and 1 the score interval ends there exactly; rounding must not say otherwise.
    low = 0.0 if successes <= 0 else middle - half
    high = 1.0 if successes >= trials else middle + half
    return max(low, 0.0), min(high, 1.0)


@dataclass(frozen=True)
class Acceptance:
    """Counts of `passes` steps that asked for drafts: how many reached, tested and accepted each position."""

    passes: float
    drafted: tuple[float, ...]
    tested: tuple[float, ...]
    accepted: tuple[float, ...]

    def __post_init__(self) -> None:
        if not len(self.drafted) == len(self.tested) == len(self.accepted):
            raise ParameterError(
                f"acceptance counts need one entry a position in each list, not {len(self.drafted)} drafted,"
                f" {len(self.tested)} tested and {len(self.accepted)} accepted"
            )
        above = self.passes
        for i, (d, t, a) in enumerate(zip(self.drafted, self.tested, self.accepted, strict=True), start=1):
            if not 0 <= a <= t <= d <= above:
                raise ParameterError(
                    f"acceptance counts at position {i} must hold 0 <= accepted <= tested <= drafted <="
                    f" drafted before, not accepted {a}, tested {t}, drafted {d}, before {above}"
                )
            above = d

    @classmethod
    def of(cls, counts: DraftCounts) -> Acceptance:
        """From the counters of a run in which every pass was asked to draft."""
        return cls(
            counts.passes, tuple(counts.drafted_at), tuple(counts.tested_at), tuple(counts.accepted_at)
        )

    @classmethod
    def synthetic(cls, rates: Sequence[float], depth: int, trials: float = 1e9) -> Acceptance:
        """What-if: conditional rates by position, the last one going on to `depth`; so many trials.

        Without a smaller `trials` the rates are taken as known exactly.
        """
        if not rates or not all(0 <= r <= 1 for r in rates):
            raise ParameterError(f"acceptance is a fraction from 0 to 1, not {', '.join(map(str, rates))}")
        tested, accepted, alive = list[float](), list[float](), trials
        for i in range(depth):
            tested.append(alive)
            alive *= rates[min(i, len(rates) - 1)]
            accepted.append(alive)
        return cls(trials, (trials,) * depth, tuple(tested), tuple(accepted))

    def __add__(self, other: Acceptance) -> Acceptance:
        def joined(mine: tuple[float, ...], theirs: tuple[float, ...]) -> tuple[float, ...]:
            size = max(len(mine), len(theirs))
            padded = ((*v, *[0.0] * (size - len(v))) for v in (mine, theirs))
            return tuple(a + b for a, b in zip(*padded, strict=True))

        return Acceptance(
            self.passes + other.passes,
            joined(self.drafted, other.drafted),
            joined(self.tested, other.tested),
            joined(self.accepted, other.accepted),
        )

    # -- rates ----------------------------------------------------------------------------------

    @property
    def depth(self) -> int:
        """Positions that were tested at least once."""
        return sum(t > 0 for t in self.tested)

    @property
    def rate(self) -> float:
        """All tested positions together: accepted / tested."""
        total = sum(self.tested)
        return sum(self.accepted) / total if total else 0.0

    def conditional(self, depth: int) -> Floats:
        """a_i for the first `depth` positions. Thinly tested and untested ones lean on those before them."""
        return _rates(self.accepted, self.tested, depth, self.rate)

    def reach(self, depth: int) -> Floats:
        """r_i for the first `depth` positions; beyond the longest draft the last one goes on."""
        asked = (self.passes, *self.accepted[:-1])
        return _rates(self.tested, asked, depth, 1.0)

    def interval(self, position: int) -> tuple[float, float]:
        """Wilson's 95 % interval of a_position; (0, 1) where nothing was tested."""
        if position >= len(self.tested):
            return 0.0, 1.0
        return wilson(self.accepted[position], self.tested[position])

    @cached_property
    def overall_interval(self) -> tuple[float, float]:
        return wilson(sum(self.accepted), sum(self.tested))

    def expected_tokens(self, depth: int) -> float:
        """E[L]: tokens a step emits when drafts are cut at `depth`, the bonus token included."""
        return 1.0 + float(np.cumprod(self.conditional(depth) * self.reach(depth)).sum())

    def lengths(self, depth: int) -> Floats:
        """Law of the draft length, [depth + 1]: shares of steps that draft 0, 1, … tokens, cut at `depth`."""
        if not self.passes or not self.drafted:
            return np.concatenate([np.zeros(depth), np.ones(1)])
        reached = [d / self.passes for d in self.drafted[:depth]]
        # How long drafts were beyond what was measured is not known: as many go on as did before.
        ratio = reached[-1] / reached[-2] if len(reached) > 1 and reached[-2] else 1.0
        while len(reached) < depth:
            reached.append(reached[-1] * ratio)
        return -np.diff([1.0, *reached, 0.0])

    def draws(self, depth: int, number: int, rng: np.random.Generator) -> Floats:
        """[number, depth] posterior draws of a_i · r_i: Beta with Jeffreys' prior for the acceptance."""
        centre = self.conditional(depth)
        tested = np.array([*self.tested[:depth], *[0.0] * max(depth - len(self.tested), 0)])
        # A borrowed rate is known no better than the neighbours it was borrowed from.
        weight = np.maximum(tested, min(_THIN, sum(self.tested)))
        hits, misses = centre * weight + _PRIOR, (1 - centre) * weight + _PRIOR
        return rng.beta(hits, misses, size=(number, depth)) * self.reach(depth)


def _rates(hits: ArrayLike, trials: ArrayLike, depth: int, first: ArrayLike) -> Floats:
    """hits / trials by position (last axis), each shrunk to the one before it as far as trials lack."""
    over, under = np.asarray(hits, dtype=np.float64), np.asarray(trials, dtype=np.float64)
    before = np.broadcast_to(np.asarray(first, dtype=np.float64), under.shape[:-1])
    rates = np.empty((*under.shape[:-1], depth))
    for i in range(depth):
        n = under[..., i] if i < over.shape[-1] else np.zeros_like(before)
        hit = over[..., i] if i < over.shape[-1] else np.zeros_like(before)
        lack = np.maximum(_THIN - n, 0.0) if i else np.where(n > 0, 0.0, 1.0)
        before = (hit + lack * before) / (n + lack)
        rates[..., i] = before
    return rates


@dataclass(frozen=True)
class Sample:
    """Acceptance of one drafter on one task, kept by prompt: steps of one text are not independent."""

    prompts: tuple[Acceptance, ...]

    def __post_init__(self) -> None:
        if not self.prompts:
            raise ParameterError("an acceptance sample needs the counts of at least one prompt")

    @cached_property
    def total(self) -> Acceptance:
        return add_all(self.prompts)

    def draws(self, depth: int, number: int, rng: np.random.Generator) -> Floats:
        """[number, depth] draws of a_i · r_i. From 5 prompts on they are resampled whole, which keeps the
        likeness of steps within a text in the interval; below, the counts are taken as independent."""
        if len(self.prompts) < 5:
            return self.total.draws(depth, number, rng)
        picks = rng.multinomial(len(self.prompts), [1 / len(self.prompts)] * len(self.prompts), size=number)
        passes, tested, accepted = (picks @ counts for counts in self._arrays)
        with np.errstate(invalid="ignore"):
            overall = np.nan_to_num(accepted.sum(-1) / tested.sum(-1))
        asked = np.concatenate([passes[:, None], accepted[:, :-1]], axis=1)
        return _rates(accepted, tested, depth, overall) * _rates(tested, asked, depth, 1.0)

    @cached_property
    def _arrays(self) -> tuple[Floats, Floats, Floats]:
        size = len(self.total.tested)

        def padded(counts: Iterable[Sequence[float]]) -> Floats:
            return np.array([[*c, *[0.0] * (size - len(c))] for c in counts]).reshape(-1, size)

        return (
            np.array([p.passes for p in self.prompts]),
            padded(p.tested for p in self.prompts),
            padded(p.accepted for p in self.prompts),
        )


def add_all(parts: Iterable[Acceptance]) -> Acceptance:
    """The sum; no parts give counts of nothing."""
    total = Acceptance(0.0, (), (), ())
    for part in parts:
        total = total + part
    return total
