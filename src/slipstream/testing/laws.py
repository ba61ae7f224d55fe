"""Random laws for `testing.exact`, as the real pipeline makes them from logits, and from the definition."""

from __future__ import annotations

import math
from functools import lru_cache

import torch

from slipstream.core.params import SamplingParams
from slipstream.logits.pipeline import LogitsPipeline
from slipstream.logits.warp import warped
from slipstream.testing.branching import LawAt, Prefix
from slipstream.testing.table_lm import TableLM

WARPS = (
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.6),
    SamplingParams(temperature=1.7, top_k=2),
    SamplingParams(temperature=0.9, top_p=0.8),
    SamplingParams(temperature=1.2, min_p=0.3),
)


def table(vocab: int, seed: int, order: int | None = None) -> LawAt:
    """A random law for every prefix, or for every `order` last tokens; a quarter of the entries is 0."""
    return lru_cache(maxsize=None)(TableLM(vocab, seed, order=order).law)


def pipeline_law(vocab: int, seed: int, params: SamplingParams, order: int | None = None) -> LawAt:
    """The target's law as the real pipeline gives it, from logits."""
    model, pipeline = TableLM(vocab, seed, order=order), LogitsPipeline(params, vocab, frozenset(), 1)
    return lru_cache(maxsize=None)(lambda prefix: pipeline.probs(model.logits(prefix), prefix))


def drafter_law(vocab: int, seed: int, params: SamplingParams, order: int | None = None) -> LawAt:
    """A draft model's law, warped by the pipeline's code."""
    model = TableLM(vocab, seed, order=order)
    return lru_cache(maxsize=None)(lambda prefix: warped(model.logits(prefix), params, vocab))


def naive_law(vocab: int, seed: int, params: SamplingParams, order: int | None = None) -> LawAt:
    """The warped law again, from its definition, one token at a time."""
    model = TableLM(vocab, seed, order=order)

    def law(prefix: Prefix) -> torch.Tensor:
        logits = model.logits(prefix).tolist()
        weights = {token: math.exp(x / params.temperature) for token, x in enumerate(logits)}
        if params.top_k:
            edge = sorted(weights.values(), reverse=True)[params.top_k - 1]
            weights = {t: w for t, w in weights.items() if w >= edge}
        wanted = params.top_p * sum(weights.values())
        values = list(weights.values())
        weights = {t: w for t, w in weights.items() if sum(v for v in values if v > w) < wanted}
        best = max(weights.values())
        weights = {t: w for t, w in weights.items() if w >= params.min_p * best}
        row = torch.tensor([weights.get(t, 0.0) for t in range(vocab)], dtype=torch.float64)  # [V]
        return row / row.sum()

    return lru_cache(maxsize=None)(law)
