"""Printing for all commands: tables for people, JSON for programs, progress on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.table import Table

from slipstream.model.progress import size


def print_json(value: Any) -> None:
    """One JSON document on stdout."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


def stdout() -> Console:
    """stdout for tables. Piped into a file it is as wide as its content, so nothing is cut."""
    return Console(width=None if sys.stdout.isatty() else 200, highlight=False, soft_wrap=False)


def plain_table(*columns: str) -> Table:
    """A table without a frame; long cells are folded, never cut."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        table.add_column(name, overflow="fold")
    return table


class TerminalProgress:
    """Draws `slipstream.model.progress.Progress` on stderr: bars on a terminal, a line a stage elsewhere."""

    def __init__(self, console: Console, bars: Bars | None) -> None:
        self._console = console
        self._bars = bars
        self._task: TaskID | None = None
        self._total = 0

    def stage(self, text: str, total: int) -> None:
        if self._bars is None:
            amount = f" ({size(total)})" if total else ""
            self._console.print(f"{text}{amount}", markup=False, soft_wrap=True)
            return
        self.finish()
        self._total = total
        self._task = self._bars.add_task(text, total=total or None, amount="")

    def at(self, done: int) -> None:
        if self._bars is not None and self._task is not None:
            amount = f"{size(done)} of {size(self._total)}" if self._total else ""
            self._bars.update(self._task, completed=done, amount=amount)

    def note(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    def finish(self) -> None:
        """Fills and stops the running bar; its line stays."""
        if self._bars is not None and self._task is not None:
            total = self._total or 1
            amount = size(total) if self._total else ""
            self._bars.update(self._task, completed=total, total=total, amount=amount)
            self._task = None


@contextmanager
def progress(transient: bool = False) -> Iterator[TerminalProgress]:
    """Progress on stderr while the body runs; `transient` bars vanish after it.

    Opens stderr once: libraries are silenced by redirecting it.
    """
    console = Console(file=sys.stderr, highlight=False)
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
        *columns, console=console, transient=transient, redirect_stdout=False, redirect_stderr=False
    ) as bars:
        drawn = TerminalProgress(console, bars)
        yield drawn
        drawn.finish()
