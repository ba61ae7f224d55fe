"""Advice as a JSON object and as one HTML page that needs nothing from outside."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from slipstream.plan.advise import Advice, BatchAdvice, Option
from slipstream.plan.charts import drawings
from slipstream.plan.drawing import svg
from slipstream.plan.page import render
from slipstream.version import __version__

SCHEMA = "slipstream-plan/1"


def to_json(advice: Advice) -> dict[str, Any]:
    """All numbers, in seconds, bytes, tokens and USD; no charts."""
    setup = advice.setup
    curve = setup.curve
    found: dict[str, Any] = finite(
        {
            "schema": SCHEMA,
            "slipstream": __version__,
            "estimate": setup.estimate,
            "acceptance_given": setup.given,
            "verdict": advice.verdict,
            "model": {
                "name": setup.model,
                "dtype": setup.dtype,
                "parameters": setup.parameters,
                "weight_bytes": setup.weight_bytes,
                "kv_bytes_per_token": setup.kv_bytes,
            },
            "machine": {
                "name": setup.machine,
                "memory_bytes": setup.memory or None,
                "bandwidth": setup.bandwidth,
                "flops": setup.flops,
                "ridge_point": ridge(advice),
                "price_per_hour": setup.price,
            },
            "context": setup.context,
            "prompt_tokens": setup.prompt_tokens,
            "off_from_batch": advice.off_from,
            "looked_to_batch": advice.looked_to,
            "batches": [_batch(b) for b in advice.batches],
            "rules": {name: [asdict(rule) for rule in rules] for name, rules in advice.rules.items()},
            "checklist": [asdict(check) for check in advice.checks],
            "scenarios": [asdict(scenario) for scenario in advice.scenarios],
            "lengths": {
                name: {str(b): [asdict(p) for p in points] for b, points in found.items()}
                for name, found in advice.lengths.items()
            },
            "kinks": [{**asdict(j), "ratio": j.ratio} for j in curve.jumps()] if curve else [],
            "inversions": [{**asdict(j), "ratio": j.ratio} for j in curve.inversions] if curve else [],
            "spread": setup.spread,
            "busy": list(setup.busy),
            "assumptions": list(setup.assumptions),
        }
    )
    return found


def ridge(advice: Advice) -> float | None:
    """Operations a byte at which memory and arithmetic take the same time; None: a rate is not known."""
    setup = advice.setup
    return setup.flops / setup.bandwidth if setup.flops and setup.bandwidth else None


def _batch(b: BatchAdvice) -> dict[str, Any]:
    return {
        "batch": b.batch,
        "regime": b.regime,
        "operations_per_byte": b.intensity,
        "spare_tokens": b.spare,
        "extra_verify_cost": {str(k): v for k, v in b.extra.items()},
        "plain": {"step_seconds": b.plain.step_seconds, "tokens_per_second": b.plain.rate},
        "cost_per_million_before": b.cost,
        "cost_per_million_after": b.best.cost if b.best else b.cost,
        "memory_bytes": b.memory,
        "fits": b.fits,
        "first_token_seconds": b.first_token,
        "speculate": b.best is not None,
        "best": _option(b.best) if b.best else None,
        "options": [_option(o) for o in b.options],
        "tasks": {task: _option(o) if o else None for task, o in b.tasks.items()},
    }


def _option(o: Option) -> dict[str, Any]:
    p = o.prediction
    return {
        "drafter": o.drafter,
        "num_speculative_tokens": p.depth,
        "nodes": p.nodes,
        "flags": o.flags,
        "tau": p.tau,
        "speedup": p.speedup,
        "speedup_low": p.low,
        "speedup_high": p.high,
        "tokens_per_second": p.rate,
        "seconds": {
            "draft": p.draft_seconds,
            "verify": p.verify_seconds,
            "overhead": p.overhead_seconds,
            "plain": p.plain_seconds,
        },
        "extra_memory_bytes": o.memory,
        "cost_per_million": o.cost,
        "classic_formula": o.classic,
        "simple_rule": o.simple,
        "second_token_wait_seconds": o.second_token_wait,
        "pays": o.pays,
        "certain": o.sure,
    }


def finite(value: Any) -> Any:
    """JSON has no infinities."""
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# -- HTML -------------------------------------------------------------------------------------------


def to_html(advice: Advice) -> str:
    """One page, see `plan.page`."""
    charts = [(title, about, svg(draw, title)) for title, about, draw in drawings(advice)]
    return render(
        "slipstream.plan", "report.html.j2", a=advice, s=advice.setup, charts=charts, ridge=ridge(advice)
    )
