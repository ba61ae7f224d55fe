"""Suffix decoding: continue as earlier text did after the same tokens, by how often it did.

Each row has a suffix tree of its prompt and output, and all rows share one of earlier outputs (Oliaro et
al., 2411.04975). For every suffix of the row that occurs in a tree the likeliest continuation is
followed, at most match * factor + offset tokens and what then fills a block of rows; the draft is the one
with the most expected accepted tokens, the sum of its path probabilities. So a draft is long where the text
repeats and absent where it is new. The row's own tree wins ties.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.drafters._suffix_guess import Guess, Limits, best_guess
from slipstream.drafters._suffix_store import SuffixStore, vocabulary_digest
from slipstream.drafters._suffix_tree import GrowingTree, expected_bytes
from slipstream.drafters.base import (
    Draft,
    Drafter,
    DraftRequest,
    MemoryEstimate,
    Observation,
    TargetInfo,
    TargetShape,
    TokenTree,
    empty_draft,
)
from slipstream.errors import ParameterError


@dataclass(frozen=True, slots=True)
class SuffixConfig:
    """num_speculative_tokens: most tokens drafted a step. max_depth: longest match and draft together.

    factor: drafted tokens for every matched one. offset: drafted tokens beyond that. block: rows that are
    computed together; drafts are as long as fills, with the root, whole ones. min_token_prob: least
    probability of a path. min_score: draft nothing if fewer accepted tokens are expected. tree: draft the
    likeliest branches, not the likeliest chain. remember: keep finished outputs for later requests.
    max_requests: outputs kept, the oldest go first. max_tokens: tokens kept of them in all. store: file that
    keeps them between runs.

    A step is padded to multiples of 4 rows. So a match of up to 3 tokens drafts 3, which cost nothing, and
    only a longer one drafts 7, which have to be worth 4 more rows. The paper's own is block=1.
    """

    num_speculative_tokens: int = 7
    max_depth: int = 24
    factor: float = 1.0
    offset: float = 0.0
    block: int = 4
    min_token_prob: float = 0.1
    min_score: float = 0.0
    tree: bool = False
    remember: bool = True
    max_requests: int = 10_000
    max_tokens: int = 200_000
    store: str = ""

    def __post_init__(self) -> None:
        if self.max_depth < 2:
            raise ParameterError(f"suffix:max_depth must be at least 2, not {self.max_depth}")
        if self.block < 1:
            raise ParameterError(f"suffix:block must be 1 or more, not {self.block}")
        for name in ("num_speculative_tokens", "factor", "min_score", "max_requests", "max_tokens"):
            if not getattr(self, name) >= 0:
                raise ParameterError(f"suffix:{name} must be 0 or more, not {getattr(self, name)}")
        for name in ("factor", "offset"):
            if not math.isfinite(getattr(self, name)):
                raise ParameterError(f"suffix:{name} must be a finite number, not {getattr(self, name)}")
        if not 0 <= self.min_token_prob <= 1:
            raise ParameterError(f"suffix:min_token_prob must be in [0, 1], not {self.min_token_prob}")
        if self.store and not self.remember:
            raise ParameterError("suffix:store keeps what is remembered; leave out remember=false or store")


@dataclass
class _Row:
    tree: GrowingTree
    prompt_length: int

    def catch_up(self, tokens: Sequence[int], start: int = 0) -> None:
        """Take tokens that stand from absolute position `start`, as far as they are new."""
        known = len(self.tree.text) - start
        if known >= 0:
            self.tree.extend(tokens[known:])


class SuffixDrafter(Drafter):
    name = "suffix"
    Config = SuffixConfig

    def __init__(self, config: SuffixConfig, target: TargetInfo, store: SuffixStore | None = None) -> None:
        """`store` is one that other drafters use as well; its own bounds and file count."""
        self._config = config
        self.learns = config.remember or store is not None
        self._shares = store is not None
        self.num_speculative_tokens = config.num_speculative_tokens
        if store is None and config.remember:
            store = SuffixStore(
                target.vocab_size,
                max_requests=config.max_requests,
                max_tokens=config.max_tokens,
                max_depth=config.max_depth,
                path=config.store or None,
                vocabulary=vocabulary_digest(target.tokenizer) if config.store else "",
            )
        self.store = store
        self._rows: dict[int, _Row] = {}

    @classmethod
    def predict_memory(cls, config: SuffixConfig, target: TargetShape) -> MemoryEstimate:
        """With a full store; what a text takes depends on it, see `_suffix_tree.expected_bytes`."""
        kept = config.max_tokens if config.remember and config.max_requests else 0
        rows = target.rows * expected_bytes(target.context)
        note = f"suffix trees: {expected_bytes(1)} bytes a token, up to an eighth more or less by the text"
        full = f", the store with all its {kept} tokens" if kept else ""
        return MemoryEstimate(tables=rows + expected_bytes(kept), notes=(note + full,))

    def open(self, seq_id: int, prompt: Sequence[int]) -> None:
        self._rows[seq_id] = row = self._new_row(len(prompt))
        row.catch_up(prompt)

    def _new_row(self, prompt_length: int) -> _Row:
        return _Row(GrowingTree(self._config.max_depth), prompt_length)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [self._one(r) for r in requests]

    def _one(self, request: DraftRequest) -> Draft:
        if request.seq_id not in self._rows:
            self._rows[request.seq_id] = self._new_row(request.prompt_length)
        tree = self._rows[request.seq_id].tree
        self._rows[request.seq_id].catch_up(request.tokens)
        config, budget = self._config, request.budget
        floor = max(config.min_token_prob, budget.stop_below)
        limits = Limits(
            budget.depth, budget.nodes, config.factor, config.offset, floor, config.tree, config.block
        )
        best = best_guess(tree, tree.repeated(), limits)
        if self.store is not None:
            best = _better(best, self.store.best(tree.tail(), limits))
        if best is None or best.score < config.min_score:
            return empty_draft(request)
        shape = TokenTree((request.root, *best.tokens), (-1, *best.parents))
        return Draft(shape, scores=(1.0, *best.probs), source=self.name)

    def observe(self, observations: Sequence[Observation]) -> None:
        for seen in observations:
            if seen.seq_id in self._rows:
                # With the next token, so that the last one of an answer is remembered too.
                told = seen.tokens if seen.next_token is None else (*seen.tokens, seen.next_token)
                self._rows[seen.seq_id].catch_up(told, seen.start)

    def close(self, seq_id: int) -> None:
        """Frees the row. Its output goes to the store."""
        row = self._rows.pop(seq_id, None)
        if row is not None and self.store is not None and self._config.remember:
            self.store.add(row.tree.text[row.prompt_length :])

    @property
    def memory_bytes(self) -> int:
        held = sum(row.tree.memory_bytes for row in self._rows.values())
        return held + (self.store.memory_bytes if self.store is not None else 0)

    def shutdown(self) -> None:
        """Frees the rows and writes the store's file; a store that others use as well stays."""
        self._rows.clear()
        store = self.store
        if not self._shares:
            self.store = None
        if store is not None:
            store.save()


def _better(local: Guess | None, shared: Guess | None) -> Guess | None:
    if local is None or (shared is not None and shared.score > local.score):
        return shared
    return local
