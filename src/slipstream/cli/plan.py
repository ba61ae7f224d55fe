"""`slipstream plan`: does speculation pay here, with what, and up to which batch size?"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.errors import ParameterError

if TYPE_CHECKING:
    from rich.console import Console

    from slipstream.plan.advise import Advice
    from slipstream.plan.setup import Setup


def plan(
    measured: Annotated[
        list[Path] | None,
        typer.Option(help="A file that `slipstream measure` wrote; may be repeated.", show_default=False),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            help="Without a measurement: a GPU or CPU by name (--gpus lists them), or a JSON file with name,"
            " memory_gb, bandwidth_gbs, tflops and price.",
            show_default=False,
        ),
    ] = None,
    model_config: Annotated[
        Path | None,
        typer.Option(help="The target's config.json, or the folder it is in.", show_default=False),
    ] = None,
    draft_config: Annotated[
        list[Path] | None,
        typer.Option(
            help="The draft model's; may be repeated. Without one, a drafter that needs no model.",
            show_default=False,
        ),
    ] = None,
    acceptance: Annotated[
        list[str] | None,
        typer.Option(
            help="Share of drafted tokens that are accepted, 0 to 1; by position as 0.9,0.8,0.7 (the last one"
            " goes on). One for all drafts, or repeated for each. With --measured: what if it were so?",
            show_default=False,
        ),
    ] = None,
    batch: Annotated[str, typer.Option(help="Batch sizes, such as 1,8,64.")] = "1",
    price: Annotated[
        float | None, typer.Option(help="USD an hour, for all GPUs together.", show_default=False)
    ] = None,
    count: Annotated[int, typer.Option("--gpu-count", help="So many GPUs as one.")] = 1,
    context: Annotated[
        int | None,
        typer.Option(help="Tokens in a sequence's cache. Default: 1024, or the shortest measured."),
    ] = None,
    prompt_tokens: Annotated[
        int, typer.Option(help="Length of a prompt, for the time to the first token.")
    ] = 512,
    dtype: Annotated[
        str | None, typer.Option(help="Of the target's weights, if not as its config says.")
    ] = None,
    draft_dtype: Annotated[str | None, typer.Option(help="Likewise for the drafts.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
    html: Annotated[
        Path | None, typer.Option(help="Also write a report with charts to this file.", show_default=False)
    ] = None,
    gpus: Annotated[bool, typer.Option("--gpus", help="List the machines that are known, and exit.")] = False,
) -> None:
    """Say whether speculation pays, with which drafter and length, and from which batch size on not at all.

    From a measurement (--measured), or estimated from data sheets and config files (--gpu, --model-config).
    """
    if gpus:
        _list(json_)
        return
    batches = read_batches(batch)
    rates = [read_rates(text) for text in acceptance or []]
    check_outputs(drawn=html)
    if measured:
        given = {
            "--gpu": gpu,
            "--model-config": model_config,
            "--draft-config": draft_config,
            "--gpu-count": count != 1,
            "--dtype": dtype,
            "--draft-dtype": draft_dtype,
        }
        extra = next((name for name, value in given.items() if value), None)
        if extra is not None:
            raise ParameterError(
                f"{extra} is for an estimate, and --measured has its own: give one or the other"
            )
        setup = _measured(measured, batches, price, context, prompt_tokens, rates)
    else:
        if gpu is None or model_config is None or not rates:
            missing = [
                name
                for name, value in (("--gpu", gpu), ("--model-config", model_config), ("--acceptance", rates))
                if not value
            ]
            raise ParameterError(
                f"{' and '.join(missing)} missing: an estimate needs --gpu, --model-config and --acceptance,"
                " a measured plan needs --measured FILE"
            )
        setup = _described(
            gpu, count, model_config, draft_config or [], rates, batches, price, context, prompt_tokens,
            dtype, draft_dtype,
        )  # fmt: skip
    from slipstream.plan.advise import advise

    advice = advise(setup)
    if html is not None:
        from slipstream.plan.report import to_html

        write(html, to_html(advice))
    if json_:
        from slipstream.cli.output import print_json
        from slipstream.plan.report import to_json

        print_json(to_json(advice))
    else:
        _print(advice)
    if html is not None:
        typer.echo(f"report: {html}", err=True)


def read_batches(text: str) -> list[int]:
    """From `1,8,64`."""
    from slipstream.plan.setup import check_batches

    try:
        found = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ParameterError(f"--batch must be whole numbers such as 1,8,64, not {text!r}") from None
    return list(check_batches(found))


def read_rates(text: str) -> list[float]:
    """From `0.8` or `0.9,0.8,0.7`."""
    try:
        found = [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ParameterError(f"--acceptance must be fractions such as 0.8, not {text!r}") from None
    wrong = next((rate for rate in found if not 0 <= rate <= 1), None)
    if not found or wrong is not None:
        hint = f" ({wrong / 100:g}?)" if wrong is not None and 2 <= wrong <= 100 else ""
        raise ParameterError(f"--acceptance must be a fraction from 0 to 1, not {text!r}{hint}")
    return found


def check_outputs(*paths: Path | None, drawn: Path | None = None) -> None:
    """ParameterError for a file that could not be written in the end, before anything takes long. drawn: one
    with charts."""
    wanted = [path for path in (*paths, drawn) if path is not None]
    for i, path in enumerate(wanted):
        if not os.path.isdir(path.parent):
            raise ParameterError(f"the folder of {path} does not exist: make it, or write elsewhere")
        if path.absolute() in (other.absolute() for other in wanted[:i]):
            raise ParameterError(f"{path} cannot be two files: give each a name of its own")
        try:
            mode = path.stat().st_mode
        except FileNotFoundError:
            mode = None
        except OSError as error:
            raise ParameterError(f"{path} cannot be written ({error.strerror}): choose another") from None
        if mode is not None and not stat.S_ISREG(mode):  # what takes its place would be a file
            what = "is a folder" if stat.S_ISDIR(mode) else "is no ordinary file"
            raise ParameterError(f"{path} cannot be written (it {what}): name a file")
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise ParameterError(f"{path} cannot be written (Permission denied): check the folder")
    if drawn is not None:
        from slipstream.plan.drawing import require_charts

        require_charts()


def write(path: Path, content: str | bytes) -> None:
    """A report, whole or not at all."""
    from slipstream.model.store import write_atomic

    try:
        write_atomic(path, content)
    except OSError as error:
        raise ParameterError(f"{path} cannot be written ({error.strerror}): check the folder") from None


def _measured(
    paths: list[Path], batches: list[int], price: float | None, context: int | None, prompt_tokens: int,
    rates: list[list[float]],
) -> Setup:  # fmt: skip
    from slipstream.cost.bundle import read_bundles
    from slipstream.plan.setup import measured

    return measured(
        read_bundles(paths),
        batches,
        price=price,
        context=context,
        prompt_tokens=prompt_tokens,
        acceptance=rates,
    )


def _described(
    gpu: str, count: int, model: Path, drafts: list[Path], rates: list[list[float]], batches: list[int],
    price: float | None, context: int | None, prompt_tokens: int, dtype: str | None, draft_dtype: str | None,
) -> Setup:  # fmt: skip
    from slipstream.cost.machines import find_machine
    from slipstream.cost.shape import read_shape
    from slipstream.plan.setup import described

    return described(
        find_machine(gpu).times(count),
        read_shape(model, dtype),
        [read_shape(path, draft_dtype) for path in drafts],
        rates,
        batches,
        price=price,
        context=1024 if context is None else context,
        prompt_tokens=prompt_tokens,
    )


def _list(as_json: bool) -> None:
    from slipstream.cli.output import plain_table, print_json, stdout
    from slipstream.cost.machines import MACHINES

    if as_json:
        print_json(
            [
                {
                    "name": m.name,
                    "memory_bytes": m.memory,
                    "bandwidth": m.bandwidth,
                    "flops": m.flops,
                    "price_per_hour": m.price,
                }
                for m in MACHINES.values()
            ]
        )
        return
    tera = (f"TFLOP/S\n{bits}-BIT" for bits in (16, 32, 8))
    table = plain_table("\nNAME", "\nMEMORY", "\nBANDWIDTH", *tera, "\nUSD/H")
    for m in MACHINES.values():
        rates = [f"{m.flops[d] / 1e12:g}" if d in m.flops else "" for d in ("bfloat16", "float32", "int8")]
        price = f"{m.price:.2f}" if m.price else ""
        table.add_row(m.name, f"{m.memory / 1e9:g} GB", f"{m.bandwidth / 1e9:g} GB/s", *rates, price)
    console = stdout()
    console.print(table)
    console.print("\nMakers' peaks without sparsity; prices are rough on-demand rents of 2026.", markup=False)


def _print(advice: Advice) -> None:
    from slipstream.cli.output import stdout

    console = stdout()
    setup = advice.setup
    kind = "estimate, nothing was measured" if setup.estimate else "measured"
    if setup.given and not setup.estimate:
        kind += "; what if: acceptance as given"
    console.print(
        f"{setup.model} ({setup.dtype}) on {setup.machine}, context {setup.context} [{kind}]", markup=False
    )
    console.print(f"\n{advice.verdict}\n", style="bold", markup=False)
    for reason in setup.busy:
        console.print(f"The machine was not quiet: {reason}. Measure again.\n", style="red", markup=False)
    _batches(console, advice)
    _details(console, advice)
    for line in setup.assumptions:
        console.print(f"assumed: {line}", style="dim", markup=False)


def _batches(console: Console, advice: Advice) -> None:
    from rich.markup import escape

    from slipstream.cli.output import plain_table
    from slipstream.plan.page import counted, drafted, gigabytes, milliseconds, per_second, usd

    priced = advice.setup.price is not None
    table = plain_table("BATCH", "REGIME", "DRAFTER", "TOKENS", "TAU", "TIMES AS FAST")
    money_head = ["\nUSD/MILLION"] if priced else []
    worth = plain_table("\nBATCH", "\nTOKENS/S", *money_head, "\nMORE MEMORY", "\nFIRST TOKEN")
    for b in advice.batches:
        o = b.best or b.options[0]
        p = o.prediction
        after = p.rate if b.best else b.plain.rate
        money = [f"{usd(b.cost)} → {usd(b.best.cost if b.best else b.cost)}"] if priced else []
        table.add_row(
            str(b.batch), b.regime, escape(o.drafter if b.best else f"none (best was {o.drafter})"),
            drafted(p.depth, p.nodes), f"{p.tau:.2f}",
            f"{p.speedup:.2f} ({p.low:.2f}–{p.high:.2f})",
        )  # fmt: skip
        worth.add_row(
            str(b.batch), f"{per_second(b.plain.rate)} → {per_second(after)}", *money,
            gigabytes(o.memory if b.best else 0), milliseconds(b.first_token),
        )  # fmt: skip
    console.print(table)
    console.print(worth)
    extra = plain_table("\nBATCH", *(f"\n{k} MORE" for k in advice.batches[0].extra))
    for b in advice.batches:
        extra.add_row(str(b.batch), *(f"{v:+.0%}" for v in b.extra.values()))
    console.print(extra)
    console.print("What verifying so many more tokens a row adds to a step.", style="dim")
    curve = advice.setup.curve
    for jump in curve.jumps() if curve else ():
        console.print(
            f"kink with {counted(jump.rows, 'row')}: {jump.tokens[1]} tokens take {jump.ratio:.2f} times as"
            f" long as {jump.tokens[0]}"
        )


def _details(console: Console, advice: Advice) -> None:
    from rich.markup import escape

    from slipstream.cli.output import plain_table

    words = {True: "[green]pass", False: "[red]fail", None: "[yellow]unknown"}
    table = plain_table("\nDRAFTER", "\nRULE", "\nFOUND", "", "\nA MISS COSTS")
    for name, rules in advice.rules.items():
        for i, rule in enumerate(rules):
            table.add_row("" if i else escape(name), rule.name, rule.value, words[rule.passed], rule.cost)
    console.print(table)
    table = plain_table("\nCHECK", "", "")
    for check in advice.checks:
        table.add_row(escape(check.name), words[check.passed], escape(check.detail))
    console.print(table)
    console.print("\nSTARTING POINTS", style="bold")
    for one in advice.scenarios:  # options are copied, so they are not folded into a column
        gain = f" ({one.speedup:.2f} times as fast)" if one.speedup else ""
        console.print(f"{one.name}{gain}: {one.why}", markup=False)
        console.print(f"  {one.flags}", markup=False, soft_wrap=True)
