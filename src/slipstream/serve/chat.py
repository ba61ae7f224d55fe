"""From messages and tools to a prompt, through the checkpoint's own chat template."""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.core import jsontext
from slipstream.engine.inputs import Prompt, encode
from slipstream.errors import SlipstreamError
from slipstream.serve.errors import ApiError, refused, unsupported
from slipstream.serve.limits import Limits
from slipstream.serve.sampling import check_json
from slipstream.serve.schemas import ChatRequest, FunctionCall, Message, Tool, ToolChoice
from slipstream.serve.tools import Form, find_form


class Prompts:
    """Encodes prompts with a tokenizer of its own, which no other thread uses. form: of tool calls."""

    def __init__(self, tokenizer: Any, limits: Limits, form: str | None = None) -> None:
        self._tokenizer = copy.deepcopy(tokenizer)
        self._limits = limits
        template = getattr(tokenizer, "chat_template", None)
        self._template = template if isinstance(template, str) else json.dumps(template or "")
        self.chats = bool(template)
        self.form: Form | None = find_form(self._template, form)
        called = inspect.signature(tokenizer.apply_chat_template).parameters
        self._taken = {name for name in called if name != "kwargs"} | {"messages", "tools"}

    def need_template(self) -> None:
        """ApiError, naming what works instead, where there is none."""
        if not self.chats:
            raise ApiError(
                400,
                "this model has no chat template: send plain text to /v1/completions",
                param="messages",
                code="no_chat_template",
            )

    def text(self, prompt: Prompt, param: str = "prompt", **options: Any) -> list[int]:
        """Token ids; raises ApiError for what cannot be encoded."""
        try:
            return encode(self._tokenizer, prompt, **options)
        except SlipstreamError as error:
            raise refused(error, param) from error
        except (UnicodeError, TypeError) as error:  # an unpaired surrogate, which is no text
            raise ApiError(400, f"{param} holds text that is not Unicode", param=param) from error

    def chat(self, body: ChatRequest) -> list[int]:
        return self.messages(body.messages, self.offered(body), self._template_options(body))

    def messages(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        self.need_template()
        read = [self._message(m, i) for i, m in enumerate(messages)]
        more: dict[str, Any] = dict(options or {})
        if tools:
            more["tools"] = [tool.model_dump(exclude_none=True) for tool in tools]
        return self.text(read, "messages", **more)

    def plain(self, text: str, special: bool) -> list[int]:
        """Text as it is, with or without the tokens that begin a text; may be empty."""
        try:
            return list(self._tokenizer(text, add_special_tokens=special)["input_ids"])
        except (UnicodeError, TypeError) as error:
            raise ApiError(400, "prompt holds text that is not Unicode", param="prompt") from error

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens)))

    def offered(self, body: ChatRequest) -> list[Tool]:
        """The tools of a request that the model may call; raises ApiError for those that cannot be."""
        if body.tools is None or not body.tools:
            if body.tool_choice not in (None, "none", "auto"):
                raise ApiError(400, "tool_choice needs tools", param="tool_choice")
            return []
        if body.tool_choice == "none":
            return []
        if self.form is None:
            raise unsupported("tools", "this model's chat template shows no tools")
        if len(body.tools) > self._limits.tools:
            raise ApiError(400, f"at most {self._limits.tools} tools are allowed", param="tools")
        check_json("tools", [t.function.parameters for t in body.tools], self._limits)
        names = [tool.function.name for tool in body.tools]
        if len(set(names)) < len(names):
            raise ApiError(400, "tools must have different names", param="tools")
        if isinstance(body.tool_choice, ToolChoice) and body.tool_choice.function.name not in names:
            raise ApiError(400, "tool_choice names a function that is not in tools", param="tool_choice")
        return body.tools

    def _template_options(self, body: ChatRequest) -> dict[str, Any]:
        given = body.chat_template_kwargs or {}
        if given:
            check_json("chat_template_kwargs", given, self._limits)
        for name in given:
            if name in self._taken or not name.isidentifier():
                raise unsupported(f"chat_template_kwargs.{name}", "only a template's variables can be set")
        return given

    def _message(self, message: Message, index: int) -> dict[str, Any]:
        read: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
        if isinstance(message.content, list):
            read["content"] = "".join(part.text for part in message.content)
        else:
            read["content"] = message.content or ""
        if message.content is None and not (message.role == "assistant" and message.tool_calls):
            raise ApiError(400, f"messages[{index}] has no content", param="messages")
        if message.name is not None:
            read["name"] = message.name
        if message.tool_call_id is not None:
            read["tool_call_id"] = message.tool_call_id
        if message.tool_calls:
            read["tool_calls"] = [
                {"id": call.id, "type": "function", "function": self._called(call.function, index)}
                for call in message.tool_calls
            ]
        return read

    def _called(self, function: FunctionCall, index: int) -> dict[str, Any]:
        """Templates write arguments out as JSON themselves, so they want the object."""
        name = f"messages[{index}].tool_calls"
        try:
            value = jsontext.parse(function.arguments or "{}")
        except ValueError as error:
            raise ApiError(400, f"{name}: arguments must be JSON", param="messages") from error
        check_json(name, value, self._limits)
        return {"name": function.name, "arguments": value}
