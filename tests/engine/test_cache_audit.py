"""After every step, the caches hold what a computation from scratch would put there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slipstream.core.params import SamplingParams
from slipstream.drafters.base import TargetInfo
from slipstream.drafters.draft_model import DraftModelConfig, ModelDrafter
from slipstream.engine.engine import Engine
from slipstream.model.pack import PackRow
from slipstream.model.runner import Runner
from slipstream.testing.adversaries import FunctionDrafter, RandomBudgets, any_of, random_tree, right_until
from slipstream.testing.oracle import Request, plain_decode
from slipstream.testing.tiny import tiny_model

VOCAB = 40
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 5},
    "gemma3_text": {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
}


@torch.inference_mode()
def audit(runner: Runner, twin: Any, seq_id: int, tokens: list[int]) -> None:
    """The slot holds exactly `tokens`: as many, and such that what comes next is computed alike."""
    assert runner.cache.length(seq_id) == len(tokens)
    probe, copy = [7, 11], -5
    runner.cache.open(copy)  # not in the slot itself: drafted tokens behind its length may be kept later
    runner.cache.copy_prefix(seq_id, copy, len(tokens))
    got = runner.forward([PackRow(copy, probe)]).logits
    runner.cache.close(copy)
    want = twin(input_ids=torch.tensor([[*tokens, *probe]]), use_cache=False).logits[0, -2:]
    assert got is not None
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_the_targets_cache_is_that_of_a_computation_from_scratch(kind: str) -> None:
    make = lambda: tiny_model(kind, vocab_size=VOCAB, seed=1, **KINDS[kind])  # noqa: E731
    twin = make()
    params = SamplingParams(max_tokens=16, temperature=0.8)
    requests = [Request(tuple(range(i, 3 * i + 1)), params, 30 + i) for i in range(4)]
    known = {r.seed: plain_decode(twin, r, vocab_size=VOCAB) for r in requests}
    drafter = FunctionDrafter(any_of((random_tree(known, VOCAB), right_until(known, VOCAB))))
    engine = Engine(Runner(make(), pack=False), drafter, controller=RandomBudgets(6), max_rows=3, chunk=3)
    rows = [engine.find(engine.add(r.prompt, r.params, seed=r.seed)) for r in requests]
    accepted_trees = steps = 0
    while engine.has_work:
        engine.step()
        steps += 1
        for row in engine._scheduler.running:
            audit(engine.runner, twin, row.id, row.tokens[:-1])
        for seq_id, read in engine._scheduler.reading.items():
            row = engine.find(seq_id)
            assert row is not None
            audit(engine.runner, twin, seq_id, row.tokens[:read])
    accepted_trees = engine.counts.accepted_tokens
    assert accepted_trees > 15 and [r.output for r in rows if r] == list(known.values())


def test_the_drafts_cache_is_a_prefix_of_what_is_committed_and_its_own_draft() -> None:
    target, draft = (tiny_model("llama", vocab_size=VOCAB, layers=1, seed=s) for s in (1, 2))
    twin = tiny_model("llama", vocab_size=VOCAB, layers=1, seed=2)
    drafter = ModelDrafter(DraftModelConfig("tiny", 4), TargetInfo(VOCAB, 2048), Runner(draft, pack=False))
    engine = Engine(Runner(target, pack=False), drafter, max_rows=2)
    for i in range(4):
        engine.add(tuple(range(1 + i, 4 + 3 * i)), SamplingParams(max_tokens=12, temperature=0.4), seed=i)
    while engine.has_work:
        engine.step()
        assert set(drafter._cache._rows) <= {r.id for r in engine._scheduler}
        for seq_id, row in drafter._cache._rows.items():
            audit(drafter.runner, twin, seq_id, row.cached)
