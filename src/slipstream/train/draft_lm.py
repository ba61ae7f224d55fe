"""A smaller language model learns to say what the target says (DistillSpec, arXiv 2310.08461).

SFT learns the tokens the target wrote. The distances learn the target's whole law at every answer
position. The draft starts from a model that exists, whole or with every k-th of its layers, and is
trained in full or through low-rank adapters (LoRA).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from slipstream.core.draft import Needs
from slipstream.model.parts import ModelParts
from slipstream.model.trainable import Trainable
from slipstream.train.losses import DISTANCES, IGNORE, Law, Teacher, in_pieces, sft
from slipstream.train.method import RANKS, Method, Wanted, ranks_of
from slipstream.train.samples import Batch

DraftLoss = Literal["sft", "forward_kl", "reverse_kl", "tv"]


class DraftMethod(Method):
    """The draft at position t against the target's token (SFT) or law (distances) of position t + 1."""

    name = "draft"
    reads_prompt = True

    def __init__(
        self,
        draft: Trainable,
        parts: ModelParts,
        *,
        loss: DraftLoss = "forward_kl",
        temperature: float = 1.0,
        vocab_size: int | None = None,
        depth: int = 5,
    ) -> None:
        """temperature: of both laws, as the drafts will be sampled. vocab_size: ids both models share, from 0
        on; the laws are those given that one of them comes."""
        super().__init__()
        self.draft = draft.model
        self._trainable = draft
        self.depth = depth
        self._loss = loss
        self._temperature = temperature
        self._shared = min(vocab_size or parts.vocab_size, parts.vocab_size, draft.vocab_size)
        self._teacher = Teacher(parts)
        self._sft = loss == "sft"

    @property
    def wanted(self) -> Wanted:
        if self._sft:
            return Wanted(Needs())
        return Wanted(Needs(last_hidden=True), or_top_logits=self._loss != "reverse_kl")

    def forward(self, batch: Batch, generator: torch.Generator) -> dict[str, torch.Tensor]:
        hidden = self._trainable.states(batch.tokens)  # [B, T, H]
        rows, at = batch.loss[:, 1:].nonzero(as_tuple=True)
        labels = batch.tokens[rows, at + 1]
        labels = labels.masked_fill(labels >= self._shared, IGNORE)

        def compute(
            states: torch.Tensor, label: torch.Tensor, row: torch.Tensor, position: torch.Tensor
        ) -> torch.Tensor:
            logits = self._trainable.logits(states)[:, : self._shared]
            if self._loss == "sft":
                return sft(logits, label).sum()
            law = self._shared_law(self._teacher.law(batch, row, position))
            return DISTANCES[self._loss](logits, law, self._temperature).sum()

        total = in_pieces(compute, self._shared, hidden[rows, at], labels, rows, at)
        return {"loss": total}

    def _shared_law(self, law: Law) -> Law:
        if law.ids is None:
            return Law(law.logits[:, : self._shared])
        outside = law.ids >= self._shared
        return Law(law.logits.masked_fill(outside, -torch.inf), law.ids.masked_fill(outside, 0))

    def ranks(self, batch: Batch) -> torch.Tensor:
        hidden = self._trainable.states(batch.tokens)
        rows, at = batch.loss[:, 1:].nonzero(as_tuple=True)
        labels = batch.tokens[rows, at + 1]
        one = torch.full((batch.tokens.shape[0], batch.tokens.shape[1] + self.depth), RANKS)
        one = one.to(hidden.device)
        for r, a, label in zip(
            torch.split(rows, 256), torch.split(at, 256), torch.split(labels, 256), strict=True
        ):
            logits = self._trainable.logits(hidden[r, a])[:, : self._shared]
            one[r, a] = ranks_of(logits, label)
        length = batch.tokens.shape[1]
        return torch.stack([one[:, d : d + length] for d in range(self.depth)], -1)

    def save(self, folder: Path, provenance: Mapping[str, Any]) -> None:
        self._trainable.save(folder, provenance)
