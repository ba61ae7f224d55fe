"""Prompt lookup: copy what followed the last time the same tokens appeared.

Needs no model. Tries the longest suffix first (`max_n` tokens down to `min_n`) and takes its most
recent earlier occurrence. A continuation that reaches the end of the text goes on with what it
has itself copied, so a repeating pattern is drafted to any length. After Saxena, prompt lookup
decoding (2023). With `branches` above 1 further occurrences, older ones and of shorter suffixes, that went on
otherwise are branches of a tree.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from slipstream.core.estimate import INT_BYTES
from slipstream.drafters.base import (
    Draft,
    Drafter,
    DraftRequest,
    MemoryEstimate,
    TargetInfo,
    TargetShape,
    TokenTree,
    empty_draft,
)
from slipstream.errors import ParameterError

MOST_N = 1024  # what a longer suffix tells, a shorter one tells too


@dataclass(frozen=True, slots=True)
class NgramConfig:
    """max_n: longest suffix looked for. min_n: shortest one. num_speculative_tokens: tokens copied.

    branches: continuations merged into a tree; each takes half of the tokens that those before it left.

    The default of 7 makes, with the root, 8 rows, a multiple of the 4 a step is padded to.
    """

    max_n: int = 4
    min_n: int = 2
    num_speculative_tokens: int = 7
    branches: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.min_n <= self.max_n <= MOST_N:
            raise ParameterError(
                f"ngram needs 1 <= min_n <= max_n <= {MOST_N}, not min_n={self.min_n}, max_n={self.max_n}"
            )
        if self.num_speculative_tokens < 0:
            raise ParameterError("ngram needs num_speculative_tokens of 0 or more")
        if self.branches < 1:
            raise ParameterError(f"ngram:branches must be at least 1, not {self.branches}")


# Share of n-grams that are new, for n of 1, 2, 3 and more: the mean of nine texts of English and code of
# 2,000 Qwen2.5 tokens each; for n = 3 they range from 0.53 to 0.96.
DISTINCT = (0.31, 0.66, 0.78, 0.85)
SCANNED = 8  # occurrences looked at for each branch, so that a long loop does not cost its length every step


class _Index:
    """Where each n-gram was last followed by a token; grows with the text, never shrinks."""

    def __init__(self, config: NgramConfig) -> None:
        self._config = config
        self._next_of: dict[tuple[int, ...], int] = {}
        self._before: dict[tuple[int, int], int] = {}  # n and occurrence -> the occurrence before it
        self.known = 0  # n-grams ending before this position are in the index

    def extend(self, tokens: Sequence[int]) -> None:
        config = self._config
        for end in range(self.known + 1, len(tokens)):  # tokens[end] follows the n-gram that ends before it
            for n in range(config.min_n, min(config.max_n, end) + 1):
                key = tuple(tokens[end - n : end])
                if config.branches > 1 and key in self._next_of:
                    self._before[n, end] = self._next_of[key]
                self._next_of[key] = end
        self.known = max(self.known, len(tokens) - 1)

    def occurrences(self, tokens: Sequence[int]) -> Iterator[int]:
        """Where the text went on after its longest suffix, latest first, then after shorter ones."""
        for n in range(min(self._config.max_n, len(tokens)), self._config.min_n - 1, -1):
            found = self._next_of.get(tuple(tokens[len(tokens) - n :]))
            while found is not None:
                yield found
                found = self._before.get((n, found))

    @property
    def memory_bytes(self) -> int:
        keys = len(self._next_of) * _key_bytes(self._config) + len(self._before) * sys.getsizeof((0, 0))
        return sys.getsizeof(self._next_of) + sys.getsizeof(self._before) + keys + self.known * INT_BYTES

    @staticmethod
    def expected_bytes(config: NgramConfig, tokens: int) -> int:
        """`memory_bytes` after so many tokens of ordinary text; at most half as much again."""
        shares = (DISTINCT[min(n, len(DISTINCT)) - 1] for n in range(config.min_n, config.max_n + 1))
        keys = int(tokens * sum(shares))
        table = sys.getsizeof(dict.fromkeys(range(keys)))  # as large as Python makes one of so many keys
        return table + sys.getsizeof({}) + keys * _key_bytes(config) + tokens * INT_BYTES


def _key_bytes(config: NgramConfig) -> int:
    """A key of middle length; its tokens are the row's own."""
    return sys.getsizeof((0,) * ((config.min_n + config.max_n) // 2))


class NgramDrafter(Drafter):
    name = "ngram"
    Config = NgramConfig

    def __init__(self, config: NgramConfig, target: TargetInfo) -> None:
        self._config = config
        self.num_speculative_tokens = config.num_speculative_tokens
        self._indexes: dict[int, _Index] = {}

    @classmethod
    def predict_memory(cls, config: NgramConfig, target: TargetShape) -> MemoryEstimate:
        """For ordinary text, see `_Index.expected_bytes`."""
        return MemoryEstimate(tables=target.rows * _Index.expected_bytes(config, target.context))

    @property
    def memory_bytes(self) -> int:
        return sum(index.memory_bytes for index in self._indexes.values())

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [self._one(r) for r in requests]

    def _one(self, request: DraftRequest) -> Draft:
        tokens, budget = request.tokens, request.budget
        index = self._indexes.get(request.seq_id)
        if index is None or index.known >= len(tokens):  # of another session that shares this drafter
            index = self._indexes[request.seq_id] = _Index(self._config)
        index.extend(tokens)
        paths: list[list[int]] = []
        for start in islice(index.occurrences(tokens), SCANNED * self._config.branches):
            period = len(tokens) - start
            path = [tokens[start + i % period] for i in range(budget.depth)]
            if path not in paths:
                paths.append(path)
            if len(paths) == self._config.branches:
                break
        if not paths:
            return empty_draft(request)
        return Draft(TokenTree.from_paths(request.root, _share(paths, budget.nodes)), source=self.name)

    def close(self, seq_id: int) -> None:
        self._indexes.pop(seq_id, None)

    def shutdown(self) -> None:
        self._indexes.clear()


def _share(paths: Sequence[Sequence[int]], nodes: int) -> list[Sequence[int]]:
    """Cut paths to `nodes` tokens in all: each has half of what is left, the last one all of it."""
    cut: list[Sequence[int]] = []
    for i, path in enumerate(paths):
        share = nodes if i == len(paths) - 1 else (nodes + 1) // 2
        common = max((_common(path, earlier) for earlier in cut), default=0)
        cut.append(path[: common + share])
        nodes -= len(cut[-1]) - common
    return cut


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common beginning."""
    return next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )
