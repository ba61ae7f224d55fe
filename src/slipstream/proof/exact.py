"""The exact law of the first few tokens after a prompt, and its division into cells that can be counted.

A vocabulary has far too many continuations to count each. So the law is a tree: behind every likely
beginning stands the target's whole next-token law; a cell is a beginning that is likely enough to be counted,
or all that goes on from a beginning with any other token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from slipstream.core.params import SamplingParams
from slipstream.logits.pipeline import LogitsPipeline
from slipstream.proof.reference import Reference

REST = -1  # in a cell: any token that is not singled out there
WIDEST = 24  # beginnings a level behind which the law is computed

Prefix = tuple[int, ...]


@dataclass(frozen=True)
class ShortLaw:
    """laws: for the likely beginnings the law of the next token, float64 [V] on the CPU, the request's
    temperature, filters and penalties applied. Outputs have `horizon` tokens; answers do not end before."""

    prompt: tuple[int, ...]
    params: SamplingParams
    horizon: int
    laws: Mapping[Prefix, torch.Tensor]

    def cells(self, least: float) -> dict[Prefix, float]:
        """Cells and their probabilities, which sum to 1; tokens are singled out from `least` on."""
        found: dict[Prefix, float] = {}

        def divide(prefix: Prefix, mass: float) -> None:
            law = self.laws.get(prefix)
            if law is None or mass < 2 * least:
                found[prefix] = mass
                return
            rest = mass
            for token in (law * mass >= least).nonzero().flatten().tolist():
                part = mass * float(law[token])
                rest -= part
                divide((*prefix, token), part)
            found[prefix + (REST,)] = max(rest, 0.0)

        divide((), 1.0)
        return found

    @staticmethod
    def cell_of(cells: Mapping[Prefix, float], output: Sequence[int]) -> Prefix:
        """The cell that an output falls into."""
        prefix: Prefix = ()
        while (rest := (*prefix, REST)) in cells:  # it is divided
            longer = tuple(output[: len(prefix) + 1])
            if longer not in cells and (*longer, REST) not in cells:
                return rest
            prefix = longer
        return prefix

    def impossible(self, output: Sequence[int]) -> tuple[Prefix, int] | None:
        """The first place where the output has a token of probability 0: what is before it, and the token."""
        for end, token in enumerate(output):
            law = self.laws.get(tuple(output[:end]))
            if law is None:
                return None
            if not float(law[token]) > 0.0:
                return tuple(output[:end]), token
        return None


def enumerate_law(
    reference: Reference, prompt: Sequence[int], params: SamplingParams, horizon: int
) -> ShortLaw:
    """Computes the target's law behind the likeliest beginnings of each length."""
    pipeline = LogitsPipeline(params, reference.vocab_size, frozenset(), len(prompt))
    laws: dict[Prefix, torch.Tensor] = {}
    level: dict[Prefix, float] = {(): 1.0}
    for _ in range(horizon):
        longer: dict[Prefix, float] = {}
        rows = reference.behind(prompt, list(level))
        for (prefix, mass), row in zip(level.items(), rows, strict=True):
            law: torch.Tensor = pipeline.probs(row, (*prompt, *prefix)).cpu()  # [V]
            laws[prefix] = law
            best = law.topk(min(WIDEST, len(law)))
            for token, p in zip(best.indices.tolist(), best.values.tolist(), strict=True):
                if p > 0.0:
                    longer[prefix + (token,)] = mass * p
        level = dict(sorted(longer.items(), key=lambda item: -item[1])[:WIDEST])
    return ShortLaw(tuple(prompt), params, horizon, laws)


def evenness(rows: torch.Tensor, temperature: float, least: float) -> torch.Tensor:
    """The entropy [n], in nats, of the cells of the laws of logit rows [n, V]: one for each token of
    probability `least` or more, and one for the others."""
    p = (rows.double() / temperature).softmax(-1)  # [n, V]
    told = p.masked_fill(p < least, 0.0)  # [n, V]
    rest = (1.0 - told.sum(-1)).clamp(min=0.0)  # [n]
    even: torch.Tensor = torch.special.entr(told).sum(-1) + torch.special.entr(rest)  # [n]
    return even
