"""Exact enumeration of passes that share noise: what happens when a pass meets uniforms seen before.

`testing.exact` walks one pass at a time, so its passes are independent by construction. Here all passes of a
run are one walk, and uniforms are kept under keys. Keyed by position alone, a pass meets those of the pass
before it, which is harmless under some rules and not under others; see `core.noise`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch

from slipstream.core.noise import Purpose
from slipstream.core.tree import TokenTree
from slipstream.testing.branching import Branches, BranchingView, GridUniform, LawAt, Prefix
from slipstream.testing.exact import OutputLaw, draw_tree
from slipstream.verify import Rule

Shape = Callable[[TokenTree | None], Sequence[int]]  # the tree of the pass before -> parents to draft
Key = Callable[[Purpose, int, int, int], Hashable]  # purpose, position, index, origin


def by_pass(purpose: Purpose, position: int, index: int, origin: int) -> Hashable:
    """As the engine does it: no two passes share a uniform."""
    return purpose, position, index, origin


def by_position(*reused: Purpose) -> Key:
    """These purposes are keyed by position alone."""
    return lambda purpose, position, index, origin: (
        (purpose, position, index) if purpose in reused else (purpose, position, index, origin)
    )


@dataclass
class _Noise:
    """The uniforms of one run, by key."""

    key: Key
    branches: Branches
    origin: int = 0

    def __post_init__(self) -> None:
        self._known: dict[Hashable, GridUniform] = {}

    def uniform(self, purpose: Purpose, position: int, index: int) -> GridUniform:
        key = self.key(purpose, position, index, self.origin)
        if key not in self._known:
            self._known[key] = GridUniform.fresh(self.branches)
        return self._known[key]


class _SharingView(BranchingView):
    """A view whose acceptance uniforms outlive it. Its other draws are looked at once by any rule."""

    noise: _Noise

    def uniform(self, node: int, index: int = 0) -> float:
        return self.noise.uniform(Purpose.ACCEPT, len(self.prefix) + self.tree.depths[node], index)


def emitted_together(
    target: LawAt, law: LawAt, shape: Shape, rule: Rule, n: int, key: Key, start: Prefix = (0,)
) -> OutputLaw:
    """The law of n tokens when each pass drafts its shape from `law`, without replacement.

    Drafted tokens are drawn by inverting the distribution function at a uniform of their position and
    their place among their siblings; cousins share it.
    """
    branches = Branches()

    def run() -> Prefix:
        noise = _Noise(key, branches)
        prefix, tree = start, None
        while len(prefix) < len(start) + n:
            noise.origin = origin = len(prefix) - 1
            parents = tuple(shape(tree))

            def draw(
                row: torch.Tensor,
                depth: int,
                node: int,
                origin: int = origin,
                parents: tuple[int, ...] = parents,
            ) -> int:
                place = parents[:node].count(parents[node])  # among the siblings
                return _invert(row, noise.uniform(Purpose.DRAFT, origin + depth, place))

            draft = draw_tree(prefix, law, parents, draw)
            tree = draft.tree
            view = _SharingView(target, prefix, tree, branches)
            view.noise = noise
            verdict = rule(draft, view)
            prefix = (*prefix, *(tree.tokens[i] for i in verdict.path), verdict.token)
        return prefix[len(start) : len(start) + n]

    found: OutputLaw = {}
    for probability, output in branches.walk(run):
        found[output] = found.get(output, 0.0) + probability
    return found


def _invert(row: torch.Tensor, u: float) -> int:
    """The first token whose cumulative probability is above u."""
    support = [(token, p) for token, p in enumerate(row.tolist()) if p > 0.0]
    reached = 0.0
    for token, p in support[:-1]:
        reached += p
        if u < reached:
            return token
    return support[-1][0]
