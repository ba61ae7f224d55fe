"""The G-test of counts against a known law, and how small a difference it finds.

With N samples in k cells, G = 2 sum O ln(O / E) follows chi-square with k - 1 degrees of freedom if the law
is the one tested, after division by Williams' factor 1 + (sum 1/p - 1) / (6 N (k - 1)) (Biometrika 63, 1976).
If the law is another, a, it follows noncentral chi-square with 2 N KL(a|p) >= 4 N d², d the total variation
between both (Pinsker). So N, k, the threshold and the power tell the d beyond which a difference is found.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

K = TypeVar("K", bound=Hashable)

LEAST = 10.0  # samples that every cell expects: with fewer the tail of chi-square no longer holds


@dataclass(frozen=True)
class GTest:
    """statistic: G, corrected. freedom 0: one cell, in which nothing can be seen."""

    statistic: float
    freedom: int
    p_value: float


def g_test(observed: Mapping[K, int], law: Mapping[K, float], least: float = LEAST) -> GTest:
    """The counts against the law, whose cells sum to 1. Cells that expect less than `least` are pooled."""
    total = sum(observed.values())
    cells: list[tuple[int, float]] = []  # (seen, probability)
    seen, mass = 0, 0.0
    for key in sorted(law, key=law.__getitem__, reverse=True):
        if law[key] * total >= least:
            cells.append((observed.get(key, 0), law[key]))
        else:
            seen, mass = seen + observed.get(key, 0), mass + law[key]
    if seen or mass * total > 1e-3:
        if mass * total < least and cells:
            last = cells.pop()
            seen, mass = seen + last[0], mass + last[1]
        cells.append((seen, mass))
    freedom = len(cells) - 1
    if freedom < 1:
        return GTest(0.0, 0, 1.0)
    statistic = 2.0 * sum(o * math.log(o / (p * total)) for o, p in cells if o)
    statistic /= 1.0 + (sum(1.0 / p for _, p in cells) - 1.0) / (6.0 * total * freedom)
    return GTest(max(statistic, 0.0), freedom, tail(statistic, freedom))


def tail(statistic: float, freedom: float) -> float:
    """P(chi-square >= statistic)."""
    return float(torch.special.gammaincc(_number(freedom / 2), _number(max(statistic, 0.0) / 2)))


def critical(freedom: int, alpha: float) -> float:
    """The statistic whose tail is alpha."""
    return _root(lambda x: tail(x, freedom), alpha)


def power(freedom: int, alpha: float, noncentrality: float) -> float:
    """The probability that a test at `alpha` finds a difference of this noncentrality: the Poisson mixture of
    central chi-squares."""
    half = noncentrality / 2
    if half <= 0.0:
        return alpha
    reach = 12.0 * math.sqrt(half) + 30.0
    j = torch.arange(max(0, int(half - reach)), int(half + reach) + 1, dtype=torch.float64)  # [n]
    weights = (j * math.log(half) - half - torch.lgamma(j + 1)).exp()  # [n]
    tails = torch.special.gammaincc(j + freedom / 2, _number(critical(freedom, alpha) / 2))  # [n]
    return float((weights * tails).sum())


def detectable(total: int, freedom: int, alpha: float, wanted: float) -> float:
    """The total variation from which on a difference between the cells is found with probability `wanted`."""
    if total < 1 or freedom < 1:
        return 1.0
    noncentrality = _root(lambda x: 1.0 - power(freedom, alpha, x), 1.0 - wanted)
    return min(1.0, math.sqrt(noncentrality / (4.0 * total)))


def _root(falling: Callable[[float], float], value: float) -> float:
    """x >= 0 with falling(x) = value."""
    low, high = 0.0, 1.0
    while falling(high) > value:
        low, high = high, 2.0 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > value else (low, middle)
    return high


def _number(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)
