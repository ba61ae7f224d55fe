"""Draft models keep what closed rows had read, as far as they may: the same drafts for less reading."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from slipstream.core.params import SamplingParams
from slipstream.drafters.base import TargetInfo
from slipstream.drafters.cascade import CascadeConfig, CascadeDrafter
from slipstream.drafters.draft_model import DraftModelConfig, ModelDrafter
from slipstream.engine.engine import Engine
from slipstream.model.cache import SlotCache
from slipstream.model.prefix import BLOCK
from slipstream.model.runner import Output, Runner
from slipstream.testing.oracle import Request, run_all
from slipstream.testing.tiny import tiny_model

VOCAB = 48
START = tuple((5 * i + i // 7) % VOCAB for i in range(3 * BLOCK))
PARAMS = SamplingParams(max_tokens=BLOCK + 8)
REQUESTS = [Request((*START, *range(i)), PARAMS, i) for i in range(1, 5)]


def model_drafter(width: int = 1) -> ModelDrafter:
    """Has the target's weights, so it is right as long as its keys are."""
    model = tiny_model("llama", vocab_size=VOCAB, layers=1, seed=2)
    config = DraftModelConfig("tiny", 3, width=width)
    return ModelDrafter(config, TargetInfo(VOCAB, 2048), Runner(model, pack=False))


def engine_for(drafter: Any, **options: Any) -> Engine:
    runner = Runner(tiny_model("llama", vocab_size=VOCAB, layers=1, seed=2), pack=False)
    return Engine(runner, drafter, vocab_size=VOCAB, **options)


@contextmanager
def counted(runner: Runner) -> Iterator[list[int]]:
    """Tokens of every forward."""
    counts: list[int] = []
    forward = runner.forward

    def spy(rows: Any, **options: Any) -> Output:
        counts.append(sum(len(row.tokens) for row in rows))
        return forward(rows, **options)

    runner.forward = spy  # type: ignore[method-assign]
    try:
        yield counts
    finally:
        del runner.forward  # type: ignore[method-assign]


def one_by_one(engine: Engine, drafter: ModelDrafter) -> tuple[list[list[int]], int, Any]:
    with counted(drafter.runner) as counts:
        outputs = [run_all(engine, [request])[0] for request in REQUESTS]
    return outputs, sum(counts), engine.counts


@pytest.mark.parametrize("width", [1, 3])
def test_the_same_drafts_for_less_reading(width: int) -> None:
    drafter = model_drafter(width)
    weights = drafter.memory_bytes
    outputs, plain, counts = one_by_one(engine_for(drafter), drafter)
    assert drafter.memory_bytes == weights
    engine = engine_for(drafter, prefix_tokens=1000)
    again, computed, kept_counts = one_by_one(engine, drafter)
    assert again == outputs and kept_counts == counts
    assert plain - computed == (len(REQUESTS) - 1) * len(START)
    each = 2 * 2 * 8 * 4  # k and v, kv heads, head_dim, float32
    assert drafter.memory_bytes - weights == drafter._cache._prefixes.tokens * each > 0
    assert len(drafter.runner.cache) == 0
    engine.limit_prefixes(0)
    assert drafter.memory_bytes == weights


def test_wrong_keys_would_draft_worse(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the test above looks at the keys."""
    drafter = model_drafter()
    _, _, counts = one_by_one(engine_for(drafter), drafter)
    release = SlotCache.release

    def fault(self: SlotCache, slot: int, ranges: Any) -> Any:
        parts = release(self, slot, ranges)
        return parts[::-1] if self is drafter.runner.cache else parts

    monkeypatch.setattr(SlotCache, "release", fault)
    worse = one_by_one(engine_for(drafter, prefix_tokens=1000), drafter)[2]
    assert worse.accepted_tokens < counts.accepted_tokens


def test_an_engine_gives_up_what_another_drafter_kept() -> None:
    drafter = model_drafter()
    engine = engine_for(drafter, prefix_tokens=1000)
    run_all(engine, REQUESTS[:1])
    assert drafter._cache._prefixes.tokens > 0
    engine.set_drafter(None)
    assert drafter._cache._prefixes.tokens == 0


def test_what_is_kept_gives_way_to_running_rows() -> None:
    drafter = model_drafter()
    engine = engine_for(drafter, prefix_tokens=1000, cache_tokens=1024)
    run_all(engine, REQUESTS[:1])
    assert drafter._cache._prefixes.tokens >= len(START)
    for seed in range(2):
        engine.add((7, *START), PARAMS, seed=seed)
    engine.step()
    assert drafter._cache._prefixes.tokens == 0


def test_parts_of_a_cascade_keep_theirs() -> None:
    drafter = model_drafter()
    config = CascadeConfig(drafters="ngram+none")
    cascade = CascadeDrafter(config, TargetInfo(VOCAB, 2048), [drafter])
    engine = engine_for(cascade, prefix_tokens=1000)
    run_all(engine, REQUESTS[:1])
    assert drafter._cache._prefixes.tokens > 0
