"""A training run on the terminal: a bar with loss, expected tau, speed and time left."""

from __future__ import annotations

import time
from types import TracebackType

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from slipstream.cli.output import stderr
from slipstream.cli.train_shared import QUIET_SECONDS, span
from slipstream.train.acceptance import Acceptance
from slipstream.train.curve import Seen


class TrainingWatch:
    """Draws on stderr: a bar on a terminal, a line now and then elsewhere. Use as a context manager."""

    def __init__(self) -> None:
        self._console = stderr()
        self._bar: Progress | None = None
        self._task: int | None = None
        self._last = float("-inf")
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("training"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TextColumn("{task.fields[text]}", markup=False),
                TimeElapsedColumn(),
                console=self._console,
            )

    def __enter__(self) -> TrainingWatch:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def begin(self, step: int, total: int) -> None:
        if self._bar is not None:
            self._task = self._bar.add_task("", total=total, completed=step, text="")

    def step(self, seen: Seen) -> None:
        tau = "" if seen.tau is None else f", expected tau {seen.tau:.2f}"
        text = f"loss {seen.loss:.4f}{tau}, {seen.speed:.0f} tokens/s, {span(seen.seconds_left)} left"
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=seen.step, text=text)  # type: ignore[arg-type]
            return
        now = time.monotonic()
        if now - self._last >= QUIET_SECONDS:
            self._last = now
            self.note(f"step {seen.step} of {seen.total}: {text}")

    def measured(self, step: int, found: Acceptance) -> None:
        rates = " ".join(f"{rate:.2f}" for rate in found.conditional)
        self.note(
            f"step {step}: expected tau {found.tau:.2f} on held-out answers, acceptance by depth {rates}"
        )

    def note(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)
