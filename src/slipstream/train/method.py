"""`Method`: what the loop asks of a way to train a drafter."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from slipstream.core.choices import Choices
from slipstream.core.draft import Needs
from slipstream.train.samples import Batch

RANKS = 10  # guesses of each depth that are looked at, best first


@dataclass(frozen=True)
class Wanted:
    """What a method may be fed: the target's states, or, where `or_top_logits`, its top logits instead of
    the "last" state."""

    needs: Needs
    or_top_logits: bool = False


class Method(nn.Module, ABC):
    """A drafter in training. Its own parameters that require gradients are trained, nothing else.

    depth: how many tokens ahead it is measured. reads_prompt: it drafts nothing until it has read the prompt
    itself (`core.draft.Needs`). changes_target: the result comes with a target of its own, and is
    lossless for that one only.
    """

    name: str = ""
    depth: int = 1
    reads_prompt: bool = False
    changes_target: bool = False

    @property
    @abstractmethod
    def wanted(self) -> Wanted:
        """What a batch must hold."""

    @abstractmethod
    def forward(self, batch: Batch, generator: torch.Generator) -> dict[str, torch.Tensor]:
        """Sums over the batch: "loss", which is made small, and parts of it to look at.

        The loop divides by `labels`. All randomness comes from the generator.
        """

    @abstractmethod
    def ranks(self, batch: Batch) -> torch.Tensor:
        """How good the guesses are, int64 [B, T, depth].

        Entry [b, r, d]: if the token at r is the root and the true tokens behind it were drafted up to depth
        d, the rank of the true token r + 1 + d among the next guesses; RANKS if it is not among the
        first, or if there is no such token.
        """

    @abstractmethod
    def save(self, folder: Path, provenance: Mapping[str, Any]) -> None:
        """Write the drafter as the engine and other projects read it, in the dtype the engine loads it as: a
        draft model's own, that of the target for heads."""

    def tree(self, accuracies: list[list[float]]) -> Choices | None:
        """The tree it will draft with these accuracies, where that is known in advance; None: a chain."""
        return None

    def groups(self, rate: float) -> list[dict[str, Any]]:
        """Parameter groups with their learning rates."""
        return [{"params": list(self.trained().values()), "lr": rate}]

    def trained(self) -> dict[str, nn.Parameter]:
        """What is trained, by name."""
        return {name: p for name, p in self.named_parameters() if p.requires_grad}


def labels(batch: Batch) -> int:
    """Answer tokens that can be predicted: the unit of every loss."""
    return int(batch.loss[:, 1:].sum())


def ranks_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The rank of each label [n] in its row of logits [n, V], RANKS if it is below that."""
    best = logits.float().topk(min(RANKS, logits.shape[-1])).indices  # [n, RANKS]
    hit = best == labels[:, None]
    return torch.where(hit.any(-1), hit.int().argmax(-1), RANKS)
