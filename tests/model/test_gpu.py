"""The recorded path on a real GPU: `make test-gpu`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from slipstream.core.draft import Needs
from slipstream.core.params import SamplingParams
from slipstream.engine.engine import Engine
from slipstream.model.graphs import CudaGraphs, RecordError
from slipstream.model.pack import PackRow
from slipstream.model.static_runner import StaticRunner, open_runner
from slipstream.testing.adversaries import FunctionDrafter, RandomBudgets, any_of, random_tree, right_until
from slipstream.testing.oracle import Request, plain_decode, run_all
from slipstream.testing.tiny import tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU here that torch can use"),
]
VOCAB = 50
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"tie": True},
    "qwen3": {},
    "mistral": {"sliding_window": 4},
    "gemma3_text": {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
}
TREE = [-1, 0, 0, 1, 1, 2, 3, 3]


def make(kind: str = "llama") -> Any:
    return tiny_model(kind, vocab_size=VOCAB, hidden=64, seed=1, **KINDS[kind])  # kernels want 16 a head


@pytest.fixture(autouse=True)
def full_precision() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.fixture
def runner() -> Iterator[StaticRunner]:
    found = open_runner(make().to("cuda"))
    assert isinstance(found, StaticRunner)
    yield found
    assert found.not_recorded is None
    found.close()


@pytest.mark.parametrize("kind", KINDS)
def test_the_tokens_are_those_of_the_cpu(kind: str) -> None:
    twin = make(kind)
    requests = [
        Request(tuple(range(1 + i, 5 + 7 * i)), SamplingParams(max_tokens=32, temperature=t), 20 + i)
        for i, t in enumerate((0.0, 0.0, 0.8, 0.0, 0.8))
    ]
    known = {r.seed: plain_decode(twin, r, vocab_size=VOCAB) for r in requests}
    drafters = {
        "plain": (FunctionDrafter(right_until(known, VOCAB), 0), None),
        "drafted": (
            FunctionDrafter(any_of((random_tree(known, VOCAB), right_until(known, VOCAB)))),
            RandomBudgets(6),
        ),
    }
    for name, (drafter, controller) in drafters.items():
        found = open_runner(make(kind).to("cuda"))
        assert isinstance(found, StaticRunner)
        with Engine(found, drafter, controller=controller, max_rows=3, chunk=16) as engine:
            assert run_all(engine, requests, arrive=2) == list(known.values()), name
            assert found.not_recorded is None


def test_a_graph_gives_what_computing_gives(runner: StaticRunner) -> None:
    runner.tap(Needs(hidden_layers=(1,), last_hidden=True))
    for slot in (0, 1):
        runner.cache.open(slot)
        runner.extend(slot, [slot, 2, 3])
    rows = [PackRow(1, list(range(8)), TREE), PackRow(0, [4, 5])]
    first = runner.forward(rows)
    again = runner.forward(rows)
    with runner.altered(None):
        computed = runner.forward(rows)
    for out in (first, again):
        assert out.logits is not None and computed.logits is not None
        torch.testing.assert_close(out.logits, computed.logits, atol=1e-6, rtol=1e-6)
        for key, value in computed.features.items():
            torch.testing.assert_close(out.features[key], value, atol=1e-6, rtol=1e-6)
    assert first.logits is not None and again.logits is not None
    assert torch.equal(first.logits, again.logits)


def test_the_host_waits_for_nothing(runner: StaticRunner) -> None:
    """Neither a step of a known shape, nor a commit of a path, nor a chunk of a prompt."""
    runner.tap(Needs(last_hidden=True))
    for slot in (0, 1):
        runner.cache.open(slot)
        runner.extend(slot, [slot, 2, 3])
    rows = [PackRow(0, list(range(8)), TREE), PackRow(1, [4])]
    runner.forward(rows)
    prompt = [PackRow(1, [5] * 100)]
    runner.forward(prompt, logits="none")
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = runner.forward(rows)
        out.features_of([0, 1, 3])
        runner.cache.commit(0, [0, 1, 3])
        runner.forward(prompt, logits="none")
        runner.forward([PackRow(0, list(range(8)), TREE), PackRow(1, [4])])
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_work_that_asks_for_a_value_cannot_be_recorded() -> None:
    x = torch.ones(4, device="cuda")
    with pytest.raises(RecordError, match="cannot become a CUDA graph"):
        CudaGraphs(x.device).record(lambda: float(x.sum()))
    assert float(x.sum()) == 4.0  # the GPU goes on
