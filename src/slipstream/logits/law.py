"""`Law`: a distribution over token ids, kept on its support, and the keyed draws from it."""

from __future__ import annotations

import math
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

    def draw(
        self, seed: int, position: int, purpose: Purpose, index: int = 0, *, origin: int | None = None
    ) -> int:
        """The Gumbel-max draw, argmax over the support of logp + G(seed, position, purpose, token).

        The noise of a token does not depend on which others are in the support, and the lowest id
        wins a tie. origin: position of the pass's root, needed for every purpose but TOKEN.
        """
        if len(self.ids) == 1:
            return int(self.ids)
        return int(self.ids[self._perturbed(seed, position, purpose, index, origin).argmax()])

    def draw_distinct(
        self, count: int, seed: int, position: int, purpose: Purpose, index: int = 0, *, origin: int | None
    ) -> list[int]:
        """`count` tokens without replacement, in the order drawn; fewer if the support is smaller.

        Gumbel top-k (arXiv 1903.06059): the k largest of logp + G, largest first, are distributed as k
        draws, each from the law with the earlier ones removed and the rest renormalised. The first is
        what `draw` gives for the same key.
        """
        count = min(count, len(self.ids))
        if len(self.ids) == 1 or count == 0:
            return [int(i) for i in self.ids[:count]]
        best = self._perturbed(seed, position, purpose, index, origin).topk(count).indices  # [count]
        return [int(i) for i in self.ids[best].tolist()]

    def above(self, floor: float) -> Law:
        """The law without tokens of probability below `floor` (the best one stays), renormalised."""
        kept = self.logp >= min(math.log(floor), float(self.logp.amax()))  # [k]
        return self if bool(kept.all()) else Law.from_scores(self.ids[kept], self.logp[kept])

    def _perturbed(
        self, seed: int, position: int, purpose: Purpose, index: int, origin: int | None
    ) -> torch.Tensor:
        """logp + G, float64 [k]."""
        if purpose is not Purpose.TOKEN and origin is None:
            raise ValueError(f"a draw for {purpose.name} needs origin=, the position of the pass's root")
        return self.logp + gumbel(self.ids, seed, position, purpose, index, origin=origin)  # [k]


_FLOOR = 1e-30  # far above the smallest normal float32, which is what a q row may be handed over in


def draw_siblings(
    law: Law, count: int, vocab_size: int, seed: int, position: int, node: int, *, origin: int
) -> tuple[list[int], torch.Tensor]:
    """The children of one node of a sampled tree, and the q row [V] that they were drawn from.

    Drawn without replacement, in the order in which multi-candidate verification tries them; add them in
    this order, and leave none out. `position` is the absolute one of the children, `node` their parent's
    number, which gives every node its own noise. Tokens below 1e-30 are taken out of the law *before*
    drawing: once the likely ones are drawn, the law of the rest is a ratio of such numbers, and they must
    not have lost their digits, or become 0, in the row.
    """
    law = law.above(_FLOOR)
    tokens = law.draw_distinct(count, seed, position, Purpose.DRAFT, node, origin=origin)
    return tokens, law.dense(vocab_size)  # [V]
