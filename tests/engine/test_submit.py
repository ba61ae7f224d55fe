"""Driving a session step by step: `submit`, `cancel`, `completion`."""

from __future__ import annotations

import pytest

import slipstream
from slipstream.core.params import SamplingParams
from slipstream.core.stats import Seconds
from slipstream.errors import ParameterError
from slipstream.testing.tiny import save_tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("tiny")))


def test_submitted_rows_become_what_generate_gives(folder: str) -> None:
    params = SamplingParams(max_tokens=8, temperature=1.0, seed=3, n=2)
    with slipstream.load(folder) as session:
        wanted = session.generate("hello", params)
        rows = session.submit("hello", params)
        while not all(row.finished for row in rows):
            session.engine.step()
        answers = [session.completion(row, Seconds()) for row in rows]
        assert [(a.tokens, a.text, a.seed) for a in answers] == [(w.tokens, w.text, w.seed) for w in wanted]
        assert session.cancel(rows) == [] and not session.engine.has_work


def test_cancelled_rows_keep_what_they_had(folder: str) -> None:
    with slipstream.load(folder) as session:
        (row,) = session.submit("hello", SamplingParams(max_tokens=50))
        for _ in range(5):
            session.engine.step()
        (event,) = session.cancel([row])
        done = session.completion(row, Seconds())
        assert event.finish_reason == done.finish_reason == "cancelled" and len(done.tokens) == 5
        assert not session.engine.has_work


def test_a_context_without_room_for_an_answer_is_refused(folder: str) -> None:
    for context in (1, 0, -5):
        with pytest.raises(ParameterError, match="context must be at least 2"):
            slipstream.load(folder, context=context)
