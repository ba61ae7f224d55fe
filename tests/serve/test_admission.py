"""Admission by cached tokens: what is let in can always finish."""

from __future__ import annotations

import pytest

from slipstream.core.params import SamplingParams
from slipstream.core.sequence import Sequence
from slipstream.drafters.base import TargetInfo
from slipstream.drafters.none import NoConfig, NoDrafter
from slipstream.engine.engine import Engine
from slipstream.engine.scheduler import Scheduler
from slipstream.errors import CapacityError
from slipstream.model.runner import Runner
from slipstream.testing.tiny import tiny_model


def sequence(number: int, prompt: int, answer: int) -> Sequence:
    params = SamplingParams(max_tokens=answer)
    return Sequence(number, tuple(range(prompt)), params, 0, frozenset(), room=4096)


def test_a_sequence_waits_until_all_it_may_need_is_free_and_the_order_stays() -> None:
    scheduler = Scheduler(8, 512, cache_tokens=100, block=10)
    large, next_, small = sequence(0, 41, 20), sequence(1, 30, 20), sequence(2, 5, 5)
    for one in (large, next_, small):
        scheduler.add(one)
    assert scheduler.need(large) == 70  # whole blocks
    assert scheduler.admit() == [large]  # the small one would fit, but must not overtake
    assert scheduler.load.reserved == 70 and scheduler.load.waiting == 2
    scheduler.retire(large)
    assert scheduler.admit() == [next_, small]
    assert scheduler.load.reserved == 60 and scheduler.load.waiting == 0


def test_what_can_never_fit_is_refused_at_once() -> None:
    scheduler = Scheduler(8, 512, cache_tokens=100, block=10)
    with pytest.raises(CapacityError, match="may need 110 cached tokens"):
        scheduler.add(sequence(0, 90, 11))
    assert len(scheduler) == 0


def test_without_a_limit_only_slots_count() -> None:
    scheduler = Scheduler(2, 512)
    for i in range(3):
        scheduler.add(sequence(i, 4000, 90))
    assert len(scheduler.admit()) == 2


def test_the_cache_never_holds_more_than_was_promised() -> None:
    runner = Runner(tiny_model("llama", vocab_size=48, layers=1), pack=False)
    plain = NoDrafter(NoConfig(), TargetInfo(48, 2048))
    engine = Engine(runner, plain, max_rows=4, cache_tokens=1024)
    for seed in range(5):
        engine.add((1, 2, 3), SamplingParams(max_tokens=30 + seed, temperature=1.0), seed=seed)
    most = 0
    while engine.has_work:
        engine.step()
        load = engine.load
        assert load.reserved <= 1024
        most = max(most, len(load.admitted))
    assert most == 2
    with pytest.raises(CapacityError):
        engine.add((1, 2, 3), SamplingParams(max_tokens=1500))
    assert not engine._pipelines
    engine.close()
