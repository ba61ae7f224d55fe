"""Measured step times: kinks kept, noise levelled, nothing invented."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.cost.curve import DraftCurve, DraftPoint, Point, StepCurve, isotonic, median, spread
from slipstream.errors import ParameterError


def curve(times: dict[int, float], rows: int = 1, error: float = 0.0, context: int = 0) -> StepCurve:
    return StepCurve(Point(rows, n, context, t, error) for n, t in times.items())


def test_a_step_that_doubles_at_five_tokens_shows() -> None:
    doubled = curve({1: 1.0, 2: 1.0, 4: 1.02, 5: 2.0, 8: 2.05, 16: 2.1})
    assert doubled.seconds(1, [4, 5]).tolist() == [1.02, 2.0]
    (jump,) = doubled.jumps()
    assert jump.tokens == (4, 5) and jump.ratio == pytest.approx(2.0 / 1.02)


def test_growth_in_proportion_is_no_kink() -> None:
    assert curve({n: n / 10 for n in (1, 2, 4, 8, 16, 32)}).jumps() == []


def test_time_follows_the_tokens_of_all_rows_between_measured_rows() -> None:
    step = StepCurve(Point(r, n, 0, 1.0 if r * n <= 8 else 2.0) for r in (1, 2, 4) for n in (1, 2, 4, 8, 9))
    # 3 rows are not measured; the kink is still at 8 tokens, not where nodes say
    assert float(step.seconds(3, 2)) == 1.0
    assert float(step.seconds(3, 16 / 3)) == 2.0


def test_measured_points_are_given_back() -> None:
    points = [Point(r, n, c, r + n / 10 + c / 1000) for r in (1, 4) for n in (1, 3, 9) for c in (0, 512)]
    step = StepCurve(points)
    for p in points:
        assert float(step.seconds(p.rows, p.nodes, p.context)) == pytest.approx(p.seconds)
        assert step.covers(p.rows, p.nodes, p.context)
    assert float(step.seconds(1, 1, 256)) == pytest.approx(1.1 + 0.256)
    assert float(step.seconds(1, 1, 1024)) == pytest.approx(1.1 + 1.024)
    assert not step.covers(5, 1) and not step.covers(4, 10) and not step.covers(1, 1, 1000)


def test_beyond_the_last_point_time_goes_on_and_never_falls() -> None:
    step = curve({1: 1.0, 8: 1.0, 9: 1.5, 10: 1.5})
    assert float(step.seconds(1, 11)) > 1.5
    flat = curve({1: 1.0})
    assert float(flat.seconds(1, 3)) == pytest.approx(
        3.0
    )  # one point says nothing of the slope: in proportion


def test_a_decrease_within_the_spread_is_levelled_and_one_beyond_it_stays() -> None:
    noisy = curve({1: 1.00, 2: 1.10, 3: 1.05, 4: 1.2}, error=0.03)
    assert noisy.seconds(1, [2, 3]).tolist() == pytest.approx([1.075, 1.075])
    assert noisy.levelled == 2 and noisy.inversions == []
    real = curve({7: 2.0, 8: 1.0, 9: 1.1}, error=0.01)
    assert real.seconds(1, [7, 8]).tolist() == [2.0, 1.0]
    (inversion,) = real.inversions
    assert inversion.tokens == (7, 8) and inversion.ratio == 0.5


@given(
    st.lists(st.tuples(st.floats(0.1, 10), st.floats(0.01, 1)), min_size=1, max_size=8),
)
def test_isotonic_values_do_not_fall_and_keep_the_weighted_mean(points: list[tuple[float, float]]) -> None:
    values, errors = (np.array(v) for v in zip(*points, strict=True))
    level = isotonic(values, errors)
    assert np.all(np.diff(level) >= -1e-12)
    weights = 1 / np.maximum(errors, errors.min()) ** 2
    assert float(weights @ level) == pytest.approx(float(weights @ values))


@given(
    st.dictionaries(
        st.integers(1, 40), st.tuples(st.floats(0.5, 5), st.floats(0, 0.2)), min_size=1, max_size=6
    ),
    st.integers(1, 8),
    st.integers(1, 60),
)
def test_more_tokens_take_no_less_time_without_certain_inversions(
    times: dict[int, tuple[float, float]], rows: int, nodes: int
) -> None:
    step = StepCurve(Point(2, n, 0, t, e) for n, (t, e) in times.items())
    if not step.inversions:
        one, two = step.seconds(rows, [nodes, nodes + 1])
        assert two >= one - 1e-9


def test_json_round_trip() -> None:
    step = curve({1: 1.0, 5: 2.0}, rows=4, error=0.1, context=64)
    again = StepCurve.from_json(step.to_json())
    assert again.points == step.points


def test_medians_and_their_errors() -> None:
    middle, error = median([1.0, 2.0, 3.0, 100.0, 2.0])
    assert middle == 2.0 and error == pytest.approx(1.2533 * 1.0 / 1.349 / 5**0.5)
    assert spread([1.0, 1.0, 1.0]) == 0.0
    # The formula against the scatter of medians really drawn.
    rng = np.random.default_rng(0)
    samples = rng.normal(10, 1, size=(2000, 25))
    told = np.mean([median(s.tolist())[1] for s in samples])
    assert told == pytest.approx(np.median(samples, axis=1).std(), rel=0.15)


@pytest.mark.parametrize(
    ("points", "words"),
    [
        ([], "no measured step time"),
        ([Point(0, 1, 0, 1.0)], "rows and nodes of at least 1"),
        ([Point(1, 1, 0, 0.0)], "positive"),
        ([Point(1, 1, 0, 1.0), Point(1, 1, 0, 2.0)], "there twice"),
    ],
)
def test_points_that_make_no_curve_are_refused(points: list[Point], words: str) -> None:
    with pytest.raises(ParameterError, match=words):
        StepCurve(points)
    with pytest.raises(ParameterError, match="not positive"):
        median([1.0, float("nan")])


def test_draft_time_of_a_chain_rises_by_a_pass_a_token() -> None:
    chain = DraftCurve([DraftPoint(1, d, d, 0.1 * d) for d in (1, 4)])
    assert chain.draft_seconds(1, 0, 0) == 0.0
    assert [chain.draft_seconds(1, d, d) for d in (1, 2, 8)] == pytest.approx([0.1, 0.2, 0.8])


def test_draft_time_of_a_parallel_drafter_stays_flat() -> None:
    heads = DraftCurve([DraftPoint(1, d, d, 0.2) for d in (1, 5)])
    assert [heads.draft_seconds(1, d, d) for d in (1, 3, 9)] == pytest.approx([0.2, 0.2, 0.2])


def test_draft_time_between_and_beyond_rows_and_nodes() -> None:
    tree = DraftCurve([DraftPoint(r, 2, n, 0.1 * r + 0.01 * n) for r in (1, 2, 4) for n in (2, 10)])
    assert tree.draft_seconds(3, 2, 6) == pytest.approx(0.36)
    assert tree.draft_seconds(8, 2, 2) == pytest.approx(0.82)
    with pytest.raises(ParameterError, match="depth <= nodes"):
        DraftCurve([DraftPoint(1, 3, 2, 0.1)])
    with pytest.raises(ParameterError, match="no measured draft time"):
        DraftCurve([])
