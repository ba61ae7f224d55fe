"""Acceptance from raw counts: what the engine counted is predicted back, and intervals hold what they say."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.core.stats import DraftCounts
from slipstream.cost.accept import Acceptance, Sample, add_all, wilson
from slipstream.cost.model import expected_tokens
from slipstream.errors import ParameterError


def run(rates: list[float], steps: int, depth: int, seed: int = 0, draft: float = 1.0) -> DraftCounts:
    """A chain drafter with these conditional rates that drafts in a share of the steps."""
    rng, counts = np.random.default_rng(seed), DraftCounts()
    for _ in range(steps):
        length = depth if rng.random() < draft else 0
        accepted = 0
        while accepted < length and rng.random() < rates[accepted]:
            accepted += 1
        counts.record(length, length, accepted, accepted + 1)
    return counts


def test_rates_and_tau_are_those_of_the_run() -> None:
    counts = run([0.9, 0.8, 0.5], 4000, 3)
    seen = Acceptance.of(counts)
    assert seen.conditional(3) == pytest.approx(counts.conditional_acceptance)
    assert seen.expected_tokens(3) == pytest.approx(counts.tau)
    assert seen.reach(3) == pytest.approx([1, 1, 1])
    assert seen.lengths(3).tolist() == [0, 0, 0, 1]


def test_a_shorter_draft_is_predicted_from_a_longer_one() -> None:
    long, short = (run([0.9, 0.8, 0.7, 0.6], 6000, d, seed=d) for d in (4, 2))
    assert Acceptance.of(long).expected_tokens(2) == pytest.approx(short.tau, rel=0.02)


def test_a_drafter_that_often_drafts_nothing_is_not_flattered() -> None:
    counts = run([0.9, 0.9], 6000, 2, draft=0.3)
    seen = Acceptance.of(counts)
    assert seen.conditional(1)[0] == pytest.approx(0.9, abs=0.03)
    assert seen.expected_tokens(2) == pytest.approx(counts.tau)
    assert seen.lengths(2).tolist() == pytest.approx([0.7, 0, 0.3], abs=0.03)


def test_positions_that_were_hardly_tested_lean_on_those_before() -> None:
    seen = Acceptance(100, (100, 100), (100, 1), (80, 0))
    assert 0.7 < seen.conditional(2)[1] < 0.8
    assert seen.conditional(5)[4] == seen.conditional(2)[1]


@given(st.floats(0, 1), st.integers(1, 12))
def test_synthetic_acceptance_gives_the_classic_formula(alpha: float, depth: int) -> None:
    made = Acceptance.synthetic([alpha], depth)
    assert made.expected_tokens(depth) == pytest.approx(expected_tokens(alpha, depth), abs=1e-6)


def test_synthetic_rates_by_position() -> None:
    made = Acceptance.synthetic([0.9, 0.5], 4)
    assert made.expected_tokens(4) == pytest.approx(1 + 0.9 + 0.45 + 0.225 + 0.1125)


def test_wilson_intervals() -> None:
    # Newcombe 1998, table I: 81 of 263, 15 of 148, 0 of 20, 1 of 29
    for (hits, trials), (low, high) in {
        (81, 263): (0.2553, 0.3662),
        (15, 148): (0.0624, 0.1605),
        (0, 20): (0.0, 0.1611),
        (1, 29): (0.0061, 0.1718),
    }.items():
        assert wilson(hits, trials) == pytest.approx((low, high), abs=5e-5)
    assert wilson(20, 20)[1] == 1.0 and wilson(0, 0) == (0.0, 1.0)
    assert Acceptance(4, (4,), (4,), (2,)).interval(3) == (0.0, 1.0)


def test_intervals_of_tau_hold_the_truth_as_often_as_they_say() -> None:
    truth = 1 + 0.8 + 0.8 * 0.6
    held = 0
    for seed in range(200):
        seen = Acceptance.of(run([0.8, 0.6], 150, 2, seed))
        drawn = 1 + np.cumprod(seen.draws(2, 400, np.random.default_rng(seed)), axis=1).sum(axis=1)
        low, high = np.percentile(drawn, (2.5, 97.5))
        held += low <= truth <= high
    assert 182 <= held <= 199  # 95 % of 200, within three standard deviations


def test_prompts_that_differ_widen_the_interval() -> None:
    alike = Sample(tuple(Acceptance.of(run([0.6], 60, 1, s)) for s in range(12)))
    apart = Sample(tuple(Acceptance.of(run([0.2 + 0.8 * (s % 2)], 60, 1, s)) for s in range(12)))

    def width(sample: Sample) -> float:
        low, high = np.percentile(sample.draws(1, 2000, np.random.default_rng(0)), (2.5, 97.5))
        return float(high - low)

    assert width(apart) > 2 * width(alike)


def test_sums_are_counting_all() -> None:
    parts = [run([0.7, 0.4, 0.2], 50, d, d) for d in (1, 2, 3)]
    whole = DraftCounts()
    for part in parts:
        whole.add(part)
    assert add_all(map(Acceptance.of, parts)) == Acceptance.of(whole)
    assert add_all([]).expected_tokens(3) == 1.0 and add_all([]).depth == 0


@pytest.mark.parametrize(
    "counts", [(5, (6,), (5,), (1,)), (5, (5,), (5,), (6,)), (5, (5, 5), (5,), (1,)), (5, (3,), (4,), (1,))]
)
def test_counts_that_contradict_each_other_are_refused(counts: tuple) -> None:  # type: ignore[type-arg]
    with pytest.raises(ParameterError, match="acceptance counts"):
        Acceptance(*counts)


@pytest.mark.parametrize("rates", [[], [1.2], [0.5, -0.1], [float("nan")]])
def test_rates_outside_zero_and_one_are_refused(rates: list[float]) -> None:
    with pytest.raises(ParameterError, match="from 0 to 1"):
        Acceptance.synthetic(rates, 3)
    with pytest.raises(ParameterError, match="at least one prompt"):
        Sample(())
