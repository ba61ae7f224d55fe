"""From a request's fields to `SamplingParams`; what is not given is the checkpoint's own default."""

from __future__ import annotations

import json
from typing import Any

from slipstream.core.params import GrammarSpec, SamplingParams
from slipstream.errors import ParameterError
from slipstream.serve.errors import ApiError, refused
from slipstream.serve.limits import Limits
from slipstream.serve.schemas import ChatRequest, CompletionRequest, ResponseFormat, Sampling, Speculative

COMPLETION_TOKENS = 16  # what OpenAI generates for a completion that does not say how much
_SAME = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
    "ignore_eos",
    "n",
    "seed",
)


def read_params(
    body: ChatRequest | CompletionRequest, defaults: SamplingParams, limits: Limits
) -> SamplingParams:
    """Raises ApiError naming the field."""
    values: dict[str, Any] = {name: value for name in _SAME if (value := getattr(body, name)) is not None}
    if body.top_k is not None:
        values["top_k"] = max(body.top_k, 0)  # -1 is vLLM's way to say off
    values["max_tokens"] = _max_tokens(body)
    if body.stop is not None:
        values["stop"] = _stop([body.stop] if isinstance(body.stop, str) else body.stop, limits)
    if body.stop_token_ids is not None:
        _at_most("stop_token_ids", len(body.stop_token_ids), limits.stops, "ids")
        values["stop_token_ids"] = tuple(body.stop_token_ids)
    if body.logit_bias is not None:
        values["logit_bias"] = _bias(body.logit_bias, limits)
    values["logprobs"] = _logprobs(body, limits)
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream: true", param="stream_options")
    _at_most("n", body.n or 1, limits.n, "answers")
    try:
        return defaults.with_(**values)
    except ParameterError as error:
        first = str(error).split()[0]
        raise refused(error, first if first in type(body).model_fields else None) from error


def read_format(given: ResponseFormat | None, limits: Limits) -> GrammarSpec | None:
    """What the answer must look like, if anything."""
    if given is None:
        return None
    name = f"response_format.{given.type}"
    for other in ("json_schema", "regex", "grammar"):
        if other != given.type and getattr(given, other) is not None:
            raise ApiError(
                400, f"response_format.{other} does not go with the type {given.type}",
                param="response_format",
            )  # fmt: skip
    if given.type == "text":
        return None
    if given.type == "json_object":
        return GrammarSpec("json_schema", '{"type": "object"}')
    if given.type == "json_schema":
        if given.json_schema is None or given.json_schema.schema_ is None:
            raise ApiError(400, f"{name} needs a schema", param="response_format")
        return GrammarSpec("json_schema", check_json(name, given.json_schema.schema_, limits))
    source = given.regex if given.type == "regex" else given.grammar
    if not source:
        raise ApiError(400, f"{name} is missing", param="response_format")
    try:
        size = len(source.encode())
    except UnicodeEncodeError as error:  # an unpaired surrogate
        raise ApiError(400, f"{name} holds text that is not Unicode", param="response_format") from error
    if size > limits.schema_bytes:
        raise _beyond("response_format", f"is larger than {limits.schema_bytes} bytes")
    return GrammarSpec("regex" if given.type == "regex" else "lark", source)


def check_speculative(given: Speculative | None, limits: Limits) -> Speculative:
    given = given or Speculative()
    if given.num_speculative_tokens is not None:
        name = "speculative.num_speculative_tokens"
        _at_most(name, given.num_speculative_tokens, limits.speculative_tokens, "tokens")
    return given


def check_json(name: str, value: Any, limits: Limits) -> str:
    """JSON from a client, within the limits of schemas; gives its text."""
    depth = _depth(value, limits.schema_depth)
    if depth > limits.schema_depth:
        raise _beyond(name, f"is nested deeper than {limits.schema_depth} levels")
    try:
        text = json.dumps(value)
        size = len(text.encode())
        json.dumps(value, ensure_ascii=False).encode()  # which unpaired surrogates do not survive
    except (UnicodeEncodeError, ValueError) as error:
        raise ApiError(400, f"{name} holds text that is not Unicode", param=name) from error
    if size > limits.schema_bytes:
        raise _beyond(name, f"has {size} bytes, at most {limits.schema_bytes} are allowed")
    return text


def _max_tokens(body: Sampling) -> int | None:
    if isinstance(body, ChatRequest):
        given = body.max_completion_tokens
        if given is not None and body.max_tokens is not None and given != body.max_tokens:
            raise ApiError(
                400,
                "max_tokens is the old name of max_completion_tokens; give one of them",
                param="max_tokens",
            )
        return body.max_tokens if given is None else given
    return COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens


def _stop(stop: list[str], limits: Limits) -> tuple[str, ...]:
    _at_most("stop", len(stop), limits.stops, "strings")
    longest = max(map(len, stop), default=0)
    _at_most("stop", longest, limits.stop_chars, "characters a string")
    return tuple(stop)


def _bias(given: dict[str, float], limits: Limits) -> dict[int, float]:
    _at_most("logit_bias", len(given), limits.bias, "entries")
    bias = {}
    for key, value in given.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise ApiError(400, f"logit_bias keys must be token ids, not {key[:40]!r}", param="logit_bias")
        if not -100 <= value <= 100:
            raise ApiError(400, f"logit_bias values must be in [-100, 100], not {value}", param="logit_bias")
        bias[int(key)] = float(value)
    return bias


def _logprobs(body: ChatRequest | CompletionRequest, limits: Limits) -> int | None:
    if isinstance(body, ChatRequest):
        if not body.logprobs:
            if body.top_logprobs:
                raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
            return None
        _at_most("top_logprobs", body.top_logprobs or 0, limits.top_logprobs, "alternatives")
        return body.top_logprobs or 0
    if body.logprobs is not None:
        _at_most("logprobs", body.logprobs, limits.top_logprobs, "alternatives")
    return body.logprobs


def _at_most(name: str, value: int, limit: int, what: str) -> None:
    if value > limit:
        raise _beyond(name, f"asks for {value} {what}, this server allows {limit}")


def _beyond(name: str, what: str) -> ApiError:
    return ApiError(400, f"{name} {what}", param=name, code="limit_exceeded")


def _depth(value: Any, limit: int) -> int:
    """Nesting of lists and objects, counted no further than one beyond `limit`."""
    depth, level = 0, [value]
    while level and depth <= limit:
        level = [
            inner
            for outer in level
            if isinstance(outer, (dict, list))
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        depth += bool(level)
    return depth
