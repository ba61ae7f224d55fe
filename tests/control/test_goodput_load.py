"""The goodput controller of a server in modelled time: batches that come and go, curves that are wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from slipstream.control import Controller, Fixed, Goodput, RowOutcome, RowState
from slipstream.control.curves import Curves, guessed_steps
from slipstream.control.fixed import FixedConfig
from slipstream.control.goodput import GoodputConfig
from slipstream.core.draft import Budget
from slipstream.cost.curve import DraftCurve, DraftPoint, Point, StepCurve, StepTime
from slipstream.cost.roofline import Free
from slipstream.plan.calibrate import corners
from slipstream.testing.modelled import Rates, Run, Stairs, fake_curves, simulate

DEPTH = 8


def steadily(rate: float) -> Rates:
    return lambda _: (rate,)


def goodput(curves: Curves | dict[str, Curves], **options: object) -> Goodput:
    return Goodput(GoodputConfig("", **options), curves)  # type: ignore[arg-type]


def drafts(price: float) -> DraftCurve:
    """`price` seconds a drafted token, half as much again with 16 rows at once."""
    return DraftCurve(
        [DraftPoint(rows, d, d, d * price * more) for rows, more in ((1, 1.0), (16, 1.5)) for d in (1, DEPTH)]
    )


def real(rise: float, price: float = 0.0) -> Curves:
    """What steps cost: a stair every 8 tokens."""
    return Curves(Stairs(rise), drafts(price) if price else Free(), DEPTH, block=8)


def calibrated(cost: Curves, rows: int = 16) -> Curves:
    """What a calibration would have measured of it."""
    points = [Point(r, n, 0, float(cost.step.seconds(r, n))) for r, n in corners(rows)]
    return replace(cost, step=StepCurve(points))


def late(run: Run, share: float = 0.5) -> list[int]:
    """Depths of all rows in the last steps."""
    return [depth for step in run.depths[int(len(run.depths) * (1 - share)) :] for depth in step]


def mean(values: Sequence[int]) -> float:
    return sum(values) / len(values)


LAWS = {"lookup": (0.35, 0.5), "draft": (1.0, 0.7), "useless": (1.0, 0.0), "copy": (0.8, 0.95)}


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("price", [0.0, 0.1])
def test_at_no_load_is_it_slower_than_plain_or_much_slower_than_the_best_length(
    law: str, price: float
) -> None:
    cost, (reach, rate) = real(0.4, price), LAWS[law]
    believed = calibrated(cost)
    for at_once in (1, 4, 16):
        rates = [steadily(rate)] * (16 + at_once)

        def pace(controller: Controller, n: int = at_once, rows: list[Rates] = rates) -> float:
            return simulate(controller, cost, rows, 64, 5, at_once=n, reach=reach).pace

        lengths = {depth: pace(Fixed(FixedConfig(depth))) for depth in (0, 1, 3, 7)}
        got = pace(goodput(believed))
        assert got >= 0.97 * lengths[0], (at_once, got, lengths)
        assert got >= 0.9 * max(lengths.values()), (at_once, got, lengths)


def test_speculation_fades_out_as_the_load_grows_and_comes_back() -> None:
    cost = real(0.5, 0.1)
    controller = goodput(calibrated(cost))
    depths = []
    for turn, at_once in enumerate((1, 2, 4, 8, 16, 1)):
        rates = [steadily(0.7)] * at_once
        run = simulate(controller, cost, rates, 150, turn, first_id=100 * turn)
        depths.append(mean([d for step in run.depths[10:] if len(step) == at_once for d in step]))
    assert depths[0] > 2.5 and depths[-1] > 2.5
    assert depths[0] > depths[2] > depths[4] and depths[1] > depths[3] and depths[4] < 0.2


def test_the_line_at_the_start_says_from_which_batch_it_is_off() -> None:
    cost = calibrated(real(0.5, 0.1))
    depths = [goodput(cost, prior=0.7).depth_at(rows) for rows in range(1, 17)]
    assert depths[0] > 2 and depths[15] == 0
    controller = goodput(cost)
    controller.depth_at(4)
    assert not controller._rows


# -- curves that are wrong --------------------------------------------------------------------------


def stepwise(plain: float, drafting: float) -> Curves:
    """A step takes `plain` seconds, or `drafting` with whatever drafts; a drafted token hardly anything."""

    class Two:
        def seconds(self, rows, nodes, context=0.0):  # type: ignore[no-untyped-def]
            import numpy as np

            return np.where(np.asarray(nodes, dtype=float) > 1, drafting, plain)

        def relative_error(self, rows, nodes, context=0.0):  # type: ignore[no-untyped-def]
            return 0 * self.seconds(rows, nodes)

    step: StepTime = Two()
    return Curves(step, drafts(0.001), DEPTH)


def test_drafts_that_the_curve_takes_for_free_are_dropped_where_they_cost_more_than_they_give() -> None:
    believed, cost = stepwise(1.0, 1.0), stepwise(1.0, 3.0)
    run = simulate(goodput(believed), cost, [steadily(0.5)], 1500)
    assert mean(late(run)) < 0.3
    assert run.pace > 0.85  # plain is 1


def test_drafts_that_the_curve_takes_for_dear_are_tried_and_kept() -> None:
    believed, cost = stepwise(1.0, 12.0), stepwise(1.0, 1.0)
    run = simulate(goodput(believed), cost, [steadily(0.8)], 4000)
    assert mean(late(run, 0.25)) > 4


def test_a_machine_of_half_the_speed_changes_no_choice() -> None:
    cost = fake_curves(0.15)
    rates = [steadily(0.8)]
    quiet = simulate(goodput(cost), cost, rates, 1500)
    busy = simulate(goodput(cost), cost, rates, 1500, stretch=lambda step: 2.0 if step > 100 else 1.0)
    assert abs(mean(late(quiet)) - mean(late(busy))) < 0.7  # it looks at other lengths at other times
    assert busy.seconds < 1.03 * 2 * quiet.seconds


def test_single_slow_steps_change_no_choice() -> None:
    cost = fake_curves(0.15)
    rates = [steadily(0.8)]
    quiet = simulate(goodput(cost), cost, rates, 1500)
    jolted = simulate(goodput(cost), cost, rates, 1500, stretch=lambda step: 10.0 if step % 30 == 9 else 1.0)
    assert abs(mean(late(quiet)) - mean(late(jolted))) < 0.7


@pytest.mark.parametrize("rise", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("rate", [0.3, 0.8])
def test_without_any_curve_it_is_learned_on_the_way(rise: float, rate: float) -> None:
    cost = replace(real(rise, 0.05), step=Stairs(rise))
    guess = Curves(guessed_steps(), Free(), DEPTH, block=8, measured=False)
    controller = goodput(guess)
    for turn, at_once in enumerate((1, 4, 8)):
        rates = [steadily(rate)] * at_once
        simulate(controller, cost, rates, 400, turn, first_id=100 * turn)
        run = simulate(controller, cost, rates, 400, 9, first_id=100 * turn + 50)
        best = max(
            simulate(Fixed(FixedConfig(depth)), cost, rates, 400, 9).pace for depth in range(DEPTH + 1)
        )
        assert run.pace >= 0.85 * best, (at_once, run.pace, best)


# -- several drafters -------------------------------------------------------------------------------


def test_drafters_of_one_batch_are_weighed_by_what_each_costs() -> None:
    step = StepCurve([Point(2, n, 0, 1.0 + 0.02 * n) for n in (1, 2, 4, 8, 9)])
    cost = {
        "cheap": Curves(step, drafts(0.001), DEPTH),
        "dear": Curves(step, drafts(1.0), DEPTH),
    }
    run = simulate(goodput(cost), cost, [steadily(0.8)] * 2, 400, drafters=("cheap", "dear"))
    both = [d for d in run.depths if len(d) == 2][40:]
    assert mean([d[0] for d in both]) > 3 and mean([d[1] for d in both]) < 0.2


def test_rows_that_do_not_draft_or_fixed_it_are_counted_and_left_alone() -> None:
    cost = {"draft": replace(calibrated(real(0.5)), block=8)}
    alone = goodput(cost).plan([RowState(0, 10, 100, "draft")])
    assert alone[0].depth > 2
    company = [RowState(i, 10, 100, "none") for i in range(1, 8)]
    beside = goodput(cost).plan([RowState(0, 10, 100, "draft"), *company])
    assert beside[0].depth < alone[0].depth and not any(b.depth for b in beside[1:])
    fixed = Budget(3, 9)
    told = goodput(cost).plan([RowState(0, 10, 100, "draft", fixed), RowState(1, 10, 100, "draft", Budget())])
    assert told == [fixed, Budget()]


def test_steps_that_others_drafted_in_do_not_move_the_clock() -> None:
    cost = {"draft": calibrated(real(0.5))}
    controller = goodput(cost)
    rows = [RowState(0, 10, 100, "draft", Budget(7, 7))]
    for _ in range(50):
        controller.plan(rows)
        controller.record([RowOutcome(0, 7, 7, 0, 1)], 50.0)
    assert controller._clock.plain(1) == 1.0
