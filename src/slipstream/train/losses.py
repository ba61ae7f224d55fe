"""What a drafter is trained to make small. p is the target's law, q the drafter's; sums over positions.

SFT takes the token the target wrote as the only truth. The distances compare whole laws: forward KL,
reverse KL and total variation (DistillSpec, arXiv 2310.08461). Total variation is what decides: the
chance that a token drawn from q is accepted is 1 - TV(p, q) (arXiv 2211.17192).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from slipstream.core.draft import Needs
from slipstream.errors import ParameterError
from slipstream.model.parts import ModelParts
from slipstream.train.samples import Batch

Distance = Literal["forward_kl", "reverse_kl", "tv"]
IGNORE = -100  # a label that is not drafted: it costs nothing
# Logits of one piece: with their gradients about four times these bytes are held.
PIECE = 1 << 26


@dataclass(frozen=True)
class Law:
    """The target's law at n positions, not normalised.

    logits [n, V] speak about all tokens; with ids [n, k] logits [n, k] are those of the likeliest k.
    """

    logits: torch.Tensor
    ids: torch.Tensor | None = None

    def logprobs(self, temperature: float = 1.0) -> torch.Tensor:
        """log p, float32; over the k that are there, if only those are."""
        return (self.logits.float() / temperature).log_softmax(-1)


class Teacher:
    """The target's law at any position of a batch, from what was captured.

    From the "last" state through the target's LM head it is whole; from the stored top logits it is cut
    to those. ids [n]: only these tokens of the target can be drafted, and the law is the one given that
    one of them comes; it then speaks in their numbering.
    """

    def __init__(self, parts: ModelParts, ids: torch.Tensor | None = None) -> None:
        self._parts = parts
        self._ids = ids
        self._head: Callable[[torch.Tensor], torch.Tensor] = (
            parts.lm_head if ids is None else parts.lm_head_rows(ids)
        )
        self._number: torch.Tensor | None = None
        if ids is not None:
            self._number = draft_numbers(ids, parts.vocab_size)

    @property
    def needs(self) -> Needs:
        return Needs(last_hidden=True)

    @torch.no_grad()
    def law(self, batch: Batch, rows: torch.Tensor, positions: torch.Tensor) -> Law:
        """At tokens[rows, positions], both [n]: the law of the token that follows each."""
        if "last" in batch.features:
            return Law(self._logits(batch.features["last"][rows, positions]))
        values, ids = _top(batch)
        values, ids = values[rows, positions].float(), ids[rows, positions]  # [n, k]
        if self._number is None:
            return Law(values, ids)
        inside = self._number.to(ids.device)[ids]  # [n, k]
        values = values.masked_fill(inside == IGNORE, -torch.inf)
        # where none can be drafted `drafts` is False too; the row must not become NaN
        values = values.masked_fill((inside == IGNORE).all(-1, keepdim=True), 0.0)
        return Law(values, inside.clamp(min=0))

    @torch.no_grad()
    def drafts(self, batch: Batch, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Whether the target's likeliest token there can be drafted at all, bool [n]."""
        if self._number is None:
            return torch.ones_like(rows, dtype=torch.bool)
        if batch.logits is not None:
            best = batch.logits[1][rows, positions, 0]
        else:
            states = batch.features["last"][rows, positions]
            weight = self._parts.embedding.dtype
            piece = max(1, PIECE // self._parts.vocab_size)
            best = torch.cat(
                [self._parts.lm_head(s.to(weight)).argmax(-1) for s in torch.split(states, piece)]
            )
        return self._number.to(best.device)[best] != IGNORE

    def _logits(self, states: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._head(states.to(self._parts.embedding.dtype))
        return logits


def _top(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    if batch.logits is None:
        raise ParameterError(
            "these data hold neither the target's last states nor its top logits: capture them again with one"
            " of the two"
        )
    return batch.logits


def draft_numbers(ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """For every target token its place in the draft vocabulary `ids`, or IGNORE; int64 [V]."""
    number = torch.full((vocab_size,), IGNORE)
    number[ids.cpu()] = torch.arange(len(ids))
    return number


def sft(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """-log q(label) at each position, [n]; 0 where the label is IGNORE. logits [n, V]."""
    return functional.cross_entropy(logits.float(), labels, ignore_index=IGNORE, reduction="none")


def forward_kl(logits: torch.Tensor, law: Law, temperature: float = 1.0) -> torch.Tensor:
    """KL(p || q) = sum p (log p - log q) at each position, [n]."""
    logp = law.logprobs(temperature)
    logq = _at((logits.float() / temperature).log_softmax(-1), law)
    terms = logp.exp() * (logp - logq)
    return terms.masked_fill(logp.isneginf(), 0.0).sum(-1)


def soft_cross_entropy(logits: torch.Tensor, law: Law, temperature: float = 1.0) -> torch.Tensor:
    """-sum p log q at each position, [n]: forward KL up to p's own entropy, so with the same gradients."""
    logp = law.logprobs(temperature)
    logq = _at((logits.float() / temperature).log_softmax(-1), law)
    return -(logp.exp() * logq).masked_fill(logp.isneginf(), 0.0).sum(-1)


def reverse_kl(logits: torch.Tensor, law: Law, temperature: float = 1.0) -> torch.Tensor:
    """KL(q || p) = sum q (log q - log p) at each position, [n].

    q may like what p never stored, so p must be whole.
    """
    if law.ids is not None:
        raise ParameterError(
            "reverse_kl needs the target's whole law: capture the last states instead of top logits, or train"
            " with forward_kl or tv"
        )
    logq = (logits.float() / temperature).log_softmax(-1)
    return (logq.exp() * (logq - law.logprobs(temperature))).sum(-1)


def total_variation(logits: torch.Tensor, law: Law, temperature: float = 1.0) -> torch.Tensor:
    """TV(p, q) = 1 - sum min(p, q) at each position, [n]; top logits count as all of p."""
    q = _at((logits.float() / temperature).softmax(-1), law)
    return 1.0 - torch.minimum(law.logprobs(temperature).exp(), q).sum(-1)


DISTANCES: dict[Distance, Callable[[torch.Tensor, Law, float], torch.Tensor]] = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "tv": total_variation,
}


def _at(rows: torch.Tensor, law: Law) -> torch.Tensor:
    """What `rows` [n, V] say about the tokens the law speaks of."""
    return rows if law.ids is None else rows.gather(-1, law.ids)


def smooth_l1(predicted: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Mean over the last dimension [n, H] -> [n] (EAGLE-1's feature loss)."""
    return functional.smooth_l1_loss(predicted.float(), wanted.float(), reduction="none").mean(-1)


def in_pieces(compute: Callable[..., torch.Tensor], width: int, *tensors: torch.Tensor) -> torch.Tensor:
    """sum of compute(*piece) over pieces of the tensors' first dimension.

    compute makes logits `width` wide for each position. Where they are too many to be held at once
    they are made again on the way back.
    """
    piece = max(1, PIECE // width)
    count = len(tensors[0])
    if count <= piece:
        return compute(*tensors)
    total: torch.Tensor | None = None
    for parts in zip(*(torch.split(t, piece) for t in tensors), strict=True):
        part = checkpoint(compute, *parts, use_reentrant=False)
        total = part if total is None else total + part
    assert total is not None
    return total
