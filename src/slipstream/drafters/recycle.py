"""Token recycling: the likeliest successors that the target gave each token when it last computed it.

A table holds, for every token of the vocabulary, the k likeliest tokens of the last logits seen after it
(Luo et al., 2408.08696). It is filled from every verified node, the rejected ones too, and is shared by all
rows. A draft reads a tree of fixed shape out of it: the path 0.1.0 is the likeliest successor's second
likeliest successor's likeliest successor. Prompts are read without logits, so a token the target has not
yet been asked about has the tokens that followed it in prompts, the latest first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slipstream.core.choices import Choices, Path_, best_tree, check_nodes, choices_of
from slipstream.core.spec import refuse_given
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

MOST_K = 256  # later successors are next to never right, and each takes four bytes a token
_ID = np.dtype(np.int32)
# What share of tokens is the successor of each rank, as far as the default shape assumes; later ranks halve.
RANKS = (0.5, 0.14, 0.08, 0.05, 0.035, 0.025, 0.02, 0.015)


@dataclass(frozen=True, slots=True)
class RecycleConfig:
    """nodes: drafted tokens of the tree. k: successors remembered a token.

    choices: the tree's paths by rank, most wanted first, as in 0+1+0.0+0.1, or a JSON file of them; by
    default the likeliest, the first rank right half of the time and each later one less.

    The default of 31 nodes makes, with the root, 32 rows, a multiple of the 4 a step is padded to.
    """

    nodes: int = 31
    k: int = 8
    choices: str = ""

    def __post_init__(self) -> None:
        check_nodes("recycle:nodes", self.nodes)
        if self.choices:
            refuse_given(self, "recycle:choices gives the whole tree", "nodes")
        if not 1 <= self.k <= MOST_K:
            raise ParameterError(f"recycle:k must be from 1 to {MOST_K}, not {self.k}")


def likeliest_choices(nodes: int, k: int) -> Choices:
    """The `nodes` likeliest paths if ranks are right as often as `RANKS` says, whatever the depth."""
    share = [RANKS[r] if r < len(RANKS) else RANKS[-1] / 2 ** (r - len(RANKS) + 1) for r in range(k)]
    return best_tree([share] * nodes, nodes)


def _shape(config: RecycleConfig, k: int) -> Choices:
    if not config.choices:
        return likeliest_choices(config.nodes, k)
    try:
        shape = choices_of(config.choices)
    except ParameterError as error:
        raise ParameterError(f"recycle:choices: {error}") from None
    if max(shape.widths, default=0) > config.k:
        raise ParameterError(f"recycle:choices has a rank above k - 1 = {config.k - 1}: raise k")
    return shape


class RecycleDrafter(Drafter):
    name = "recycle"
    Config = RecycleConfig
    needs = Needs(node_logits=True)
    learns = True

    def __init__(self, config: RecycleConfig, target: TargetInfo) -> None:
        self._vocab = target.vocab_size
        self._k = min(config.k, target.vocab_size)
        self._shape = _shape(config, self._k)
        self.num_speculative_tokens, self.draft_nodes = self._shape.depth, len(self._shape)
        self._clear()

    @classmethod
    def predict_memory(cls, config: RecycleConfig, target: TargetShape) -> MemoryEstimate:
        _shape(config, min(config.k, target.vocab_size))  # told here as when it is built
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
        node_of: dict[Path_, int] = {(): 0}
        for path in self._shape.paths:
            if len(tokens) > budget.nodes:
                break
            parent = node_of.get(path[:-1])
            if parent is None or len(path) > budget.depth:
                continue
            if parent not in successors:
                successors[parent] = self._table[tokens[parent]].tolist()
            ranked = successors[parent]
            if path[-1] < len(ranked) and ranked[path[-1]] >= 0:
                node_of[path] = len(tokens)
                tokens.append(ranked[path[-1]])
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
