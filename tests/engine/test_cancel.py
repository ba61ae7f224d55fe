"""A cancelled request frees both caches at once and leaves its neighbours alone."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest

from slipstream.core.draft import Draft, DraftRequest
from slipstream.core.params import SamplingParams
from slipstream.drafters.base import TargetInfo
from slipstream.drafters.draft_model import DraftModelConfig, ModelDrafter
from slipstream.engine.engine import Engine
from slipstream.engine.session import Session
from slipstream.model.runner import Runner
from slipstream.testing.adversaries import FunctionDrafter, random_chain
from slipstream.testing.oracle import Request, plain_decode
from slipstream.testing.tiny import tiny_model

VOCAB = 48
PROMPTS = ((1, 2, 3), (4,), (5, 6, 7, 8, 9, 10, 11), (12, 13), tuple(range(14, 30)), (31, 32, 33, 34))
PARAMS = SamplingParams(max_tokens=14, temperature=0.9)


def make_model() -> Any:
    return tiny_model("llama", vocab_size=VOCAB, layers=1, seed=2)


@lru_cache
def target() -> Runner:
    return Runner(make_model(), pack=False)


@lru_cache
def expected() -> list[list[int]]:
    twin = make_model()
    return [plain_decode(twin, Request(p, PARAMS, 70 + i), vocab_size=VOCAB) for i, p in enumerate(PROMPTS)]


def draft_model() -> ModelDrafter:
    model = tiny_model("llama", vocab_size=VOCAB, layers=1, seed=4)
    return ModelDrafter(DraftModelConfig("tiny", 3), TargetInfo(VOCAB, 2048), Runner(model, pack=False))


def start(engine: Engine) -> list[int]:
    return [engine.add(p, PARAMS, seed=70 + i) for i, p in enumerate(PROMPTS)]


def finish(engine: Engine, told: dict[int, list[int]]) -> None:
    for event in engine.run():
        told.setdefault(event.seq_id, []).extend(event.tokens)


def assert_neighbours(told: dict[int, list[int]], cancelled: set[int]) -> None:
    for i, want in enumerate(expected()):
        got = told.get(i, [])
        assert got == (want[: len(got)] if i in cancelled else want), i


@pytest.mark.parametrize("after", range(9))
def test_a_cancelled_row_is_gone_at_the_next_step_wherever_it_was(after: int) -> None:
    """With 3 slots and pieces of 2 tokens, row i is waiting, reading, running or finished by turns."""
    drafter = draft_model()
    engine = Engine(target(), drafter, vocab_size=VOCAB, max_rows=3, chunk=2)
    ids = start(engine)
    told: dict[int, list[int]] = {}
    for _ in range(after):
        for event in engine.step():
            told.setdefault(event.seq_id, []).extend(event.tokens)
    gone = {ids[0], ids[2], ids[5]}
    for i in (*gone, *gone, 999, -1):
        engine.cancel(i)
    live = {i for i in gone if engine.find(i) is not None}
    events = engine.apply_cancels()
    assert {e.seq_id for e in events} == live
    assert all(e.finish_reason == "cancelled" and not e.tokens for e in events)
    for i in gone:
        assert engine.find(i) is None and i not in target().cache and i not in drafter.runner.cache
    finish(engine, told)
    assert_neighbours(told, gone)
    assert len(target().cache) == len(drafter.runner.cache) == 0


def test_a_cancel_from_within_a_drafter_takes_effect_at_the_step_boundary() -> None:
    made = random_chain(VOCAB)
    engines: list[Engine] = []

    def draft(request: DraftRequest) -> Draft:
        if request.seq_id == 1 and len(request.tokens) > 5:
            engines[0].cancel(1)
            engines[0].cancel(0)
        return made(request)

    engine = Engine(target(), FunctionDrafter(draft), vocab_size=VOCAB)
    engines.append(engine)
    start(engine)
    told: dict[int, list[int]] = {}
    while 0 not in engine._cancelled:
        for event in engine.step():
            told.setdefault(event.seq_id, []).extend(event.tokens)
    assert engine.find(1) is not None  # its step was finished
    ended = engine.step()
    assert {e.seq_id for e in ended if e.finish_reason == "cancelled"} == {0, 1}
    assert 0 not in target().cache and 1 not in target().cache
    for event in ended:
        told.setdefault(event.seq_id, []).extend(event.tokens)
    finish(engine, told)
    assert_neighbours(told, {0, 1})


def test_a_consumer_that_leaves_a_stream_frees_both_caches_at_once() -> None:
    drafter = draft_model()
    engine = Engine(target(), drafter, vocab_size=VOCAB)
    session = Session(engine, None, TargetInfo(VOCAB, 2048), PARAMS)
    start(engine)
    stream = session.stream([1, 2, 3], PARAMS)
    for _ in range(3):
        next(stream)
    row = max(s.id for s in engine._scheduler)
    assert row in target().cache and row in drafter.runner.cache
    stream.close()
    assert row not in target().cache and row not in drafter.runner.cache and engine.find(row) is None
    finish(engine, {})


def test_a_cancel_of_an_id_that_does_not_exist_yet_does_not_hit_a_later_request() -> None:
    engine = Engine(target(), draft_model(), vocab_size=VOCAB)
    engine.cancel(0)
    start(engine)
    told: dict[int, list[int]] = {}
    finish(engine, told)
    assert_neighbours(told, set())


def test_a_cancelled_text_keeps_what_was_held_back() -> None:
    engine = Engine(
        target(), draft_model(), vocab_size=VOCAB, decode=lambda ids: "".join("ab"[t % 2] for t in ids)
    )
    seq_id = engine.add((1, 2), PARAMS.with_(stop=("aaaaaaaaab", "bbbbbbbbba")))
    row = engine.find(seq_id)
    events = [*engine.step(), *engine.step()]
    engine.cancel(seq_id)
    events += engine.step()
    assert row is not None and "".join(e.text for e in events) == row.text
    assert len(row.text) == row.num_output and row.finish_reason == "cancelled"


def test_the_prompt_is_copied_from_a_living_twin_after_the_first_one_is_cancelled() -> None:
    engine = Engine(target(), draft_model(), vocab_size=VOCAB, max_rows=2)
    prompt = PROMPTS[4]
    ids = [engine.add(prompt, PARAMS, seed=74, group=7) for _ in range(4)]
    told: dict[int, list[int]] = {}
    for turn in range(6):
        for event in engine.step():
            told.setdefault(event.seq_id, []).extend(event.tokens)
        if turn == 2:
            engine.cancel(ids[0])
    finish(engine, told)
    assert [told[i] for i in ids[1:]] == [expected()[4]] * 3
