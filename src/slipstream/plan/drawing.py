"""What all charts share: style, colours, panels. As SVG they take their colours from the page they stand in:
one drawing for dark and light."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from slipstream.cost.accept import Acceptance
from slipstream.errors import ParameterError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which people with any colour vision can tell apart, without the yellow.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
# Drawn in these, and replaced by the page's own in SVG.
_INK, _GRID = "#1b1f24", "#d0d7de"
_WIDTH, _HEIGHT = 5.2, 3.3


def require_charts() -> None:
    """ParameterError without matplotlib. Imports nothing: to be asked before what takes long."""
    if find_spec("matplotlib") is None:
        raise ParameterError("charts need matplotlib: pip install 'slipstream-lm[bench]', or leave them out")


@contextmanager
def _style() -> Iterator[None]:
    require_charts()
    import matplotlib

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
            "text.parse_math": False,  # a drafter's or a task's name may hold dollar signs
            "xtick.color": _INK,
            "ytick.color": _INK,
            "legend.frameon": False,
            "legend.fontsize": 8,
            "lines.linewidth": 1.8,
        }
    ):
        yield


def new_figure(panels: int = 1) -> tuple[Figure, list[Axes]]:
    """A figure of so many panels that share their y axis."""
    from matplotlib.figure import Figure

    columns = panels if panels == 4 else min(panels, 3)
    rows = -(-panels // columns)
    width = _WIDTH if panels == 1 else 2 * _WIDTH  # a page shows several side by side over its whole width
    figure = Figure(figsize=(width, _HEIGHT * rows))
    axes = figure.subplots(rows, columns, squeeze=False, sharey=True).ravel().tolist()
    for unused in axes[panels:]:
        unused.set_visible(False)
    return figure, axes[:panels]


def _drawn(draw: Callable[[], Figure]) -> Figure:
    figure = draw()
    if figure.get_layout_engine() is None:
        figure.tight_layout()
    return figure


def svg(draw: Callable[[], Figure], title: str) -> str:
    """The drawing as an <svg> that can stand in a page; title: what a screen reader says."""
    with _style():
        figure = _drawn(draw)
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
        figure = _drawn(draw)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=150)
    return buffer.getvalue()


def colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def even_line(axes: Axes, label: str = "plain decoding") -> None:
    """A dashed line where drafting neither gains nor loses."""
    axes.axhline(1.0, color=_INK, linewidth=0.8, linestyle=(0, (4, 3)))
    axes.annotate(
        label, (1.0, 1.0), xycoords=("axes fraction", "data"), xytext=(0, 2), textcoords="offset points",
        ha="right", fontsize=7,
    )  # fmt: skip


def legend_below(figure: Figure, panels: Sequence[Axes]) -> None:
    """One legend for all panels, below them: within a panel it would hide lines."""
    found: dict[str, Any] = {}
    for axes in panels:
        handles, labels = axes.get_legend_handles_labels()
        found.update(zip(labels, handles, strict=True))
    if not found:
        return
    longest = max(map(len, found))
    columns = 2 if longest > 30 else 3 if longest > 18 else 4
    figure.set_figheight(figure.get_figheight() + 0.2 * -(-len(found) // columns))
    figure.set_layout_engine("constrained")
    figure.legend(list(found.values()), list(found), loc="outside lower center", ncols=columns)


def whole_numbers(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def short(name: str) -> str:
    """A drafter as a legend has room for it."""
    return name.replace("draft_model:model=", "draft ").split("/")[-1] if len(name) > 24 else name


def rates_line(axes: Axes, seen: Acceptance, ink: str, label: str) -> None:
    """Conditional acceptance over the position, with Wilson's 95 % interval."""
    known = [i for i in range(len(seen.tested)) if seen.tested[i] > 0]
    rates = [seen.accepted[i] / seen.tested[i] for i in known]
    spans = [seen.interval(i) for i in known]
    below = [max(r - low, 0.0) for r, (low, _) in zip(rates, spans, strict=True)]
    above = [max(high - r, 0.0) for r, (_, high) in zip(rates, spans, strict=True)]
    axes.errorbar(
        [i + 1 for i in known], rates, yerr=[below, above], color=ink, label=label, marker="o", ms=3,
        capsize=2, elinewidth=0.8,
    )  # fmt: skip
