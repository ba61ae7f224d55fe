"""`slipstream measure`: what this machine, this model and these drafters take, as a file for `plan`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli.plan import check_outputs, write
from slipstream.cli.request import (
    MOST_THREADS,
    DeviceOption,
    DtypeOption,
    EmbeddingOption,
    ThreadsOption,
    TrustOption,
    WeightsOption,
)
from slipstream.errors import ParameterError
from slipstream.prompts.rows import read_prompts

if TYPE_CHECKING:
    from slipstream.cost.bundle import Bundle

DEFAULT_OUT = Path("slipstream-measure.json")


def measure(
    model: Annotated[
        str, typer.Option(help="Catalogue name (see `slipstream models`), folder, .gguf file or hub id.")
    ],
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[:KEY=VALUE,...]",
            help="A way of drafting to measure; may be repeated. Without one, only the target is measured.",
            show_default=False,
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="What people ask the model: a text file with a prompt a line, or .jsonl with objects that"
            ' hold "prompt", "messages", "turns" or "question", and "task". Default: a small set of our own.',
            show_default=False,
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="The file to write.")] = DEFAULT_OUT,
    png: Annotated[
        Path | None, typer.Option(help="Also draw the step times to this file.", show_default=False)
    ] = None,
    rows: Annotated[str, typer.Option(help="Batch sizes.")] = "1,2,4,8",
    nodes: Annotated[
        str, typer.Option(help="Tokens a row, 1 is plain decoding.")
    ] = "1,2,3,4,5,6,7,8,9,12,16,17",
    contexts: Annotated[str, typer.Option(help="Tokens in the cache before the step.")] = "256",
    depths: Annotated[
        str, typer.Option(help="Lengths of drafts; acceptance is counted with the longest.")
    ] = "1,4,8",
    rounds: Annotated[int, typer.Option(help="Repeats of each step.")] = 7,
    tokens: Annotated[int, typer.Option(help="Tokens of each answer.")] = 64,
    most_tokens: Annotated[int, typer.Option(help="Leave out steps of more tokens in all.")] = 64,
    limit: Annotated[
        int | None, typer.Option(help="Prompts used, the first ones.", show_default=False)
    ] = None,
    dtype: DtypeOption = "auto",
    weights: WeightsOption = "plain",
    embedding: EmbeddingOption = "plain",
    device: DeviceOption = "cpu",
    threads: ThreadsOption = None,
    json_: Annotated[bool, typer.Option("--json", help="Print the measurement as JSON too.")] = False,
    trust_remote_code: TrustOption = False,
) -> None:
    """Measure step times, drafters and acceptance; `slipstream plan --measured FILE` turns them into advice.

    Nothing else should run meanwhile: repeats that scatter are told, and the file says so.
    """
    for name, value in (("limit", limit), ("threads", threads)):
        if value is not None and value < 1:
            raise ParameterError(f"--{name} must be at least 1, not {value}")
    if threads is not None and threads > MOST_THREADS:
        raise ParameterError(f"--threads must be at most {MOST_THREADS}, not {threads}")
    asked = read_prompts(prompts, limit)
    check_outputs(out, drawn=png)
    batches, widths = numbers("rows", rows), numbers("nodes", nodes)
    cached, lengths = numbers("contexts", contexts), numbers("depths", depths)

    from slipstream.cli.output import print_json, progress
    from slipstream.core.precision import check_precision
    from slipstream.drafters import configure

    check_precision(weights, embedding)
    specs = list(dict.fromkeys(spec.strip() for spec in drafter or []))
    for spec in specs:  # a mistyped one is told before anything is loaded
        if spec == "none":
            raise ParameterError("plain decoding is always measured: leave out --drafter none")
        configure(spec)
    with progress() as drawn:
        drawn.stage(f"looking for {model}", 0)
        import torch

        import slipstream
        from slipstream.plan.measure import Plan
        from slipstream.plan.measure import measure as take

        if threads is not None:
            torch.set_num_threads(threads)
        plan = Plan(batches, widths, cached, lengths, rounds=rounds, tokens=tokens, most_tokens=most_tokens)
        options: dict[str, Any] = {
            "dtype": dtype,
            "weights": weights,
            "embedding": embedding,
            "device": device,
            "trust_remote_code": trust_remote_code,
        }
        with slipstream.load(model, max_rows=max(plan.rows), progress=drawn, **options) as session:
            bundle = take(session, model, specs, asked, plan, drawn)
    write(out, bundle.model_dump_json(indent=1) + "\n")
    if png is not None:
        _draw(png, bundle)
    if json_:
        print_json(bundle.model_dump())
    else:
        _print(bundle)
    typer.echo(f"kept in {out}; next: slipstream plan --measured {out} --batch {rows}", err=True)


def numbers(name: str, text: str) -> tuple[int, ...]:
    """From `1,2,4`, sorted."""
    try:
        return tuple(sorted({int(part) for part in text.split(",") if part.strip()}))
    except ValueError:
        raise ParameterError(f"--{name} must be whole numbers such as 1,2,4, not {text!r}") from None


def _draw(path: Path, bundle: Bundle) -> None:
    from slipstream.plan.charts import curve_figure
    from slipstream.plan.drawing import png

    write(path, png(lambda: curve_figure(bundle.step_curve)))


def _print(bundle: Bundle) -> None:
    from rich.markup import escape

    from slipstream.cli.output import plain_table, stdout
    from slipstream.cost.bundle import busy_reasons
    from slipstream.cost.roofline import EXTRA, extra_cost, measured_regime
    from slipstream.plan.page import counted, drafted, milliseconds

    console, curve, machine = stdout(), bundle.step_curve, bundle.machine
    console.print(
        f"{bundle.model} ({bundle.dtype}) on {machine.name}, {counted(machine.threads, 'thread')}",
        markup=False,
    )
    rate = machine.flops.get(bundle.dtype)
    if machine.bandwidth and rate:
        console.print(
            f"memory {machine.bandwidth / 1e9:.3g} GB/s, matrix product {rate / 1e9:.3g} GFLOP/s, ridge point"
            f" {rate / machine.bandwidth:.3g} operations a byte"
        )
    table = plain_table("\nROWS", "\nREGIME", "\nPLAIN STEP", *(f"\n{k} MORE" for k in EXTRA))
    context = bundle.steps[0].context
    for rows in curve.rows_at():
        extra = extra_cost(curve, rows, context)
        told = [f"{v:+.0%}" if curve.covers(rows, 1 + k, context) else "" for k, v in extra.items()]
        plain = milliseconds(float(curve.seconds(rows, 1, context)))
        table.add_row(str(rows), measured_regime(curve, rows, context), plain, *told)
    console.print(table)
    console.print("What verifying so many more tokens a row adds to a step.", style="dim")
    for jump in curve.jumps():
        console.print(
            f"kink with {counted(jump.rows, 'row')}: {jump.tokens[1]} tokens take {jump.ratio:.2f} times as"
            f" long as {jump.tokens[0]}"
        )
    if bundle.drafts:
        table = plain_table("\nDRAFTER", "\nROWS", "\nTOKENS", "\nTIME", "\nACCEPTED")
        from slipstream.cost.accept import add_all

        for name in bundle.drafter_names:
            seen = add_all(s.total for s in bundle.samples(name).values())
            for d in (d for d in bundle.drafts if d.drafter == name):
                took = milliseconds(sorted(d.seconds)[len(d.seconds) // 2])
                table.add_row(escape(name), str(d.rows), drafted(d.depth, d.nodes), took, f"{seen.rate:.0%}")
        console.print(table)
    console.print(f"repeats of a step differ by at most {bundle.spread:.0%}")
    for reason in busy_reasons(bundle):
        console.print(f"The machine was not quiet: {reason}. Measure again.", style="red", markup=False)
