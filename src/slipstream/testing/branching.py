"""Random choices as branches: the machinery under `testing.exact`.

A `BranchingView` answers a verification rule, and every random choice the rule makes becomes a branch
that is walked. Two faults that a sampled test hardly sees are made visible: uniforms live on a grid,
where a non-strict comparison is likelier than a strict one, and a law that sums to less than 1 gives
what is missing to the last token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from slipstream.core.tree import TokenTree

Prefix = tuple[int, ...]
LawAt = Callable[[Prefix], torch.Tensor]  # prefix -> float64 [V]
T = TypeVar("T")

GRID = 64  # coarse, so that a wrong comparison is far outside rounding


class Branches:
    """Depth-first walk over all outcomes of a function that makes random choices.

    The function is run again for every outcome: the choices up to the last branch are replayed, the
    last one takes its next possible value.
    """

    def __init__(self) -> None:
        self._weights: list[list[float]] = []
        self._taken: list[int] = []
        self._depth = 0

    def choose(self, weights: list[float]) -> int:
        """An index, with the given probabilities, which must sum to 1."""
        if self._depth == len(self._taken):
            self._weights.append(weights)
            self._taken.append(next(i for i, w in enumerate(weights) if w > 0.0))
        self._depth += 1
        return self._taken[self._depth - 1]

    def walk(self, run: Callable[[], T]) -> Iterator[tuple[float, T]]:
        """Every outcome of `run` with its probability."""
        while True:
            self._depth = 0
            result = run()
            probability = 1.0
            for weights, taken in zip(self._weights, self._taken, strict=True):
                probability *= weights[taken]
            yield probability, result
            while self._taken:
                rest = [i for i, w in enumerate(self._weights[-1]) if i > self._taken[-1] and w > 0.0]
                if rest:
                    self._taken[-1] = rest[0]
                    break
                self._taken.pop()
                self._weights.pop()
            if not self._taken:
                return


@dataclass
class _Interval:
    """Where a uniform still may lie after what its comparisons have told."""

    low: float = 0.0
    high: float = 1.0


class GridUniform(float):
    """factor * u for a u on {0, 1/N, ..., (N-1)/N} that is not drawn until it is compared.

    `u * q < p` holds with probability min(1, p/q); `u * q <= p` with one N-th more. Comparing the same
    u twice is consistent. As a number it is NaN: a rule may only scale and compare it.
    """

    _branches: Branches
    _interval: _Interval
    _factor: float

    @classmethod
    def fresh(cls, branches: Branches) -> GridUniform:
        return cls._scaled(branches, _Interval(), 1.0)

    @classmethod
    def _scaled(cls, branches: Branches, interval: _Interval, factor: float) -> GridUniform:
        self = cls("nan")
        self._branches, self._interval, self._factor = branches, interval, factor
        return self

    def __mul__(self, factor: float) -> GridUniform:
        return self._scaled(self._branches, self._interval, self._factor * factor)

    __rmul__ = __mul__

    def __lt__(self, bound: float) -> bool:
        return self._below(bound / self._factor) if self._factor else bound > 0.0

    def __le__(self, bound: float) -> bool:
        return self._below(bound / self._factor + 1.0 / GRID) if self._factor else bound >= 0.0

    def __gt__(self, bound: float) -> bool:
        return not self <= bound

    def __ge__(self, bound: float) -> bool:
        return not self < bound

    def _below(self, threshold: float) -> bool:
        left = self._interval
        cut = min(max(threshold, left.low), left.high)
        share = (cut - left.low) / (left.high - left.low)
        if self._branches.choose([share, 1.0 - share]) == 0:
            left.high = cut
            return True
        left.low = cut
        return False


@dataclass
class BranchingView:
    """`TargetView` whose every draw is a branch; a draw asked for twice gives the same answer."""

    target: LawAt
    prefix: Prefix
    tree: TokenTree
    branches: Branches
    _tokens: dict[int, int] = field(default_factory=dict)
    _uniforms: dict[tuple[int, int], GridUniform] = field(default_factory=dict)
    _draws: set[int] = field(default_factory=set)

    def token(self, node: int) -> int:
        if node not in self._tokens:
            self._tokens[node] = self.branches.choose(self.probs(node).tolist())
        return self._tokens[node]

    def probs(self, node: int) -> torch.Tensor:
        return self.target((*self.prefix, *self.tree.path_tokens(node)))  # [V]

    def uniform(self, node: int, index: int = 0) -> float:
        key = (node, index)
        if key not in self._uniforms:
            self._uniforms[key] = GridUniform.fresh(self.branches)
        return self._uniforms[key]

    def draw(self, node: int, law: torch.Tensor) -> int:
        if node in self._draws:
            raise AssertionError(f"node {node}: two residual draws would share their noise")
        self._draws.add(node)
        weights: list[float] = law.tolist()
        weights[-1] += max(0.0, 1.0 - sum(weights))
        return self.branches.choose(weights)
