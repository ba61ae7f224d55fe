"""What somebody who tried to break the server found, each now answered as it should be."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from pydantic import ValidationError

import slipstream
from slipstream.serve import protocol
from slipstream.serve.binding import Binding, listen
from slipstream.serve.limits import Limits
from slipstream.serve.metrics import Metrics
from slipstream.serve.schemas import ChatRequest, CompletionRequest
from slipstream.serve.server import Server
from slipstream.serve.service import Options, Service
from slipstream.serve.worker import Worker

from .conftest import Running, running
from .test_refusals import CHAT, LONG, refused

JSON = {"Content-Type": "application/json"}


@pytest.fixture
def http(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as made:
        yield made


def test_the_official_client_gets_one_model(server: Running) -> None:
    client = server.client()
    card = client.models.retrieve("tiny")
    assert card == client.models.list().data[0] and card.id == "tiny"
    with pytest.raises(openai.NotFoundError, match="there is no model 'org/other'"):
        client.models.retrieve("org/other")


@pytest.mark.parametrize("kind", ["regex", "grammar"])
def test_a_form_that_is_no_unicode_is_a_400(http: httpx.Client, kind: str) -> None:
    form = f'{{"type": "{kind}", "{kind}": "start: \\"\\ud800\\""}}'
    body = f'{{"prompt": "a", "max_tokens": 1, "response_format": {form}}}'
    error = refused(http.post("/v1/completions", content=body, headers=JSON))
    assert error["param"] == "response_format" and "not Unicode" in error["message"]


@pytest.mark.parametrize(
    "given",
    [
        {"type": "text", "regex": "a"},
        {"type": "regex", "regex": "a", "grammar": 'start: "b"'},
        {"type": "json_object", "json_schema": {"name": "x", "schema": {"type": "string"}}},
    ],
)
def test_a_form_is_not_given_twice(http: httpx.Client, given: Any) -> None:
    body = {"prompt": "a", "max_tokens": 1, "response_format": given}
    assert refused(http.post("/v1/completions", json=body))["param"] == "response_format"


@pytest.mark.parametrize(("field", "value"), [("logit_bias", {"99999": 1}), ("stop_token_ids", [99999])])
def test_an_id_outside_the_vocabulary_names_its_field(http: httpx.Client, field: str, value: Any) -> None:
    error = refused(http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, field: value}))
    assert error["param"] == field and "99999" in error["message"]


def test_stream_options_without_a_stream_are_refused(http: httpx.Client) -> None:
    body = {"prompt": "a", "stream_options": {"include_usage": True}}
    assert refused(http.post("/v1/completions", json=body))["param"] == "stream_options"


@pytest.mark.parametrize("headers", [{}, {"Content-Type": "application/x-www-form-urlencoded"}])
def test_a_forgotten_content_type_is_told(http: httpx.Client, headers: dict[str, str]) -> None:
    error = refused(http.post("/v1/completions", content='{"prompt": "a"}', headers=headers))
    assert "Content-Type: application/json" in error["message"]


@pytest.mark.parametrize("prompt", [None, 7, [-1], ["a", [1]], [1.5], {"a": 1}])
def test_what_a_prompt_may_be_is_told(http: httpx.Client, prompt: Any) -> None:
    error = refused(http.post("/v1/completions", json={"prompt": prompt}))
    assert error["param"] == "prompt" and "token ids" in error["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("completions", {"prompt": [-1] * 50_000}),
        ("completions", {"prompt": "a", "stop": [1] * 50_000}),
        ("completions", {"prompt": "a", **{f"field{i}": 1 for i in range(50_000)}}),
        ("completions", {"prompt": "a", "logit_bias": {str(i): "x" for i in range(50_000)}}),
        ("chat/completions", {"messages": [{}] * 50_000}),
        ("chat/completions", {"messages": [{"role": "user", "content": [{}] * 50_000}]}),
    ],
)
def test_a_thousand_faults_are_told_as_one(path: str, body: dict[str, Any]) -> None:
    """Each costs a kilobyte and microseconds of the event loop, which the good requests need."""
    model = CompletionRequest if path == "completions" else ChatRequest
    with pytest.raises(ValidationError) as told:
        model.model_validate(body)
    assert told.value.error_count() <= 4


def test_a_long_name_is_not_sent_back_whole(http: httpx.Client) -> None:
    error = refused(http.post("/v1/completions", json={"prompt": "a", "x" * 5000: 1}))
    assert len(error["message"]) < 200 and error["param"] == "x" * 80


def test_a_host_is_a_host_in_capitals_too(http: httpx.Client) -> None:
    assert http.get("/health", headers={"Host": "LocalHost:80"}).status_code == 200
    refused(http.get("/health", headers={"Host": "LOCALHOST.evil.example"}), 421)


@pytest.mark.parametrize("path", ["/", "/health", "/ready"])
def test_probes_may_ask_for_the_head_only(http: httpx.Client, path: str) -> None:
    answer = http.head(path)
    assert answer.status_code == 200 and not answer.content


def test_a_model_without_a_chat_template_says_what_works(bare: Running) -> None:
    client = bare.client()
    card: Any = client.models.retrieve("tiny")
    assert card.chat is False
    for ask in (
        lambda: client.chat.completions.create(model="tiny", messages=CHAT),
        lambda: client.chat.completions.create(model="tiny", messages=CHAT, tool_choice="required", tools=[
            {"type": "function", "function": {"name": "f"}}]),
    ):  # fmt: skip
        with pytest.raises(openai.BadRequestError, match="/v1/completions"):
            ask()
    refused(httpx.post(f"{bare.url}/tokenize", json={"messages": CHAT}))
    assert client.completions.create(model="tiny", prompt="a", max_tokens=2).choices[0].text


def test_the_tiny_model_takes_tools_too() -> None:
    tools: Any = [{"type": "function", "function": {"name": "f", "parameters": {
        "type": "object", "properties": {"x": {"enum": ["y"]}}, "required": ["x"],
        "additionalProperties": False}}}]  # fmt: skip
    with slipstream.load("tiny") as session, running(session) as toy:
        chats = toy.client().chat.completions
        asked: Any = {
            "model": "tiny",
            "messages": CHAT,
            "tools": tools,
            "max_tokens": 900,
            "temperature": 1,
            "seed": 1,
        }
        first = chats.create(**asked, tool_choice="required", parallel_tool_calls=False).choices[0]
        assert first.finish_reason == "tool_calls" and first.message.tool_calls
        call: Any = first.message.tool_calls[0]
        assert call.function.arguments == '{"x": "y"}'
        result = {"role": "tool", "tool_call_id": call.id, "content": "z"}
        asked["messages"] = [*CHAT, first.message.model_dump(), result]
        assert chats.create(**{**asked, "max_tokens": 2}).choices


def test_a_connection_that_asks_nothing_is_closed(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.5)
    head = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
    for sent in ([], [head], [head[i : i + 1] for i in range(9)], [head + b"\r\n", head]):
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as raw:
            said = b""
            for part in sent:
                raw.sendall(part)
                if part.endswith(b"\r\n\r\n"):
                    said = raw.recv(4096)
                time.sleep(0.05)
            while got := raw.recv(4096):
                said += got
            assert said.startswith(b"HTTP/1.1 200") == (len(sent) == 2)
    with httpx.Client(base_url=server.url, timeout=60) as http:  # a long answer and a pause are none of that
        for _ in range(2):
            answer = http.post("/v1/completions", json={**LONG, "max_tokens": 900})
            assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 900
            time.sleep(0.6)


def test_a_server_that_was_told_to_stop_still_says_so(folder: Path) -> None:
    with slipstream.load(str(folder), max_rows=1) as session:
        drafters: Any = {"none": slipstream.drafters.build_drafter("none", session.info)}
        worker = Worker(session, Limits(), Metrics("tiny"), drafters=drafters, default="none")
        service = Service(session, worker, Limits(), Options(("tiny",)))
        server = Server(service, Binding(port=0, grace=30.0))
        with listen("127.0.0.1", 0) as listening:
            url = f"http://127.0.0.1:{listening.getsockname()[1]}"
            thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
            thread.start()
            body = {**LONG, "stream": True, "speculative": {"drafter": "none"}}
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as stream:
                lines = stream.iter_lines()
                next(lines)
                server.handle_exit(15, None)
                refused(httpx.get(f"{url}/ready"), 503)
                assert httpx.get(f"{url}/health").status_code == 200
                refusal = httpx.post(f"{url}/v1/completions", json={"prompt": "a"})
                assert refused(refusal, 503)["code"] == "shutting_down" and refusal.headers["Retry-After"]
                server.handle_exit(15, None)  # no more patience
                assert any("shutting down" in line for line in lines)
            thread.join(30)
            assert not thread.is_alive() and not worker.alive
