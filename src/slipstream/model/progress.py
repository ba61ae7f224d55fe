"""How long work reports where it is. The library only calls this; who called the library draws it."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """stage: a new piece of work of `total` (0: unknown) units, bytes if the unit is empty. at: how many of
    them are done. note: a plain line."""

    def stage(self, text: str, total: int, unit: str = "") -> None: ...

    def at(self, done: int) -> None: ...

    def note(self, text: str) -> None: ...


class Silent:
    """Draws nothing."""

    def stage(self, text: str, total: int, unit: str = "") -> None:
        pass

    def at(self, done: int) -> None:
        pass

    def note(self, text: str) -> None:
        pass


def size(number: int) -> str:
    """Bytes as people read them: 1.26 GB, 491 MB, 12 kB."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= scale:
            value = number / scale
            return (
                f"{value:.2f} {unit}"
                if value < 10
                else f"{value:.1f} {unit}"
                if value < 100
                else f"{value:.0f} {unit}"
            )
    return f"{number} bytes"
