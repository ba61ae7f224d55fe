"""The G-test: its p-values, its power, and that it keeps to the false alarms it promises."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from slipstream.proof.gtest import critical, detectable, g_test, power, tail


@pytest.mark.parametrize(
    ("freedom", "quantile", "p"),
    [(1, 3.841, 0.05), (10, 23.209, 0.01), (100, 149.449, 0.001), (500, 563.852, 0.025)],
)
def test_the_tail_is_that_of_published_tables(freedom: int, quantile: float, p: float) -> None:
    assert tail(quantile, freedom) == pytest.approx(p, rel=2e-3)
    assert critical(freedom, p) == pytest.approx(quantile, rel=1e-3)


@pytest.mark.parametrize(
    ("freedom", "alpha", "noncentrality", "wanted"),
    # Noncentralities that are tabulated for this power (Haynam, Govindarajulu and Leone, 1970).
    [(1, 0.05, 7.849, 0.80), (1, 0.05, 10.507, 0.90), (5, 0.05, 12.828, 0.80), (10, 0.05, 16.241, 0.80)],
)
def test_the_power_is_that_of_published_tables(
    freedom: int, alpha: float, noncentrality: float, wanted: float
) -> None:
    assert power(freedom, alpha, noncentrality) == pytest.approx(wanted, abs=0.002)
    assert power(freedom, alpha, 0.0) == alpha


LAW = {"a": 0.4, "b": 0.25, "c": 0.15, "d": 0.1, "e": 0.06, "f": 0.03, "g": 0.008, "h": 0.002}


def counts(law: dict[str, float], total: int, seed: int) -> Counter[str]:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.multinomial(torch.tensor([*law.values()]), total, True, generator=generator)
    return Counter([*law][i] for i in drawn.tolist())


def test_p_values_of_the_right_law_are_uniform_and_never_alarm() -> None:
    found = torch.tensor([g_test(counts(LAW, 400, seed), LAW).p_value for seed in range(1000)])
    for share in (0.5, 0.1, 0.01):
        spread = (share * (1 - share) / len(found)) ** 0.5
        assert float((found < share).float().mean()) == pytest.approx(share, abs=4 * spread)
    assert float(found.min()) > 1e-5


def test_a_law_that_is_off_by_what_is_told_is_found() -> None:
    total, alpha = 600, 1e-4
    off = detectable(total, g_test(counts(LAW, total, 0), LAW).freedom, alpha, 0.99)
    assert 0.05 < off < 0.25
    other = {**LAW, "a": LAW["a"] - off, "b": LAW["b"] + off}
    found = [g_test(counts(other, total, seed), LAW).p_value < alpha for seed in range(200)]
    assert sum(found) >= 0.97 * len(found)


def test_rare_cells_are_pooled_and_one_cell_says_nothing() -> None:
    law = {"a": 0.9, **{f"rare{i}": 0.001 for i in range(100)}}
    test = g_test(Counter(a=180, rare3=20), law)
    assert test.freedom == 1 and test.p_value == pytest.approx(1.0)
    alone = g_test(Counter(a=5), {"a": 1.0})
    assert (alone.freedom, alone.p_value) == (0, 1.0)
    assert detectable(5, 0, 1e-4, 0.99) == 1.0


def test_more_samples_find_less() -> None:
    found = [detectable(total, 20, 1e-5, 0.99) for total in (100, 1000, 10_000)]
    assert found == sorted(found, reverse=True) and found[0] == pytest.approx(10 * found[2], rel=1e-6)
