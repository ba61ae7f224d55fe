"""What a verification rule may ask of the target, and the answer from one row's raw logits.

A view is lazy: only the nodes a rule visits are processed, with the tokens on the way to them as the
prefix. All randomness is keyed by the absolute position of the token that is drawn, so asking twice,
or in another order, gives the same answer. All but the target's own draws is keyed by the position of the
root too, so no pass meets a uniform that an earlier one has looked at (`core.noise` says why that matters).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from slipstream.core.noise import Purpose, uniform
from slipstream.core.tree import TokenTree
from slipstream.errors import ModelError
from slipstream.logits.law import Law
from slipstream.logits.pipeline import LogitsPipeline


class TargetView(Protocol):
    """The target at the nodes of one drafted tree. A node stands for the token that follows it."""

    def token(self, node: int) -> int:
        """The target's own draw there: has the law `probs(node)`, and is the same whenever asked."""

    def probs(self, node: int) -> torch.Tensor:
        """The target's law there, float64 [V], summing to 1."""

    def uniform(self, node: int, index: int = 0) -> float:
        """A number of [0, 1), independent of the draws; `index` separates several at one node.

        Fresh in every pass: a rule may look at any node's, also behind the end of what it accepts.
        """

    def draw(self, node: int, law: torch.Tensor) -> int:
        """A draw from another law [V] there, which sums to 1; independent of `token` and `uniform`."""


@dataclass(frozen=True)
class Verdict:
    """The accepted drafted nodes, from just below the root down, and the token that follows them."""

    path: tuple[int, ...]
    token: int


class LogitsView:
    """`TargetView` over raw logits [nodes, width] of one row.

    tokens: what is committed, the root last; it is read, never kept beyond the step. greedy: the
    argmax of every node where it is already known.
    """

    def __init__(
        self,
        logits: torch.Tensor,
        pipeline: LogitsPipeline,
        tokens: Sequence[int],
        tree: TokenTree,
        seed: int,
        greedy: Sequence[int] | None = None,
    ) -> None:
        self._logits = logits  # [nodes, width]
        self._pipeline = pipeline
        self._tokens = tokens
        self._tree = tree
        self._seed = seed
        self._origin = len(tokens) - 1
        self._greedy = greedy
        self._laws: dict[int, Law] = {}
        self._drawn: dict[int, int] = {}

    def token(self, node: int) -> int:
        if self._greedy is not None:
            return self._greedy[node]
        if node not in self._drawn:
            drawn = self._law(node).draw(self._seed, self._position(node), Purpose.TOKEN)
            self._drawn[node] = drawn
        return self._drawn[node]

    def probs(self, node: int) -> torch.Tensor:
        return self._law(node).dense(self._pipeline.vocab_size)  # [V]

    def uniform(self, node: int, index: int = 0) -> float:
        return uniform(self._seed, self._position(node), Purpose.ACCEPT, index, origin=self._origin)

    def draw(self, node: int, law: torch.Tensor) -> int:
        return Law.from_probs(law).draw(
            self._seed, self._position(node), Purpose.RESIDUAL, origin=self._origin
        )

    def _position(self, node: int) -> int:
        return len(self._tokens) + self._tree.depths[node]

    def _law(self, node: int) -> Law:
        if node not in self._laws:
            prefix: Sequence[int] = ()
            if not self._pipeline.history_free:  # a long prefix is copied only where it is read
                prefix = (*self._tokens, *self._tree.path_tokens(node))
            self._laws[node] = self._pipeline.law(self._logits[node], prefix)
        return self._laws[node]


@dataclass(frozen=True)
class ViewRow:
    """One row of a step: its request, its tree, and where its nodes start in the packed logits."""

    pipeline: LogitsPipeline
    tokens: Sequence[int]
    tree: TokenTree
    seed: int
    start: int


def build_views(rows: Sequence[ViewRow], logits: torch.Tensor) -> list[TargetView]:
    """A view a row over packed logits [nodes of all rows, width].

    Plain rows need nothing but an argmax, so all of theirs are computed together and fetched with
    the one host sync of the step. The others read their logits when a rule asks.
    """
    parts = [logits[row.start : row.start + len(row.tree)] for row in rows]  # each [nodes, width]
    plain = [i for i, row in enumerate(rows) if row.pipeline.plain]
    best = _batched_argmax([parts[i][:, : rows[i].pipeline.vocab_size] for i in plain])
    greedy = dict(zip(plain, best, strict=True))
    return [
        LogitsView(part, row.pipeline, row.tokens, row.tree, row.seed, greedy.get(i))
        for i, (row, part) in enumerate(zip(rows, parts, strict=True))
    ]


def _batched_argmax(parts: Sequence[torch.Tensor]) -> list[list[int]]:
    """argmax of every row of every part [n_i, V]; the lowest id of equals wins."""
    if not parts:
        return []
    # The maximum of bfloat16 is several times slower than that of the float32 copy. Of equal maxima
    # torch gives the first. A NaN is its own maximum; it is marked, so that one fetch tells all.
    tops = [part.float().max(-1) for part in parts]  # each values [n_i], indices [n_i]
    best = [torch.where(top.values.isnan(), -1, top.indices) for top in tops]
    ids: list[int] = torch.cat(best).tolist()  # THE host sync of a step
    if -1 in ids:
        raise ModelError("the model gave NaN logits; its weights are damaged, or overflow in this dtype")
    ends = [0]
    for part in parts:
        ends.append(ends[-1] + len(part))
    return [ids[a:b] for a, b in zip(ends, ends[1:], strict=False)]
