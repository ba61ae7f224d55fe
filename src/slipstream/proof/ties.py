"""The audit of a difference: was it a near-tie, which rounding may decide either way?

Both outputs agree up to some place, where one has this token and the other that. The target's logits for
that place are computed again in two plain ways, the whole prefix in one forward and a token a step. The
margin is how far logits had to move against each other for the other token to be drawn, with penalties,
temperature, filters and noise as they were; it is held against the distance of neighbouring numbers of the
model's dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from slipstream.logits.pipeline import LogitsPipeline
from slipstream.proof.reference import Reference

# Neighbouring numbers apart at which rounding may still decide. Logits of 16 bits are rounded once more, at
# the end, far more coarsely than the sums they come from; in float32 it is the sums that differ.
ALLOWED = {torch.float32: 256.0, torch.float64: 256.0}
_ALLOWED_16_BIT = 4.0
_HOPELESS = 1e4


@dataclass(frozen=True)
class Margin:
    """logits: how far apart the two tokens are. spacing: of neighbouring numbers of that size. allowed: how
    many spacings still are a near-tie."""

    logits: float
    spacing: float
    allowed: float

    @property
    def near_tie(self) -> bool:
        return self.logits <= self.allowed * self.spacing


def margin_of(
    reference: Reference,
    pipeline: LogitsPipeline,
    prompt: Sequence[int],
    before: Sequence[int],
    seed: int,
    tokens: tuple[int, int],
) -> Margin:
    """The margin between the two tokens that were chosen behind prompt and `before`."""
    prefix = (*prompt, *before)

    def choose(row: torch.Tensor) -> int:
        return pipeline.token(row, prefix, seed, len(prefix))

    rows = (reference.behind(prompt, [before])[0], reference.stepwise(prompt, before))  # each [width]
    margin = max(_needed(choose, row, token) for row in rows for token in tokens)
    return Margin(margin, spacing(rows[0], tokens, reference.dtype), allowed(reference.dtype))


def allowed(dtype: torch.dtype) -> float:
    return ALLOWED.get(dtype, _ALLOWED_16_BIT)


def spacing(row: torch.Tensor, tokens: Sequence[int], dtype: torch.dtype) -> float:
    """The distance of neighbouring numbers at the larger of these logits."""
    size = max(abs(float(row[token])) for token in tokens)
    exponent = math.frexp(size)[1] - 1 if size else 0  # 2^exponent <= size < 2^(exponent + 1)
    return float(torch.finfo(dtype).eps * 2.0**exponent)


def may_be_drawn(
    reference: Reference, pipeline: LogitsPipeline, prompt: Sequence[int], before: Sequence[int], token: int
) -> bool:
    """Whether the filters let the token through if rounding helps it: a filter has a sharp edge."""
    row = reference.behind(prompt, [before])[0].float()  # [width]
    gap = allowed(reference.dtype) * spacing(row, (token,), reference.dtype)
    return float(pipeline.probs(_let_in(row, token, gap), (*prompt, *before))[token]) > 0.0


def _needed(choose: Callable[[torch.Tensor], int], row: torch.Tensor, wanted: int) -> float:
    """How far `wanted` and what is chosen must move against each other; inf if it never helps."""
    row = row.float()  # [width]
    chosen = choose(row)

    def helps(gap: float) -> bool:
        for moved in (row.clone(), _let_in(row, wanted, gap), _kept_out(row, chosen, gap)):
            moved[wanted], moved[chosen] = row[wanted] + gap / 2, row[chosen] - gap / 2
            if choose(moved) == wanted:
                return True
        return False

    if chosen == wanted:
        return 0.0
    low, high = 0.0, 1.0
    while not helps(high):
        low, high = high, 2 * high
        if high > _HOPELESS:
            return math.inf
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if helps(middle) else (middle, high)
    return high


def _let_in(row: torch.Tensor, token: int, gap: float) -> torch.Tensor:
    """Likelier tokens fall and the others rise: at the edge of top-p it is the sum that decides."""
    return row + torch.where(row > row[token], -gap / 2, gap / 2)  # [width]


def _kept_out(row: torch.Tensor, token: int, gap: float) -> torch.Tensor:
    """Likelier tokens rise, and this one and the others fall."""
    return row + torch.where(row > row[token], gap / 2, -gap / 2)  # [width]
