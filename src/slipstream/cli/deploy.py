"""`slipstream deploy`: start an engine with a plan, prove that its speculation works, serve until stopped."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from slipstream.cli.config import (
    DrafterOption,
    DraftParallel,
    Model,
    OffAbove,
    Parallel,
    PerBatch,
    PlanFile,
    Settings,
    Target,
    Tokens,
    plan_of,
)
from slipstream.cli.plan import write
from slipstream.errors import ParameterError


def deploy(
    engine: Annotated[str, typer.Argument(help="vllm, or vllm==VERSION.", show_default=False)],
    plan: PlanFile = None,
    version: Annotated[
        str | None, typer.Option(help="The engine's version; default: the installed one.", show_default=False)
    ] = None,
    target: Target = None,
    drafter: DrafterOption = None,
    model: Model = None,
    tokens: Tokens = None,
    per_batch: PerBatch = None,
    off_above: OffAbove = None,
    tp: Parallel = None,
    draft_tp: DraftParallel = None,
    set_: Settings = None,
    executable: Annotated[str, typer.Option(help="The engine's program.")] = "vllm",
    timeout: Annotated[float, typer.Option(min=1, help="Seconds to wait until it is healthy.")] = 1800.0,
    log: Annotated[Path, typer.Option(help="The engine's output.")] = Path("vllm.log"),
    manifest: Annotated[
        Path | None,
        typer.Option(help="Start nothing: write the Kubernetes manifest here.", show_default=False),
    ] = None,
    check_only: Annotated[bool, typer.Option("--check", help="Stop it after the check.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print the check as JSON.")] = False,
) -> None:
    """Start `vllm serve` with a plan, wait until it is healthy, ask it something, compare its acceptance
    with the plan's prediction, and serve until Ctrl-C. Exit status 1 if acceptance is far below the
    prediction; then nothing is left running.
    """
    from slipstream.cli.output import print_json
    from slipstream.deploy.program import find_program
    from slipstream.export.engines import NEWEST, parse_engine

    _require_vllm(parse_engine(engine).name)
    version = version or engine.partition("==")[2]
    named = f"vllm=={version}" if version else None
    wanted = plan_of(
        named, plan, target, drafter, model, tokens, per_batch, off_above, tp, draft_tp, set_,
        here=manifest is None,
    )  # fmt: skip
    from slipstream.deploy.check import check
    from slipstream.deploy.process import Server
    from slipstream.export.config import settings
    from slipstream.export.manifest import manifest as write_manifest

    _require_vllm(wanted.parsed_engine.name)
    if "==" not in wanted.engine:  # a plan's own version comes first
        installed = find_program(executable).version or NEWEST["vllm"]
        wanted = wanted.model_copy(update={"engine": f"vllm=={installed}"})
    made = settings(wanted)
    if manifest is not None:
        write(manifest, write_manifest(made))
        typer.echo(f"{manifest}: kubectl apply -f {manifest}")
        return
    command = [*find_program(executable).words, *made.command[2:]]
    for number in (signal.SIGTERM, signal.SIGHUP):  # the latter where its terminal is closed
        signal.signal(number, _stop)
    with Server(command, wanted.host, wanted.port, log) as server:
        typer.echo(f"starting {made.plan.engine} on {server.url}; its output is in {log}", err=True)
        seconds = server.wait_healthy(timeout)
        typer.echo(f"healthy after {seconds:.0f} s; asking", err=True)
        found = check(server.url, wanted)
        if json_:
            print_json({"url": server.url, "command": command, **found.as_dict()})
        else:
            typer.echo(
                f"{found.model} answers; {_measured(found.seen.tau, found.seen.per_position)}"
                + ("" if wanted.predicted_tau is None else f"; tau {wanted.predicted_tau:.2f} is predicted")
            )
        if found.problem is not None:
            typer.echo(f"slipstream: the plan does not hold: {found.problem}", err=True)
            raise typer.Exit(1)
        if check_only:
            return
        typer.echo(f"serving on {server.url} until Ctrl-C", err=True)
        while True:
            time.sleep(0.5)
            server.require_alive()


def _require_vllm(name: str) -> None:
    if name != "vllm":
        raise ParameterError(
            f"only vLLM is started, not {name}: `slipstream config {name}` prints its command or manifest;"
            " when it runs, `slipstream watch URL` looks at it"
        )


def _measured(tau: float | None, positions: tuple[float, ...]) -> str:
    if tau is None:
        return "nothing is drafted"
    told = " ".join(f"{p:.0%}" for p in positions)
    return f"tau {tau:.2f}" + (f", accepted by position {told}" if told else "")


def _stop(number: int, frame: FrameType | None) -> None:
    raise typer.Exit(128 + number)
