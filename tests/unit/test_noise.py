"""Keyed noise: uniform, independent between keys, the same for the same key."""

from __future__ import annotations

import math

import pytest
import torch

from slipstream.core.noise import Purpose, gumbel, uniform

COUNT = 4000
PINNED_UNIFORM = 0.10014059898869931
PINNED_GUMBEL = [0.12796572792896263, -1.0131131009878742, 0.4122546149017797]
FAR = 4.5  # standard deviations; the keys are fixed, so these are not chances that a run may fail


def streams() -> dict[str, list[float]]:
    """Streams that differ in one part of the key."""
    base = range(COUNT)
    return {
        "positions": [uniform(1, i, Purpose.TOKEN) for i in base],
        "next position": [uniform(1, i + 1, Purpose.TOKEN) for i in base],
        "next seed": [uniform(2, i, Purpose.TOKEN) for i in base],
        "far seed": [uniform(2**63 + 1, i, Purpose.TOKEN) for i in base],
        "accept": [uniform(1, i, Purpose.ACCEPT) for i in base],
        "residual": [uniform(1, i, Purpose.RESIDUAL) for i in base],
        "draft": [uniform(1, i, Purpose.DRAFT) for i in base],
        "next index": [uniform(1, i, Purpose.TOKEN, 1) for i in base],
        "draft of a pass": [uniform(1, i, Purpose.DRAFT, origin=4) for i in base],
        "draft of the next pass": [uniform(1, i, Purpose.DRAFT, origin=5) for i in base],
        "passes": [uniform(1, COUNT, Purpose.ACCEPT, origin=i) for i in base],
        "seeds": [uniform(i, 5, Purpose.TOKEN) for i in base],
        "indices": [uniform(1, 5, Purpose.TOKEN, i) for i in base],
        "token 0": _uniform_of(gumbel(torch.tensor([0]), i, 3, Purpose.TOKEN) for i in base),
        "token 1": _uniform_of(gumbel(torch.tensor([1]), i, 3, Purpose.TOKEN) for i in base),
        "tokens": _uniform_of([gumbel(torch.arange(COUNT), 3, 9, Purpose.TOKEN)]),
        "tokens at the next position": _uniform_of([gumbel(torch.arange(COUNT), 3, 10, Purpose.TOKEN)]),
        "tokens of a draft": _uniform_of([gumbel(torch.arange(COUNT), 3, 9, Purpose.DRAFT)]),
    }


def _uniform_of(noise) -> list[float]:  # type: ignore[no-untyped-def]
    return torch.exp(-torch.exp(-torch.cat(list(noise)))).tolist()  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def table() -> dict[str, torch.Tensor]:
    return {name: torch.tensor(values, dtype=torch.float64) for name, values in streams().items()}


def test_every_stream_is_uniform(table: dict[str, torch.Tensor]) -> None:
    bins = 40
    for name, values in table.items():
        assert bool((values >= 0).all()) and bool((values < 1).all())
        counts = torch.histc(values, bins, 0.0, 1.0)
        statistic = float(((counts - COUNT / bins) ** 2).sum() / (COUNT / bins))
        assert abs(statistic - (bins - 1)) < FAR * math.sqrt(2 * (bins - 1)), name
        assert abs(float(values.mean()) - 0.5) < FAR / math.sqrt(12 * COUNT), name


def test_streams_are_uncorrelated(table: dict[str, torch.Tensor]) -> None:
    """Between keys that differ in one part, and between neighbours of one stream."""
    rows = torch.stack(list(table.values()))  # [streams, COUNT]
    correlation = torch.corrcoef(rows)
    names = list(table)
    for i, one in enumerate(names):
        for j, other in enumerate(names[:i]):
            if {one, other} == {"positions", "next position"}:
                continue  # the same numbers, shifted: their neighbours are tested below
            assert abs(float(correlation[i, j])) < FAR / math.sqrt(COUNT), (one, other)
    for name, values in table.items():
        for lag in (1, 2, 7):
            pair = torch.stack((values[:-lag], values[lag:]))
            assert abs(float(torch.corrcoef(pair)[0, 1])) < FAR / math.sqrt(COUNT), (name, lag)


def test_streams_are_independent_in_pairs(table: dict[str, torch.Tensor]) -> None:
    """Beyond correlation: the joint counts of two streams on a 6 by 6 grid."""
    side = 6
    for one, other in (
        ("positions", "accept"),
        ("accept", "residual"),
        ("positions", "next seed"),
        ("token 0", "token 1"),
        ("tokens", "tokens of a draft"),
        ("positions", "draft"),
        ("draft", "draft of a pass"),
        ("draft of a pass", "draft of the next pass"),
    ):
        cell = (table[one] * side).long() * side + (table[other] * side).long()
        counts = torch.bincount(cell, minlength=side * side).double()
        expected = COUNT / side**2
        statistic = float(((counts - expected) ** 2).sum() / expected)
        freedom = side * side - 1
        assert abs(statistic - freedom) < FAR * math.sqrt(2 * freedom), (one, other)


def test_gumbel_has_its_mean_and_variance() -> None:
    noise = gumbel(torch.arange(20_000), 5, 0, Purpose.TOKEN)
    assert noise.dtype == torch.float64 and bool(torch.isfinite(noise).all())
    assert float(noise.mean()) == pytest.approx(0.5772, abs=0.04)
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, abs=0.1)


def test_noise_of_a_token_depends_on_nothing_but_its_key() -> None:
    some, all_ = torch.tensor([5, 77, 3]), torch.arange(100)
    assert torch.equal(gumbel(some, 1, 2, Purpose.TOKEN), gumbel(all_, 1, 2, Purpose.TOKEN)[some])
    assert uniform(-3, 0, Purpose.ACCEPT) == uniform(2**64 - 3, 0, Purpose.ACCEPT)


def test_noise_is_the_same_for_ever() -> None:
    """Seeds written down by people must keep their meaning: a change here is a breaking change."""
    assert uniform(0, 0, Purpose.TOKEN) == PINNED_UNIFORM
    assert gumbel(torch.tensor([0, 1, 151935]), 42, 7, Purpose.TOKEN).tolist() == pytest.approx(PINNED_GUMBEL)
