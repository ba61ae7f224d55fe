"""A bench as a JSON object and as one HTML page that needs nothing from outside."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from slipstream.bench.bundle import BenchBundle
from slipstream.bench.charts import drawings, name_of
from slipstream.bench.compare import Change, Comparison, compare
from slipstream.bench.figures import Figure, figures
from slipstream.bench.predict import Compared, Predictor
from slipstream.bench.recorded import Replayed
from slipstream.bench.summary import Cell, Ratio, Summary
from slipstream.cost.bundle import Bundle
from slipstream.plan.drawing import svg
from slipstream.plan.page import render
from slipstream.plan.report import finite
from slipstream.version import __version__

SCHEMA = "slipstream-bench-report/1"


@dataclass(frozen=True)
class Report:
    """All that is said of a bench. figures: the project's own claims, if they were asked for. compared:
    predictions beside what was measured, if there is a measurement. comparison: with a baseline, if there is
    one. notes: what a reader has to know. replayed: drafters that were not run."""

    summary: Summary
    figures: tuple[Figure, ...]
    compared: tuple[Compared, ...] = ()
    comparison: Comparison | None = None
    notes: tuple[str, ...] = field(default=())
    replayed: tuple[Replayed, ...] = ()

    @property
    def verdict(self) -> str:
        """One sentence: the best setting, and whether the tokens are plain decoding's."""
        totals = [c for c in self.summary.totals if not c.setting.plain]
        if not totals:
            return "Only plain decoding was measured."
        best = max(totals, key=lambda c: c.speedup.value)
        said = "Nothing was faster than plain decoding"
        if best.speedup.value > 1:
            said = f"Best: {best.speedup.value:.2f} times as fast as plain decoding with {best.setting.label}"
            said += f" ({best.setting.where})"
        broken = len(self.summary.broken)
        if broken:
            return f"{said}. BROKEN: {broken} answers have other tokens than plain decoding."
        return f"{said}; every answer that was promised plain decoding's tokens has them."

    @property
    def exact(self) -> bool:
        return not self.summary.broken


def make_report(
    bundle: BenchBundle,
    measurement: Bundle | None = None,
    baseline: BenchBundle | None = None,
    *,
    claims: bool = False,
) -> Report:
    """claims: whether the sweep shows what the project claims of its planner (`bench/sweep.py`); of any other
    bench they say nothing. Raises ParameterError where the measurement or the baseline is of another model.
    """
    summary = Summary(bundle)
    predictor = None if measurement is None else Predictor(summary, measurement)
    notes = [f"The machine was not quiet: {reason}." for reason in summary.busy]
    if not bundle.complete:
        notes.append("Not all is measured: the same command goes on with it.")
    if predictor is not None:
        notes += [f"The prediction is from another place: {note}." for note in predictor.notes]
    repeated = [u for u in bundle.units if len(set(u.prompts)) < len(u.prompts)]
    if repeated:
        notes.append(
            f"{len(repeated)} of {len(bundle.units)} units repeat prompts: their tasks have fewer than the"
            " batch has rows."
        )
    return Report(
        summary,
        tuple(figures(summary, predictor)) if claims else (),
        () if predictor is None else tuple(predictor.cells()),
        None if baseline is None else compare(bundle, baseline),
        tuple(notes),
    )


def to_json(report: Report) -> dict[str, Any]:
    """Everything that is derived, in seconds, tokens and shares; the raw numbers are in the bundle."""
    summary, bundle = report.summary, report.summary.bundle
    predicted = {(c.cell.setting, c.cell.task): c for c in report.compared}
    found: dict[str, Any] = finite(
        {
            "schema": SCHEMA,
            "slipstream": __version__,
            "verdict": report.verdict,
            "exact": report.exact,
            "complete": bundle.complete,
            "model": bundle.model,
            "target": bundle.target.model_dump(),
            "plan": bundle.plan.model_dump(),
            "sessions": [note.model_dump() for note in bundle.sessions],
            "spread": summary.spread,
            "notes": list(report.notes),
            "cells": [_cell(c, predicted.get((c.setting, c.task))) for c in summary.cells],
            "totals": [_cell(c, None) for c in summary.totals],
            "differences": [
                {
                    "setting": d.setting.model_dump(),
                    "prompt": d.prompt,
                    "round": d.round,
                    "at": d.at,
                    "broken": d.broken,
                    "why": d.why,
                }
                for d in summary.differences
            ],
            "figures": [{**asdict(f), "verdict": f.verdict} for f in report.figures],
            "comparison": None if report.comparison is None else _comparison(report.comparison),
            "replayed": [_replayed(one) for one in report.replayed],
        }
    )
    return found


def _cell(c: Cell, predicted: Compared | None) -> dict[str, Any]:
    counts = c.counts
    return {
        **c.setting.model_dump(),
        "task": c.task,
        "answers": c.answers,
        "same_as_plain": c.same,
        "tokens_per_second": c.rate,
        "speedup": asdict(c.speedup),
        "decoding_speedup": asdict(c.decoding),
        "steady_speedup": None if c.steady is None else asdict(c.steady),
        "tau": counts.tau,
        "conditional_acceptance": counts.conditional_acceptance,
        "tested_at": counts.tested_at,
        "accepted_at": counts.accepted_at,
        "seconds_per_token": c.split,
        "predicted": None if predicted is None else _predicted(predicted),
    }


def _predicted(c: Compared) -> dict[str, Any]:
    p = c.predicted
    if p is None:
        return {"why": c.why}
    return {
        "speedup": p.speedup,
        "low": p.low,
        "high": p.high,
        "tau": p.tau,
        "error": c.error,
        "close": c.close,
    }


def _replayed(one: Replayed) -> dict[str, Any]:
    return {
        "drafter": one.drafter,
        "depth": one.depth,
        "nodes": one.nodes,
        "temperature": one.temperature,
        "tasks": {
            task: {
                "passes": counts.passes,
                "tau": counts.tau,
                "conditional_acceptance": counts.conditional_acceptance,
                "drafted_at": counts.drafted_at,
                "tested_at": counts.tested_at,
                "accepted_at": counts.accepted_at,
            }
            for task, counts in one.counts.items()
        },
    }


def _comparison(found: Comparison) -> dict[str, Any]:
    return {
        "verdict": found.verdict,
        "noise": {str(batch): value for batch, value in found.noise.items()},
        "notes": list(found.notes),
        "changes": [
            {**asdict(c), "setting": c.setting.model_dump(), "verdict": c.verdict} for c in found.changes
        ],
    }


# -- HTML -------------------------------------------------------------------------------------------


def to_html(report: Report) -> str:
    """One page, see `plan.page`."""
    summary = report.summary
    tasks = summary.tasks if len(summary.tasks) > 1 else []
    charts = [(title, about, svg(draw, title)) for title, about, draw in drawings(summary, report.compared)]
    changes = report.comparison.changes if report.comparison else ()
    return render(
        "slipstream.bench",
        "bench.html.j2",
        r=report,
        s=summary,
        b=summary.bundle,
        tasks=tasks,
        charts=charts,
        changes=sorted(changes, key=_interest),
        name_of=name_of,
        times=times,
    )


def _interest(change: Change) -> tuple[int, float]:
    """What changed first, the largest change before others."""
    order = {"slower": 0, "faster": 0, "unclear": 1, "same": 2}
    return order[change.verdict], -abs(change.change)


def times(ratio: Ratio | None) -> str:
    """A speed-up with its interval."""
    if ratio is None:
        return "–"
    if not ratio.certain:
        return f"{ratio.value:.2f}"
    return f"{ratio.value:.2f} ({ratio.low:.2f}–{ratio.high:.2f})"
