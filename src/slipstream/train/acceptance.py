"""How many tokens a pass to expect, from held-out answers, without an engine.

The answers were written by the target, so along them it is known which guesses it would accept. Each answer
is walked as the engine walks it: from a root over what is accepted to the next root. Averages over
all positions would be too high, since the engine jumps over the easy stretches.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from slipstream.core.choices import Choices
from slipstream.train.method import RANKS, Method
from slipstream.train.samples import Batch


@dataclass
class Acceptance:
    """Raw counts. offered[d]: rounds whose first d drafted tokens were accepted and that had a token at
    depth d to guess; accepted[d]: those that guessed it. right[d][r]: positions whose guess of rank r
    at depth d was right, of positions[d]."""

    rounds: int = 0
    tokens: int = 0
    offered: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    right: list[list[int]] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)

    @property
    def conditional(self) -> list[float]:
        """P(a token of depth d is accepted | all before it were)."""
        return [a / o if o else 0.0 for a, o in zip(self.accepted, self.offered, strict=True)]

    @property
    def tau(self) -> float:
        """Expected tokens a target pass, bonus included: 1 + the running products of `conditional`."""
        total, path = 1.0, 1.0
        for rate in self.conditional:
            path *= rate
            total += path
        return total

    @property
    def accuracies(self) -> list[list[float]]:
        """[depth][rank]: how often that guess is right, over all positions."""
        return [
            [n / count if count else 0.0 for n in row]
            for row, count in zip(self.right, self.positions, strict=True)
        ]

    def to_json(self) -> dict[str, Any]:
        return {
            "tau": self.tau,
            "walked_tau": self.tokens / self.rounds if self.rounds else 0.0,
            "rounds": self.rounds,
            "tokens": self.tokens,
            "offered": self.offered,
            "accepted": self.accepted,
        }


@torch.no_grad()
def measure(method: Method, batches: Iterable[Batch]) -> Acceptance:
    """Walk the answers in these batches with the drafts the method would make."""
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []  # ranks [T, D] and loss [T] of each sample
    training = method.training
    method.eval()
    for batch in batches:
        ranks = method.ranks(batch).cpu()
        for row, length in enumerate(batch.lengths.tolist()):
            seen.append((ranks[row, :length], batch.loss[row, :length].cpu()))
    method.train(training)
    found = Acceptance(
        offered=[0] * method.depth,
        accepted=[0] * method.depth,
        right=[[0] * RANKS for _ in range(method.depth)],
        positions=[0] * method.depth,
    )
    for ranks, loss in seen:
        _count(found, ranks, loss)
    tree = method.tree(found.accuracies)
    for ranks, loss in seen:
        for begin, end in answers(loss):
            _walk(found, ranks, begin, end, tree, method.reads_prompt)
    return found


def answers(loss: torch.Tensor) -> list[tuple[int, int]]:
    """The runs of True in loss [T], as (begin, end)."""
    padded = torch.cat((torch.tensor([False]), loss.bool(), torch.tensor([False]))).int()
    edges = padded.diff().nonzero().flatten().tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def _count(found: Acceptance, ranks: torch.Tensor, loss: torch.Tensor) -> None:
    for depth in range(ranks.shape[1]):
        label = torch.zeros_like(loss)
        label[: -1 - depth] = loss[1 + depth :]
        label &= loss  # roots are answer tokens themselves
        counts = torch.bincount(ranks[label, depth], minlength=RANKS + 1).tolist()
        found.positions[depth] += sum(counts)
        for rank in range(RANKS):
            found.right[depth][rank] += counts[rank]


def _walk(
    found: Acceptance, ranks: torch.Tensor, begin: int, end: int, tree: Choices | None, reads_prompt: bool
) -> None:
    """One answer. The first root is the prompt's last token; what is drafted for it needs a state before
    it, and nothing is drafted by a drafter that has yet to read the prompt."""
    paths = None if tree is None else frozenset(tree.paths)
    rows = ranks.tolist()
    root = begin - 1
    while root < end - 1:
        taken = 0
        deepest = min(ranks.shape[1], end - 1 - root)
        if root < begin and (reads_prompt or root < 1):
            deepest = 0
        for depth in range(deepest):
            found.offered[depth] += 1
            path = tuple(rows[root][: depth + 1])
            if not (path in paths if paths is not None else path[-1] == 0):
                break
            found.accepted[depth] += 1
            taken += 1
        found.rounds += 1
        found.tokens += min(taken + 1, end - 1 - root)
        root += taken + 1
