"""The goodput controller in modelled time: what it gives, what it costs, and how soon it follows."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from slipstream.control import Controller, Fixed, Goodput, RowOutcome, RowState, build_controller
from slipstream.control.curves import Curves
from slipstream.control.fixed import FixedConfig
from slipstream.control.goodput import GoodputConfig
from slipstream.errors import ParameterError
from slipstream.testing.modelled import Rates, Run, fake_curves, simulate

TASKS = {"wrong": 0.0, "prose": 0.4, "mixed": 0.6, "code": 0.8, "edit": 0.95}


def goodput(curves: Curves, **options: object) -> Goodput:
    return Goodput(GoodputConfig("", **options), curves)  # type: ignore[arg-type]


def steadily(rate: float) -> Rates:
    return lambda _: (rate,)


def pace(controllers: Sequence[Controller], curves: Curves, rates: Sequence[Rates], tokens: int) -> float:
    """Tokens a second over runs with different luck, each with a controller of its own."""
    runs = [simulate(c, curves, rates, tokens, seed) for seed, c in enumerate(controllers)]
    return sum(r.tokens for r in runs) / sum(r.seconds for r in runs)


def best_fixed(curves: Curves, rates: Sequence[Rates], tokens: int) -> float:
    """The pace of the best single length for this, found by trying all."""
    return max(
        pace([Fixed(FixedConfig(depth))] * 2, curves, rates, tokens) for depth in range(curves.max_depth + 1)
    )


@pytest.mark.parametrize("price", [0.03, 0.3])
@pytest.mark.parametrize("task", TASKS)
def test_every_task_goes_nearly_as_fast_as_with_its_best_fixed_length(task: str, price: float) -> None:
    curves, rates = fake_curves(price), [steadily(TASKS[task])]
    best = best_fixed(curves, rates, 600)
    assert pace([goodput(curves), goodput(curves)], curves, rates, 600) >= 0.97 * best


def test_acceptance_that_falls_with_the_position_is_seen() -> None:
    curves, rates = fake_curves(0.1), [lambda _: (0.95, 0.9, 0.1)]
    best = best_fixed(curves, rates, 1000)
    controller = goodput(curves)
    run = simulate(controller, curves, rates, 1000)
    assert run.pace >= 0.97 * best
    late = [d for (d,) in run.depths[len(run.depths) // 2 :]]
    assert sum(d == 2 for d in late) > 0.7 * len(late)


def test_the_mixed_set_goes_faster_than_with_any_single_length() -> None:
    curves = fake_curves(0.15)

    def total(make: type | object) -> float:
        runs = [simulate(make(), curves, [steadily(rate)], 600) for rate in TASKS.values()]  # type: ignore[operator]
        return sum(r.tokens for r in runs) / sum(r.seconds for r in runs)

    single = max(total(lambda d=depth: Fixed(FixedConfig(d))) for depth in range(13))  # type: ignore[misc]
    assert total(lambda: goodput(curves)) >= 1.05 * single


@pytest.mark.parametrize("price", [0.02, 0.15, 0.4])
def test_a_useless_drafter_costs_at_most_three_percent(price: float) -> None:
    curves = fake_curves(price)
    for tokens in (96, 1000):
        run = simulate(goodput(curves), curves, [steadily(0.0)], tokens)
        assert run.seconds <= 1.03 * tokens  # a plain step takes 1
        assert any(d for (d,) in run.depths[len(run.depths) // 2 :]) or price * 100 > tokens  # still probing


def test_a_useless_drafter_costs_less_once_a_row_has_shown_it() -> None:
    curves = fake_curves(0.15)
    controller = goodput(curves)
    first = simulate(controller, curves, [steadily(0.0)], 96, first_id=0)
    later = [simulate(controller, curves, [steadily(0.0)], 96, seed=i, first_id=i) for i in range(1, 6)]
    assert sum(r.seconds for r in later) / 5 < first.seconds


def depths_after(run: Run, row_tokens: Sequence[int], change: int) -> list[int]:
    at = next(i for i, done in enumerate(row_tokens) if done >= change)
    return [d for (d,) in run.depths[at:]]


class Watched(Goodput):
    """Keeps how many tokens its one row had at every step."""

    seen: list[int]

    def plan(self, rows: Sequence[RowState]):  # type: ignore[no-untyped-def]
        self.seen = [*getattr(self, "seen", []), rows[0].position]
        return super().plan(rows)


@pytest.mark.parametrize(("before", "after"), [(0.95, 0.05), (0.05, 0.95), (0.0, 0.9), (0.9, 0.5)])
def test_drift_is_followed_within_fifty_steps(before: float, after: float) -> None:
    curves = fake_curves(0.15)
    settled = goodput(curves)
    goal = simulate(settled, curves, [steadily(after)], 1000, seed=9)
    wanted = sum(d for (d,) in goal.depths[60:]) / len(goal.depths[60:])
    means = []
    for seed in range(4):
        controller = Watched(GoodputConfig(""), curves)
        law: Rates = lambda done: (before if done < 500 else after,)  # noqa: E731
        run = simulate(controller, curves, [law], 1000, seed)
        depths = depths_after(run, controller.seen, 500)[50:80]
        means.append(sum(depths) / len(depths))
    assert abs(sum(means) / len(means) - wanted) <= 1.0


def test_rows_of_one_batch_are_judged_each_by_its_own_acceptance() -> None:
    curves = fake_curves(0.01, free=2, slope=0.02)
    run = simulate(goodput(curves), curves, [steadily(0.95), steadily(0.0)], 400)
    both = [d for d in run.depths if len(d) == 2][30:]
    good, bad = (sum(d[i] for d in both) / len(both) for i in (0, 1))
    assert good > 4 and bad < 1  # which is looked at now and then: here that costs next to nothing


def test_a_fast_row_is_not_served_at_the_cost_of_those_that_stay_longer() -> None:
    """Of the next step alone, 5 tokens for the fast row would give most: (6.0 + 1) / 1.75 against
    (1.95 + 1) / 1.15 for one. But the other row is there to the end, and each of its steps would take 1.75.
    """
    curves = fake_curves(0.05, free=2, slope=0.1)
    rates = [steadily(0.95), steadily(0.0)]
    run = simulate(goodput(curves), curves, rates, 400)
    both = [d for d in run.depths if len(d) == 2][30:]
    assert sum(d[0] for d in both) / len(both) < 2
    greedy = simulate(Fixed(FixedConfig(5)), curves, rates, 400)
    assert run.seconds < 0.8 * greedy.seconds


@pytest.mark.parametrize("batch", [1, 4, 8])
@pytest.mark.parametrize("rates", [(0.85, 0.7, 0.9), (0.6, 0.35, 0.5), (0.9, 0.3, 0.6)])
def test_batches_of_rows_of_any_kind_go_nearly_as_fast_as_with_their_best_fixed_length(
    batch: int, rates: tuple[float, ...]
) -> None:
    """A draft model that costs a third to half of a step, so that in a batch little is to be gained and bad
    luck at the start easily turns it off; rows that are done are replaced."""
    curves = fake_curves(0.35, free=8, slope=0.06, longest=7)
    rows = [steadily(rates[i % len(rates)]) for i in range(8 * batch)]

    def seconds(make: Callable[[], Controller]) -> float:
        return sum(simulate(make(), curves, rows, 64, seed, at_once=batch).seconds for seed in range(2))

    best = min(seconds(lambda d=depth: Fixed(FixedConfig(d))) for depth in range(8))  # type: ignore[misc]
    assert seconds(lambda: goodput(curves)) <= best / 0.95


def test_a_row_with_bad_luck_near_break_even_is_tried_again_soon() -> None:
    """Six of ten drafted tokens pay for the drafts. The first two are rejected."""
    curves = fake_curves(0.55)
    controller = goodput(curves)
    depths = []
    for step in range(40):
        (budget,) = controller.plan([RowState(0, step, 200)])
        depths.append(budget.depth)
        good = budget.depth if len([d for d in depths if d]) > 2 else 0
        controller.record([RowOutcome(0, budget.depth, budget.depth, good, good + 1)], 1.0)
    assert sum(depth > 0 for depth in depths) > 20


def test_a_large_batch_is_not_drafted_for_and_comes_back_when_it_is_small() -> None:
    curves = fake_curves(0.1, free=16, slope=0.06)
    controller = goodput(curves)
    rates = [steadily(0.7)] * 64
    run = simulate(controller, curves, rates, 60)
    assert not any(any(d) for d in run.depths)  # nothing would pay, so nothing is probed either
    alone = simulate(controller, curves, rates[:1], 200, first_id=100)
    assert sum(d for (d,) in alone.depths) / len(alone.depths) > 2


def test_a_step_that_doubles_at_five_tokens_is_not_walked_into() -> None:
    from slipstream.cost.curve import DraftCurve, DraftPoint, Point, StepCurve

    step = StepCurve([Point(1, n, 0, 1.0 if n < 5 else 2.0) for n in (1, 2, 3, 4, 5, 8, 13)])
    curves = Curves(step, DraftCurve([DraftPoint(1, 1, 1, 0.01), DraftPoint(1, 12, 12, 0.12)]), 12)
    run = simulate(goodput(curves), curves, [steadily(0.7)], 1000)
    depths = [d for (d,) in run.depths[20:-8]]
    assert sum(d == 3 for d in depths) > 0.9 * len(depths)


def test_controllers_share_nothing() -> None:
    curves = fake_curves(0.15)
    first, second = goodput(curves), goodput(curves)
    fresh = simulate(goodput(curves), curves, [steadily(0.8)], 200, seed=3)
    simulate(first, curves, [steadily(0.0)], 500)
    again = simulate(second, curves, [steadily(0.8)], 200, seed=3)
    assert again.depths == fresh.depths


def test_a_drafter_that_had_to_read_the_prompt_first_is_not_held_to_have_nothing() -> None:
    curves = fake_curves(0.1)
    ready, reading = goodput(curves, prior=0.8), goodput(curves, prior=0.8)
    state = [RowState(0, 10, 100)]
    reading.plan(state)
    reading.record([RowOutcome(0, 0, 0, 0, 1)], 1.0)
    assert reading.plan(state) == ready.plan(state)


def test_forgotten_rows_hold_no_memory() -> None:
    curves = fake_curves(0.1)
    controller = goodput(curves)
    simulate(controller, curves, [steadily(0.5)] * 4, 50)
    assert not controller._rows


def test_trees_get_their_nodes() -> None:
    budget = goodput(fake_curves(0.02, free=64), nodes_per_level=3).plan([RowState(0, 10, 100)])[0]
    assert budget.depth > 0 and budget.nodes == 3 * budget.depth


def test_planning_takes_little_time() -> None:
    curves = fake_curves(0.01, free=64, slope=0.001)
    controller = goodput(curves)
    states = [RowState(i, 500, 500) for i in range(8)]
    outcomes = [RowOutcome(i, 6, 6, 3, 4) for i in range(8)]
    times = []
    for _ in range(30):
        began = time.perf_counter()
        controller.plan(states)
        controller.record(outcomes, 1.0)
        times.append(time.perf_counter() - began)
    assert sorted(times)[2] < 0.02  # of a step of tens of milliseconds; the fastest of 30, whatever else runs


def test_the_options_are_read_and_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="needs the option 'curve'"):
        build_controller("goodput", 5)
    with pytest.raises(ParameterError, match="cannot be read"):
        build_controller(f"goodput:curve={tmp_path / 'no.json'}", 5)
    with pytest.raises(ParameterError, match="half_life from 1"):
        build_controller("goodput:curve=x,half_life=0", 5)
    (tmp_path / "bad.json").write_text(json.dumps({"kind": "slipstream-measure"}))
    with pytest.raises(ParameterError, match="bad.json is not a measurement"):
        build_controller(f"goodput:curve={tmp_path / 'bad.json'}", 5)
