"""EAGLE heads: one layer that continues the target's own features (arXiv 2401.15077, 2503.01840, 2408.15766).

The head is unrolled as it will draft: step 0 reads the target's features, each later step its own
output, one token further on. In step i row t joins the output of step i - 1 with the embedding of
token t + 1 + i and guesses token t + 2 + i; it sees the true features up to t and its own outputs of
the steps before (EAGLE-3's training-time test, HASS's context alignment). One step is EAGLE-1's own
recipe.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from slipstream.core.draft import Needs
from slipstream.heads.eagle import Attend, DraftAttention, EagleHead, attend_masked
from slipstream.heads.io import save_eagle
from slipstream.model.parts import ModelParts
from slipstream.train.losses import Teacher, draft_numbers, in_pieces, smooth_l1, soft_cross_entropy
from slipstream.train.method import RANKS, Method, Wanted, ranks_of
from slipstream.train.samples import Batch

DECAY = 0.8  # weight of step i is DECAY^i
REGRESSION, CLASSIFICATION = 1.0, 0.1  # EAGLE-1's two losses
NOISE = (
    0.2  # EAGLE-1 adds uniform noise this wide to features, for texts of NOISE_LENGTH; less to longer ones
)
NOISE_LENGTH = 512


class EagleMethod(Method):
    """Version 1: SmoothL1 on the next feature and 0.1 of the soft cross entropy through the target's LM head.
    Version 3: the soft cross entropy over the draft vocabulary, where the target's choice is in it."""

    name = "eagle"

    def __init__(
        self,
        head: EagleHead,
        parts: ModelParts,
        *,
        steps: int = 3,
        decay: float = DECAY,
        noise: float | None = None,
        temperature: float = 1.0,
        depth: int = 5,
    ) -> None:
        """steps: unrolled in training; depth: measured. noise: None is the version's own (0.2, 0)."""
        super().__init__()
        head.target = parts
        self.head = head.requires_grad_(True)
        self.depth = depth
        self.steps = steps
        self._decay = decay
        self._noise = noise if noise is not None else NOISE if head.config.version == 1 else 0.0
        self._temperature = temperature
        self._parts = parts
        ids = head.vocab.target_ids() if head.vocab.reduced else None
        self._teacher = Teacher(parts, ids)
        self._number = None if ids is None else draft_numbers(ids, parts.vocab_size)

    @property
    def wanted(self) -> Wanted:
        needs = self.head.needs
        return Wanted(
            Needs(needs.hidden_layers, last_hidden=True), or_top_logits=self.head.config.version == 3
        )

    def forward(self, batch: Batch, generator: torch.Generator) -> dict[str, torch.Tensor]:
        total: torch.Tensor | None = None
        parts: dict[str, torch.Tensor] = {}
        for i, outputs in enumerate(self.unroll(batch, self.steps, generator)):
            each = self._step_loss(batch, outputs, i)
            weighted = each * self._decay**i
            total = weighted if total is None else total + weighted
            parts[f"step{i}"] = each.detach()
        assert total is not None
        return {"loss": total, **parts}

    def unroll(
        self, batch: Batch, steps: int, generator: torch.Generator | None = None
    ) -> Iterator[torch.Tensor]:
        """The head's outputs [B, T - 1, H] of every step, as the drafter would have them.

        Row t of step i stands for token t + 1 + i. With a generator, features get their noise.
        """
        features = self.head.features(batch.features)[:, :-1]
        features = features.to(self.head.body["fc"].weight.dtype)  # type: ignore[arg-type]
        if generator is not None and self._noise:
            wide = self._noise * NOISE_LENGTH / batch.tokens.shape[1]
            drawn = torch.rand(features.shape, generator=generator, device=features.device)
            features = features + (drawn - 0.5) * wide
        hidden = self.head.fuse(features)
        attention = Unrolled()
        rows = torch.arange(hidden.shape[1], device=hidden.device).expand(hidden.shape[:2])
        for i in range(steps):
            ids = torch.zeros_like(batch.tokens[:, 1:])
            ahead = batch.tokens[:, 1 + i :]  # nothing, for texts shorter than the unrolling
            ids[:, : ahead.shape[1]] = ahead
            hidden = self.head(ids, hidden, rows + i, attention.step(i))
            yield hidden

    def _step_loss(self, batch: Batch, outputs: torch.Tensor, i: int) -> torch.Tensor:
        rows, at = _guessed(batch, i)
        positions = at + 1 + i  # the target's state there speaks of the guessed token
        inside = self._teacher.drafts(batch, rows, positions)
        rows, at, positions = rows[inside], at[inside], positions[inside]
        third = self.head.config.version == 3

        def compute(hidden: torch.Tensor, row: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
            law = self._teacher.law(batch, row, position)
            cost = soft_cross_entropy(self.head.logits(hidden), law, self._temperature)
            if third:
                return cost.sum()
            near = smooth_l1(hidden, batch.features["last"][row, position])
            return (REGRESSION * near + CLASSIFICATION * cost).sum()

        return in_pieces(compute, self.head.vocab.size, outputs[rows, at], rows, positions)

    def ranks(self, batch: Batch) -> torch.Tensor:
        ranks = torch.full((*batch.tokens.shape, self.depth), RANKS, device=batch.tokens.device)
        for i, outputs in enumerate(self.unroll(batch, self.depth)):
            rows, at = _guessed(batch, i)
            labels = batch.tokens[rows, at + 2 + i]
            if self._number is not None:
                labels = self._number.to(labels.device)[labels]
            for r, a, label in zip(
                torch.split(rows, 256), torch.split(at, 256), torch.split(labels, 256), strict=True
            ):
                # the root of a draft is the token after the last true feature
                ranks[r, a + 1, i] = ranks_of(self.head.logits(outputs[r, a]), label)
        return ranks

    def save(self, folder: Path, provenance: Mapping[str, Any]) -> None:
        save_eagle(self.head, folder, provenance=provenance, dtype=self._parts.embedding.dtype)


def _guessed(batch: Batch, i: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Where step i guesses an answer token: samples [n] and rows t [n], the token being t + 2 + i."""
    rows, tokens = batch.loss[:, 2 + i :].nonzero(as_tuple=True)
    return rows, tokens


class Unrolled:
    """Attention of the steps: over the true features up to one's own row, then over one's own outputs.

    The keys of all steps are laid side by side; a mask lets row t see columns 0 … t of step 0 and
    column t of every later step up to its own.
    """

    def __init__(self) -> None:
        self._keys: dict[int, list[torch.Tensor]] = {}  # by layer: [B, kv_heads, T, D] of each step
        self._values: dict[int, list[torch.Tensor]] = {}

    def step(self, i: int) -> Attend:
        def attend(
            module: DraftAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
        ) -> torch.Tensor:
            keys = self._keys.setdefault(module.layer_idx, [])
            values = self._values.setdefault(module.layer_idx, [])
            keys.append(key)
            values.append(value)
            size = key.shape[2]
            mask = None
            if i:
                causal = torch.ones(size, size, dtype=torch.bool, device=key.device).tril()
                own = torch.eye(size, dtype=torch.bool, device=key.device)
                mask = torch.cat((causal, *[own] * i), 1)[None, None]  # [1, 1, T, (i + 1) T]
            return attend_masked(mask)(module, query, torch.cat(keys, 2), torch.cat(values, 2))

        return attend
