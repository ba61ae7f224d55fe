"""Expected tokens and speed-up: from measured acceptance and step times, and by the classic formulas.

The formulas of Leviathan et al. (arXiv 2211.17192) take one acceptance rate α for all positions, independent
of each other, and one cost ratio c = draft step / target step:

    E[tokens]  = (1 − α^(γ+1)) / (1 − α)                        (equation 1)
    speed-up   = (1 − α^(γ+1)) / ((1 − α)(γc + 1))              (theorem 3.8)
    operations = (1 − α)(γĉ + γ + 1) / (1 − α^(γ+1))            (theorem 3.11)

What is predicted here keeps the conditional acceptance of every position and the time of every width:

    speed-up   = E[L] · (T(B, 1) + overhead) / (T_draft(B, γ) + T(B, 1 + drafted) + overhead)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from slipstream.core.choices import Choices
from slipstream.cost.accept import Acceptance, Sample
from slipstream.cost.curve import DraftTime, StepTime
from slipstream.errors import ParameterError

Floats = NDArray[np.float64]
ALPHAS = (0.5, 0.6, 0.7, 0.8, 0.9)
GAMMAS = (3, 5, 7, 10)
# The cell of the articles' table that is known to contradict the formula printed above it.
PRINTED = {(0.5, 5): 1.25}
DRAWS, _SEED = 2000, 0
_LEVEL = (2.5, 97.5)
_MANY = 32  # rows
_UNKNOWN = 1.0  # standard error, as a share, from which on nothing is known of a time


# -- the classic formulas ---------------------------------------------------------------------------


def check_alpha(alpha: float) -> None:
    if not 0 <= alpha <= 1:
        raise ParameterError(f"acceptance is a fraction from 0 to 1, not {alpha:g}")


def _check(gamma: float, c: float = 0.0) -> None:
    if not gamma >= 0:
        raise ParameterError(f"the draft length must be 0 or more, not {gamma:g}")
    if not 0 <= c < math.inf:
        raise ParameterError(f"the cost ratio must be a number of 0 or more, not {c:g}")


def expected_tokens(alpha: float, gamma: int) -> float:
    """Tokens a target pass emits, bonus included: (1 − α^(γ+1)) / (1 − α), γ + 1 at α = 1."""
    check_alpha(alpha)
    _check(gamma)
    return float(gamma + 1) if alpha == 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha)


def speedup(alpha: float, gamma: int, c: float) -> float:
    """Walltime improvement of theorem 3.8. c: time of a drafted token over time of a target step."""
    _check(gamma, c)
    return expected_tokens(alpha, gamma) / (gamma * c + 1)


def operations(alpha: float, gamma: int, c_ops: float) -> float:
    """Arithmetic a token, as a multiple of plain decoding's (theorem 3.11). c_ops: the ratio a token."""
    _check(gamma, c_ops)
    return (gamma * c_ops + gamma + 1) / expected_tokens(alpha, gamma)


def best_gamma(alpha: float, c: float, limit: int = 200) -> tuple[int, float]:
    """The length with the largest `speedup`, and that speed-up; (0, 1) if none gains, so iff α ≤ c."""
    return max(((g, speedup(alpha, g, c)) for g in range(limit + 1)), key=lambda pair: pair[1])


def simple_rule(alpha: float, gamma: int) -> float:
    """γ / (1 + (1 − α)γ), as popular articles print it: not the speed-up, and not the expected tokens.

    It has no draft cost, so it never says that drafting loses by its price; it has no bonus token, so at
    α = 0 it says γ / (1 + γ) < 1 where the step still emits one token; and it grows with γ for ever, towards
    1 / (1 − α), so it always advises the longest draft.
    """
    check_alpha(alpha)
    _check(gamma)
    return gamma / (1 + (1 - alpha) * gamma)


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of a table; printed: what an article has there, if it is known."""

    alpha: float
    gamma: int
    value: float
    printed: float | None = None

    @property
    def contradicts(self) -> bool:
        """Whether the printed number is not the formula's, rounded as it is printed."""
        return self.printed is not None and abs(self.printed - self.value) >= 0.005


def table(
    formula: Callable[[float, int], float],
    printed: Mapping[tuple[float, int], float] | None = None,
    alphas: Sequence[float] = ALPHAS,
    gammas: Sequence[int] = GAMMAS,
) -> list[list[Cell]]:
    """formula(α, γ) for every α (rows) and γ (columns), beside what was printed."""
    known = printed or {}
    return [[Cell(a, g, formula(a, g), known.get((a, g))) for g in gammas] for a in alphas]


# -- from measurements ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Prediction:
    """A way of drafting at one batch size. Seconds are of a whole step, all rows together.

    tau: tokens a row and step. low, high: 95 % interval of the speed-up (itself, where it was not asked for).
    """

    batch: int
    depth: int
    nodes: int
    tau: float
    plain_seconds: float
    draft_seconds: float
    verify_seconds: float
    overhead_seconds: float
    speedup: float
    low: float
    high: float

    @property
    def step_seconds(self) -> float:
        return self.draft_seconds + self.verify_seconds + self.overhead_seconds

    @property
    def rate(self) -> float:
        """Tokens a second, all rows together."""
        return self.batch * self.tau / self.step_seconds


@dataclass(frozen=True)
class Costs:
    """What a step costs: the target's curve, the loop's own seconds a step; context: where they are asked."""

    step: StepTime
    overhead: float = 0.0
    context: float = 0.0

    def plain(self, batch: int) -> Prediction:
        """Plain decoding as a prediction: tau 1, speed-up 1."""
        seconds = float(self.step.seconds(batch, 1, self.context))
        return Prediction(batch, 0, 0, 1.0, seconds, 0.0, seconds, self.overhead, 1.0, 1.0, 1.0)


def verify_seconds(costs: Costs, batch: int, lengths: Floats, extra: int = 0) -> float:
    """Mean seconds of a verification whose rows draft independent numbers of tokens with law `lengths`.

    lengths: [γ + 1]. extra: tokens a drafting row has beside its chain (a tree). The mean is taken over the
    law of the sum, since a curve with kinks is not the curve of the mean; in a large batch the sum hardly
    strays from its own mean, and that is taken.
    """
    one = np.zeros(len(lengths) + extra)
    one[0] = lengths[0]
    one[1 + extra : len(lengths) + extra] += lengths[1:]
    if batch > _MANY or np.count_nonzero(one) == 1:
        mean = float(one @ np.arange(len(one)))
        return float(costs.step.seconds(batch, 1 + mean, costs.context))
    total = np.ones(1)
    for _ in range(batch):
        total = np.convolve(total, one)
    drafted = np.flatnonzero(total > 1e-12)
    share = total[drafted] / total[drafted].sum()
    return float(share @ costs.step.seconds(batch, 1 + drafted / batch, costs.context))


def expect(
    costs: Costs, drafter: DraftTime, sample: Sample | Acceptance, batch: int, depth: int, nodes: int = 0
) -> Prediction:
    """Drafts of `depth` tokens (as a tree of `nodes`, if more) for each of `batch` rows; no interval.

    For a tree the sample must have been counted with trees of this shape.
    """
    seen = sample.total if isinstance(sample, Sample) else sample
    if depth == 0:
        return costs.plain(batch)
    nodes = max(nodes, depth)
    return _assemble(costs, drafter, batch, depth, nodes, seen.expected_tokens(depth), seen.lengths(depth))


def predict(
    costs: Costs, drafter: DraftTime, sample: Sample | Acceptance, batch: int, depth: int, nodes: int = 0
) -> Prediction:
    """`expect` with the interval that the counts and the spread of the curves leave."""
    sample = Sample((sample,)) if isinstance(sample, Acceptance) else sample
    found = expect(costs, drafter, sample, batch, depth, nodes)
    if depth == 0:
        return found
    draws = np.cumprod(sample.draws(depth, DRAWS, np.random.default_rng(_SEED)), axis=1).sum(axis=1)
    return _bounded(costs, drafter, found, 1.0 + draws)


def predict_tree(
    costs: Costs, drafter: DraftTime, choices: Choices, accuracies: Sequence[Sequence[float]], batch: int
) -> Prediction:
    """A static tree from the accuracy of each rank at each depth; the interval: the curves' errors only."""
    tau, depth = choices.expected_tau(accuracies), choices.depth
    lengths = np.concatenate([np.zeros(depth), np.ones(1)])
    found = _assemble(costs, drafter, batch, depth, len(choices), tau, lengths)
    return _bounded(costs, drafter, found, np.full(DRAWS, tau))


def _assemble(
    costs: Costs, drafter: DraftTime, batch: int, depth: int, nodes: int, tau: float, lengths: Floats
) -> Prediction:
    plain = float(costs.step.seconds(batch, 1, costs.context))
    verify = verify_seconds(costs, batch, lengths, nodes - depth)
    draft = drafter.draft_seconds(batch, depth, nodes, costs.context)
    gain = tau * (plain + costs.overhead) / (draft + verify + costs.overhead)
    return Prediction(batch, depth, nodes, tau, plain, draft, verify, costs.overhead, gain, gain, gain)


def _bounded(costs: Costs, drafter: DraftTime, found: Prediction, taus: Floats) -> Prediction:
    """With the 95 % interval over draws of tau and of the times, each scattered by its standard error: in
    logarithms, for a time of which little is known is still not below nothing."""
    rng = np.random.default_rng(_SEED + 1)
    batch, nodes = found.batch, found.nodes
    plain, draft, verify = (
        seconds * np.exp(min(error, _UNKNOWN) * rng.standard_normal(len(taus)))
        for seconds, error in (
            (found.plain_seconds, float(costs.step.relative_error(batch, 1, costs.context))),
            (found.draft_seconds, drafter.draft_error(batch, found.depth, nodes)),
            (found.verify_seconds, float(costs.step.relative_error(batch, 1 + nodes, costs.context))),
        )
    )
    drawn = taus * (plain + costs.overhead) / (draft + verify + costs.overhead)
    low, high = (float(v) for v in np.percentile(drawn, _LEVEL))
    return replace(found, low=min(low, found.speedup), high=max(high, found.speedup))


def best_length(
    costs: Costs, drafter: DraftTime, sample: Sample | Acceptance, batch: int, longest: int
) -> Prediction:
    """The chain length of 0 … `longest` with the largest expected speed-up; depth 0 is plain decoding."""
    found = [expect(costs, drafter, sample, batch, depth) for depth in range(longest + 1)]
    return max(found, key=lambda p: p.speedup)


def break_even(costs: Costs, drafter: DraftTime, batch: int, depth: int) -> float:
    """The acceptance (the same at every position) from which drafts of `depth` gain; inf: they never do."""
    price = drafter.draft_seconds(batch, depth, depth, costs.context) + costs.overhead
    price += float(costs.step.seconds(batch, 1 + depth, costs.context))
    needed = price / (float(costs.step.seconds(batch, 1, costs.context)) + costs.overhead)
    if needed > depth + 1:
        return math.inf
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens(middle, depth) < needed else (low, middle)
    return high
