"""`slipstream doctor`: what this machine can run, and what would be refused and why."""

from __future__ import annotations

import platform
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli.memory_plan import as_json, check_numbers, print_plan
from slipstream.cli.request import (
    DEFAULT_MODEL,
    DeviceOption,
    DtypeOption,
    EmbeddingOption,
    TrustOption,
    WeightsOption,
)
from slipstream.errors import ParameterError, SlipstreamError

if TYPE_CHECKING:
    from slipstream.plan.memory import MemoryPlan


def doctor(
    model: Annotated[
        str | None,
        typer.Argument(
            help=f"Also check this model; nothing is downloaded. With --drafter by default {DEFAULT_MODEL}.",
            metavar="[MODEL]",
            show_default=False,
        ),
    ] = None,
    model_: Annotated[
        str | None, typer.Option("--model", help="The same, as other commands have it.", show_default=False)
    ] = None,
    drafter: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[:KEY=VALUE,...]",
            help="Also say how much memory the model and this drafter would take, before either is loaded.",
            show_default=False,
        ),
    ] = None,
    context: Annotated[
        int | None, typer.Option(help="Tokens of prompt and answer. Default: the model's own.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Sequences at once.")] = 1,
    dtype: DtypeOption = "auto",
    weights: WeightsOption = "plain",
    embedding: EmbeddingOption = "plain",
    device: DeviceOption = "cpu",
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    trust_remote_code: TrustOption = False,
) -> None:
    """Report on this machine: versions, processor, memory, disk, GPUs, models; and whether a model fits.

    Exit status 1 if the model is refused or does not fit.
    """
    check_numbers(context, batch)
    if model is not None and model_ is not None:
        raise ParameterError(f"two models were named, {model} and {model_}: give one")
    model = model or model_
    from slipstream.core.precision import check_precision

    check_precision(weights, embedding)
    if drafter is not None:
        from slipstream.drafters import check_spec

        check_spec(drafter)
    from slipstream.cli.output import print_json

    precision = {"weights": weights, "embedding": embedding}
    report = gather(model, **precision)
    refused = model is not None and report["models"][-1]["refused"] is not None
    plan = None
    if drafter is not None or (model is not None and not refused):
        plan = _plan(
            model,
            drafter,
            context=context,
            rows=batch,
            dtype=dtype,
            device=device,
            trust_remote_code=trust_remote_code,
            **precision,
        )
    report["memory_plan"] = None if plan is None else as_json(plan)
    if json_:
        print_json(report)
    else:
        _print(report)
        if plan is not None:
            print_plan(plan)
    if refused or (plan is not None and not plan.fits):
        raise typer.Exit(1)


def _plan(model: str | None, drafter: str | None, **options: Any) -> MemoryPlan | None:
    """None for a model alone of which nothing is here and nothing is known; its row says so."""
    from slipstream.errors import ModelError
    from slipstream.plan.memory import plan_memory

    try:
        return plan_memory(model or DEFAULT_MODEL, drafter or "none", **options)
    except ModelError:
        if drafter is None:
            return None
        raise


def gather(model: str | None, **precision: str) -> dict[str, Any]:
    """The report as plain values; sizes in bytes. precision: of the named model's weights, as to `load`."""
    import torch
    import transformers

    from slipstream.model import memory
    from slipstream.model.catalogue import CATALOGUE
    from slipstream.model.store import cache_dir
    from slipstream.version import __version__

    cache = cache_dir()
    there = next(p for p in (cache, *cache.absolute().parents) if p.exists())
    processor = _processor()
    gpus = _gpus()
    dtype, why = _advised(gpus)
    report: dict[str, Any] = {
        "versions": {
            "slipstream": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "system": platform.platform(),
        "processor": processor,
        "memory": {
            "total_bytes": memory.total(),
            "available_bytes": memory.available(),
            "cgroup_limit_bytes": memory.cgroup_limit(Path("/")),
        },
        "cache": {"path": str(cache), "free_bytes": shutil.disk_usage(there).free},
        "gpus": gpus,
        "advised_dtype": dtype,
        "advised_because": why,
        "models": [],
    }
    named = [entry.name for entry in CATALOGUE if entry.name != model]
    for spec in named + ([model] if model is not None else []):
        wanted = precision if spec == model else {}
        report["models"].append(_check(spec, dtype, "cuda" if gpus else "cpu", **wanted))
    return report


def _flags() -> dict[str, Any]:
    """What torch knows about the processor, by its own names."""
    import torch

    try:
        return dict(torch.cpu.get_capabilities())
    except AttributeError:  # an older torch
        return {"avx2": torch.cpu._is_avx2_supported(), "avx512_f": torch.cpu._is_avx512_supported()}


def _processor() -> dict[str, Any]:
    import psutil
    import torch

    flags = _flags()
    wanted = ("avx2", "avx512_f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8", "sve", "bf16")
    return {
        "name": str(flags.get("cpu_name") or platform.processor() or platform.machine()),
        "cores": psutil.cpu_count(logical=False) or psutil.cpu_count() or 1,
        "threads": psutil.cpu_count() or 1,
        "torch_threads": torch.get_num_threads(),
        "torch_kernels": torch.backends.cpu.get_cpu_capability(),
        "instructions": [name for name in wanted if flags.get(name)],
    }


def _gpus() -> list[dict[str, Any]]:
    import torch

    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        properties = torch.cuda.get_device_properties(index)
        found.append(
            {
                "device": f"cuda:{index}",
                "name": properties.name,
                "capability": f"{properties.major}.{properties.minor}",
                "free_bytes": free,
                "total_bytes": total,
            }
        )
    return found


def _advised(gpus: list[dict[str, Any]]) -> tuple[str, str]:
    """The dtype to load models in, and the reason."""
    from slipstream.model.packed import computes_bfloat16

    if gpus:
        if float(gpus[0]["capability"]) >= 8:
            return "bfloat16", "the GPU computes it natively"
        return "float16", "the GPU has no native bfloat16"
    if computes_bfloat16():
        return "bfloat16", "the processor has fast products of it and it halves the memory traffic"
    return "float32", "the processor has no fast products of bfloat16; --weights int8 is faster still"


def _check(
    spec: str, dtype: str, device: str, weights: str = "plain", embedding: str = "plain"
) -> dict[str, Any]:
    """Whether a model could be loaded now, without downloading anything."""
    import torch

    from slipstream.model.catalogue import find
    from slipstream.model.checkpoint import inspect
    from slipstream.model.load import DTYPES, local_folder, require_memory

    row: dict[str, Any] = {"model": spec, "path": None, "weight_bytes": None, "refused": None, "note": None}
    try:
        folder = local_folder(spec)
        if folder is None:
            row["note"] = f"not on this machine: slipstream pull {spec}"
            entry = find(spec)
            if entry is None:
                return row
            row["weight_bytes"] = entry.parameters * DTYPES[dtype].itemsize
        else:
            row["path"] = str(folder)
            row["weight_bytes"] = inspect(folder).bytes_as(DTYPES[dtype].itemsize)
        if weights == "int8":
            from slipstream.model.blueprint import Blueprint

            shape = Blueprint.of(spec, dtype=dtype, weights=weights, embedding=embedding)
            row["weight_bytes"] = shape.weight_bytes
        kept = "int8" if weights == "int8" else dtype
        where = "cpu" if weights == "int8" else device
        require_memory(spec, row["weight_bytes"], kept, torch.device(where))
    except SlipstreamError as error:
        row["refused"] = str(error)
    return row


def _print(report: dict[str, Any]) -> None:
    from slipstream.cli.output import plain_table, stdout
    from slipstream.model.progress import size

    cpu, memory, cache = report["processor"], report["memory"], report["cache"]
    limit = memory["cgroup_limit_bytes"]
    inside = f" (container limit {size(limit)})" if limit is not None else ""
    gpus = [
        f"{g['device']} {g['name']}, {size(g['free_bytes'])} of {size(g['total_bytes'])} free"
        for g in report["gpus"]
    ]
    rows = [
        ("versions", ", ".join(f"{name} {number}" for name, number in report["versions"].items())),
        ("system", report["system"]),
        (
            "processor",
            f"{cpu['name']}, {cpu['cores']} cores, {cpu['threads']} threads "
            f"(torch uses {cpu['torch_threads']})",
        ),
        (
            "instructions",
            f"{' '.join(cpu['instructions']) or 'none of interest'} (torch kernels: {cpu['torch_kernels']})",
        ),
        ("memory", f"{size(memory['available_bytes'])} available of {size(memory['total_bytes'])}{inside}"),
        ("cache", f"{cache['path']} ({size(cache['free_bytes'])} free)"),
        ("GPUs", "\n".join(gpus) or "none that torch can use"),
        ("advised dtype", f"{report['advised_dtype']}: {report['advised_because']}"),
    ]
    console = stdout()
    table = plain_table("", "")
    table.show_header = False
    for name, value in rows:
        table.add_row(f"[bold]{name}", value.replace("[", r"\["))
    console.print(table)
    models = plain_table("\nMODEL", "\nWEIGHTS", "\nSTATE")
    for row in report["models"]:
        weights = size(row["weight_bytes"]) if row["weight_bytes"] is not None else "-"
        state = f"refused: {row['refused']}" if row["refused"] else row["note"] or f"fits: {row['path']}"
        models.add_row(row["model"], weights, state.replace("[", r"\["))
    console.print(models)
