"""Medusa heads: each guesses one token further ahead from the target's last state (arXiv 2401.10774).

Medusa-1 leaves the target alone. Medusa-2 tunes the target as well: better guesses, another model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from slipstream.core.choices import Choices, best_tree
from slipstream.core.draft import Needs
from slipstream.heads.io import save_medusa
from slipstream.heads.medusa import LMHead, MedusaHeads
from slipstream.model.parts import ModelParts
from slipstream.model.store import write_atomic
from slipstream.train.losses import IGNORE, draft_numbers, in_pieces, sft
from slipstream.train.method import RANKS, Method, Wanted, ranks_of
from slipstream.train.samples import Batch

DECAY = 0.8  # weight of head k is DECAY^k (section 2.3.1)
NODES = 63  # of the drafter's tree unless told otherwise; with the root 64 rows
ACCURACIES = "accuracies.json"


class MedusaMethod(Method):
    """Medusa-1: sum over heads k of 0.8^k CE(head k at t, token t + 2 + k); everything else is frozen."""

    name = "medusa"

    def __init__(self, heads: MedusaHeads, parts: ModelParts, *, decay: float = DECAY) -> None:
        super().__init__()
        self.heads = heads.requires_grad_(True)
        self.depth = heads.config.num_heads
        self._parts = parts
        self._decay = decay
        self._accuracies: list[list[float]] = []
        device = parts.embedding.device
        self._number = (
            draft_numbers(heads.vocab.target_ids(), parts.vocab_size).to(device)
            if heads.vocab.reduced
            else None
        )
        self._lm_head: LMHead | None = None
        if heads.config.output == "target":
            reduced = heads.vocab.reduced
            shared = parts.lm_head_rows(heads.vocab.target_ids()) if reduced else parts.lm_head
            dtype = parts.embedding.dtype  # heads are trained in float32, the target may be of another
            self._lm_head = lambda outputs: shared(outputs.to(dtype))

    @property
    def wanted(self) -> Wanted:
        return Wanted(Needs(last_hidden=True))

    def forward(self, batch: Batch, generator: torch.Generator) -> dict[str, torch.Tensor]:
        return self.heads_loss(batch.features["last"], batch)

    def heads_loss(self, hidden: torch.Tensor, batch: Batch) -> dict[str, torch.Tensor]:
        """The loss of all heads on last states [B, T, H], and that of each."""
        labels = self.aligned(batch)  # [B, T, K]
        here = (labels != IGNORE).any(-1)  # [B, T]
        weights = self._decay ** torch.arange(self.depth, device=labels.device)  # [K]

        def compute(states: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
            logits = self._logits(states)  # [K, n, V]
            lost = sft(logits.flatten(0, 1), wanted.T.flatten())  # [K n]
            return lost.view(self.depth, -1).sum(1)

        width = self.depth * self.heads.vocab.size
        each = in_pieces(compute, width, hidden[here], labels[here])  # [K]
        parts = {f"head{k}": value.detach() for k, value in enumerate(each)}
        return {"loss": (each * weights).sum(), **parts}

    def aligned(self, batch: Batch) -> torch.Tensor:
        """What head k should say at every position, as draft ids [B, T, K]; IGNORE for nothing."""
        shape = (*batch.tokens.shape, self.depth)
        labels = torch.full(shape, IGNORE, device=batch.tokens.device)
        for k in range(self.depth):
            offset = 2 + k
            wanted = batch.tokens[:, offset:]
            if self._number is not None:
                wanted = self._number[wanted]
            labels[:, : wanted.shape[1], k] = wanted.masked_fill(~batch.loss[:, offset:], IGNORE)
        return labels

    def _logits(self, states: torch.Tensor) -> torch.Tensor:
        """States [n, H] -> [K, n, draft V]."""
        dtype = self.heads.heads[0][0].linear.weight.dtype  # type: ignore[index,union-attr]
        return self.heads(states.to(dtype), self._lm_head)  # type: ignore[no-any-return]

    def ranks(self, batch: Batch) -> torch.Tensor:
        return self.head_ranks(batch.features["last"], batch)

    def head_ranks(self, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
        """`ranks` from last states [B, T, H]: the root's guesses come from the state before it."""
        labels = self.aligned(batch)
        here = (labels != IGNORE).any(-1)
        found = []
        for states, wanted in zip(
            torch.split(hidden[here], 256), torch.split(labels[here], 256), strict=True
        ):
            logits = self._logits(states)
            found.append(torch.stack([ranks_of(row, w) for row, w in zip(logits, wanted.T, strict=True)], -1))
        ranks = torch.full_like(labels, RANKS)
        if found:
            ranks[:, 1:][here[:, :-1]] = torch.cat(found)
        return ranks

    def tree(self, accuracies: list[list[float]]) -> Choices:
        self._accuracies = accuracies
        return best_tree(accuracies, NODES, self.depth)

    def save(self, folder: Path, provenance: Mapping[str, Any]) -> None:
        save_medusa(self.heads, folder, provenance=provenance, dtype=self._parts.embedding.dtype)
        if self._accuracies:
            write_atomic(folder / ACCURACIES, json.dumps({"accuracies": self._accuracies}) + "\n")
