"""Medusa-2: heads and target learn together (arXiv 2401.10774, sections 2.2.2 and 2.3.2).

The target gets low-rank adapters, and is held to what it was by the KL divergence from its own law before
(self-distillation). What comes out is another model: decoding with it is exact for that model only.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from slipstream.core.choices import Choices
from slipstream.core.draft import Needs
from slipstream.heads.medusa import MedusaHeads
from slipstream.model.parts import ModelParts
from slipstream.model.trainable import Trainable
from slipstream.train.losses import Teacher, forward_kl, in_pieces
from slipstream.train.medusa import DECAY, MedusaMethod
from slipstream.train.method import Method, Wanted
from slipstream.train.samples import Batch

HEADS_WEIGHT = 0.2  # lambda_0
HEADS_RATE = 4.0  # the heads' learning rate, times the target's
TARGET = "target"


class JointMedusaMethod(Method):
    """KL(target before || target now) + lambda_0 times the loss of the heads, on the states of now.

    The heads should come from Medusa-1: random ones would drag the target along.
    """

    name = "medusa2"
    changes_target = True

    def __init__(
        self,
        target: Trainable,
        heads: MedusaHeads,
        parts: ModelParts,
        *,
        heads_weight: float = HEADS_WEIGHT,
        decay: float = DECAY,
    ) -> None:
        """parts: of the target as it was."""
        super().__init__()
        self._medusa = MedusaMethod(heads, parts, decay=decay)
        self.target = target.model
        self.depth = self._medusa.depth
        self._trainable = target
        self._weight = heads_weight
        self._teacher = Teacher(parts)

    @property
    def wanted(self) -> Wanted:
        return Wanted(Needs(last_hidden=True), or_top_logits=True)

    def forward(self, batch: Batch, generator: torch.Generator) -> dict[str, torch.Tensor]:
        states = self._trainable.states(batch.tokens)  # [B, T, H]
        rows, at = batch.loss[:, 1:].nonzero(as_tuple=True)

        def compute(now: torch.Tensor, row: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
            return forward_kl(self._trainable.logits(now), self._teacher.law(batch, row, position)).sum()

        kept = in_pieces(compute, self._trainable.vocab_size, states[rows, at], rows, at)
        found = self._medusa.heads_loss(states, batch)
        heads = found.pop("loss")
        return {
            "loss": kept + self._weight * heads,
            "target": kept.detach(),
            "heads": heads.detach(),
            **found,
        }

    def ranks(self, batch: Batch) -> torch.Tensor:
        return self._medusa.head_ranks(self._trainable.states(batch.tokens), batch)

    def tree(self, accuracies: list[list[float]]) -> Choices:
        return self._medusa.tree(accuracies)

    def groups(self, rate: float) -> list[dict[str, Any]]:
        heads = {id(p) for p in self._medusa.parameters()}
        trained = list(self.trained().values())
        return [
            {"params": [p for p in trained if id(p) not in heads], "lr": rate},
            {"params": [p for p in trained if id(p) in heads], "lr": HEADS_RATE * rate},
        ]

    def save(self, folder: Path, provenance: Mapping[str, Any]) -> None:
        """The heads, and below them the target they are for."""
        self._medusa.save(folder, {**provenance, "changed_target": TARGET})
        self._trainable.save(folder / TARGET, provenance)
