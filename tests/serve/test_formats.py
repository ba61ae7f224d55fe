"""Answers of a wanted form, and tool calls: exact with any drafter, whole or streamed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

import slipstream
from slipstream import SamplingParams
from slipstream.core.params import GrammarSpec
from slipstream.serve.tools import FORMS, Call, CallReader, find_form

from .conftest import Running, running

CHAT: Any = [{"role": "user", "content": "weather?"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Bern", "Basel"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "description": "x", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "stop"}},
]
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }} Answer <tool_call>{...}</tool_call>{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<tool_call>{{ c.function.arguments.city }}</tool_call>{% endfor %}{% endfor %}<assistant>"
)


@pytest.fixture(scope="module")
def tooled(folder: Path) -> Iterator[Running]:
    with slipstream.load(str(folder), max_rows=8) as session:
        session.tokenizer.chat_template = TEMPLATE
        with running(session) as made:
            yield made


def grammar_options(kind: str) -> tuple[dict[str, Any], GrammarSpec]:
    if kind == "json_schema":
        given = {"type": kind, "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
        return given, GrammarSpec("json_schema", json.dumps(SCHEMA))
    if kind == "regex":
        return {"type": kind, "regex": "(yes|no){3}[0-9]{2}"}, GrammarSpec("regex", "(yes|no){3}[0-9]{2}")
    return {"type": kind, "grammar": 'start: "<" /[a-c]{4}/ ">"'}, GrammarSpec(
        "lark", 'start: "<" /[a-c]{4}/ ">"'
    )


@pytest.mark.parametrize("kind", ["json_schema", "regex", "grammar"])
def test_a_wanted_form_is_kept_and_is_what_the_session_gives(tooled: Running, kind: str) -> None:
    given, spec = grammar_options(kind)
    options: dict[str, Any] = {"temperature": 1.0, "seed": 5, "max_tokens": 80}
    client = tooled.client()
    texts = set()
    for drafter in ("ngram", "none"):
        extra = {"response_format": given, "speculative": {"drafter": drafter}}
        answer: Any = client.chat.completions.create(model="tiny", messages=CHAT, extra_body=extra, **options)
        texts.add(answer.choices[0].message.content)
        assert answer.choices[0].finish_reason == "stop"
        if kind != "regex":
            assert answer.model_extra["speculative"]["sources"]["grammar"]["accepted_tokens"] > 0
        stream = client.chat.completions.create(
            model="tiny", messages=CHAT, stream=True, extra_body=extra, **options
        )
        texts.add("".join(c.choices[0].delta.content or "" for c in stream))
    (text,) = texts
    assert text == tooled.session.generate(CHAT, SamplingParams(grammar=spec, **options)).text
    if kind == "json_schema":
        value = json.loads(text)
        assert value["city"] in ("Bern", "Basel") and 1 <= value["days"] <= 9
    else:
        assert re.fullmatch("(yes|no){3}[0-9]{2}" if kind == "regex" else "<[a-c]{4}>", text)


def test_several_answers_each_keep_the_form(tooled: Running) -> None:
    given, _ = grammar_options("json_schema")
    options: dict[str, Any] = {"n": 4, "temperature": 1.5, "seed": 1, "max_tokens": 500}
    extra = {"response_format": given}
    answer = tooled.client().completions.create(model="tiny", prompt="x", extra_body=extra, **options)
    assert len({c.text for c in answer.choices}) > 1
    assert all(json.loads(c.text)["city"] for c in answer.choices)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"type": "json_schema"}, "needs a schema"),
        ({"type": "json_schema", "json_schema": {"schema": {"type": "wat"}}}, "cannot be used"),
        ({"type": "regex"}, "missing"),
        ({"type": "regex", "regex": "(a"}, "cannot be used"),
        ({"type": "grammar", "grammar": "start: nobody"}, "cannot be used"),
        ({"type": "regex", "regex": "a" * 100_000}, "larger"),
    ],
)
def test_a_form_that_cannot_be_kept_is_a_400(tooled: Running, given: Any, says: str) -> None:
    with pytest.raises(openai.BadRequestError, match=says) as error:
        tooled.client().completions.create(model="tiny", prompt="x", extra_body={"response_format": given})
    assert "response_format" in str(error.value.body)


def test_an_exploding_pattern_harms_nobody(tooled: Running) -> None:
    given = {"type": "regex", "regex": "((a{1,999}){1,999}){1,999}b|(x+x+)+y"}
    with ThreadPoolExecutor(2) as pool:
        bad = pool.submit(
            httpx.post,
            f"{tooled.url}/v1/completions",
            json={"prompt": "x", "max_tokens": 20, "response_format": given},
            timeout=60,
        )
        good = tooled.client().completions.create(model="tiny", prompt="abc", max_tokens=20)
        assert good.choices[0].text
        assert bad.result().status_code in (200, 400)


def test_schemas_have_limits(tooled: Running) -> None:
    deep: Any = {"type": "string"}
    for _ in range(30):
        deep = {"type": "array", "items": deep}
    for schema, says in ((deep, "nested"), ({"enum": ["a" * 99_000]}, "bytes")):
        given = {"type": "json_schema", "json_schema": {"schema": schema}}
        with pytest.raises(openai.BadRequestError, match=says):
            tooled.client().completions.create(
                model="tiny", prompt="x", extra_body={"response_format": given}
            )
    with pytest.raises(openai.BadRequestError, match="min_tokens"):
        more = {"response_format": {"type": "json_object"}, "min_tokens": 4}
        tooled.client().completions.create(model="tiny", prompt="x", extra_body=more)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_required_call_is_parsed(tooled: Running, choice: Any) -> None:
    client = tooled.client()
    options: dict[str, Any] = {"temperature": 1.0, "seed": 3, "tools": TOOLS, "tool_choice": choice}
    options |= {"max_tokens": 300, "parallel_tool_calls": False}
    answer = client.chat.completions.create(model="tiny", messages=CHAT, **options).choices[0]
    assert answer.finish_reason == "tool_calls" and answer.message.content is None
    (call,) = answer.message.tool_calls or []
    assert call.type == "function" and call.id.startswith("call_")
    if call.function.name == "weather":
        assert set(json.loads(call.function.arguments)) == {"city", "days"}
    chunks = list(client.chat.completions.create(model="tiny", messages=CHAT, stream=True, **options))
    deltas = [d for c in chunks if c.choices for d in c.choices[0].delta.tool_calls or []]
    assert [(d.index, d.function and d.function.name) for d in deltas] == [(0, call.function.name)]
    assert deltas[0].function is not None and deltas[0].function.arguments == call.function.arguments
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_a_call_and_its_result_go_back_through_the_template(tooled: Running) -> None:
    arguments = json.dumps({"city": "Bern"})
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    back: Any = [
        *CHAT,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]
    client = tooled.client()
    answer = client.chat.completions.create(model="tiny", messages=back, tools=TOOLS, max_tokens=4)
    assert answer.choices
    raw = client.post("../tokenize", body={"messages": back}, cast_to=object)
    text = bytes(raw["tokens"]).decode()  # type: ignore[index]
    assert text == "<user>weather?<assistant><tool_call>Bern</tool_call><tool>rain<assistant>"
    bad: Any = [*CHAT, {**back[1], "tool_calls": [{**call, "function": {"name": "f", "arguments": "{"}}]}]
    with pytest.raises(openai.BadRequestError, match="must be JSON"):
        client.chat.completions.create(model="tiny", messages=bad)


def test_tools_that_cannot_be_used_are_refused(tooled: Running) -> None:
    client = tooled.client()
    twice: Any = [TOOLS[1], TOOLS[1]]
    unknown: Any = {"type": "function", "function": {"name": "nobody"}}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"tools": twice}, "different names"),
        ({"tools": TOOLS, "tool_choice": unknown}, "not in tools"),
        ({"tool_choice": "required"}, "needs tools"),
        (
            {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}},
            "exclude each other",
        ),
    ]
    for given, says in cases:
        with pytest.raises(openai.BadRequestError, match=says):
            client.chat.completions.create(model="tiny", messages=CHAT, **given)
    off = client.chat.completions.create(
        model="tiny", messages=CHAT, tools=TOOLS, tool_choice="none", max_tokens=3, temperature=0
    )
    plain = client.chat.completions.create(model="tiny", messages=CHAT, max_tokens=3, temperature=0)
    assert off.choices[0].message.content == plain.choices[0].message.content


# -- reading calls from text ---------------------------------------------------------------------

ONE = '{"name": "weather", "arguments": {"city": "Bern"}}'
READ = ("weather", {"city": "Bern"})
CALL = f"<tool_call>{ONE}</tool_call>"
CASES = [
    ("hermes", "just text <b> here ", "just text <b> here ", []),
    ("hermes", f"<tool_call>\n{ONE}\n</tool_call>", "", [READ]),
    ("hermes", f"Let me see.\n{CALL}\n{CALL}\n", "Let me see.", [READ] * 2),
    ("hermes", f"a<tool_call>{ONE}", "a", [READ]),
    ("hermes", "<tool_call>not json</tool_call> b", "<tool_call>not json</tool_call> b", []),
    ("hermes", '<tool_call>{"name": "other", "arguments": {}}</tool_call>', "SAME", []),
    ("hermes", "cut <tool_ca", "cut <tool_ca", []),
    ("mistral", f"[TOOL_CALLS] [{ONE}, {ONE}]", "", [READ] * 2),
    ("mistral", f"see [TOOL_CALLS]{ONE}", "see", [READ]),
    ("llama3_json", ONE.replace("arguments", "parameters"), "", [READ]),
    ("llama3_json", ' {"no": "call"}', ' {"no": "call"}', []),
    ("llama3_json", f"text {ONE}", f"text {ONE}", []),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text", "content", "calls"), CASES)
def test_calls_are_read_the_same_however_the_text_is_cut(
    form: str, text: str, content: str, calls: list[Any]
) -> None:
    for size in (1, 2, 5, 1000):
        reader = CallReader(FORMS[form], ["weather"])
        told = [reader.feed(text[i : i + size]) for i in range(0, len(text), size)] + [reader.finish()]
        found: list[Call] = [c for t in told for c in t.calls]
        assert "".join(t.content for t in told) == (text if content == "SAME" else content)
        assert [(c.name, json.loads(c.arguments)) for c in found] == calls
        assert len({c.id for c in found}) == len(found)


def test_the_template_tells_the_form() -> None:
    assert find_form("tools <tool_call>") is FORMS["hermes"]
    assert find_form("tools [TOOL_CALLS]") is FORMS["mistral"]
    assert find_form('tools {"name": x, "parameters": y}') is FORMS["llama3_json"]
    assert find_form("messages only") is None and find_form("tools, somehow") is None
    assert find_form("", "hermes") is FORMS["hermes"]
