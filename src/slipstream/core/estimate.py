"""How much memory something will take, by what takes it."""

from __future__ import annotations

from dataclasses import dataclass

INT_BYTES = 32  # of a Python int that is not one of the small ones it keeps


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes at their most: all rows open, each as long as the context.

    weights: as they are kept, packed or quantised. cache: keys and values. tables: what is learned, indexed
    or looked up. notes: what a person should know about the numbers. unknown: why something is not in them;
    empty if all is.
    """

    weights: int = 0
    cache: int = 0
    tables: int = 0
    notes: tuple[str, ...] = ()
    unknown: str = ""

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.tables

    def __add__(self, other: MemoryEstimate) -> MemoryEstimate:
        """Both held at once."""
        return MemoryEstimate(
            self.weights + other.weights,
            self.cache + other.cache,
            self.tables + other.tables,
            tuple(dict.fromkeys((*self.notes, *other.notes))),
            "; ".join(filter(None, dict.fromkeys((self.unknown, other.unknown)))),
        )
