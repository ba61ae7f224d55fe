"""Who reads its prompt, who decodes, who waits. Knows token counts only.

First come, first served. A sequence is admitted when a slot is free, reads its prompt in chunks, then
decodes until it ends; its slot is free in the same step. Every step serves all decoding rows and
at most one chunk's worth of prompt tokens, so a long prompt does not stop running streams.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from slipstream.core.sequence import Sequence


class Scheduler:
    """max_rows: sequences that hold a slot at once. chunk: prompt tokens a step."""

    def __init__(self, max_rows: int, chunk: int) -> None:
        self.max_rows = max_rows
        self.chunk = chunk
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
        self.waiting.append(sequence)

    def admit(self) -> list[Sequence]:
        """Move waiting sequences into free slots, oldest first."""
        admitted = []
        while self.waiting and len(self._admitted) < self.max_rows:
            sequence = self.waiting.popleft()
            self._admitted[sequence.id] = sequence
            self.reading[sequence.id] = 0
            admitted.append(sequence)
        return admitted

    def chunks(self) -> list[tuple[Sequence, int, int]]:
        """(sequence, start, end) of the prompt pieces to read now.

        All of a prompt but its last token is read: that one is the first root. Pieces start at
        multiples of `chunk`, so how a prompt is cut depends on the prompt alone.
        """
        pieces = []
        budget = self.chunk
        for sequence_id, start in self.reading.items():
            sequence = self._admitted[sequence_id]
            end = min(start + self.chunk, len(sequence.prompt) - 1)
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
