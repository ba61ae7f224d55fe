"""Tool calls: how a model writes them, read back from its text as it comes.

The chat template that teaches a model its tools also shows the form it will answer in, so the template tells
which form to read. Text before and between calls is content; what is no call after all is content too.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.core import jsontext
from slipstream.core.params import GrammarSpec
from slipstream.errors import ParameterError
from slipstream.serve.errors import unsupported
from slipstream.serve.schemas import ChatRequest, Tool, ToolChoice


@dataclass(frozen=True)
class Form:
    """How calls are written: between `open` and `close` (empty: up to the end), as JSON.

    arguments: the key that holds them. many: the JSON is a list of calls. bare: an answer that begins with
    a JSON object is a call, without any marker.
    """

    name: str
    open: str
    close: str = ""
    arguments: str = "arguments"
    many: bool = False
    bare: bool = False


FORMS = {
    form.name: form
    for form in (
        Form("hermes", "<tool_call>", "</tool_call>"),
        Form("mistral", "[TOOL_CALLS]", many=True),
        Form("llama3_json", "<|python_tag|>", arguments="parameters", bare=True),
    )
}


def find_form(template: str, name: str | None = None) -> Form | None:
    """By name, or by what the chat template holds; None if it holds nothing known."""
    if name is not None:
        if name not in FORMS:
            raise ParameterError(f"unknown tool call form {name!r}; there are {', '.join(FORMS)}")
        return FORMS[name]
    if "tools" not in template:
        return None
    marked = (form for form in FORMS.values() if form.open in template)
    found = next(marked, None)
    return found or (FORMS["llama3_json"] if '"parameters"' in template else None)


@dataclass(frozen=True)
class Call:
    """arguments is JSON text, as OpenAI's API gives it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Told:
    """What became certain with a piece of text."""

    content: str = ""
    calls: tuple[Call, ...] = ()


class CallReader:
    """Reads one answer's text piece by piece. names: of the tools there are."""

    def __init__(self, form: Form, names: Sequence[str]) -> None:
        self._form = form
        self._names = frozenset(names)
        self._held = ""
        self._space = ""  # content's last white space: it is none before a call
        self._begun = False
        self.called = False

    def feed(self, piece: str) -> Told:
        self._held += piece
        return self._advance(last=False)

    def finish(self) -> Told:
        """No more text: what is held back is a call or content."""
        return self._advance(last=True)

    def _advance(self, last: bool) -> Told:
        content: list[str] = []
        calls: list[Call] = []
        while self._held:
            raw, inner = self._next(last)
            if not raw:
                break
            self._held = self._held[len(raw) :]
            found = [] if inner is None else self._read(inner)
            if found:
                self._space, self.called = "", True
                calls += found
            else:
                whole = self._space + raw
                content.append(whole.rstrip())
                self._space = whole[len(content[-1]) :]
            self._begun = self._begun or bool(found) or bool(content[-1])
        if last and not self.called:
            content.append(self._space)
        return Told("".join(content), tuple(calls))

    def _next(self, last: bool) -> tuple[str, str | None]:
        """What is certain at the beginning of what is held, and a call's inside if it looks like one."""
        form, held = self._form, self._held
        if form.bare and not self._begun:
            text = held.lstrip()
            if text.startswith("{") or not text and not last:
                return (held, held) if last else ("", None)
        at = held.find(form.open)
        if at < 0:
            return held[: len(held) - (0 if last else _overlap(held, form.open))], None
        if at > 0:
            return held[:at], None
        begin = len(form.open)
        end = held.find(form.close, begin) if form.close else -1
        if end >= 0:
            return held[: end + len(form.close)], held[begin:end]
        return (held, held[begin:]) if last else ("", None)

    def _read(self, text: str) -> list[Call]:
        try:
            value = jsontext.parse(text)
        except ValueError:
            return []
        given = value if self._form.many and isinstance(value, list) else [value]
        calls = [self._call(one) for one in given]
        return [call for call in calls if call is not None] if all(calls) else []

    def _call(self, value: Any) -> Call | None:
        if not isinstance(value, dict) or value.get("name") not in self._names:
            return None
        arguments = value.get(self._form.arguments, value.get("arguments", {}))
        if not isinstance(arguments, dict):
            return None
        return Call(call_id(), value["name"], json.dumps(arguments, ensure_ascii=False))


def forced_call(form: Form, tools: Sequence[Tool], body: ChatRequest) -> GrammarSpec | None:
    """The grammar of an answer that is nothing but calls, if the request wants one. Raises ApiError."""
    choice = body.tool_choice
    if choice in (None, "auto", "none"):
        return None
    if form.many:
        raise unsupported("tool_choice", f"calls in the form of {form.name} cannot be required")
    named = choice.function.name if isinstance(choice, ToolChoice) else None
    several = named is None and body.parallel_tool_calls is not False and not form.bare
    shapes = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool.function.name},
                form.arguments: tool.function.parameters or {"type": "object"},
            },
            "required": ["name", form.arguments],
            "additionalProperties": False,
        }
        for tool in tools
        if named in (None, tool.function.name)
    ]
    schema = json.dumps({"anyOf": shapes})
    if form.bare:
        return GrammarSpec("json_schema", schema)
    one = f'{json.dumps(form.open)} "\\n" call "\\n" {json.dumps(form.close)}'
    more = '("\\n" one)*' if several else ""
    return GrammarSpec("lark", f"start: one {more}\none: {one}\ncall: %json {schema}\n")


def call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _overlap(text: str, marker: str) -> int:
    """Length of the longest end of `text` that begins `marker`."""
    for n in range(min(len(marker) - 1, len(text)), 0, -1):
        if marker.startswith(text[-n:]):
            return n
    return 0
