"""Prompt lookup: copy what followed the last time the same tokens appeared.

Needs no model. Tries the longest suffix first (`max_n` tokens down to `min_n`) and takes its most
recent earlier occurrence. A continuation that reaches the end of the text goes on with what it
has itself copied, so a repeating pattern is drafted to any length. After Saxena, prompt lookup
decoding (2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.drafters.base import Draft, Drafter, DraftRequest, TargetInfo, TokenTree, empty_draft
from slipstream.errors import ParameterError


@dataclass(frozen=True, slots=True)
class NgramConfig:
    """max_n: longest suffix looked for. min_n: shortest one. num_speculative_tokens: tokens copied.

    The default of 7 makes, with the root, the 8 rows a step is padded to anyway.
    """

    max_n: int = 4
    min_n: int = 2
    num_speculative_tokens: int = 7

    def __post_init__(self) -> None:
        if not 1 <= self.min_n <= self.max_n:
            raise ParameterError(
                f"ngram needs 1 <= min_n <= max_n, not min_n={self.min_n}, max_n={self.max_n}"
            )
        if self.num_speculative_tokens < 0:
            raise ParameterError("ngram needs num_speculative_tokens of 0 or more")


class _Index:
    """Where each n-gram was last followed by a token; grows with the text, never shrinks."""

    def __init__(self) -> None:
        self.next_of: dict[tuple[int, ...], int] = {}
        self.known = 0  # n-grams ending before this position are in the index

    def extend(self, tokens: Sequence[int], min_n: int, max_n: int) -> None:
        for end in range(self.known + 1, len(tokens)):  # tokens[end] follows the n-gram that ends before it
            for n in range(min_n, min(max_n, end) + 1):
                self.next_of[tuple(tokens[end - n : end])] = end
        self.known = max(self.known, len(tokens) - 1)


class NgramDrafter(Drafter):
    name = "ngram"
    Config = NgramConfig

    def __init__(self, config: NgramConfig, target: TargetInfo) -> None:
        self._config = config
        self.num_speculative_tokens = config.num_speculative_tokens
        self._indexes: dict[int, _Index] = {}

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [self._one(r) for r in requests]

    def _one(self, request: DraftRequest) -> Draft:
        tokens, config = request.tokens, self._config
        index = self._indexes.setdefault(request.seq_id, _Index())
        index.extend(tokens, config.min_n, config.max_n)
        for n in range(min(config.max_n, len(tokens)), config.min_n - 1, -1):
            start = index.next_of.get(tuple(tokens[len(tokens) - n :]))
            if start is not None:
                period = len(tokens) - start
                copied = [tokens[start + i % period] for i in range(request.budget.depth)]
                return Draft(TokenTree.chain(request.root, copied), source=self.name)
        return empty_draft(request)

    def close(self, seq_id: int) -> None:
        self._indexes.pop(seq_id, None)

    def shutdown(self) -> None:
        self._indexes.clear()
