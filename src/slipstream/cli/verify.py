"""`slipstream verify`: is the output of this model with this drafter really unchanged, on this machine?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.cli.request import (
    DEFAULT_MODEL,
    MOST_THREADS,
    DeviceOption,
    DtypeOption,
    ThreadsOption,
    TrustOption,
)
from slipstream.core.fault import ENVIRONMENT, FAULTS
from slipstream.errors import ParameterError

if TYPE_CHECKING:
    from rich.console import Console

    from slipstream.proof.identity import IdentityCheck
    from slipstream.proof.report import Proof

_SHOWN = 12  # differences in the table; --json has all


def verify(
    model: Annotated[
        str,
        typer.Option(help="Catalogue name, folder, .gguf file or hub id; tiny comes with Slipstream."),
    ] = DEFAULT_MODEL,
    drafter: Annotated[
        str,
        typer.Option(
            metavar="NAME[:KEY=VALUE,...]",
            help="How to draft; see `slipstream drafters`. none: only the built-in probes draft.",
        ),
    ] = "ngram",
    controller: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[:KEY=VALUE,...]",
            help="How much to draft; see `slipstream controllers`. Default: the drafter's own length.",
        ),
    ] = None,
    rule: Annotated[
        str, typer.Option(help="auto, rejection, block or typical, which is lossy and never verified.")
    ] = "auto",
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="A text file with a prompt a line, or .jsonl as `slipstream measure` reads it."
            " Default: a small set of our own.",
            show_default=False,
        ),
    ] = None,
    limit: Annotated[int, typer.Option(help="Prompts used, the first ones.")] = 8,
    tokens: Annotated[int, typer.Option(help="Tokens of each answer; fewer if the time is short.")] = 32,
    samples: Annotated[int, typer.Option(help="Samples of each law; fewer if the time is short.")] = 600,
    minutes: Annotated[float, typer.Option(help="Time to spend, the loading of models apart.")] = 10.0,
    seed: Annotated[int, typer.Option(help="Another one tries other random numbers.")] = 0,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "cpu",
    threads: ThreadsOption = None,
    fail_fast: Annotated[
        bool, typer.Option("--fail-fast", help="Stop at the first thing that is broken.")
    ] = False,
    faults: Annotated[
        bool, typer.Option("--faults", help=f"List the faults that {ENVIRONMENT} can plant, and do no more.")
    ] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
    trust_remote_code: TrustOption = False,
) -> None:
    """Try to find a difference between plain decoding and speculation, for your model and drafter.

    Ends with verified or near-tie only (exit status 0), or broken (1). Built-in probes draft as well, so that
    every part of the loop is tried whatever your drafter does. SLIPSTREAM_FAULT=NAME plants a fault, which
    must be found.
    """
    if faults:
        return _list_faults(json_)
    from slipstream.cli.output import print_json, progress
    from slipstream.control import build_controller
    from slipstream.drafters import check_spec, configure
    from slipstream.prompts.rows import read_prompts

    # Mistakes are told before torch is imported and models are loaded.
    check_spec(drafter)
    build_controller(controller, 0)
    if limit < 1:
        raise ParameterError(f"--limit must be at least 1, not {limit}")
    asked = read_prompts(prompts)
    if threads is not None and not 1 <= threads <= MOST_THREADS:
        raise ParameterError(f"threads must be from 1 to {MOST_THREADS}, not {threads}")
    with progress(transient=True) as drawn:
        drawn.stage(f"looking for {model}", 0)
        configure(drafter)
        import torch

        from slipstream.proof.pair import verify_pair
        from slipstream.proof.plan import Plan

        plan = Plan(
            prompts=limit, tokens=tokens, samples=samples, minutes=minutes, seed=seed, fail_fast=fail_fast
        )
        if threads is not None:
            torch.set_num_threads(threads)
        proof = verify_pair(
            model,
            drafter,
            prompts=asked,
            plan=plan,
            controller=controller,
            rule=rule,
            progress=drawn,
            dtype=dtype,
            device=device,
            trust_remote_code=trust_remote_code,
        )
    if json_:
        print_json(proof.as_json())
    else:
        _print(proof)
    if proof.exit_status:
        raise typer.Exit(proof.exit_status)


def _list_faults(json_: bool) -> None:
    from slipstream.cli.output import plain_table, print_json, stdout

    if json_:
        return print_json(FAULTS)
    table = plain_table("FAULT", "WHAT IS WRONG")
    for name, text in FAULTS.items():
        table.add_row(name, text)
    console = stdout()
    console.print(table)
    console.print(f"\n{ENVIRONMENT}=NAME slipstream verify … must end with exit status 1.", markup=False)


def _print(proof: Proof) -> None:
    from slipstream.cli.output import stdout

    console, about = stdout(), proof.about
    console.print(
        f"{about.model} ({about.dtype}) with {about.drafter} on {about.machine}, {about.threads} threads",
        markup=False,
    )
    if about.fault is not None:
        console.print(f"planted: {about.fault}", style="red", markup=False)
    _print_identity(console, proof)
    _print_differences(console, proof)
    _print_laws(console, proof)
    for note in proof.notes:
        console.print(f"note: {note}", markup=False)
    seconds = sum(proof.seconds.values())
    colour = {"verified": "bold green", "near-tie only": "bold yellow", "broken": "bold red"}[proof.verdict]
    console.print(f"\n{proof.verdict.upper()} in {seconds:.0f} s", style=colour, markup=False)
    for reason in proof.reasons:
        console.print(f"  {reason}", markup=False)


def _print_identity(console: Console, proof: Proof) -> None:
    from slipstream.cli.output import plain_table

    table = plain_table("\nSAME TOKENS", "\nDRAFTER", "\nDRAFTED", "\nACCEPTED", "\nTHE SAME", "\n")
    for check in proof.identity:
        name = f"{check.setting}, one by one" if check.alone else check.setting
        same = f"{check.identical} of {check.answers}" if check.promised else "-"
        accepted = f"{check.accepted / check.drafted:.0%}" if check.drafted else ""
        table.add_row(name, _plain(check.drafter), str(check.drafted or ""), accepted, same, _mark(check))
    console.print(table)


def _mark(check: IdentityCheck) -> str:
    if not check.promised:
        return "law only"
    if check.broken:
        return "[red]broken"
    return "[yellow]near-tie" if check.differences else "[green]✓"


def _print_differences(console: Console, proof: Proof) -> None:
    from slipstream.cli.output import plain_table

    found = [(check, one) for check in proof.identity for one in check.differences]
    if not found:
        return
    table = plain_table("\nDIFFERENCE", "\nPROMPT", "\nAT", "\nPLAIN", "\nDRAFTED", "\nMARGIN", "\n")
    for check, one in found[:_SHOWN]:
        margin, verdict = "", "[red]no tie"
        if one.margin is not None and one.spacing is not None:
            margin = f"{one.margin:.3g} = {one.margin / one.spacing:.3g} × {one.spacing:.2g}"
            verdict = "[yellow]near-tie" if one.near_tie else verdict
        sides = ((one.plain, one.plain_text), (one.drafted, one.drafted_text))
        texts = ["(ended)" if token is None else repr(text) for token, text in sides]
        name = _plain(f"{check.setting}, {check.drafter}")
        table.add_row(
            name, _plain(proof.prompts[one.prompt]), str(one.at), *map(_plain, texts), margin, verdict
        )
    console.print(table)
    if len(found) > _SHOWN:
        console.print(f"and {len(found) - _SHOWN} more (--json has them)", style="dim")
    console.print("Margin in logits, in distances of neighbouring numbers of the model's dtype.", style="dim")


def _print_laws(console: Console, proof: Proof) -> None:
    from slipstream.cli.output import plain_table

    if not proof.laws:
        return
    head = ("SAME LAW", "DRAFTER", "ACCEPTED", "SAMPLES", "CELLS", "G", "P", "FINDS", "")
    table = plain_table(*(f"\n{word}" for word in head))
    for law in proof.laws:
        accepted = f"{law.accepted / law.drafted:.0%}" if law.drafted else ""
        numbers = [str(law.samples), str(law.cells), f"{law.statistic:.1f}", f"{law.p_value:.2g}"]
        finds, mark = f"≥ {law.detectable:.1%}", "[red]broken" if law.broken else "[green]✓"
        table.add_row(law.setting, _plain(law.drafter), accepted, *numbers, finds, mark)
    console.print(table)
    first, runs = proof.laws[0], 1 / proof.plan.alpha
    console.print(
        f"G-test of the first {first.horizon} tokens against the target's exact law; broken below"
        f" p = {first.threshold:.2g} (a false alarm in {runs:,.0f} runs). FINDS: a law that is off by so much"
        f" (total variation over the cells) is found with a probability of {first.power:.0%}.",
        style="dim",
        markup=False,
    )


def _plain(text: str) -> str:
    return text.replace("[", r"\[")
