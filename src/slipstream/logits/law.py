"""`Law`: a distribution over token ids, kept on its support, and the keyed draw from it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from slipstream.core.noise import Purpose, gumbel


@dataclass(frozen=True)
class Law:
    """Tokens that can be chosen, in ascending order, and their log-probabilities.

    ids int64 [k], logp float64 [k] with sum(exp(logp)) == 1. Every token outside has probability 0.
    """

    ids: torch.Tensor
    logp: torch.Tensor

    @classmethod
    def point(cls, token: int, device: torch.device) -> Law:
        """All mass on one token: the law of greedy decoding."""
        ids = torch.tensor([token], device=device)  # [1]
        return cls(ids, torch.zeros(1, dtype=torch.float64, device=device))

    @classmethod
    def from_scores(cls, ids: torch.Tensor, scores: torch.Tensor) -> Law:
        """The softmax of float64 scores [k] over ids [k]."""
        return cls(ids, scores - scores.logsumexp(0))

    @classmethod
    def from_probs(cls, probs: torch.Tensor) -> Law:
        """A dense row of probabilities [V]; whatever it sums to, its zeros are never drawn."""
        ids = (probs > 0).nonzero().squeeze(-1)  # [k]
        return cls.from_scores(ids, probs[ids].double().log())

    def dense(self, vocab_size: int) -> torch.Tensor:
        """Probabilities, float64 [V]."""
        row = torch.zeros(vocab_size, dtype=torch.float64, device=self.ids.device)  # [V]
        return row.index_copy_(0, self.ids, self.logp.exp())  # [V]

    def draw(self, seed: int, position: int, purpose: Purpose, index: int = 0) -> int:
        """The Gumbel-max draw, argmax over the support of logp + G(seed, position, purpose, token).

        The noise of a token does not depend on which others are in the support, and the lowest id
        wins a tie.
        """
        if len(self.ids) == 1:
            return int(self.ids)
        noise = gumbel(self.ids, seed, position, purpose, index)  # [k]
        return int(self.ids[(self.logp + noise).argmax()])
