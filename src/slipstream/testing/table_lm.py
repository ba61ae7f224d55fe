"""`TableLM`: a language model small enough to know its law exactly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from slipstream.core.noise import Purpose, uniform


@dataclass(frozen=True)
class TableLM:
    """A random law for every prefix, the same for the same seed; a share of the entries is exactly 0.

    order: how many of the last tokens matter; None means all of them. sharpness: above 1 gives more
    peaked laws. At least one entry of every law is above 0.
    """

    vocab_size: int
    seed: int
    zeros: float = 0.25
    sharpness: float = 2.0
    order: int | None = None

    def law(self, prefix: Sequence[int]) -> torch.Tensor:
        """The law of the token that follows `prefix`: float64 [V], sums to 1."""
        context = tuple(prefix) if self.order is None else tuple(prefix)[-self.order :]
        code = 0
        for token in context:
            code = code * (self.vocab_size + 1) + token + 1
        weights = [
            uniform(self.seed, code, Purpose.DRAFT, 2 * token) ** self.sharpness
            if uniform(self.seed, code, Purpose.DRAFT, 2 * token + 1) >= self.zeros
            else 0.0
            for token in range(self.vocab_size)
        ]
        if sum(weights) == 0.0:
            weights[code % self.vocab_size] = 1.0
        row = torch.tensor(weights, dtype=torch.float64)  # [V]
        return row / row.sum()

    def logits(self, prefix: Sequence[int]) -> torch.Tensor:
        """log of the law as a model's head would give it: float32 [V], impossible tokens at -inf."""
        return self.law(prefix).log().float()
