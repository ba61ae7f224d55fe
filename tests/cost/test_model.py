"""The formulas of the papers and articles, and predictions from curves."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from slipstream.core.choices import best_tree
from slipstream.cost import model
from slipstream.cost.accept import Acceptance
from slipstream.cost.curve import DraftCurve, DraftPoint, Point, StepCurve
from slipstream.cost.model import Costs, best_gamma, best_length, predict
from slipstream.errors import ParameterError

# Best length and speed-up by α and c of theorem 3.8, worked out apart from this code.
BEST = {
    0.5: [(5, 1.88), (4, 1.79), (3, 1.63), (2, 1.46), (1, 1.25), (1, 1.15)],
    0.6: [(7, 2.30), (6, 2.17), (4, 1.92), (3, 1.67), (2, 1.40), (1, 1.23)],
    0.7: [(9, 2.97), (8, 2.76), (6, 2.35), (4, 1.98), (3, 1.58), (2, 1.37)],
    0.8: [(14, 4.23), (11, 3.82), (8, 3.09), (6, 2.47), (4, 1.87), (3, 1.55)],
    0.9: [(24, 7.49), (19, 6.37), (13, 4.67), (10, 3.43), (7, 2.37), (5, 1.87)],
}
RATIOS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3)


def test_expected_tokens_by_enumeration() -> None:
    for alpha, gamma in itertools.product((0.0, 0.3, 0.9, 1.0), range(5)):
        mean = 0.0
        for outcome in itertools.product((True, False), repeat=gamma):
            chance = math.prod(alpha if hit else 1 - alpha for hit in outcome)
            run = next((i for i, hit in enumerate(outcome) if not hit), gamma)
            mean += chance * (run + 1)
        assert model.expected_tokens(alpha, gamma) == pytest.approx(mean)


@pytest.mark.parametrize("alpha", BEST)
def test_best_lengths_of_the_classic_formula(alpha: float) -> None:
    for c, (gamma, gain) in zip(RATIOS, BEST[alpha], strict=True):
        found, speed = best_gamma(alpha, c)
        assert found == gamma and speed == pytest.approx(gain, abs=0.005)


def test_a_gain_exists_exactly_where_acceptance_exceeds_the_cost_ratio() -> None:
    for alpha, c in itertools.product(np.linspace(0, 0.95, 20), np.linspace(0.01, 0.96, 20)):
        assert (best_gamma(float(alpha), float(c))[1] > 1 + 1e-12) == (alpha > c + 1e-12)


def test_operations_of_the_theorem() -> None:
    # Leviathan et al., theorem 3.11 at α = 0.8, γ = 5, ĉ = 0.02, computed from the formula as printed
    assert model.operations(0.8, 5, 0.02) == pytest.approx((0.2 * (5 * 0.02 + 6)) / (1 - 0.8**6))
    assert model.operations(0.0, 3, 0.0) == pytest.approx(4.0)  # everything drafted was for nothing
    assert model.operations(1.0, 3, 0.0) == pytest.approx(1.0)


def test_the_articles_table_and_its_wrong_cell() -> None:
    rows = model.table(model.simple_rule, model.PRINTED)
    cells = [cell for row in rows for cell in row]
    assert [row[0].alpha for row in rows] == [0.5, 0.6, 0.7, 0.8, 0.9]
    assert [cell.gamma for cell in rows[0]] == [3, 5, 7, 10]
    assert [[round(c.value, 2) for c in row] for row in rows] == [
        [1.2, 1.43, 1.56, 1.67],
        [1.36, 1.67, 1.84, 2.0],
        [1.58, 2.0, 2.26, 2.5],
        [1.88, 2.5, 2.92, 3.33],
        [2.31, 3.33, 4.12, 5.0],
    ]
    (wrong,) = [c for c in cells if c.contradicts]
    assert (wrong.alpha, wrong.gamma, wrong.printed) == (0.5, 5, 1.25) and round(wrong.value, 2) == 1.43


def test_the_expected_token_table() -> None:
    rows = model.table(model.expected_tokens)
    assert [[round(c.value, 2) for c in row] for row in rows] == [
        [1.88, 1.97, 1.99, 2.0],
        [2.18, 2.38, 2.46, 2.49],
        [2.53, 2.94, 3.14, 3.27],
        [2.95, 3.69, 4.16, 4.57],
        [3.44, 4.69, 5.7, 6.86],
    ]


def test_why_the_simple_rule_misleads() -> None:
    assert model.simple_rule(0.0, 5) < 1 == model.expected_tokens(0.0, 5)  # no bonus token
    assert model.simple_rule(0.5, 50) > model.simple_rule(0.5, 5)  # the longest draft is always best
    assert model.speedup(0.5, 50, 0.1) < 1 < model.speedup(0.5, 2, 0.1)  # though it loses


@pytest.mark.parametrize("alpha", [-0.1, 1.1, float("nan")])
def test_acceptance_outside_zero_and_one_is_refused(alpha: float) -> None:
    for formula in (model.expected_tokens, model.simple_rule):
        with pytest.raises(ParameterError, match="from 0 to 1"):
            formula(alpha, 3)


# -- predictions ----------------------------------------------------------------------------------

LENGTHS = (1, 2, 3, 5, 9, 17)


def flat(c: float) -> tuple[Costs, DraftCurve]:
    step = StepCurve(Point(r, n, 0, 1.0) for r in (1, 8) for n in LENGTHS)
    return Costs(step), DraftCurve([DraftPoint(r, d, d, c * d) for r in (1, 8) for d in (1, 16)])


@pytest.mark.parametrize(("gamma", "c"), [(-1, 0.1), (3, -0.4), (3, math.nan), (3, math.inf)])
def test_lengths_and_costs_below_nothing_are_refused(gamma: int, c: float) -> None:
    for formula in (model.speedup, model.operations):
        with pytest.raises(ParameterError, match="must be"):
            formula(0.8, gamma, c)


def test_an_interval_of_times_that_scatter_wildly_is_still_above_nothing() -> None:
    wild = StepCurve([Point(1, n, 0, 1.0, error=1e6, count=3) for n in (1, 2, 4)])
    found = model.predict(Costs(wild), flat(0.1)[1], Acceptance.synthetic([0.8], 3), 1, 3)
    assert 0 < found.low < found.speedup < found.high < 100


def test_with_a_flat_curve_and_one_rate_the_prediction_is_the_classic_formula() -> None:
    costs, drafter = flat(0.1)
    for alpha, gamma in itertools.product((0.5, 0.9), (1, 4, 8)):
        found = predict(costs, drafter, Acceptance.synthetic([alpha], 16), 4, gamma)
        assert found.speedup == pytest.approx(model.speedup(alpha, gamma, 0.1))
        assert found.low == pytest.approx(found.speedup, rel=1e-3) == found.high
    best = best_length(costs, drafter, Acceptance.synthetic([0.8], 16), 1, 16)
    assert (best.depth, round(best.speedup, 2)) == (6, 2.47)


def test_a_kink_decides_the_length() -> None:
    step = StepCurve(Point(1, n, 0, 1.0 if n < 5 else 2.0) for n in (1, 2, 4, 5, 8, 16))
    drafter = DraftCurve([DraftPoint(1, d, d, 0.01 * d) for d in (1, 16)])
    best = best_length(Costs(step), drafter, Acceptance.synthetic([0.8], 16), 1, 12)
    assert best.depth == 3


def test_rows_that_draft_different_lengths_are_averaged_over_the_curve_not_before_it() -> None:
    step = StepCurve(Point(1, n, 0, 1.0 if n < 5 else 2.0) for n in (1, 4, 5, 9))
    seen = Acceptance(100, (50, 50, 50, 50), (50, 40, 30, 20), (40, 30, 20, 10))  # every second step drafts 4
    drafter = DraftCurve([DraftPoint(1, 4, 4, 1e-9)])
    found = predict(Costs(step), drafter, seen, 1, 4)
    assert found.verify_seconds == pytest.approx(1.5)
    assert found.tau == pytest.approx(1 + (40 + 30 + 20 + 10) / 100)


def test_overhead_is_in_both_sides() -> None:
    costs, drafter = flat(0.1)
    with_overhead = predict(Costs(costs.step, overhead=1.0), drafter, Acceptance.synthetic([0.8], 8), 1, 4)
    assert with_overhead.speedup == pytest.approx(model.expected_tokens(0.8, 4) * 2 / 2.4)


def test_few_counts_give_a_wide_interval_that_holds_the_prediction() -> None:
    costs, drafter = flat(0.1)
    few = predict(costs, drafter, Acceptance.synthetic([0.8], 4, trials=20), 1, 4)
    many = predict(costs, drafter, Acceptance.synthetic([0.8], 4, trials=2000), 1, 4)
    for found in (few, many):
        assert found.low < found.speedup < found.high
    assert few.high - few.low > 5 * (many.high - many.low)


def test_a_scattered_curve_widens_it_too() -> None:
    step = StepCurve(Point(1, n, 0, 1.0 + n / 100, 0.05) for n in LENGTHS)
    drafter = DraftCurve([DraftPoint(1, 4, 4, 0.4, 0.05)])
    found = predict(Costs(step), drafter, Acceptance.synthetic([0.8], 4), 1, 4)
    assert found.high - found.low > 0.2


def test_plain_decoding_is_the_best_where_nothing_pays() -> None:
    costs, drafter = flat(0.5)
    best = best_length(costs, drafter, Acceptance.synthetic([0.4], 8), 1, 8)
    assert (best.depth, best.speedup, best.tau) == (0, 1.0, 1.0)


def test_a_tree_is_worth_its_nodes() -> None:
    costs, drafter = flat(0.1)
    ranks = [[0.6, 0.2], [0.5, 0.2]]
    choices = best_tree(ranks, 4)
    found = model.predict_tree(costs, drafter, choices, ranks, 1)
    assert found.tau == pytest.approx(choices.expected_tau(ranks)) and found.nodes == 4
    assert found.speedup == pytest.approx(found.tau / 1.2)


def test_break_even_acceptance() -> None:
    costs, drafter = flat(0.1)
    for depth in (1, 4):
        needed = model.break_even(costs, drafter, 1, depth)
        assert model.speedup(needed, depth, 0.1) == pytest.approx(1.0)
    costs, drafter = flat(3.0)
    assert model.break_even(costs, drafter, 1, 1) == math.inf
