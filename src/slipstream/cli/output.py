"""Printing for all commands: tables for people, JSON for programs, progress on stderr."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.table import Table

from slipstream.model.progress import size


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """rich would exit with status 1; `cli.leaving` knows what to do."""
        raise BrokenPipeError


def print_json(value: Any) -> None:
    """One JSON document on stdout."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


def stdout() -> Console:
    """stdout for tables. Piped into a file it is as wide as its content, so nothing is cut."""
    return _Console(width=None if sys.stdout.isatty() else 200, highlight=False, soft_wrap=False)


def stderr() -> Console:
    """stderr for what is said beside the results."""
    return _Console(file=sys.stderr, highlight=False)


def plain_table(*columns: str) -> Table:
    """A table without a frame; long cells are folded, never cut."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        table.add_column(name, overflow="fold")
    return table


class TerminalProgress:
    """Draws `slipstream.model.progress.Progress` on stderr: bars on a terminal, a line a stage elsewhere.

    calm: bars are drawn when they move, at most once a second, and nothing runs beside what is measured.
    """

    def __init__(self, console: Console, bars: Bars | None, calm: bool = False) -> None:
        self._console = console
        self._bars = bars
        self._calm = calm
        self._drawn = 0.0
        self._task: TaskID | None = None
        self._total = 0
        self._unit = ""

    def stage(self, text: str, total: int, unit: str = "") -> None:
        """unit: of what is counted; bytes if empty."""
        self.finish()
        self._total, self._unit = total, unit
        if self._bars is None:
            whole = f" ({self._amount(total)})" if total else ""
            self._console.print(f"{text}{whole}", markup=False, soft_wrap=True)
            return
        self._task = self._bars.add_task(text, total=total or None, amount="")
        self._draw(now=True)

    def at(self, done: int) -> None:
        if self._bars is not None and self._task is not None:
            amount = f"{self._number(done)} of {self._amount(self._total)}" if self._total else ""
            self._bars.update(self._task, completed=done, amount=amount)
            self._draw()

    def _number(self, value: int) -> str:
        return str(value) if self._unit else size(value)

    def _amount(self, value: int) -> str:
        return f"{value} {self._unit}" if self._unit else size(value)

    def _draw(self, now: bool = False) -> None:
        if self._calm and self._bars is not None and (now or time.monotonic() - self._drawn >= 1.0):
            self._drawn = time.monotonic()
            self._bars.refresh()

    def note(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    def finish(self) -> None:
        """Fills and stops the running bar; its line stays."""
        if self._bars is not None and self._task is not None:
            total = self._total or 1
            amount = self._amount(total) if self._total else ""
            self._bars.update(self._task, completed=total, total=total, amount=amount)
            self._task = None


@contextmanager
def progress(transient: bool = False, calm: bool = False) -> Iterator[TerminalProgress]:
    """Progress on stderr while the body runs; `transient` bars vanish after it. calm: see `TerminalProgress`.

    Opens stderr once: libraries are silenced by redirecting it.
    """
    console = stderr()
    if not console.is_terminal:
        yield TerminalProgress(console, None)
        return
    columns = (
        SpinnerColumn(finished_text="[green]✓"),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[amount]}"),
        TimeElapsedColumn(),
    )
    with Bars(
        *columns,
        console=console,
        transient=transient,
        auto_refresh=not calm,
        redirect_stdout=False,
        redirect_stderr=False,
    ) as bars:
        drawn = TerminalProgress(console, bars, calm)
        yield drawn
        drawn.finish()
