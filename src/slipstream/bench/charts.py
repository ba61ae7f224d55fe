"""The charts of a bench."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from slipstream.bench.bundle import Setting
from slipstream.bench.predict import CLOSE, Compared
from slipstream.bench.summary import Cell, Summary
from slipstream.core.spec import parse_spec
from slipstream.cost.accept import add_all
from slipstream.plan.drawing import (
    colour,
    even_line,
    legend_below,
    new_figure,
    rates_line,
    short,
    whole_numbers,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Drawing = tuple[str, str, Callable[[], "Figure"]]

_PANELS = 9
_PARTS = ("target", "drafter", "prefill", "other")


def name_of(drafter: str) -> str:
    """A drafter as a chart or a narrow column has room for it: its name and what tells it from others."""
    name, values = parse_spec(drafter)
    name = name.rpartition(":")[2] if ":" in name else name
    told = [v if k == "model" else f"{k}={v}" for k, v in values.items()]
    return short(f"{name} {', '.join(told)}".strip())


def drawings(summary: Summary, compared: Sequence[Compared] | None) -> list[Drawing]:
    """(title, what it shows, how to draw it) of every chart of a report."""
    found: list[Drawing] = []
    for batch, temperature in summary.conditions:
        where = f"batch {batch}" + (f", temperature {temperature:g}" if temperature else "")
        cells = summary.at(batch, temperature)
        if len(cells) < 2:
            continue
        found.append(
            (
                f"Speed-up by task, {where}",
                "Whole requests against plain decoding beside them, with the 95 % interval; dotted: a"
                " controller decides how much. Below the line, drafting is slower.",
                partial(speedups, summary, batch, temperature),
            )
        )
        found.append(
            (
                f"Where the time goes, {where}",
                "Milliseconds a token, all rows together, of all tasks.",
                partial(split, cells),
            )
        )
    if any(cell.acceptance.depth for cell in summary.totals):
        found.append(
            (
                "What is accepted",
                "Share of drafted tokens accepted at each position, counting only drafts that got that far."
                " Of the longest drafts.",
                partial(acceptance, summary),
            )
        )
        found.append(
            (
                "Tokens a target pass",
                "τ, the bonus token included; plain decoding has 1.",
                partial(taus, summary),
            )
        )
    if compared and any(c.close is not None for c in compared):
        found.append(
            (
                "Predicted and measured",
                f"A point is a drafter, a length and a task; the band is ±{CLOSE:.0%}.",
                partial(prediction, compared),
            )
        )
    return found


def _lines(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    """Cells of fixed lengths by drafter, by length."""
    found: dict[str, list[Cell]] = {}
    for cell in sorted(cells, key=lambda c: c.setting.depth):
        if cell.setting.fixed:
            found.setdefault(cell.setting.drafter, []).append(cell)
    return found


def _drafters(summary: Summary) -> list[str]:
    """In the order in which they have their colours."""
    return list(dict.fromkeys(s.drafter for s in summary.bundle.settings if not s.plain))


def speedups(summary: Summary, batch: int, temperature: float) -> Figure:
    """Speed-up over draft length, a panel a task, a line a drafter."""
    tasks, drafters = summary.tasks[:_PANELS], _drafters(summary)
    figure, panels = new_figure(len(tasks))
    for axes, task in zip(panels, tasks, strict=True):
        cells = [
            c
            for c in summary.cells
            if c.task == task and (c.setting.batch, c.setting.temperature) == (batch, temperature)
        ]
        for drafter, line in _lines(cells).items():
            values = [c.speedup for c in line]
            ink = colour(drafters.index(drafter))
            axes.errorbar(
                [c.setting.depth for c in line], [v.value for v in values],
                yerr=[[v.value - v.low for v in values], [v.high - v.value for v in values]],
                color=ink, label=name_of(drafter), marker="o", ms=3, capsize=2, elinewidth=0.8,
            )  # fmt: skip
        for cell in cells:
            if cell.setting.controller:
                ink = colour(drafters.index(cell.setting.drafter))
                label = f"{name_of(cell.setting.drafter)}, {cell.setting.how}"
                axes.axhline(cell.speedup.value, color=ink, linestyle=":", linewidth=1.4, label=label)
        even_line(axes)
        axes.set(title=task, xlabel="drafted tokens a step")
        whole_numbers(axes)
    legend_below(figure, panels)
    panels[0].set_ylabel("times as fast as plain")
    return figure


def taus(summary: Summary) -> Figure:
    """Tokens a pass over the length, of all tasks, a panel a condition."""
    drafters, conditions = _drafters(summary), summary.conditions[:_PANELS]
    figure, panels = new_figure(len(conditions))
    for axes, (batch, temperature) in zip(panels, conditions, strict=True):
        cells = summary.at(batch, temperature)
        for drafter, line in _lines(cells).items():
            axes.plot(
                [c.setting.depth for c in line], [c.counts.tau for c in line],
                color=colour(drafters.index(drafter)), label=name_of(drafter), marker="o", ms=3,
            )  # fmt: skip
        warm = f", temperature {temperature:g}" if temperature else ""
        axes.set(title=f"batch {batch}{warm}", xlabel="drafted tokens a step")
        whole_numbers(axes)
    legend_below(figure, panels)
    panels[0].set_ylabel("tokens a target pass")
    return figure


def acceptance(summary: Summary) -> Figure:
    """Conditional acceptance over the position, a panel a drafter, a line a task."""
    drafters = [d for d in _drafters(summary) if _longest(summary, d)][:_PANELS]
    figure, panels = new_figure(len(drafters))
    for axes, drafter in zip(panels, drafters, strict=True):
        longest = _longest(summary, drafter)
        for i, task in enumerate(summary.tasks):
            cells = [c for s in longest if (c := summary.of(s, task))]
            if cells:
                rates_line(axes, add_all(c.acceptance for c in cells[:1]), colour(i), task)
        axes.set(title=name_of(drafter), xlabel="position in the draft", ylim=(0, 1.02))
        whole_numbers(axes)
    legend_below(figure, panels)
    panels[0].set_ylabel("accepted, if all before it was")
    return figure


def _longest(summary: Summary, drafter: str) -> list[Setting]:
    """Of a drafter's fixed lengths the longest; where there are none, its controllers."""
    own = [c.setting for c in summary.totals if c.setting.drafter == drafter and c.acceptance.depth]
    fixed = [s for s in own if s.fixed]
    deepest = max((s.depth for s in fixed), default=0)
    return [s for s in fixed if s.depth == deepest] or own


def split(cells: Sequence[Cell]) -> Figure:
    """Milliseconds a token by where they went, a bar a setting, plain decoding on top."""
    figure, (axes,) = new_figure()
    figure.set_size_inches(10.4, max(0.32 * len(cells) + 1.1, 2.2))
    shown = list(reversed(cells))
    places, left = list(range(len(shown))), [0.0] * len(shown)
    for i, part in enumerate(_PARTS):
        widths = [1e3 * cell.split[part] for cell in shown]
        axes.barh(places, widths, left=left, color=colour(i), label=_part_name(part), height=0.7)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    plain = next((at for at, c in zip(left, shown, strict=True) if c.setting.plain), None)
    if plain is not None:
        axes.axvline(plain, color="#8c959f", linewidth=0.8, linestyle=(0, (4, 3)))
    names = ["plain" if c.setting.plain else f"{name_of(c.setting.drafter)} · {c.setting.how}" for c in shown]
    axes.set_yticks(places, names, fontsize=8)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("ms a token")
    legend_below(figure, [axes])
    return figure


def _part_name(part: str) -> str:
    return {"prefill": "reading prompts", "other": "all else"}.get(part, part)


def prediction(compared: Sequence[Compared]) -> Figure:
    """Predicted over measured speed-up, a point a cell."""
    figure, (axes,) = new_figure()
    known = [c for c in compared if c.predicted is not None and c.measured]
    values = [v for c in known if c.predicted for v in (c.predicted.speedup, c.measured or 0.0)]
    ends = [0.95 * min(values), 1.05 * max(values)]
    axes.fill_between(
        ends, [(1 - CLOSE) * e for e in ends], [(1 + CLOSE) * e for e in ends], color="#8c959f", alpha=0.2
    )
    axes.plot(ends, ends, color="#8c959f", linewidth=0.8)
    for i, drafter in enumerate(dict.fromkeys(c.cell.setting.drafter for c in known)):
        own = [c for c in known if c.cell.setting.drafter == drafter]
        axes.plot(
            [c.measured or 0.0 for c in own], [c.predicted.speedup for c in own if c.predicted], "o", ms=4,
            color=colour(i), label=name_of(drafter), alpha=0.8,
        )  # fmt: skip
    axes.set(xlabel="measured, times as fast as plain", ylabel="predicted", xlim=ends, ylim=ends)
    axes.legend(loc="upper left")
    return figure
