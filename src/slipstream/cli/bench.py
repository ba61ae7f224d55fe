"""`slipstream bench`: whole answers by every drafter, length and batch size, beside plain decoding."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli.measure import numbers
from slipstream.cli.plan import check_outputs, write
from slipstream.cli.request import MOST_THREADS, DeviceOption, DtypeOption, ThreadsOption, TrustOption
from slipstream.errors import ParameterError

if TYPE_CHECKING:
    from slipstream.bench.bundle import BenchBundle, Plan
    from slipstream.bench.recorded import Replayed
    from slipstream.cost.bundle import Bundle
    from slipstream.prompts.rows import Row

DEFAULT_OUT = Path("slipstream-bench.json")


def bench(
    model: Annotated[
        str | None,
        typer.Option(
            help="Catalogue name (see `slipstream models`), folder, .gguf file or hub id.", show_default=False
        ),
    ] = None,
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[:KEY=VALUE,...]",
            help="A way of drafting; may be repeated. Plain decoding is always measured beside them.",
            show_default=False,
        ),
    ] = None,
    length: Annotated[
        str,
        typer.Option(
            help="Drafted tokens a step, such as 2,4,7; a drafter whose options say num_speculative_tokens"
            " has that. Default: each drafter's own."
        ),
    ] = "",
    controller: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[:KEY=VALUE,...]",
            help="Also with this controller, such as goodput:curve=FILE; may be repeated.",
            show_default=False,
        ),
    ] = None,
    temperature: Annotated[str, typer.Option(help="Temperatures, such as 0,0.8; 0 is greedy.")] = "0",
    batch: Annotated[str, typer.Option(help="Sequences decoded at once, such as 1,4,8.")] = "1",
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="What is asked: a text file with a prompt a line, or .jsonl as Spec-Bench, MT-Bench,"
            " HumanEval and GSM8K are published. Default: a small set of our own.",
            show_default=False,
        ),
    ] = None,
    task: Annotated[
        list[str] | None, typer.Option(help="Only prompts of this task; may be repeated.", show_default=False)
    ] = None,
    limit: Annotated[
        int | None, typer.Option(help="Prompts used of each task, the first ones.", show_default=False)
    ] = None,
    tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 64,
    rounds: Annotated[int, typer.Option(help="How often everything is measured.")] = 3,
    seed: Annotated[int, typer.Option(help="Of the answers, where the temperature is not 0.")] = 0,
    minutes: Annotated[
        float | None,
        typer.Option(
            help="Begin nothing that would end later; the same command goes on.", show_default=False
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="The file to write.")] = DEFAULT_OUT,
    html: Annotated[
        Path | None, typer.Option(help="Also write a report with charts to this file.", show_default=False)
    ] = None,
    measurement: Annotated[
        list[Path] | None,
        typer.Option(
            help="What `slipstream measure` wrote: what it predicts is shown beside what was measured.",
            show_default=False,
        ),
    ] = None,
    baseline: Annotated[
        Path | None,
        typer.Option(help="An earlier bench: say what changed beyond noise.", show_default=False),
    ] = None,
    bundle: Annotated[
        Path | None,
        typer.Option(help="Measure nothing, report what this file holds.", show_default=False),
    ] = None,
    replay: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[:KEY=VALUE,...]",
            help="With --bundle: what a drafter that needs no target would have had accepted on the answers"
            " in it, in seconds; at --length, if given. May be repeated.",
            show_default=False,
        ),
    ] = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "cpu",
    threads: ThreadsOption = None,
    json_: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    trust_remote_code: TrustOption = False,
) -> None:
    """Measure whole answers, in rounds, everything interleaved; report speed-ups, acceptance and exactness.

    A run that was killed or whose --minutes were over goes on with the same command. Exit status 1 where
    tokens differ from plain decoding's that must not.
    """
    check_outputs(out if bundle is None else None, drawn=html)
    measured, before = _read(measurement, baseline)
    if bundle is not None:
        if model or drafter:
            raise ParameterError(
                "--bundle measures nothing: leave out --model and --drafter (--replay tries a drafter on"
                " what is recorded)"
            )
        from slipstream.bench.bundle import read_bench

        recorded = read_bench(bundle)
        _tell(recorded, measured, before, html, json_, _replay(recorded, replay or [], length))
        return
    if replay:
        raise ParameterError("--replay needs --bundle FILE: the answers recorded in it are replayed")
    if model is None:
        raise ParameterError("--model is missing: name what to measure, or --bundle FILE to report a bench")
    if threads is not None and not 1 <= threads <= MOST_THREADS:
        raise ParameterError(f"--threads must be from 1 to {MOST_THREADS}, not {threads}")
    if minutes is not None and not 0 < minutes < float("inf"):
        raise ParameterError(f"--minutes must be above 0, not {minutes:g}")
    plan = _plan(drafter or [], length, controller or [], temperature, batch, tokens, rounds, seed)
    asked = choose(prompts, task or [], limit)
    load: dict[str, Any] = {"dtype": dtype, "device": device, "trust_remote_code": trust_remote_code}
    from slipstream.bench.journal import journal_of, keep_bundle
    from slipstream.model import disk

    with disk.held(journal_of(out)):
        found = _measure(model, plan, asked, out, minutes, threads, load, measured, before)
        keep_bundle(out, found)
    typer.echo(f"kept in {out}", err=True)
    _tell(found, measured, before, html, json_)


def _replay(recorded: BenchBundle, specs: list[str], length: str) -> list[Replayed]:
    from slipstream.bench.recorded import replay_all

    lengths = numbers("length", length)
    if lengths and lengths[0] < 1:
        raise ParameterError(f"--length must be whole numbers from 1 on, not {lengths[0]}")
    return replay_all(recorded, specs, lengths)


def _read(measurement: list[Path] | None, baseline: Path | None) -> tuple[Bundle | None, BenchBundle | None]:
    """What stands beside the bench, read before anything takes long."""
    from slipstream.bench.bundle import read_bench
    from slipstream.cost.bundle import read_bundles

    measured = read_bundles(measurement) if measurement else None
    return measured, None if baseline is None else read_bench(baseline)


def _plan(
    drafters: list[str], length: str, controllers: list[str], temperature: str, batch: str, tokens: int,
    rounds: int, seed: int,
) -> Plan:  # fmt: skip
    from slipstream.bench.bundle import Plan
    from slipstream.bench.plan import check_plan

    for name, value in (("tokens", tokens), ("rounds", rounds)):
        if value < 1:
            raise ParameterError(f"--{name} must be at least 1, not {value}")
    lengths, batches = numbers("length", length), numbers("batch", batch)
    for name, values in (("length", lengths), ("batch", batches)):
        if values and values[0] < 1:
            raise ParameterError(f"--{name} must be whole numbers from 1 on, not {values[0]}")
    if not batches:
        raise ParameterError("there is no batch size: give --batch 1,4,8")
    plan = Plan(
        drafters=drafters,
        lengths=list(lengths),
        controllers=controllers,
        temperatures=_temperatures(temperature),
        batches=list(batches),
        tokens=tokens,
        rounds=rounds,
        seed=seed,
    )
    return check_plan(plan)  # before torch is imported


def _temperatures(text: str) -> list[float]:
    try:
        found = sorted({float(part) for part in text.split(",") if part.strip()})
    except ValueError:
        found = []
    if not found or not all(0 <= value < float("inf") for value in found):
        raise ParameterError(f"--temperature must be numbers of 0 or more, such as 0,0.8, not {text!r}")
    return found


def choose(prompts: Path | None, tasks: list[str], limit: int | None) -> list[Row]:
    """The first `limit` prompts of each of these tasks; no tasks: of all."""
    from slipstream.prompts.rows import read_prompts

    if limit is not None and limit < 1:
        raise ParameterError(f"--limit must be at least 1, not {limit}")
    rows = read_prompts(prompts)
    known = list(dict.fromkeys(row.task for row in rows))
    unknown = next((t for t in tasks if t not in known), None)
    if unknown is not None:
        raise ParameterError(f"there is no prompt of task {unknown!r}; there are {', '.join(known)}")
    wanted = [t for t in known if not tasks or t in tasks]
    return [row for t in wanted for row in [r for r in rows if r.task == t][:limit]]


def _measure(
    model: str, plan: Plan, asked: list[Row], out: Path, minutes: float | None, threads: int | None,
    load: dict[str, Any], measured: Bundle | None, before: BenchBundle | None,
) -> BenchBundle:  # fmt: skip
    from slipstream.cli.output import progress

    with progress(transient=True, calm=True) as drawn:
        drawn.stage(f"looking for {model}", 0)
        import torch

        import slipstream
        from slipstream.bench.compare import require_same_target
        from slipstream.bench.journal import journal_of
        from slipstream.bench.predict import require_same_model
        from slipstream.bench.run import bench, target_note

        if threads is not None:
            torch.set_num_threads(threads)
        with slipstream.load(model, max_rows=max(plan.batches), progress=drawn, **load) as session:
            if measured is not None:
                require_same_model(measured, model, session.info.dtype)
            if before is not None:
                require_same_target(before, target_note(session, model))
            return bench(
                session,
                model,
                plan,
                asked,
                keep=journal_of(out),
                minutes=minutes,
                command=["slipstream", *sys.argv[1:]],
                progress=drawn,
            )


def _tell(
    found: BenchBundle,
    measured: Bundle | None,
    before: BenchBundle | None,
    html: Path | None,
    as_json: bool,
    replayed: Sequence[Replayed] = (),
) -> None:
    """Print it, draw it; ends with status 1 where tokens differ that must not."""
    from slipstream.bench.report import make_report, to_json

    report = replace(make_report(found, measured, before), replayed=tuple(replayed))
    if html is not None:
        from slipstream.bench.report import to_html

        write(html, to_html(report))
    if as_json:
        from slipstream.cli.output import print_json

        print_json(to_json(report))
    else:
        from slipstream.cli.bench_show import show

        show(report)
    if html is not None:
        typer.echo(f"report: {html}", err=True)
    if not report.exact:
        raise typer.Exit(1)
