"""How often Medusa's heads are right about a target, measured while it answers (`slipstream tune medusa`)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from slipstream.drafters.base import Draft, Drafter, DraftRequest, Observation, empty_draft
from slipstream.drafters.medusa import RANKS, MedusaDrafter
from slipstream.errors import DrafterError
from slipstream.model.store import try_writing, write_atomic

_ROWS = 32  # states ranked at once: all heads' logits of all of them are there together


@dataclass(frozen=True)
class HeadCounts:
    """right[k][r]: how often the rank-r choice of head k was the target's token. guesses[k]: of how many."""

    right: tuple[tuple[int, ...], ...]
    guesses: tuple[int, ...]

    @property
    def accuracies(self) -> list[list[float]]:
        """[head][rank]"""
        return [[r / max(n, 1) for r in row] for row, n in zip(self.right, self.guesses, strict=True)]


@dataclass
class _Row:
    """tokens: all known ones. states: the target's, of the tokens from position `first` on."""

    tokens: list[int]
    first: int
    states: list[torch.Tensor] = field(default_factory=list)  # each [n, H]


class HeadProbe(Drafter):
    """Drafts nothing. It is told what `MedusaDrafter` would be told, and counts how often each choice of each
    head would have been the token that the target then said.

    Every state that a draft could have been made from counts: the one before each root, the first of which is
    the prompt's last token. Right or wrong is asked of each head by itself, whatever the others guessed,
    which is how a tree is valued (`choices.best_tree`).
    """

    name = "medusa"

    def __init__(self, medusa: MedusaDrafter, ranks: int = RANKS) -> None:
        self._medusa, self.needs = medusa, medusa.needs
        self._ranks = min(ranks, medusa.vocab_size)
        self._right = torch.zeros(medusa.num_heads, self._ranks, dtype=torch.int64)  # [K, ranks]
        self._guesses = [0] * medusa.num_heads
        self._rows: dict[int, _Row] = {}

    @property
    def memory_bytes(self) -> int:
        return self._medusa.memory_bytes

    @property
    def counts(self) -> HeadCounts:
        """Of all rows that have ended."""
        return HeadCounts(tuple(map(tuple, self._right.tolist())), tuple(self._guesses))

    def open(self, seq_id: int, prompt: Sequence[int]) -> None:
        self._rows[seq_id] = _Row(list(prompt), max(len(prompt) - 2, 0))

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [empty_draft(r) for r in requests]

    def observe(self, observations: Sequence[Observation]) -> None:
        for seen in observations:
            row = self._rows[seen.seq_id]
            row.states.append(seen.features["last"][max(row.first - seen.start, 0) :].clone())
            told = (*seen.tokens, *(() if seen.next_token is None else (seen.next_token,)))
            row.tokens.extend(told[len(row.tokens) - seen.start :])

    def close(self, seq_id: int) -> None:
        row = self._rows.pop(seq_id, None)
        if row is not None and row.states:
            self._count(row)

    def _count(self, row: _Row) -> None:
        states = torch.cat(row.states)  # [n, H]
        heads = len(self._guesses)
        for start in range(0, len(states), _ROWS):
            part = states[start : start + _ROWS]
            ids = self._medusa.ranked(part, heads, self._ranks)[0].cpu()  # [rows, K, ranks]
            for head in range(heads):
                ahead = row.first + start + 2 + head  # what the part's first state is asked about
                truth = torch.tensor(row.tokens[ahead : ahead + len(part)])  # [known rows]
                right = ids[: len(truth), head] == truth[:, None]  # [known rows, ranks]
                self._right[head] += right.sum(0)
                self._guesses[head] += len(truth)

    def shutdown(self) -> None:
        self._rows.clear()
        self._medusa.shutdown()


def save_accuracies(file: Path, counts: HeadCounts, model: str) -> None:
    """Write what `medusa` reads, whole or not at all, with the raw counts and the target's name."""
    value = {
        "model": model,
        "accuracies": [[round(a, 6) for a in row] for row in counts.accuracies],
        "right": counts.right,
        "guesses": counts.guesses,
    }
    with _placing(file):
        write_atomic(file, json.dumps(value) + "\n")


def check_place(file: Path) -> None:
    """Raise DrafterError where the file cannot be written: told before the measurement."""
    with _placing(file):
        try_writing(file.parent)


@contextmanager
def _placing(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DrafterError(
            f"{file} cannot be written ({error.strerror or error}): give another place with --out, and"
            " medusa:accuracies=FILE when drafting"
        ) from error
