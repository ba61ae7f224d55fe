"""The command line: which commands there are, and how errors leave them.

A new command is one line in `COMMANDS` or in its group. `cli.main` says what the exit statuses mean.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from slipstream.cli import train
from slipstream.cli.bench import bench
from slipstream.cli.config import config
from slipstream.cli.deploy import deploy
from slipstream.cli.doctor import doctor
from slipstream.cli.drafters import controllers, drafters
from slipstream.cli.export import export
from slipstream.cli.leaving import fail, without_output
from slipstream.cli.lint import lint
from slipstream.cli.measure import measure
from slipstream.cli.models import models
from slipstream.cli.plan import plan
from slipstream.cli.pull import pull
from slipstream.cli.run import run
from slipstream.cli.serve import serve
from slipstream.cli.tune_medusa import tune_medusa
from slipstream.cli.tune_selfspec import tune_selfspec
from slipstream.cli.verify import verify
from slipstream.cli.watch import watch
from slipstream.core.fault import FaultWarning, planted_fault, warning_of
from slipstream.errors import SlipstreamError
from slipstream.version import __version__

COMMANDS: dict[str, Callable[..., None]] = {
    "run": run,
    "serve": serve,
    "pull": pull,
    "models": models,
    "drafters": drafters,
    "controllers": controllers,
    "doctor": doctor,
    "measure": measure,
    "plan": plan,
    "verify": verify,
    "bench": bench,
    "export": export,
    "lint": lint,
    "config": config,
    "deploy": deploy,
    "watch": watch,
}
GROUPS: dict[str, tuple[str, dict[str, Callable[..., None]]]] = {
    "tune": (
        "Measure what a drafter needs to know about a model, once, and keep it.",
        {"selfspec": tune_selfspec, "medusa": tune_medusa},
    ),
}


def assemble() -> typer.Typer:
    """The application with all commands."""
    app = _typer("Exact speculative decoding for Hugging Face models.", name="slipstream")
    app.callback()(_top)
    for name, command in {**COMMANDS, "version": version}.items():
        app.command(name)(guarded(command))
    for group, (text, commands) in GROUPS.items():
        inner = _typer(text)
        for name, command in commands.items():
            inner.command(name)(guarded(command))
        app.add_typer(inner, name=group)
    app.add_typer(train.build(guarded), name="train")
    return app


def _typer(text: str, **options: Any) -> typer.Typer:
    return typer.Typer(
        help=text,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # plain text: errors stay one line
        context_settings={"help_option_names": ["-h", "--help"]},
        **options,
    )


def version() -> None:
    """Print the version."""
    typer.echo(f"slipstream {__version__}")


def _version(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit


def _top(
    show_version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_version)
    ] = False,
) -> None:
    pass  # the option's callback does it: it runs before typer asks for a command


def guarded(command: Callable[..., None]) -> Callable[..., None]:
    """The command with its errors turned into one line and an exit status."""

    @functools.wraps(command)
    def run(*args: Any, **options: Any) -> None:
        try:
            with told_of_faults():
                command(*args, **options)
        except SlipstreamError as error:
            fail(str(error))
            raise typer.Exit(2) from None
        except OSError as error:
            status = without_output(error)
            if status is None:
                raise
            raise typer.Exit(status) from None
        except KeyboardInterrupt:
            typer.echo("slipstream: interrupted", err=True)
            raise typer.Exit(130) from None

    return run


@contextmanager
def told_of_faults() -> Iterator[None]:
    """Nothing runs with a planted fault unseen: every command says so first. Raises ParameterError for one
    that is not known."""
    name = planted_fault()
    if name is None:
        yield
        return
    typer.echo(f"slipstream: WARNING: {warning_of(name)}", err=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FaultWarning)  # the engine's own, which is the same
        yield
