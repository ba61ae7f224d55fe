"""What a client does wrong is told by name, in OpenAI's shape, and costs nobody else anything."""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

import slipstream

from .conftest import Running, running

CHAT: Any = [{"role": "user", "content": "hi"}]
LONG: Any = {
    "prompt": "abc", "max_tokens": 1900, "temperature": 1.0, "ignore_eos": True,
    "speculative": {"drafter": "none"},
}  # fmt: skip


@pytest.fixture
def http(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as made:
        yield made


def refused(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"] and "Traceback" not in response.text and "/work" not in response.text
    found: dict[str, Any] = body["error"]
    return found


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("nonsense", 1),
        ("audio", {"voice": "x", "format": "wav"}),
        ("prediction", {"type": "content", "content": "x"}),
        ("functions", []),
        ("reasoning_effort", "low"),
        ("beam_search", True),
        ("modalities", ["audio"]),
        ("store", True),
        ("service_tier", "flex"),
        ("temperature", -1),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_p", 2),
        ("top_k", 1.5),
        ("min_p", 7),
        ("n", 0),
        ("n", 99),
        ("n", True),
        ("max_tokens", 0),
        ("max_completion_tokens", "12"),
        ("min_tokens", -1),
        ("stop", ["a"] * 99),
        ("stop", ["a" * 9999]),
        ("stop", [""]),
        ("stop", 7),
        ("stop_token_ids", [-1]),
        ("seed", 1.5),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"1": 1000}),
        ("logit_bias", {str(i): 1 for i in range(2000)}),
        ("top_logprobs", 2),
        ("presence_penalty", 3),
        ("messages", []),
        ("messages", "hello"),
        ("stream", "yes"),
        ("stream_options", {"chunks": 1}),
        ("response_format", {"type": "xml"}),
        ("speculative", {"drafter": "nobody"}),
        ("speculative", {"num_speculative_tokens": 99}),
        ("speculative", {"rule": "typical"}),
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "required"),
        ("chat_template_kwargs", {"chat_template": "{{ 1 }}"}),
        ("chat_template_kwargs", {"tokenize": False}),
    ],
)
def test_a_bad_field_is_refused_by_name(http: httpx.Client, field: str, value: Any) -> None:
    error = refused(http.post("/v1/chat/completions", json={"messages": CHAT, field: value}))
    assert (error["param"] or "").split(".")[0] == field and field in error["message"], error
    assert error["type"] == "invalid_request_error"


def test_fields_that_say_who_asks_are_taken(http: httpx.Client) -> None:
    body = {
        "messages": CHAT, "max_tokens": 2, "user": "me", "metadata": {"a": "b"}, "store": False,
        "service_tier": "auto", "modalities": ["text"], "seed": None, "stop": None, "n": None,
    }  # fmt: skip
    assert http.post("/v1/chat/completions", json=body).status_code == 200


def test_messages_come_back_as_the_client_got_them(server: Running) -> None:
    client = server.client()
    first = client.chat.completions.create(model="tiny", messages=CHAT, max_tokens=4)
    again: Any = [*CHAT, first.choices[0].message.model_dump(), {"role": "user", "content": [
        {"type": "text", "text": "more "}, {"type": "text", "text": "text"}]}]  # fmt: skip
    assert client.chat.completions.create(model="tiny", messages=again, max_tokens=2).choices
    with pytest.raises(openai.BadRequestError, match="content.0.type: input should be 'text'"):
        image: Any = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
        client.chat.completions.create(model="tiny", messages=image)


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"null", b'"text"', b"\xff\xfe", b'{"messages": ' + b"[" * 50_000,
        b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "\\ud800"}', b'{"prompt": []}', b'{"prompt": ""}', b'{"prompt": [[]]}',
        b'{"prompt": [1, "a"]}', b'{"prompt": [99999]}', b'{"prompt": [true]}',
    ],
)  # fmt: skip
def test_a_broken_body_is_a_400(http: httpx.Client, body: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    refused(http.post("/v1/completions", content=body, headers=headers))


def test_text_that_is_no_unicode_is_a_400(http: httpx.Client) -> None:
    bad = '{"messages": [{"role": "user", "content": "\\udcff"}]}'
    headers = {"Content-Type": "application/json"}
    refused(http.post("/v1/chat/completions", content=bad, headers=headers))
    refused(http.post("/tokenize", content='{"prompt": "\\udcff"}', headers=headers))
    hidden = '{"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"x": "\\udcff"}}'
    refused(http.post("/v1/chat/completions", content=hidden, headers=headers))


def test_a_prompt_that_does_not_fit_says_so(http: httpx.Client) -> None:
    error = refused(http.post("/v1/completions", json={"prompt": "a" * 3000}))
    assert error["code"] == "context_length_exceeded" and "2048" in error["message"]
    streamed = http.post("/v1/completions", json={"prompt": "a" * 3000, "stream": True})
    assert refused(streamed)["code"] == "context_length_exceeded"  # not an event of a stream that began well


def test_unknown_models_paths_and_methods(http: httpx.Client) -> None:
    error = refused(http.post("/v1/completions", json={"model": "gpt-9", "prompt": "a"}), 404)
    assert error["code"] == "model_not_found" and error["param"] == "model"
    refused(http.get("/v1/nothing"), 404)
    refused(http.get("/v1/completions"), 405)
    refused(http.get("/web/../../service.py"), 404)
    refused(http.get("/web/%2e%2e/service.py"), 404)


def test_a_web_page_elsewhere_cannot_use_a_local_server(http: httpx.Client) -> None:
    refused(http.get("/v1/models", headers={"Host": "evil.example"}), 421)
    for host in ("localhost", "127.0.0.1:99", "[::1]:8000"):
        assert http.get("/v1/models", headers={"Host": host}).status_code == 200
    page = http.options("/v1/models", headers={"Origin": "http://evil.example"})
    assert "access-control-allow-origin" not in page.headers
    form = http.post("/v1/completions", content='{"prompt": "a"}', headers={"Content-Type": "text/plain"})
    refused(form)  # what a page may send without asking first is not read as JSON


def test_a_request_that_is_too_large_is_not_read(folder: Path) -> None:
    with slipstream.load(str(folder)) as session, running(session, body_bytes=1000) as small:
        with httpx.Client(base_url=small.url) as http:
            refused(http.post("/v1/completions", json={"prompt": "a" * 2000}), 413)

            def pieces() -> Iterator[bytes]:
                for _ in range(100):
                    yield b"a" * 100

            refused(http.post("/v1/completions", content=pieces()), 413)  # no Content-Length
        with socket.create_connection(("127.0.0.1", small.port)) as raw:
            raw.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999999999999\r\n\r\n"
            )
            assert b" 413 " in raw.recv(4096)


def test_a_key_is_needed_where_one_is_set(folder: Path) -> None:
    with slipstream.load(str(folder)) as session, running(session, api_keys=("right", "other")) as locked:
        with httpx.Client(base_url=locked.url) as http:
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "right"}):
                error = refused(http.get("/v1/models", headers=headers), 401)
                assert error["code"] == "invalid_api_key"
                refused(http.post("/tokenize", json={"prompt": "a"}, headers=headers), 401)
            for key in ("right", "other"):
                assert http.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == 200
            for path in ("/health", "/ready", "/metrics", "/"):
                assert http.get(path).status_code == 200
        with pytest.raises(openai.AuthenticationError):
            locked.client().models.list()
    all_of_it: dict[str, Any] = {"api_keys": ("right",), "guard_metrics": True}
    with slipstream.load(str(folder)) as session, running(session, **all_of_it) as locked:
        refused(httpx.get(f"{locked.url}/metrics"), 401)


def test_an_allowed_origin_may_ask_with_a_key(folder: Path) -> None:
    options: dict[str, Any] = {"api_keys": ("right",), "cors_origins": ("http://good.example",)}
    with slipstream.load(str(folder)) as session, running(session, **options) as open_:
        asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "Authorization"}
        for origin, fine in (("http://good.example", True), ("http://evil.example", False)):
            before = httpx.options(f"{open_.url}/v1/models", headers={"Origin": origin, **asked})
            assert (before.headers.get("access-control-allow-origin") == origin) is fine
        headers = {"Origin": "http://good.example", "Authorization": "Bearer right"}
        assert httpx.get(f"{open_.url}/v1/models", headers=headers).status_code == 200


def test_a_client_that_leaves_is_gone_and_blocks_nobody(server: Running) -> None:
    for stream in (True, False):
        for _ in range(3):
            with socket.create_connection(("127.0.0.1", server.port)) as raw:
                text = json.dumps({**LONG, "stream": stream}).encode()
                head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(text)}\r\n"
                raw.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + text)
                if stream:
                    raw.recv(100)
                else:
                    time.sleep(0.05)
    answer = server.client().completions.create(model="tiny", prompt="abc", max_tokens=5, temperature=0)
    assert answer.choices[0].text
    deadline = time.monotonic() + 10
    while server.session.engine.has_work and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(server.session.engine.runner.cache) == 0 and not server.session.engine.has_work


def test_a_full_queue_is_a_429_with_a_time_to_come_back(folder: Path) -> None:
    with slipstream.load(str(folder), max_rows=1) as session, running(session, waiting=0) as small:
        long = {**LONG, "stream": True}
        with httpx.stream("POST", f"{small.url}/v1/completions", json=long) as first:
            lines = first.iter_lines()  # its end would be the end of the client
            next(lines)
            refusal = httpx.post(f"{small.url}/v1/completions", json={"prompt": "a"})
            assert refused(refusal, 429)["code"] == "queue_full"
            assert int(refusal.headers["Retry-After"]) >= 1
            with pytest.raises(openai.RateLimitError):
                small.client().completions.create(model="tiny", prompt="a")


def test_a_request_over_its_time_is_a_504_or_an_event(folder: Path) -> None:
    with slipstream.load(str(folder)) as session, running(session, seconds=0.4) as slow:
        refused(httpx.post(f"{slow.url}/v1/completions", json=LONG), 504)
        stream = slow.client().completions.create(model="tiny", prompt="", stream=True, extra_body=LONG)
        with pytest.raises(openai.APIError, match="not finished within"):
            for _ in stream:
                pass


def test_the_log_tells_what_happened_but_not_what_was_said(
    server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="slipstream.serve"):
        server.client().completions.create(model="tiny", prompt="secret words", max_tokens=3)
        with pytest.raises(openai.BadRequestError):
            server.client().completions.create(model="tiny", prompt="secret words" * 999)
    lines = [json.loads(r.getMessage()) for r in caplog.records if r.name == "slipstream.serve.access"]
    assert [line["status"] for line in lines] == [200, 400]
    assert lines[0]["prompt_tokens"] == 12 and lines[0]["completion_tokens"] == 3 and lines[0]["seconds"] > 0
    assert "secret" not in caplog.text
