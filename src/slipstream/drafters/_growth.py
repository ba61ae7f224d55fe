"""Draft trees that grow level by level: EAGLE-2's dynamic tree, and trees of a fixed shape.

A `Growth` says which nodes are to be expanded next (`frontier`), takes the likeliest continuations of
each, and in the end chooses what is drafted. It knows nothing of models.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

from slipstream.core.choices import Choices, Path_
from slipstream.core.draft import Draft
from slipstream.core.tree import TokenTree

ROOT = -1


class Growth(ABC):
    """Scored nodes are numbered in the order they are added; `ROOT` is the root.

    values are cumulative log-probabilities, so a node's is never above its parent's.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.values: list[float] = []
        self.depths: list[int] = []
        self.frontier: list[int] = [ROOT]

    @property
    @abstractmethod
    def width(self) -> int:
        """How many continuations of each frontier node are wanted now."""

    @abstractmethod
    def add(self, tokens: Sequence[Sequence[int]], logprobs: Sequence[Sequence[float]]) -> None:
        """The likeliest continuations of each frontier node, best first; moves the frontier one level down.

        More than `width` may come, or fewer where there are no more.
        """

    @abstractmethod
    def chosen(self) -> list[int]:
        """The nodes to draft, parents before children, the most useful first."""

    def draft(self, root: int, source: str) -> Draft:
        """The chosen nodes as point masses, with their path probabilities as scores."""
        order = self.chosen()
        number = {node: i for i, node in enumerate((ROOT, *order))}
        tree = TokenTree(
            (root, *(self.tokens[n] for n in order)), (-1, *(number[self.parents[n]] for n in order))
        )
        return Draft(tree, scores=(1.0, *(math.exp(self.values[n]) for n in order)), source=source)

    def _append(self, parent: int, token: int, logprob: float) -> int:
        self.tokens.append(token)
        self.parents.append(parent)
        # a log-probability is at most 0; rounding must not let a child overtake its parent
        self.values.append((self.values[parent] if parent != ROOT else 0.0) + min(logprob, 0.0))
        self.depths.append(self.depths[parent] + 1 if parent != ROOT else 1)
        return len(self.tokens) - 1


class DynamicGrowth(Growth):
    """EAGLE-2 (arXiv 2406.16858): expand the `top_k` likeliest nodes of each level, then keep the `nodes`
    likeliest of all that were scored.

    Ties go to the shallower, then to the earlier node, so what is kept is a tree. Continuations less
    likely than `stop_below` are left out. With top_k 1 it is a greedy chain.
    """

    def __init__(self, top_k: int, depth: int, nodes: int, stop_below: float = 0.0) -> None:
        super().__init__()
        self._top_k, self._depth, self._nodes = top_k, depth, nodes
        self._least = math.log(stop_below) if stop_below > 0.0 else -math.inf
        self._level = 0
        if depth < 1 or nodes < 1:
            self.frontier = []

    @property
    def width(self) -> int:
        return self._top_k

    def add(self, tokens: Sequence[Sequence[int]], logprobs: Sequence[Sequence[float]]) -> None:
        added = [
            self._append(parent, token, logprob)
            for parent, row, scores in zip(self.frontier, tokens, logprobs, strict=True)
            for token, logprob in zip(row[: self._top_k], scores[: self._top_k], strict=True)
            if logprob >= self._least
        ]
        self._level += 1
        self.frontier = []
        if self._level < self._depth:
            beams = sorted(added, key=lambda n: (-self.values[n], n))[: self._top_k]
            # Nothing below a node that is not among the best is: its descendants are worth even less.
            worth = set(self.chosen())
            self.frontier = [n for n in beams if n in worth]

    def chosen(self) -> list[int]:
        order = sorted(range(len(self.tokens)), key=lambda n: (-self.values[n], self.depths[n], n))
        return order[: self._nodes]


class StaticGrowth(Growth):
    """A tree of a given shape."""

    def __init__(self, choices: Choices) -> None:
        super().__init__()
        self._choices = choices
        self._node: dict[Path_, int] = {(): ROOT}
        self._level = 0
        if not len(choices):
            self.frontier = []

    @property
    def width(self) -> int:
        return self._choices.widths[self._level]

    def add(self, tokens: Sequence[Sequence[int]], logprobs: Sequence[Sequence[float]]) -> None:
        place = {node: i for i, node in enumerate(self.frontier)}
        self._level += 1
        level = [p for p in self._choices.paths if len(p) == self._level]
        for path in level:
            parent = self._node.get(path[:-1])
            if parent is not None and path[-1] < len(tokens[place[parent]]):
                at = place[parent]
                self._node[path] = self._append(parent, tokens[at][path[-1]], logprobs[at][path[-1]])
        self.frontier = [self._node[p] for p in level if p in self._node and p in self._choices.inner]

    def chosen(self) -> list[int]:
        return [self._node[p] for p in self._choices.paths if p in self._node]
