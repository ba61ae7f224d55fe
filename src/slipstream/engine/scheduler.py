"""Who reads its prompt, who decodes, who waits. Knows token counts only.

First come, first served. A sequence is admitted when a slot is free and the cache has room for all it may
become (there is nothing to swap out to, so what runs can always end), reads its prompt in chunks, then
decodes until it ends; its slot is free in the same step. Every step serves all decoding rows and
at most one chunk's worth of prompt tokens, so a long prompt does not stop running streams.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass

from slipstream.core.sequence import Sequence
from slipstream.errors import CapacityError

Piece = tuple[Sequence, int, int]  # of whose prompt, from, to


@dataclass(frozen=True)
class Load:
    """slots: for so many sequences. admitted: those that hold one, oldest first. waiting: how many wait for
    one. reserved: cached tokens promised to the admitted, of `cache_tokens` (None: no limit). parked: cached
    tokens of sequences that ended, which make room for the admitted as they grow."""

    slots: int
    admitted: tuple[int, ...]
    waiting: int
    reserved: int
    cache_tokens: int | None
    parked: int = 0


class Scheduler:
    """max_rows: sequences that hold a slot at once. chunk: prompt tokens a step.

    cache_tokens: cached tokens of all slots together, None without a limit; a slot grows by `block`.
    held: how many tokens there is memory for once slots hold so many each.
    """

    def __init__(
        self,
        max_rows: int,
        chunk: int,
        cache_tokens: int | None = None,
        block: int = 1,
        held: Callable[[Items[int]], int] = sum,
    ) -> None:
        self.max_rows = max_rows
        self.chunk = chunk
        self.cache_tokens = cache_tokens
        self._block = block
        self._held = held
        self.waiting: deque[Sequence] = deque()
        self.reading: dict[int, int] = {}  # sequence id -> prompt tokens read
        self.running: list[Sequence] = []
        self._admitted: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return len(self.waiting) + len(self._admitted)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._admitted.values()
        yield from self.waiting

    def add(self, sequence: Sequence) -> None:
        """Raises CapacityError for a sequence that could never be admitted."""
        need = self._held([self.need(sequence)])
        if self.cache_tokens is not None and need > self.cache_tokens:
            raise CapacityError(
                f"prompt and answer may need {need} cached tokens, there is memory for {self.cache_tokens};"
                " lower max_tokens or shorten the prompt"
            )
        self.waiting.append(sequence)

    def need(self, sequence: Sequence) -> int:
        """Cached tokens that the sequence may come to hold, in whole blocks."""
        return -(-(len(sequence.prompt) + sequence.limit) // self._block) * self._block

    @property
    def reserved(self) -> int:
        """Cached tokens that the admitted sequences may come to hold."""
        return self._held([self.need(s) for s in self._admitted.values()])

    @property
    def load(self) -> Load:
        return Load(self.max_rows, tuple(self._admitted), len(self.waiting), self.reserved, self.cache_tokens)

    def admit(self) -> list[Sequence]:
        """Move waiting sequences into free slots, oldest first."""
        admitted = []
        limited = self.cache_tokens is not None and self.waiting
        needs = [self.need(s) for s in self._admitted.values()] if limited else []
        while self.waiting and len(self._admitted) < self.max_rows:
            needs.append(self.need(self.waiting[0]))
            if self.cache_tokens is not None and self._held(needs) > self.cache_tokens:
                break  # a smaller one behind it must wait too, or a large one would wait for ever
            sequence = self.waiting.popleft()
            self._admitted[sequence.id] = sequence
            self.reading[sequence.id] = 0
            admitted.append(sequence)
        return admitted

    @property
    def admitted(self) -> Collection[Sequence]:
        """Sequences that hold a slot, oldest first."""
        return self._admitted.values()

    def chunks(self, found: Callable[[Sequence, int, Items[Piece]], int | None]) -> list[Piece]:
        """The prompt pieces to read now.

        All of a prompt but its last token is read: that one is the first root. Pieces end at
        multiples of `chunk`, so how a prompt is cut depends on the prompt alone, and on what is `found`:
        that tells how much of a prompt is there already, given how much of it was read and the pieces
        chosen so far, or None for one that had better wait for these.
        """
        pieces: list[Piece] = []
        budget = self.chunk
        for sequence_id, read in self.reading.items():
            sequence = self._admitted[sequence_id]
            start = found(sequence, read, pieces)
            if start is None:
                continue
            self.reading[sequence_id] = start
            end = min((start // self.chunk + 1) * self.chunk, len(sequence.prompt) - 1)
            if end - start > budget:
                break
            budget -= end - start
            pieces.append((sequence, start, end))
        return pieces

    def read(self, sequence: Sequence, end: int) -> None:
        """The prompt is read up to `end`; a sequence with only its root left decodes from now on."""
        if end >= len(sequence.prompt) - 1:
            self.reading.pop(sequence.id, None)
            self.running.append(sequence)
        else:
            self.reading[sequence.id] = end

    def retire(self, sequence: Sequence) -> None:
        """Forget the sequence, wherever it is."""
        self._admitted.pop(sequence.id, None)
        self.reading.pop(sequence.id, None)
        self.running = [s for s in self.running if s is not sequence]
        if sequence in self.waiting:
            self.waiting.remove(sequence)
