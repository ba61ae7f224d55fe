"""The official client, against a real server on a real port."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from slipstream import SamplingParams

from .conftest import Running

CHAT: Any = [{"role": "user", "content": "hello there"}]
SEEDED: dict[str, Any] = {"temperature": 0.9, "seed": 7, "max_tokens": 24}


def ids(text: str) -> list[int]:
    return list(text.encode())


def offline(server: Running, prompt: Any, **params: Any) -> Any:
    """What the session itself says: only for tests in which nothing else is asked at the time."""
    worker_done(server)
    return server.session.generate(prompt, SamplingParams(**params))


def worker_done(server: Running) -> None:
    while server.session.engine.has_work:
        pass


def test_a_chat_is_what_the_session_says(server: Running, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=CHAT, **SEEDED)
    expected = offline(server, CHAT, **SEEDED)
    choice = answer.choices[0]
    assert choice.message.content == expected.text and choice.message.role == "assistant"
    assert choice.finish_reason == expected.finish_reason
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(expected.tokens)
    assert answer.usage.prompt_tokens == expected.prompt_tokens
    assert answer.object == "chat.completion" and answer.model == "tiny"


def test_text_lists_and_ids_are_prompts(server: Running, client: openai.OpenAI) -> None:
    for prompt in ("abc abc", ["abc", "x"], ids("abc"), [ids("abc"), ids("xy")]):
        answer = client.completions.create(model="tiny", prompt=prompt, **SEEDED)
        many = prompt if isinstance(prompt[0], (list, str)) and not isinstance(prompt, str) else [prompt]
        for choice, one in zip(answer.choices, many, strict=True):
            assert choice.text == offline(server, one, **SEEDED).text
        assert [c.index for c in answer.choices] == list(range(len(many)))
    assert len(client.completions.create(model="tiny", prompt="abc", temperature=1.5).choices[0].text) <= 16


@pytest.mark.parametrize("drafter", ["ngram", "none", "draft_model", "suffix"])
def test_the_same_seed_gives_the_same_text_alone_in_company_streaming_or_not_with_any_drafter(
    server: Running, client: openai.OpenAI, drafter: str
) -> None:
    texts = [f"stranger {i} " + "ab" * i for i in range(7)]
    wanted: dict[str, Any] = {"prompt": "abcabcabc", "temperature": 1.1, "seed": 3, "max_tokens": 40}
    extra = {"extra_body": {"speculative": {"drafter": drafter}}}
    alone = client.completions.create(model="tiny", **wanted).choices[0].text

    def ask(i: int) -> str:
        if i < 7:
            more = {"temperature": 0.2 * i, "max_tokens": 20 + i}
            return client.completions.create(model="tiny", prompt=texts[i], **more, **extra).choices[0].text
        return client.completions.create(model="tiny", **wanted, **extra).choices[0].text

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(8)))[7] == alone
    stream = client.completions.create(model="tiny", stream=True, **wanted, **extra)
    assert "".join(chunk.choices[0].text for chunk in stream) == alone


def test_a_stream_is_the_whole_answer_in_pieces(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {**SEEDED, "n": 2, "logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(model="tiny", messages=CHAT, **options)
    stream = client.chat.completions.create(
        model="tiny", messages=CHAT, stream=True, stream_options={"include_usage": True}, **options
    )
    chunks = list(stream)
    assert [c.choices[0].delta.role for c in chunks[:2]] == ["assistant"] * 2
    for choice in whole.choices:
        own = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == choice.index]
        assert "".join(c.delta.content or "" for c in own) == choice.message.content
        entries = [e for c in own if c.logprobs for e in c.logprobs.content or []]
        assert choice.logprobs is not None and entries == choice.logprobs.content
        assert [c.finish_reason for c in own if c.finish_reason] == [choice.finish_reason]
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    assert all(c.usage is None for c in chunks[:-1])
    assert len({c.id for c in chunks}) == 1


def test_usage_grows_with_the_stream_where_asked(client: openai.OpenAI) -> None:
    """vLLM's extension, which load generators ask for: a chunk may hold several tokens."""
    stream = client.completions.create(
        model="tiny",
        prompt="abcabcabc",
        stream=True,
        max_tokens=40,
        n=2,
        extra_body={
            "ignore_eos": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "speculative": {"drafter": "draft_model"},
        },
    )
    chunks = list(stream)
    counted = [c.usage.completion_tokens for c in chunks if c.usage]
    assert len(counted) == len(chunks) > 2
    assert counted == sorted(counted) and counted[0] > 0 and counted[-2:] == [80, 80]
    assert all(c.usage and c.usage.total_tokens == 9 + n for c, n in zip(chunks, counted, strict=True))


def test_a_stream_never_splits_a_character_and_ends_with_done(server: Running) -> None:
    biased = {str(t): 12.0 for t in "ä€😀".encode()}
    body = {
        "prompt": "x", "max_tokens": 60, "temperature": 1.0, "seed": 1, "stream": True, "logit_bias": biased
    }  # fmt: skip
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    texts = [json.loads(line[6:])["choices"][0]["text"] for line in lines[:-1]]
    whole = httpx.post(f"{server.url}/v1/completions", json={**body, "stream": False}).json()
    text = whole["choices"][0]["text"]
    assert "".join(texts) == text
    assert text.rstrip("\ufffd").count("\ufffd") == sum(t.count("\ufffd") for t in texts) - (
        len(text) - len(text.rstrip("\ufffd"))
    )


def test_logprobs_are_those_of_plain_decoding(server: Running, client: openai.OpenAI) -> None:
    options: dict[str, Any] = {**SEEDED, "logprobs": True, "top_logprobs": 3}
    with_drafts, plain = (
        client.chat.completions.create(
            model="tiny", messages=CHAT, extra_body={"speculative": {"drafter": name}}, **options
        ).choices[0]
        for name in ("draft_model", "none")
    )
    assert with_drafts.logprobs is not None and plain.logprobs is not None
    left, right = with_drafts.logprobs.content or [], plain.logprobs.content or []
    assert [e.token for e in left] == [e.token for e in right]
    for a, b in zip(left, right, strict=True):
        assert a.logprob == pytest.approx(b.logprob, abs=1e-5)
        assert [t.token for t in a.top_logprobs] == [t.token for t in b.top_logprobs]
        assert len(a.top_logprobs) == 3 and a.bytes == b.bytes
    told = with_drafts.message.content or ""
    assert bytes(x for e in left for x in e.bytes or []).decode("utf-8", "replace").startswith(told[:5])


def test_completion_logprobs_have_offsets_into_the_text(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt="abc", logprobs=2, **SEEDED).choices[0]
    told = answer.logprobs
    assert told is not None and told.tokens and told.token_logprobs and told.text_offset and told.top_logprobs
    assert len(told.tokens) == len(told.token_logprobs) == len(told.text_offset) == len(told.top_logprobs)
    assert told.text_offset[0] == 0 and told.text_offset == sorted(told.text_offset)
    assert all(
        max(top.values()) >= p - 1e-6 for top, p in zip(told.top_logprobs, told.token_logprobs, strict=True)
    )


def test_every_sampling_field_means_what_it_means_offline(server: Running, client: openai.OpenAI) -> None:
    end = {"logit_bias": {"257": 9}}
    fields: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"top_p": 0.6}, {}),
        ({"top_k": 3}, {}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"min_p": 0.2}, {}),
        ({"repetition_penalty": 1.5}, {}),
        ({"presence_penalty": 1.5, "frequency_penalty": -0.5}, {}),
        ({"logit_bias": {"65": 9, "66": -100}}, {"logit_bias": {65: 9.0, 66: -100.0}}),
        ({**end, "min_tokens": 9}, {"logit_bias": {257: 9.0}}),
        ({**end, "ignore_eos": True}, {"logit_bias": {257: 9.0}}),
        ({"stop_token_ids": list(range(65, 81))}, {"stop_token_ids": tuple(range(65, 81))}),
        ({"temperature": 0}, {"temperature": 0.0}),
    ]
    seen = set()
    for asked, meant in fields:
        base = {**SEEDED, "model": "tiny", "prompt": "abcabc"}
        got = client.completions.create(**base, extra_body=asked).choices[0]
        want = offline(server, "abcabc", **{**SEEDED, **asked, **meant})
        assert (got.text, got.finish_reason) == (want.text, want.finish_reason), asked
        seen.add(got.text)
    assert len(seen) > 7  # the fields do something


def test_stop_strings_end_and_are_cut(server: Running, client: openai.OpenAI) -> None:
    free = client.completions.create(model="tiny", prompt="abcabc", **SEEDED).choices[0].text
    stop = free[4:6]
    for given in (stop, [stop, "never said"]):
        cut = client.completions.create(model="tiny", prompt="abcabc", stop=given, **SEEDED).choices[0]
        assert cut.text == free[: free.index(stop)] and cut.finish_reason == "stop"
    stream = client.completions.create(model="tiny", prompt="abcabc", stop=stop, stream=True, **SEEDED)
    assert "".join(c.choices[0].text for c in stream) == free[: free.index(stop)]


def test_n_and_echo(server: Running, client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt=["ab", "cd"], n=3, echo=True, **SEEDED)
    want = [text + one.text for text in ("ab", "cd") for one in offline(server, text, **{**SEEDED, "n": 3})]
    assert [c.text for c in answer.choices] == want
    stream = client.completions.create(
        model="tiny", prompt=["ab", "cd"], n=3, echo=True, stream=True, **SEEDED
    )
    texts = [""] * 6
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == want


def test_max_completion_tokens_is_max_tokens(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=CHAT, max_completion_tokens=5, logit_bias={"257": -100}
    )
    assert answer.usage is not None and answer.usage.completion_tokens == 5
    assert answer.choices[0].finish_reason == "length"


def test_models_version_health_and_tokens(server: Running, client: openai.OpenAI) -> None:
    (card,) = client.models.list().data
    assert card.id == "tiny" and card.owned_by == "slipstream"
    told: Any = card.model_extra
    assert told["max_model_len"] == 2048 and set(told["speculative"]["drafters"]) >= {"ngram", "none"}
    with httpx.Client(base_url=server.url) as http:
        assert http.get("/health").json() == http.get("/ready").json() == {"status": "ok"}
        assert http.get("/version").json()["version"]
        tokens = http.post("/tokenize", json={"prompt": "häuser"}).json()
        assert tokens["tokens"] == ids("häuser") and tokens["count"] == 7
        chat = http.post("/tokenize", json={"messages": CHAT}).json()["tokens"]
        assert (
            chat
            == server.session.tokenizer.apply_chat_template(CHAT, add_generation_prompt=True)["input_ids"]
        )
        back = http.post("/detokenize", json={"tokens": tokens["tokens"]}).json()
        assert back == {"prompt": "häuser"}
        empty = http.post("/tokenize", json={"prompt": ""}).json()
        assert empty["tokens"] == []


def test_timings_and_speculation_are_told_per_request(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"prompt": "abababababab", "temperature": 0, "max_tokens": 50}
    extra = {"speculative": {"drafter": "ngram", "num_speculative_tokens": 3, "trace": True}}
    answer = client.completions.create(model="tiny", extra_body=extra, **asked)
    told: Any = answer.model_extra
    timings, spec = told["timings"], told["speculative"]
    assert timings["predicted_n"] == 50 and timings["prompt_n"] == 12
    assert timings["draft_n"] == spec["num_draft_tokens"] > 0
    assert timings["draft_n_accepted"] == spec["num_accepted_tokens"]
    assert spec["num_passes"] == 50 - spec["num_accepted_tokens"]
    assert spec["mean_acceptance_length"] == pytest.approx(50 / spec["num_passes"])
    assert spec["drafter"] == "ngram" and len(spec["acceptance_per_position"]) <= 3
    choice: Any = answer.choices[0].model_extra
    tokens = [t for step in choice["steps"] for t in step["tokens"]]
    assert "".join(t["text"] for t in tokens) == answer.choices[0].text
    assert sum(t["drafted"] for t in tokens) == spec["num_accepted_tokens"]
    assert all(len(step["tree"]) <= 4 for step in choice["steps"])
    plain: Any = client.completions.create(
        model="tiny", extra_body={"speculative": {"num_speculative_tokens": 0}}, **asked
    )
    assert plain.choices[0].text == answer.choices[0].text
    assert plain.model_extra["speculative"]["num_draft_tokens"] == 0
    quiet: Any = client.completions.create(model="tiny", **asked)
    assert "speculative" not in quiet.model_extra and quiet.model_extra["timings"]["predicted_n"] == 50
    chunks = list(client.completions.create(model="tiny", stream=True, extra_body=extra, **asked))
    last: Any = chunks[-1].model_extra
    assert last["timings"]["predicted_n"] == 50 and last["speculative"]["num_passes"] == spec["num_passes"]


def test_metrics_have_vllms_names_and_add_up(server: Running, client: openai.OpenAI) -> None:
    def read() -> dict[str, float]:
        lines = httpx.get(f"{server.url}/metrics").text.splitlines()
        return {k: float(v) for k, v in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}

    label = '{model_name="tiny"}'
    before = read()
    told: Any = client.completions.create(
        model="tiny", prompt="ababababab", temperature=0, max_tokens=30, extra_body={"speculative": {}}
    ).model_extra
    after = read()

    def grown(name: str, label: str = label) -> float:
        return after[f"slipstream:{name}{label}"] - before.get(f"slipstream:{name}{label}", 0.0)

    assert grown("generation_tokens_total") == 30 and grown("prompt_tokens_total") == 10
    assert grown("spec_decode_num_drafts_total") == told["speculative"]["num_drafts"]
    assert grown("spec_decode_num_draft_tokens_total") == told["speculative"]["num_draft_tokens"]
    assert grown("spec_decode_num_accepted_tokens_total") == told["speculative"]["num_accepted_tokens"]
    at = "spec_decode_num_accepted_tokens_per_pos_total"
    positions = [grown(at, f'{{model_name="tiny",position="{i}"}}') for i in range(2)]
    assert positions[0] >= positions[1]
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time"):
        assert grown(f"{name}_seconds_count") == 1
    assert grown("inter_token_latency_seconds_count") == 30 - 1
    assert after[f"slipstream:num_requests_running{label}"] == 0
    assert f"slipstream:kv_cache_usage_perc{label}" in after
    reason = '{finished_reason="length",model_name="tiny"}'
    assert grown("request_success_total", reason) == 1
