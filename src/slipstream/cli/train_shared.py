"""What the commands under `slipstream train` share: options, loading the target, a line of progress."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli.request import MOST_THREADS
from slipstream.errors import ParameterError

if TYPE_CHECKING:
    from slipstream.model.load import LoadedModel

Guard = Callable[[Callable[..., None]], Callable[..., None]]  # turns errors into an exit status

QUIET_SECONDS = 30.0  # between two lines of progress where there is no terminal

ModelArgument = Annotated[
    str, typer.Argument(help="The target: catalogue name, folder, .gguf file or hub id.", show_default=False)
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the manifest as JSON.")]


@contextmanager
def loaded_target(
    model: str,
    dtype: str,
    device: str,
    threads: int | None,
    trust_remote_code: bool,
    drafter: str | None = None,
) -> Iterator[LoadedModel]:
    """The target, loaded; memory is checked before."""
    from slipstream.cli.output import progress

    if threads is not None and not 1 <= threads <= MOST_THREADS:
        raise ParameterError(f"--threads must be from 1 to {MOST_THREADS}, not {threads}")
    with progress(transient=True) as drawn:
        drawn.stage(f"looking for {model}", 0)
        import torch

        from slipstream.drafters import configure
        from slipstream.model.load import load

        if threads is not None:
            torch.set_num_threads(threads)
        if drafter is not None:  # a mistyped drafter is told before gigabytes are loaded for it
            configure(drafter)
        options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "progress": drawn}
        loaded = load(model, dtype=dtype, device=device, **options)
    yield loaded


def leave(status: int) -> None:
    """Ends the command with an interrupt's exit status, if it had one."""
    if status:
        typer.echo("slipstream: stopped; the same command goes on from here", err=True)
        raise typer.Exit(status)


class StatusLine:
    """One line on stderr that is written over on a terminal, and a line now and then elsewhere."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._last = time.monotonic()
        self._open = False

    def __enter__(self) -> StatusLine:
        return self

    def __call__(self, text: str) -> None:
        now = time.monotonic()
        if now - self._last < (0.2 if self._terminal else QUIET_SECONDS):
            return
        self._last = now
        if self._terminal:
            sys.stderr.write(f"\r\x1b[K{text}")
            self._open = True
        else:
            sys.stderr.write(text + "\n")
        sys.stderr.flush()

    def note(self, text: str) -> None:
        self._end()
        sys.stderr.write(text + "\n")

    def _end(self) -> None:
        if self._open:
            sys.stderr.write("\n")
            self._open = False

    def __exit__(self, *_: object) -> None:
        self._end()


def span(seconds: float) -> str:
    """Seconds as people read them: 45 s, 3 min 20 s, 2 h 5 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def require_file(output: Path, usual: str) -> None:
    """ParameterError for a folder where a file is to be written; usual: what it could be called there."""
    if output.is_dir():
        raise ParameterError(f"{output} is a folder: name the file to write, {output / usual} say")


def parse_time(text: str) -> float:
    """Seconds of "90", "90s", "30m" or "2h"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text.strip())
    if match is None or not 0 < float(match[1]) < 1e9:
        raise ParameterError(f"--limit-time must be like 90s, 30m or 2h, not {text!r}")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]


def parse_layers(text: str, option: str = "--layers") -> tuple[int, ...]:
    """Layer numbers of "2,14,25"."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ParameterError(f"{option} must be numbers with commas, like 2,14,25, not {text!r}") from None
