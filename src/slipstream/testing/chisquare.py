"""Pearson's chi-square test against a known law, with its p-value."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from typing import TypeVar

import torch

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
    if len(cells) < 2:
        return 1.0
    halves = torch.tensor([(len(cells) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(*halves))
