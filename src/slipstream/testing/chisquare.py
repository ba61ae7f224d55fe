"""Pearson's chi-square test against a known law, with its p-value. No SciPy."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping
from typing import TypeVar

K = TypeVar("K", bound=Hashable)


def chi_square(observed: Counter[K], law: Mapping[K, float], least: float = 5.0) -> float:
    """p-value of the counts under the law. Cells that expect less than `least` are pooled.

    0.0 if anything was seen that the law forbids.
    """
    total = sum(observed.values())
    if any(law.get(key, 0.0) <= 0.0 for key in observed):
        return 0.0
    cells: list[tuple[float, float]] = []
    rare_seen = rare_expected = 0.0
    for key, p in law.items():
        if p * total >= least:
            cells.append((observed[key], p * total))
        else:
            rare_seen, rare_expected = rare_seen + observed[key], rare_expected + p * total
    if rare_expected >= least or rare_seen >= least:
        cells.append((rare_seen, rare_expected))
    statistic = sum((seen - expected) ** 2 / expected for seen, expected in cells)
    return upper_gamma((len(cells) - 1) / 2, statistic / 2)


def upper_gamma(a: float, x: float) -> float:
    """Regularised upper incomplete gamma function Q(a, x): series below a + 1, Lentz's fraction above."""
    if x <= 0.0 or a <= 0.0:
        return 1.0
    front = math.exp(a * math.log(x) - x - math.lgamma(a))
    if x < a + 1.0:
        term = total = 1.0 / a
        for n in range(1, 10_000):
            term *= x / (a + n)
            total += term
            if term < total * 1e-15:
                break
        return max(0.0, 1.0 - front * total)
    b = x + 1.0 - a
    c, d = 1e300, 1.0 / b
    value = d
    for n in range(1, 10_000):
        step = -n * (n - a)
        b += 2.0
        d = 1.0 / (step * d + b)
        c = b + step / c
        value *= c * d
        if abs(c * d - 1.0) < 1e-15:
            break
    return front * value
