"""How `slipstream doctor` shows what a model and a drafter would take."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slipstream.errors import ParameterError

if TYPE_CHECKING:
    from slipstream.core.estimate import MemoryEstimate
    from slipstream.plan.memory import MemoryPlan


def check_numbers(context: int | None, batch: int) -> None:
    """ParameterError for numbers that make no sense, before anything is imported."""
    if batch < 1:
        raise ParameterError(f"batch must be at least 1, not {batch}")
    if context is not None and context < 2:
        raise ParameterError(f"context must be at least 2 tokens, not {context}")


def as_json(plan: MemoryPlan) -> dict[str, Any]:
    return {
        "model": plan.model,
        "drafter": plan.drafter_spec,
        "dtype": plan.dtype,
        "weights": plan.weights,
        "embedding": plan.embedding,
        "device": plan.device,
        "context": plan.context,
        "batch": plan.rows,
        "target": _parts(plan.target),
        "drafter_memory": _parts(plan.drafter),
        "needed_bytes": plan.needed,
        "available_bytes": plan.available,
        "fits": plan.fits,
        "advice": None if plan.fits else plan.advice,
        "notes": [*plan.target.notes, *plan.drafter.notes],
    }


def _parts(estimate: MemoryEstimate) -> dict[str, Any]:
    return {
        "weight_bytes": estimate.weights,
        "cache_bytes": estimate.cache,
        "table_bytes": estimate.tables,
        "total_bytes": estimate.total,
        "unknown": estimate.unknown or None,
    }


def print_plan(plan: MemoryPlan) -> None:
    from slipstream.cli.output import plain_table, stdout
    from slipstream.model.progress import size

    table = plain_table("\nMEMORY", "\nWEIGHTS", "\nKEYS, VALUES", "\nTABLES", "\nIN ALL")
    named = (("target", plan.model, plan.target), ("drafter", plan.drafter_spec, plan.drafter))
    for role, name, held in named:
        parts = [size(part) if part else "-" for part in (held.weights, held.cache, held.tables)]
        whole = size(held.total)
        if held.unknown:
            whole = f"at least {whole}" if held.total else "unknown"
        table.add_row(f"{role} {name}".replace("[", r"\["), *parts, whole)
    console = stdout()
    console.print(table)
    rows = "1 sequence" if plan.rows == 1 else f"{plan.rows} sequences"
    found = f"{size(plan.needed)} with room to work, {size(plan.available)} available"
    for line in (
        f"{_kept(plan)}, {rows} of {plan.context} tokens: {found}: {_verdict(plan)}",
        *((f"unknown: {plan.drafter.unknown}",) if plan.drafter.unknown else ()),
        *plan.target.notes,
        *plan.drafter.notes,
    ):
        console.print(line, markup=False, soft_wrap=True)


def _kept(plan: MemoryPlan) -> str:
    if plan.weights == "plain":
        return plan.dtype
    return f"int8 and {plan.dtype}{', embedding int8' if plan.embedding == 'int8' else ''}"


def _verdict(plan: MemoryPlan) -> str:
    if not plan.fits:
        return f"refused. {plan.advice[0].upper()}{plan.advice[1:]}"
    return "fits" if not plan.drafter.unknown else "fits but for what is unknown"
