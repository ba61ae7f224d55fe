"""What requests may hold. A field that is not here is refused by name, never ignored.

Fields of OpenAI's API, and those that vLLM's and llama.cpp's clients send besides. A few are taken only with
the value that asks for nothing, and a few say who asks; they change nothing.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

Number = Annotated[float, Field(allow_inf_nan=False)]
Whole = Annotated[int, Field(ge=0, le=1 << 31)]
TokenId = Annotated[int, Field(ge=0, le=1 << 31)]
T = TypeVar("T")
# Its first fault is enough: a body of 4 MB has room for millions, and each costs a kilobyte to describe.
List = Annotated[list[T], Field(fail_fast=True)]
_MANY = 64  # more than any object here has fields
_ENTRIES = 1 << 14


def _few(given: Any) -> Any:
    if isinstance(given, dict) and len(given) > _ENTRIES:
        raise PydanticCustomError("too_many", "it has more than {most} entries", {"most": _ENTRIES})
    return given


Few = BeforeValidator(_few)  # of an object with any keys, whose entries would all be looked at


class Strict(BaseModel):
    """JSON types as they are: no "1" for 1, no fields beyond those declared."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _one_unknown_is_enough(cls, given: Any) -> Any:
        if not isinstance(given, dict) or len(given) <= _MANY:
            return given
        names = {field.alias or name for name, field in cls.model_fields.items()}
        unknown = next(name for name in given if name not in names)
        return {name: given[name] for name in (*names, unknown) if name in given}


class StreamOptions(Strict):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = Field(
        default=None, description="With include_usage: the usage so far in every chunk, as vLLM has it."
    )
    include_obfuscation: Literal[False] | None = None


class Speculative(Strict):
    """How this request drafts, which never changes its output, and how much is told about it."""

    drafter: str | None = Field(default=None, description="One that /v1/models lists; none is plain.")
    num_speculative_tokens: Whole | None = Field(
        default=None, description="Draft always so many tokens, the root not counted; 0 is plain decoding."
    )
    trace: bool = Field(default=False, description="Tell each token's origin and each step's draft tree.")


class JsonSchema(Strict):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """What an answer must look like. regex and grammar (Lark, as llguidance reads it) go beyond OpenAI."""

    type: Literal["text", "json_object", "json_schema", "regex", "grammar"]
    json_schema: JsonSchema | None = None
    regex: str | None = None
    grammar: str | None = None


class Sampling(Strict):
    """Fields that chats and completions share."""

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1, le=1 << 31)] | None = None
    temperature: Annotated[Number, Field(ge=0)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=1 << 31)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[Number, Field(gt=0)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    logit_bias: Annotated[dict[str, Number], Few] | None = None
    stop: str | List[str] | None = None
    stop_token_ids: List[TokenId] | None = None
    min_tokens: Whole | None = None
    ignore_eos: bool | None = None
    n: Annotated[int, Field(ge=1, le=1 << 31)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    speculative: Speculative | None = None
    # Says who asks.
    user: str | None = None
    metadata: Annotated[dict[str, str], Few] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    # Only with the value that asks for nothing.
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None


class TextPart(Strict):
    type: Literal["text"]
    text: str


class FunctionCall(Strict):
    name: str
    arguments: str


class ToolCall(Strict):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Strict):
    """One message. Fields that OpenAI's own answers carry may be sent back as they came."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | List[TextPart] | None = None
    name: str | None = None
    tool_calls: List[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    audio: None = None
    function_call: None = None


class Function(Strict):
    name: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.-]+$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function


class ChosenFunction(Strict):
    name: str


class ToolChoice(Strict):
    type: Literal["function"]
    function: ChosenFunction


class ChatRequest(Sampling):
    messages: Annotated[List[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=1 << 31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Whole | None = None
    tools: List[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    modalities: List[Literal["text"]] | None = None


class CompletionRequest(Sampling):
    prompt: str | List[str] | List[TokenId] | List[List[TokenId]]
    logprobs: Whole | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1, le=1 << 31)] | None = None
    suffix: None = None


class TokenizeRequest(Strict):
    """Text as it is, or messages through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[List[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool = True


class DetokenizeRequest(Strict):
    model: str | None = None
    tokens: List[TokenId]
