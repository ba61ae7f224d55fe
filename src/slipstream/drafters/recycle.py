"""Token recycling: the likeliest successors that the target gave each token when it last computed it.

A table holds, for every token of the vocabulary, the k likeliest tokens of the last logits seen after it
(Luo et al., 2408.08696). It is filled from every verified node, the rejected ones too, and is shared by all
rows. A draft reads a tree of fixed shape out of it: the path 0.1.0 is the likeliest successor's second
likeliest successor's likeliest successor. Prompts are read without logits, so a token the target has not
yet been asked about has the tokens that followed it in prompts, the latest first.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slipstream.drafters.base import (
    Draft,
    Drafter,
    DraftRequest,
    MemoryEstimate,
    Needs,
    Observation,
    TargetInfo,
    TargetShape,
    TokenTree,
    empty_draft,
)
from slipstream.errors import ParameterError

_ID = np.dtype(np.int32)
# What share of tokens is the successor of each rank, as far as the default shape assumes; later ranks halve.
RANKS = (0.5, 0.14, 0.08, 0.05, 0.035, 0.025, 0.02, 0.015)


@dataclass(frozen=True, slots=True)
class RecycleConfig:
    """num_speculative_tokens: nodes of the tree. k: successors remembered a token.

    choices: the tree's paths by rank, most wanted first, as in 0+1+0.0+0.1; by default those that are
    likeliest if each rank is right as often as `RANKS` says.

    The default of 31 makes, with the root, 32 rows, a multiple of the 8 a step is padded to.
    """

    num_speculative_tokens: int = 31
    k: int = 8
    choices: str = ""

    def __post_init__(self) -> None:
        if self.num_speculative_tokens < 0:
            raise ParameterError("recycle needs num_speculative_tokens of 0 or more")
        if self.k < 1:
            raise ParameterError(f"recycle:k must be at least 1, not {self.k}")
        if self.choices:
            parse_choices(self.choices, self.k)


@dataclass(frozen=True, slots=True)
class Choice:
    """A node of the shape: the index of its parent (-1: the root) among those before it, rank and depth."""

    parent: int
    rank: int
    depth: int


def parse_choices(text: str, k: int) -> list[Choice]:
    """Read `0+1+0.0`; raises ParameterError."""
    index: dict[tuple[int, ...], int] = {(): -1}
    shape: list[Choice] = []
    for item in text.split("+"):
        try:
            path = tuple(int(rank) for rank in item.split("."))
        except ValueError:
            raise ParameterError(f"recycle:choices has {item!r}; write ranks as in 0+1+0.0+0.1") from None
        if not all(0 <= rank < k for rank in path):
            raise ParameterError(f"recycle:choices has {item!r}; ranks go from 0 to k - 1 = {k - 1}")
        if path[:-1] not in index or path in index:
            raise ParameterError(f"recycle:choices must name {item!r} once and after its parent")
        index[path] = len(shape)
        shape.append(Choice(index[path[:-1]], path[-1], len(path)))
    return shape


def likeliest_choices(nodes: int, k: int) -> list[Choice]:
    """The `nodes` likeliest paths, best first, so that any beginning is the best tree of its size."""
    share = [RANKS[r] if r < len(RANKS) else RANKS[-1] / 2 ** (r - len(RANKS) + 1) for r in range(k)]
    shape: list[Choice] = []
    heap = [(-share[0], 0, -1, 0, 1, 1.0)]  # -probability, tie-break, parent, rank, depth, the parent's own
    order = 1
    while heap and len(shape) < nodes:
        negative, _, parent, rank, depth, above = heapq.heappop(heap)
        shape.append(Choice(parent, rank, depth))
        following = [(len(shape) - 1, 0, depth + 1, -negative)]  # first child, next sibling
        if rank + 1 < k:
            following.append((parent, rank + 1, depth, above))
        for node, nth, level, base in following:
            heapq.heappush(heap, (-base * share[nth], order, node, nth, level, base))
            order += 1
    return shape


class RecycleDrafter(Drafter):
    name = "recycle"
    Config = RecycleConfig
    needs = Needs(node_logits=True)
    learns = True

    def __init__(self, config: RecycleConfig, target: TargetInfo) -> None:
        self.num_speculative_tokens = config.num_speculative_tokens
        self._vocab = target.vocab_size
        self._k = min(config.k, target.vocab_size)
        self._shape = (
            parse_choices(config.choices, config.k)
            if config.choices
            else likeliest_choices(config.num_speculative_tokens, self._k)
        )
        self._clear()

    @classmethod
    def predict_memory(cls, config: RecycleConfig, target: TargetShape) -> MemoryEstimate:
        row = min(config.k, target.vocab_size) * _ID.itemsize + np.dtype(np.bool_).itemsize
        return MemoryEstimate(tables=target.vocab_size * row)

    def _clear(self) -> None:
        self._table = np.full((self._vocab, self._k), -1, dtype=_ID)  # [V, k], -1 is unknown
        self._computed = np.zeros(self._vocab, dtype=np.bool_)  # [V] the row is from logits

    def open(self, seq_id: int, prompt: Sequence[int]) -> None:
        """Seed the successors of tokens that the target has not been asked about."""
        for token, following in zip(prompt, prompt[1:], strict=False):
            if token >= self._vocab or following >= self._vocab or self._computed[token]:
                continue
            row = [t for t in self._table[token].tolist() if t not in (following, -1)]
            self._table[token, : len(row) + 1] = [following, *row][: self._k]

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [self._one(r) for r in requests]

    def _one(self, request: DraftRequest) -> Draft:
        budget = request.budget
        if request.root >= self._vocab:
            return empty_draft(request)  # an id of the head's padding, in a prompt
        tokens, parents = [request.root], [-1]
        successors: dict[int, list[int]] = {}  # node -> its table row
        node_of: dict[int, int] = {-1: 0}  # choice -> node
        for i, choice in enumerate(self._shape):
            if len(tokens) > budget.nodes:
                break
            parent = node_of.get(choice.parent)
            if parent is None or choice.depth > budget.depth:
                continue
            if parent not in successors:
                successors[parent] = self._table[tokens[parent]].tolist()
            ranked = successors[parent]
            if choice.rank < len(ranked) and ranked[choice.rank] >= 0:
                node_of[i] = len(tokens)
                tokens.append(ranked[choice.rank])
                parents.append(parent)
        return Draft(TokenTree(tuple(tokens), tuple(parents)), source=self.name)

    def observe(self, observations: Sequence[Observation]) -> None:
        """Learn from all nodes; where a token occurs twice, what was kept counts, and of that the last."""
        for seen in observations:
            if seen.draft is None or seen.node_logits is None:
                continue
            top = seen.node_logits[:, : self._vocab].topk(self._k).indices.tolist()  # [nodes, k]
            kept = (0, *seen.accepted)
            tokens = seen.draft.tree.tokens
            order = [*(n for n in range(len(tokens)) if n not in kept), *kept]
            rows = {tokens[n]: top[n] for n in order if tokens[n] < self._vocab}
            for token, row in rows.items():
                self._table[token] = row
                self._computed[token] = True

    @property
    def memory_bytes(self) -> int:
        return int(self._table.nbytes + self._computed.nbytes)

    def shutdown(self) -> None:
        self._table = self._table[:0]
        self._computed = self._computed[:0]
