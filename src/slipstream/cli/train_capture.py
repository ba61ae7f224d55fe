"""`slipstream train capture`: what the target computes on training text, kept on disk."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.cli.request import DeviceOption, DtypeOption, ThreadsOption, TrustOption
from slipstream.cli.train_shared import (
    JsonOption,
    ModelArgument,
    StatusLine,
    leave,
    loaded_target,
    parse_layers,
    span,
)
from slipstream.errors import ParameterError

if TYPE_CHECKING:
    from slipstream.model.load import LoadedModel
    from slipstream.train.capture import Captured
    from slipstream.train.shards import Plan, Progress

METHODS = ("draft", "medusa", "eagle", "eagle3")


def capture(
    model: ModelArgument,
    folder: Annotated[
        Path, typer.Option("--data", help="The folder that train data made.", show_default=False)
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", help="The folder to write or to go on with.", show_default=False)
    ],
    method: Annotated[
        str | None,
        typer.Option(
            "--for", help=f"What it is for, which sets the three options below: {', '.join(METHODS)}."
        ),
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(metavar="K,K,...", help="Residual streams after so many layers; 0: embeddings."),
    ] = None,
    last: Annotated[bool, typer.Option("--last", help="The state that enters the LM head.")] = False,
    top_k: Annotated[int | None, typer.Option(help="The best logits of each token; 0: none.")] = None,
    max_length: Annotated[int | None, typer.Option(help="Cut samples to so many tokens.")] = None,
    limit_tokens: Annotated[int | None, typer.Option(help="Use about so many tokens of the data.")] = None,
    store: Annotated[
        str, typer.Option(help="dtype on disk; auto is the target's, which keeps every bit.")
    ] = "auto",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what it would need.")] = False,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "cpu",
    threads: ThreadsOption = None,
    json_: JsonOption = False,
    trust_remote_code: TrustOption = False,
) -> None:
    """Store what a model computes on training text: hidden states and its best logits.

    Says how much disk it needs before it begins. A run that was stopped goes on with the same command.
    Training with --online needs no stored states.
    """
    if method is not None and method not in METHODS:
        raise ParameterError(f"--for must be {', '.join(METHODS[:-1])} or {METHODS[-1]}, not {method!r}")
    chosen = None if layers is None else parse_layers(layers)
    if method is None and chosen is None and not last and not top_k:
        raise ParameterError(f"say what to store: --for {'|'.join(METHODS)}, or --layers, --last, --top-k")
    for name, value in (("max-length", max_length), ("limit-tokens", limit_tokens)):
        if value is not None and value < 2:
            raise ParameterError(f"--{name} must be at least 2, not {value}")
    from slipstream.train.dataset import load_data

    found = load_data(folder, max_length=max_length, limit_tokens=limit_tokens)
    with loaded_target(model, dtype, device, threads, trust_remote_code) as loaded:
        from slipstream.model import disk
        from slipstream.model.identity import identity
        from slipstream.model.progress import size
        from slipstream.train.shards import plan_capture

        target = identity(loaded.model, loaded.tokenizer, loaded.name)
        wanted = needed(method, int(target["num_layers"]), chosen, last, top_k)
        plan = plan_capture(output, target, found, wanted, dtype=store)
        typer.echo(
            f"{sum(s.tokens for s in plan.shards)} tokens in {len(plan.shards)} shards, together"
            f" {size(plan.total_bytes)}; {size(plan.needed_bytes)} are still to be written,"
            f" {size(disk.free_bytes(output))} are free",
            err=True,
        )
        status = 0 if dry_run else _capture(loaded, plan)
    if json_:
        from slipstream.cli.output import print_json

        print_json({**plan.manifest, "needed_bytes": plan.needed_bytes, "total_bytes": plan.total_bytes})
    leave(status)


def _capture(loaded: LoadedModel, plan: Plan) -> int:
    """Runs the plan; gives the exit status."""
    from slipstream.cli.generation import Interrupts
    from slipstream.model.runner import Runner
    from slipstream.train.capture import Captor
    from slipstream.train.shards import capture as run

    line, last = StatusLine(), None

    def report(progress: Progress) -> None:
        nonlocal last
        last = progress
        rate = progress.tokens / progress.seconds if progress.seconds else 0.0
        left = (progress.total_tokens - progress.done_tokens) / rate if rate else 0.0
        line(
            f"{progress.done_tokens} of {progress.total_tokens} tokens, {rate:.0f} tokens/s,"
            f" {span(left)} left"
        )

    runner = Runner(loaded.model, pack=True)
    try:
        captor = Captor(runner, min(runner.vocab_size, len(loaded.tokenizer)), plan.captured)
        with Interrupts() as interrupts, line:
            run(plan, captor, report=report, stopped=lambda: interrupts.number is not None)
        if not plan.missing:
            typer.echo(f"all states are in {plan.folder} already", err=True)
        if last is not None:
            typer.echo(
                f"states of {last.stored_tokens} of {last.total_tokens} tokens in {plan.folder}; this run:"
                f" {last.tokens} tokens in {span(last.seconds)}",
                err=True,
            )
        return interrupts.status
    finally:
        runner.close()


def needed(
    method: str | None, num_layers: int, layers: tuple[int, ...] | None, last: bool, top_k: int | None
) -> Captured:
    """What a method learns from, where the options do not say otherwise."""
    from slipstream.train.build import aux_layers
    from slipstream.train.capture import Captured

    usual = {
        "draft": Captured(top_k=64),
        "medusa": Captured(last_hidden=True),
        "eagle": Captured(last_hidden=True, top_k=64),
        "eagle3": Captured(aux_layers(num_layers), top_k=64),
        None: Captured(),
    }[method]
    chosen = usual.hidden_layers if layers is None else layers
    return Captured(chosen, last or usual.last_hidden, usual.top_k if top_k is None else top_k)
