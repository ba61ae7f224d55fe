"""Drafts that grow level by level: EAGLE-2's dynamic tree, trees of a fixed shape, sampled chains.

A `Growth` says which nodes are to be expanded next (`frontier`), takes the likeliest continuations of
each, and in the end chooses what is drafted. It knows nothing of models: `grow` asks whoever has one for
the continuations of one level at a time, for all rows together.
"""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol, TypeVar

import torch

from slipstream.core.choices import Choices, Path_, check_nodes
from slipstream.core.draft import Draft
from slipstream.core.tree import TokenTree
from slipstream.errors import ParameterError

ROOT = -1


@dataclass(frozen=True)
class Level:
    """Continuations of n nodes, for each the likeliest first.

    tokens [n][width]. logprobs [n][width]: their log-probabilities, None where they were not wanted.
    logits [n, V]: for those who draw.
    """

    tokens: Sequence[Sequence[int]]
    logprobs: Sequence[Sequence[float]] | None = None
    logits: torch.Tensor | None = None

    def part(self, start: int, end: int) -> Level:
        return Level(
            self.tokens[start:end],
            self.logprobs[start:end] if self.logprobs is not None else None,
            self.logits[start:end] if self.logits is not None else None,
        )


def likeliest(logits: torch.Tensor, width: int, scored: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The `width` best ids of logits [..., V], best first, and if `scored` their log-probabilities.

    The argmax goes in front whatever topk makes of ties, so that any width has the greedy chain. It is all
    that a greedy chain needs: a softmax over the vocabulary is computed only where someone asks for it.
    """
    scores = logits.float()  # [..., V]
    ids = scores.argmax(-1, keepdim=True)  # [..., 1]
    if width > 1:
        first = scores.scatter(-1, ids, float("inf"))  # [..., V]
        ids = first.topk(min(width, scores.shape[-1]), -1).indices  # [..., width]
    return ids, scores.log_softmax(-1).gather(-1, ids) if scored else None


def check_tree(owner: str, width: int, nodes: int, depth: int) -> None:
    """ParameterError for trees of `width` paths that are too large, and for `nodes` of what is a chain."""
    if width == 1 and nodes:
        raise ParameterError(
            f"{owner}:nodes is the size of a tree and width=1 a chain: set width, or leave out nodes"
        )
    check_nodes(f"{owner}:width", width)
    check_nodes(f"{owner}:nodes", nodes)
    if width > 1 and not nodes:
        check_nodes(f"{owner}:width times num_speculative_tokens", width * depth)


class Growth(ABC):
    """Nodes are numbered in the order they are added, parents before children; `ROOT` is the root.

    width: how many continuations of each frontier node are wanted. scored: whether their log-probabilities
    are. values[i] is the log-probability of the path that ends in node i, where `scored`; it is never above
    its parent's.
    """

    width: int = 1
    scored: bool = False

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.values: list[float] = []
        self.depths: list[int] = []
        self.frontier: list[int] = [ROOT]
        self._columns: dict[int, int] = {ROOT: -1}
        self._above: list[int] = []  # the column of each column's parent

    @abstractmethod
    def add(self, level: Level) -> None:
        """The continuations of each frontier node; moves the frontier one level down.

        More than `width` may come, or fewer where there are no more.
        """

    @abstractmethod
    def chosen(self) -> list[int]:
        """The nodes to draft, parents before children, the most useful first."""

    def draft(self, root: int, source: str) -> Draft:
        """The chosen nodes as point masses; where `scored`, with their path probabilities."""
        order = self.chosen()
        number = {node: i for i, node in enumerate((ROOT, *order))}
        tree = TokenTree(
            (root, *(self.tokens[n] for n in order)), (-1, *(number[self.parents[n]] for n in order))
        )
        scores = (1.0, *(math.exp(self.values[n]) for n in order)) if self.scored else None
        return Draft(tree, scores=scores, source=source)

    # -- in a cache -----------------------------------------------------------------------------

    def place(self) -> tuple[list[int], tuple[int, ...]]:
        """The frontier as the next level behind those placed before, as `PackRow` takes it: its tokens, and
        the parents of all nodes placed so far. A node has one column, its number among them."""
        for node in self.frontier:
            self._columns[node] = len(self._above)
            self._above.append(self._columns[self.parents[node]])
        return [self.tokens[n] for n in self.frontier], tuple(self._above)

    def placed_path(self, tokens: Sequence[int]) -> list[int]:
        """Columns of the longest placed path from the root that spells a beginning of `tokens`."""
        children = {(self.parents[n], self.tokens[n]): n for n in self._columns if n != ROOT}
        columns: list[int] = []
        at: int | None = ROOT
        for token in tokens:
            at = children.get((at, token))  # type: ignore[arg-type]
            if at is None:
                break
            columns.append(self._columns[at])
        return columns

    def _logprobs(self, level: Level, i: int) -> Sequence[float]:
        """Those of node i of a level; zeros where they are not wanted, whatever other rows want."""
        if not self.scored:
            return [0.0] * len(level.tokens[i])
        assert level.logprobs is not None
        return level.logprobs[i]

    def _append(self, parent: int, token: int, logprob: float) -> int:
        self.tokens.append(token)
        self.parents.append(parent)
        # a log-probability is at most 0; rounding must not let a child overtake its parent
        self.values.append((self.values[parent] if parent != ROOT else 0.0) + min(logprob, 0.0))
        self.depths.append(self.depths[parent] + 1 if parent != ROOT else 1)
        return len(self.tokens) - 1


class _Grown(Protocol):
    @property
    def growth(self) -> Growth: ...


R = TypeVar("R", bound=_Grown)
Expand = Callable[[Sequence[R], int, bool], Level]
"""(rows, width, scored) -> the continuations of all their frontier nodes, row by row."""


def grow(rows: Sequence[R], expand: Expand[R]) -> None:
    """Grow all rows to their end, a level of all of them at a time."""
    live = [row for row in rows if row.growth.frontier]
    while live:
        level = expand(live, max(r.growth.width for r in live), any(r.growth.scored for r in live))
        at = 0
        for row in live:
            end = at + len(row.growth.frontier)
            row.growth.add(level.part(at, end))
            at = end
        live = [row for row in live if row.growth.frontier]


def _least(stop_below: float) -> float:
    """The log-probability below which nothing is drafted: what is impossible never is."""
    return math.log(max(stop_below, sys.float_info.min))


class DynamicGrowth(Growth):
    """EAGLE-2 (arXiv 2406.16858): expand the `top_k` likeliest nodes of each level, then keep the `nodes`
    likeliest of all that were scored, which maximises the expected number of accepted tokens.

    Exact because drafted tokens are point masses chosen without the target's noise. Ties go to the
    shallower, then to the earlier node, so what is kept is a tree. Continuations less likely than
    `stop_below` are left out. With greedy_path the path of the likeliest tokens is always expanded and
    always kept, so the tree never accepts less than the chain of its depth. scored: whether the scores are
    wanted; a greedy chain that stops nowhere does without, a tree cannot.
    """

    def __init__(
        self,
        top_k: int,
        depth: int,
        nodes: int,
        stop_below: float = 0.0,
        *,
        scored: bool = True,
        greedy_path: bool = False,
    ) -> None:
        super().__init__()
        self.width = top_k
        self.scored = scored or top_k > 1 or stop_below > 0.0
        self._depth, self._nodes = min(depth, nodes), nodes
        self._least = _least(stop_below)
        self._greedy: list[int] | None = [] if greedy_path else None
        self._level = 0
        if self._depth < 1:
            self.frontier = []

    def add(self, level: Level) -> None:
        before = len(self.tokens)
        for i, parent in enumerate(self.frontier):
            continuations = zip(level.tokens[i], self._logprobs(level, i), strict=True)
            for rank, (token, logprob) in enumerate(islice(continuations, self.width)):
                if not logprob >= self._least:
                    continue
                node = self._append(parent, token, logprob)
                if rank == 0 and self._greedy is not None and parent == (self._greedy or [ROOT])[-1]:
                    self._greedy.append(node)
        self._level += 1
        self.frontier = []
        if self._level < self._depth:
            greedy = set(self._greedy or ())
            added = range(before, len(self.tokens))
            best = sorted(added, key=lambda n: (n not in greedy, -self.values[n], n))[: self.width]
            # Nothing below a node that is not among the best is: its descendants are worth even less.
            worth = set(self.chosen())
            self.frontier = [n for n in best if n in worth]

    def chosen(self) -> list[int]:
        greedy = self._greedy or []
        # Until it stops the greedy path may still take a node a level.
        taken = self._depth if self._greedy is not None and len(greedy) == self._level else len(greedy)
        rest = set(range(len(self.tokens))).difference(greedy)
        order = sorted(rest, key=lambda n: (-self.values[n], self.depths[n], n))
        return [*greedy, *order[: self._nodes - taken]]


class StaticGrowth(Growth):
    """A tree of a given shape. Continuations less likely than `stop_below` are left out, and what would
    follow them."""

    def __init__(self, choices: Choices, stop_below: float = 0.0, *, scored: bool = True) -> None:
        super().__init__()
        self.scored = scored or stop_below > 0.0
        self.depth = choices.depth
        self._choices = choices
        self._least = _least(stop_below)
        self._node: dict[Path_, int] = {(): ROOT}
        self._level = 0
        self._advance([ROOT] if len(choices) else [])

    def _advance(self, frontier: list[int]) -> None:
        self.frontier = frontier
        if frontier:
            self.width = self._choices.widths[self._level]

    def add(self, level: Level) -> None:
        place = {node: i for i, node in enumerate(self.frontier)}
        self._level += 1
        paths = [p for p in self._choices.paths if len(p) == self._level]
        for path in paths:
            parent, rank = self._node.get(path[:-1]), path[-1]
            if parent is None or rank >= len(level.tokens[place[parent]]):
                continue
            at = place[parent]
            logprob = self._logprobs(level, at)[rank]
            if logprob >= self._least:
                self._node[path] = self._append(parent, level.tokens[at][rank], logprob)
        self._advance([self._node[p] for p in paths if p in self._node and p in self._choices.inner])

    def chosen(self) -> list[int]:
        return [self._node[p] for p in self._choices.paths if p in self._node]


class SampledChain(Growth):
    """Tokens drawn one after the other. Where the likeliest token of a law is less likely than `stop_below`
    the chain ends: that is asked before a token is drawn and looks at none, so what is drawn keeps its law.
    It ends as well where the logits are no numbers: a bad draft costs time, and no request.

    draw(logits [V], number drawn before) gives a token and the row q [V'] that it was drawn from, in the
    target's vocabulary. The draft carries these rows and no scores: a choice by the score of what was drawn
    would change its law.
    """

    def __init__(
        self, depth: int, stop_below: float, draw: Callable[[torch.Tensor, int], tuple[int, torch.Tensor]]
    ) -> None:
        super().__init__()
        self.scored = stop_below > 0.0
        self._depth, self._draw = depth, draw
        self._least = _least(stop_below)
        self.laws: list[torch.Tensor] = []
        if depth < 1:
            self.frontier = []

    def add(self, level: Level) -> None:
        (parent,), self.frontier = self.frontier, []
        if not self._logprobs(level, 0)[0] >= self._least:
            return
        assert level.logits is not None
        if not math.isfinite(float(level.logits[0].amax())):
            return  # a draft that overflows, or is damaged, has no law to draw from
        token, law = self._draw(level.logits[0], len(self.tokens))
        self.laws.append(law)
        node = self._append(parent, token, 0.0)
        if len(self.tokens) < self._depth:
            self.frontier = [node]

    def chosen(self) -> list[int]:
        return list(range(len(self.tokens)))

    def draft(self, root: int, source: str) -> Draft:
        tree = TokenTree.chain(root, self.tokens)
        return Draft(tree, (*self.laws, None) if self.laws else None, source=source)
