"""The charts of a plan. As SVG they take their colours from the page: one drawing for dark and light."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from slipstream.cost.accept import Acceptance
from slipstream.cost.curve import StepCurve
from slipstream.errors import ParameterError
from slipstream.plan.advise import WORTH, Advice

if TYPE_CHECKING:
    from collections.abc import Iterator

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which people with any colour vision can tell apart, without the yellow.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
# Drawn in these, and replaced by the page's own in SVG.
_INK, _GRID = "#1b1f24", "#d0d7de"
_WIDTH, _HEIGHT = 5.2, 3.3


@contextmanager
def _style() -> Iterator[None]:
    try:
        import matplotlib
    except ImportError:
        raise ParameterError(
            "charts need matplotlib: pip install 'slipstream-lm[bench]', or leave them out"
        ) from None
    with matplotlib.rc_context(
        {
            "svg.fonttype": "none",
            "svg.hashsalt": "slipstream",
            "font.family": "sans-serif",
            "font.size": 9,
            "axes.edgecolor": _INK,
            "axes.labelcolor": _INK,
            "axes.titlecolor": _INK,
            "axes.titlesize": 10,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.axisbelow": True,
            "axes.grid": True,
            "grid.color": _GRID,
            "grid.linewidth": 0.6,
            "text.color": _INK,
            "xtick.color": _INK,
            "ytick.color": _INK,
            "legend.frameon": False,
            "legend.fontsize": 8,
            "lines.linewidth": 1.8,
        }
    ):
        yield


def _figure(panels: int = 1) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure

    columns = panels if panels == 4 else min(panels, 3)
    rows = -(-panels // columns)
    width = _WIDTH if panels == 1 else 2 * _WIDTH  # a page shows several side by side over its whole width
    figure = Figure(figsize=(width, _HEIGHT * rows))
    axes = figure.subplots(rows, columns, squeeze=False, sharey=True).ravel().tolist()
    for unused in axes[panels:]:
        unused.set_visible(False)
    return figure, axes[:panels]


def svg(draw: Callable[[], Figure], title: str) -> str:
    """The drawing as an <svg> that can stand in a page; title: what a screen reader says."""
    with _style():
        figure = draw()
        figure.tight_layout()
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = text.replace(_INK, "var(--ink)").replace(_GRID, "var(--grid)")
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    return text.replace("<svg", f'<svg role="img" aria-label="{title}"', 1)


def png(draw: Callable[[], Figure]) -> bytes:
    """The drawing on white."""
    with _style():
        figure = draw()
        figure.tight_layout()
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=150)
    return buffer.getvalue()


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def _even(axes: Axes, label: str = "plain decoding") -> None:
    axes.axhline(1.0, color=_INK, linewidth=0.8, linestyle=(0, (4, 3)))
    axes.annotate(
        label, (1.0, 1.0), xycoords=("axes fraction", "data"), xytext=(0, 2), textcoords="offset points",
        ha="right", fontsize=7,
    )  # fmt: skip


def _whole(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _short(name: str) -> str:
    """A drafter as a legend has room for it."""
    return name.replace("draft_model:model=", "draft ").split("/")[-1] if len(name) > 24 else name


def by_length(advice: Advice) -> Figure:
    """Speed-up over draft length, a panel a batch size, with the 95 % interval."""
    batches = [b.batch for b in advice.batches][:6]
    figure, panels = _figure(len(batches))
    for axes, batch in zip(panels, batches, strict=True):
        for i, (name, found) in enumerate(advice.lengths.items()):
            points = found[batch]
            if not points:
                continue
            x = [p.depth for p in points]
            axes.fill_between(
                x, [p.low for p in points], [p.high for p in points], color=_colour(i), alpha=0.2
            )
            axes.plot(x, [p.speedup for p in points], color=_colour(i), label=_short(name), marker="o", ms=3)
            top = max(points, key=lambda p: p.speedup)
            axes.plot(
                [top.depth], [top.speedup], "o", ms=8, mfc="none", mec=_colour(i), mew=1.5, label="_best"
            )
        _even(axes)
        axes.set(title=f"batch {batch}", xlabel="drafted tokens a step")
        _whole(axes)
    panels[0].set_ylabel("times as fast as plain")
    panels[0].legend(loc="best")
    return figure


def by_batch(advice: Advice) -> Figure:
    """The best speed-up of each drafter over the batch size, and where it stops."""
    figure, (axes,) = _figure()
    for i, (name, points) in enumerate(advice.by_batch.items()):
        axes.plot([b for b, _ in points], [s for _, s in points], color=_colour(i), label=_short(name))
    if advice.off_from is not None:
        axes.axvline(advice.off_from, color=COLOURS[1], linewidth=1, linestyle=":")
        axes.annotate(
            f"off from {advice.off_from}", (advice.off_from, 1.0), xycoords=("data", "axes fraction"),
            xytext=(3, -9), textcoords="offset points", fontsize=8,
        )  # fmt: skip
    _even(axes)
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
    figure, (axes,) = _figure()
    if setup.curve is None:
        for i, b in enumerate(advice.batches):
            nodes = list(range(1, 18))
            times = setup.step.seconds(b.batch, nodes, setup.context)
            axes.plot(nodes, times / times[0], color=_colour(i), label=f"batch {b.batch}")
        axes.set_xlabel("tokens a row (1 is plain decoding)")
        axes.set_ylabel("step time, plain = 1")
    else:
        curve_chart(axes, setup.curve)
    axes.set_ylim(bottom=0)
    axes.legend(loc="best")
    return figure


def curve_figure(curve: StepCurve) -> Figure:
    """Measured step times, for `slipstream measure`."""
    figure, (axes,) = _figure()
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
            tokens, seconds * 1e3, yerr=1.96 * errors * 1e3, color=_colour(i), label=label, marker="o", ms=3,
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
    figure, panels = _figure(len(candidates))
    for axes, candidate in zip(panels, candidates, strict=True):
        for i, (task, sample) in enumerate(candidate.samples.items()):
            _rates(axes, sample.total, _colour(i), task)
        axes.set(title=_short(candidate.name), xlabel="position in the draft", ylim=(0, 1.02))
        _whole(axes)
        axes.legend(loc="lower left")
    panels[0].set_ylabel("accepted, if all before it was")
    return figure


def _rates(axes: Axes, seen: Acceptance, colour: str, label: str) -> None:
    known = [i for i in range(len(seen.tested)) if seen.tested[i] > 0]
    rates = [seen.accepted[i] / seen.tested[i] for i in known]
    spans = [seen.interval(i) for i in known]
    below = [max(r - low, 0.0) for r, (low, _) in zip(rates, spans, strict=True)]
    above = [max(high - r, 0.0) for r, (_, high) in zip(rates, spans, strict=True)]
    axes.errorbar(
        [i + 1 for i in known], rates, yerr=[below, above], color=colour, label=label, marker="o", ms=3,
        capsize=2, elinewidth=0.8,
    )  # fmt: skip


def cost(advice: Advice) -> Figure:
    """USD a million tokens before and after, by batch size."""
    figure, (axes,) = _figure()
    batches = [b for b in advice.batches if b.cost is not None]
    before = [b.cost or 0.0 for b in batches]
    after = [(b.best.cost if b.best and b.best.cost is not None else b.cost) or 0.0 for b in batches]
    places = list(range(len(batches)))
    for offset, values, colour, label in (
        (-0.2, before, "#8c959f", "plain"),
        (0.2, after, COLOURS[0], "as advised"),
    ):
        bars = axes.bar([p + offset for p in places], values, 0.38, color=colour, label=label)
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
    if not advice.setup.estimate:
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
