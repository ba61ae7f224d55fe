"""The law of sampled speculation through the whole engine, against the exact law of the model.

The first three tokens of N independent requests, jointly, 8^3 cells. Seeds are fixed, so a test either
always passes or always fails: the bounds 1e-3 and 1e-6 are not exceeded by luck.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import pytest
import torch

from slipstream.core.draft import Draft, DraftRequest, Needs
from slipstream.core.params import SamplingParams
from slipstream.drafters.base import TargetInfo
from slipstream.drafters.draft_model import DraftModelConfig, ModelDrafter
from slipstream.engine.engine import Engine
from slipstream.logits.pipeline import LogitsPipeline
from slipstream.model.runner import Runner
from slipstream.testing.chisquare import chi_square
from slipstream.testing.tiny import tiny_model

V, N, FIRST = 8, 2000, 3
PROMPT = (1, 5)
CASES = {
    "free": SamplingParams(max_tokens=4, temperature=1.0),
    "warped": SamplingParams(max_tokens=4, temperature=1.4, top_p=0.9, repetition_penalty=1.3),
}


class Eager(ModelDrafter):
    needs = Needs()  # draft from the first token on


class Liar(Eager):
    """Draws from its law and reports a uniform one."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        drafts = super().propose(requests)
        flat = torch.full((V,), 1 / V, dtype=torch.float64)
        return [
            Draft(d.tree, tuple(None if row is None else flat for row in d.q)) if d.q else d for d in drafts
        ]


def make(seed: int) -> Any:
    return tiny_model("llama", vocab_size=V, layers=1, hidden=16, seed=seed)


@lru_cache
@torch.inference_mode()
def exact(case: str) -> dict[tuple[int, ...], float]:
    params, model = CASES[case], make(0)
    pipeline = LogitsPipeline(params, V, frozenset(), len(PROMPT))
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(FIRST):
        rows = model(input_ids=torch.tensor([[*PROMPT, *out] for out in law])).logits[:, -1]  # [prefixes, V]
        law = {
            (*out, token): mass * p
            for (out, mass), row in zip(law.items(), rows, strict=True)
            for token, p in enumerate(pipeline.probs(row, (*PROMPT, *out)).tolist())
            if p > 0
        }
    assert sum(law.values()) == pytest.approx(1)
    return law


def sample(case: str, kind: type[Eager], gamma: int) -> tuple[Counter[tuple[int, ...]], Engine]:
    config = DraftModelConfig("tiny", gamma, sampled=True)
    drafter = kind(config, TargetInfo(V, 2048), Runner(make(1), pack=False))
    engine = Engine(Runner(make(0), pack=False), drafter, max_rows=400)
    ids = [engine.add(PROMPT, CASES[case], seed=s) for s in range(N)]
    told: dict[int, list[int]] = {i: [] for i in ids}
    for event in engine.run():
        told[event.seq_id].extend(event.tokens)
    return Counter(tuple(t[:FIRST]) for t in told.values()), engine


@pytest.mark.parametrize(("case", "gamma"), [("free", 3), ("warped", 1)])
def test_the_ratio_test_keeps_the_joint_law_of_the_first_tokens(case: str, gamma: int) -> None:
    seen, engine = sample(case, Eager, gamma)
    assert 0.2 < engine.counts.acceptance_rate < 0.9  # both branches were taken
    assert chi_square(seen, exact(case)) > 1e-3


def test_a_drafter_that_lies_about_its_law_is_found_out() -> None:
    seen, _ = sample("free", Liar, 3)
    assert chi_square(seen, exact("free")) < 1e-6


def test_p_values_are_right() -> None:
    assert chi_square(Counter({"a": 50, "b": 50}), {"a": 0.5, "b": 0.5}) == 1.0
    assert chi_square(Counter({"a": 60, "b": 40}), {"a": 0.5, "b": 0.5}) == pytest.approx(0.0455, abs=1e-4)
    assert chi_square(Counter({"c": 1}), {"a": 1.0}) == 0.0
