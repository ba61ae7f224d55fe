"""The charts of a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from slipstream.cost.curve import StepCurve
from slipstream.plan.advise import WORTH, Advice
from slipstream.plan.drawing import COLOURS, colour, even_line, new_figure, rates_line, short, whole_numbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def by_length(advice: Advice) -> Figure:
    """Speed-up over draft length, a panel a batch size, with the 95 % interval."""
    batches = [b.batch for b in advice.batches][:6]
    figure, panels = new_figure(len(batches))
    for axes, batch in zip(panels, batches, strict=True):
        for i, (name, found) in enumerate(advice.lengths.items()):
            points = found[batch]
            if not points:
                continue
            x = [p.depth for p in points]
            axes.fill_between(
                x, [p.low for p in points], [p.high for p in points], color=colour(i), alpha=0.2
            )
            axes.plot(x, [p.speedup for p in points], color=colour(i), label=short(name), marker="o", ms=3)
            top = max(points, key=lambda p: p.speedup)
            axes.plot(
                [top.depth], [top.speedup], "o", ms=8, mfc="none", mec=colour(i), mew=1.5, label="_best"
            )
        even_line(axes)
        axes.set(title=f"batch {batch}", xlabel="drafted tokens a step")
        whole_numbers(axes)
    panels[0].set_ylabel("times as fast as plain")
    panels[0].legend(loc="best")
    return figure


def by_batch(advice: Advice) -> Figure:
    """The best speed-up of each drafter over the batch size, and where it stops."""
    figure, (axes,) = new_figure()
    for i, (name, points) in enumerate(advice.by_batch.items()):
        axes.plot([b for b, _ in points], [s for _, s in points], color=colour(i), label=short(name))
    if advice.off_from is not None:
        axes.axvline(advice.off_from, color=COLOURS[1], linewidth=1, linestyle=":")
        axes.annotate(
            f"off from {advice.off_from}", (advice.off_from, 1.0), xycoords=("data", "axes fraction"),
            xytext=(3, -9), textcoords="offset points", fontsize=8,
        )  # fmt: skip
    even_line(axes)
    if advice.looked_to > 16:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set(xlabel="batch (sequences decoded at once)", ylabel="times as fast as plain")
    axes.set_ylim(bottom=min(0.95, axes.get_ylim()[0]))
    axes.legend(loc="best")
    return figure


def step_time(advice: Advice) -> Figure:
    """Time of a step over the tokens a row, as a multiple of the plain step: the price of verifying."""
    setup = advice.setup
    figure, (axes,) = new_figure()
    if setup.curve is None:
        for i, b in enumerate(advice.batches):
            nodes = list(range(1, 18))
            times = setup.step.seconds(b.batch, nodes, setup.context)
            axes.plot(nodes, times / times[0], color=colour(i), label=f"batch {b.batch}")
        axes.set_xlabel("tokens a row (1 is plain decoding)")
        axes.set_ylabel("step time, plain = 1")
    else:
        curve_chart(axes, setup.curve)
    axes.set_ylim(bottom=0)
    axes.legend(loc="best")
    return figure


def curve_figure(curve: StepCurve) -> Figure:
    """Measured step times, for `slipstream measure`."""
    figure, (axes,) = new_figure()
    curve_chart(axes, curve)
    axes.set_ylim(bottom=0)
    axes.legend(loc="best")
    return figure


def curve_chart(axes: Axes, curve: StepCurve) -> None:
    """Measured step times in milliseconds over all tokens of the step, by rows; kinks are marked."""
    for i, rows in enumerate(curve.rows_at()):
        tokens, seconds, errors = curve.line(rows)
        label = f"{rows} row{'s' if rows > 1 else ''}"
        axes.errorbar(
            tokens, seconds * 1e3, yerr=1.96 * errors * 1e3, color=colour(i), label=label, marker="o", ms=3,
            capsize=2, elinewidth=0.8,
        )  # fmt: skip
    if max(p.tokens for p in curve.points) > 32:  # kinks lie among the few tokens
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    marked = set()
    for jump in curve.jumps():
        if jump.tokens not in marked:
            marked.add(jump.tokens)
            axes.annotate(
                f"×{jump.ratio:.2g} at {jump.tokens[1]}", (jump.tokens[1], jump.seconds[1] * 1e3),
                xytext=(4, -10), textcoords="offset points", fontsize=7,
            )  # fmt: skip
    axes.set(xlabel="tokens of the step, all rows together", ylabel="step time, ms")


def acceptance(advice: Advice) -> Figure:
    """Conditional acceptance over the position, by drafter and task, with Wilson's 95 % interval."""
    candidates = advice.setup.candidates[:6]
    figure, panels = new_figure(len(candidates))
    for axes, candidate in zip(panels, candidates, strict=True):
        for i, (task, sample) in enumerate(candidate.deepest.items()):
            rates_line(axes, sample.total, colour(i), task)
        axes.set(title=short(candidate.name), xlabel="position in the draft", ylim=(0, 1.02))
        whole_numbers(axes)
        axes.legend(loc="lower left")
    panels[0].set_ylabel("accepted, if all before it was")
    return figure


def cost(advice: Advice) -> Figure:
    """USD a million tokens before and after, by batch size."""
    figure, (axes,) = new_figure()
    batches = [b for b in advice.batches if b.cost is not None]
    before = [b.cost or 0.0 for b in batches]
    after = [(b.best.cost if b.best and b.best.cost is not None else b.cost) or 0.0 for b in batches]
    places = list(range(len(batches)))
    for offset, values, fill, label in (
        (-0.2, before, "#8c959f", "plain"),
        (0.2, after, COLOURS[0], "as advised"),
    ):
        bars = axes.bar([p + offset for p in places], values, 0.38, color=fill, label=label)
        axes.bar_label(bars, fmt="%.3g", fontsize=7, padding=1)
    axes.set_xticks(places, [f"batch {b.batch}" for b in batches])
    axes.set_ylabel("USD a million tokens")
    axes.grid(axis="x", visible=False)
    axes.legend(loc="best")
    return figure


def drawings(advice: Advice) -> Sequence[tuple[str, str, Callable[[], Figure]]]:
    """(title, what it shows, how to draw it) of every chart of a report."""
    found: list[tuple[str, str, Callable[[], Figure]]] = [
        (
            "How long to draft",
            "The ring is the best length; the band is the 95 % interval. Below the line, drafting is slower.",
            lambda: by_length(advice),
        ),
        (
            "Up to which batch it pays",
            f"Each drafter at its best length. A gain below {WORTH - 1:.0%} does not count as one.",
            lambda: by_batch(advice),
        ),
        (
            "What verifying costs",
            "Flat is memory-bound: more tokens ride along for free. Rising is compute-bound.",
            lambda: step_time(advice),
        ),
    ]
    if not advice.setup.given:
        found.append(
            (
                "What is accepted",
                "Share of drafted tokens accepted at each position, counting only drafts that got that far.",
                lambda: acceptance(advice),
            )
        )
    if advice.setup.price is not None:
        found.append(("What it costs", "At the price and batch sizes asked.", lambda: cost(advice)))
    return found
