"""What prompts begin with in common is computed once, and told as OpenAI, llama.cpp and vLLM tell it."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

import slipstream
from slipstream import SamplingParams, Session
from slipstream.core.draft import Draft, DraftRequest, Needs
from slipstream.drafters.base import empty_draft
from slipstream.serve.worker import Done, Failed, Job, Message, Worker
from slipstream.testing.adversaries import FunctionDrafter

from .conftest import Running, running

# Longer than the 512 tokens that are shared even where kernels mind how a prompt is cut.
SYSTEM = "You are a helpful assistant who answers in few words, and never, never in rhyme. " * 8
ASKED: dict[str, Any] = {"model": "tiny", "temperature": 0.9, "max_tokens": 40}


@pytest.fixture(scope="module")
def session(folder: Path) -> Iterator[Session]:
    with slipstream.load(str(folder), max_rows=3, prefix_tokens=20_000) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def fresh(folder: Path) -> Iterator[Session]:
    """The same model without a prefix cache."""
    with slipstream.load(str(folder)) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    with slipstream.load(str(folder), prefix_tokens=20_000) as loaded, running(loaded) as made:
        yield made


def chat(*turns: str) -> Any:
    roles = ("user", "assistant")
    said = [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]
    return [{"role": "system", "content": SYSTEM}, *said]


def test_a_chat_is_read_on_from_where_it_ended(
    server: Running, client: openai.OpenAI, fresh: Session
) -> None:
    turns: list[str] = ["hello"]
    cached = []
    for turn in range(3):
        messages = chat(*turns)
        answer = client.chat.completions.create(messages=messages, seed=turn, **ASKED)
        text = str(answer.choices[0].message.content)
        params = SamplingParams(temperature=0.9, max_tokens=40, seed=turn)
        assert text == fresh.generate(messages, params).text
        usage, timings = answer.usage, answer.model_extra["timings"]  # type: ignore[index]
        assert usage is not None and usage.prompt_tokens_details is not None
        cached.append(usage.prompt_tokens_details.cached_tokens)
        assert timings["cache_n"] == cached[-1]
        assert timings["cache_n"] + timings["prompt_n"] == usage.prompt_tokens
        turns += [text, f"and then? {turn}"]
    assert cached[0] == 0 < 512 <= cached[1] <= cached[2]
    assert cached[1] < cached[2] or not server.session.engine._reader._any_cut
    # Streamed, with the system prompt of the others.
    *_, last = client.chat.completions.create(
        messages=chat("other"), stream=True, stream_options={"include_usage": True}, **ASKED
    )
    assert last.usage is not None and last.usage.prompt_tokens_details is not None
    assert last.usage.prompt_tokens_details.cached_tokens >= 512


def test_answers_of_one_request_are_no_hits(server: Running, client: openai.OpenAI) -> None:
    answer = client.completions.create(prompt="one two three four five six " * 20, n=3, seed=1, **ASKED)
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_metrics_count_tokens_under_vllms_names(server: Running, client: openai.OpenAI) -> None:
    def read() -> dict[str, float]:
        lines = httpx.get(f"{server.url}/metrics").text.splitlines()
        found = (line.rsplit(" ", 1) for line in lines if "prefix_cache" in line and line[0] != "#")
        return {name.split("{")[0].removeprefix("slipstream:"): float(value) for name, value in found}

    prompt = "metrics " * 80
    grown, told = [], []
    for _ in range(2):
        before = read()
        answer = client.completions.create(prompt=prompt, **ASKED)
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        told.append(answer.usage.prompt_tokens_details.cached_tokens)
        grown.append({name: value - before[name] for name, value in read().items()})
    queries, hits = (f"prefix_cache_{name}_total" for name in ("queries", "hits"))
    assert [g[queries] for g in grown] == [len(prompt)] * 2
    assert [g[hits] for g in grown] == told and told[0] == 0 < told[1]


class Fed(FunctionDrafter):
    """Must see hidden states of every token."""

    needs = Needs(last_hidden=True)

    def __init__(self) -> None:
        super().__init__(self._draft)
        self.told: dict[int, int] = {}

    def _draft(self, request: DraftRequest) -> Draft:
        assert self.told[request.seq_id] == len(request.tokens) - 1
        return empty_draft(request)

    def observe(self, observations: Any) -> None:
        for seen in observations:
            assert self.told.get(seen.seq_id, 0) == seen.start
            self.told[seen.seq_id] = seen.start + seen.features["last"].shape[0]


def test_only_rows_whose_drafter_must_see_the_prompt_read_it_again(
    make_worker: Callable[..., Worker], fresh: Session
) -> None:
    worker = make_worker(drafters={"fed": Fed()})
    prompt = list(b"a prompt that is long enough to be kept and found again" * 11)
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=3)
    cached = []
    for name in ("ngram", "fed", "none", "fed"):
        messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        (ticket,) = worker.submit([Job(prompt, params, drafter=name)], [messages.put])
        while not isinstance(message := messages.get(timeout=30), (Done, Failed)):
            pass
        assert isinstance(message, Done)
        row = ticket.answers[0].row
        assert tuple(row.output) == fresh.generate(prompt, params).tokens
        cached.append(row.cached_tokens)
    assert cached[0] == cached[1] == cached[3] == 0 < cached[2]
