"""What answers hold: OpenAI's objects, with `timings` as llama.cpp has them and a `speculative` block."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

Finish = Literal["stop", "length", "tool_calls"]


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(BaseModel):
    error: ErrorDetail


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Timings(BaseModel):
    """cache_n: prompt tokens that were in the prefix cache, prompt_n: those that were read. prompt_ms: from
    the slot to the first token. predicted_*: tokens after the first step, and their time; predicted_n is all
    tokens. queued_ms: from arrival to the slot. Of several answers, the sum of tokens and the time of the
    longest."""

    queued_ms: float
    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_second: float
    draft_n: int
    draft_n_accepted: int


class SpeculativeReply(BaseModel):
    """Raw counts and what follows from them; mean_acceptance_length is tokens a target pass."""

    drafter: str
    num_passes: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    mean_acceptance_length: float
    acceptance_rate: float
    acceptance_per_position: list[float]
    sources: dict[str, dict[str, int]]


class TracedToken(BaseModel):
    id: int
    text: str
    drafted: bool


class TracedNode(BaseModel):
    id: int
    text: str
    parent: int
    accepted: bool


class StepReply(BaseModel):
    """One target pass: the tokens it gave, and the tree it verified (node 0 is the root, parent -1)."""

    tokens: list[TracedToken]
    tree: list[TracedNode]
    source: str


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprobs(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[TokenLogprobs]
    refusal: None = None


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class FunctionReply(BaseModel):
    name: str
    arguments: str


class ToolCallReply(BaseModel):
    index: int | None = None  # in streams only
    id: str
    type: Literal["function"] = "function"
    function: FunctionReply


class MessageReply(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: list[ToolCallReply] | None = None


class Delta(BaseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[ToolCallReply] | None = None


class ChatChoice(BaseModel):
    index: int
    message: MessageReply
    logprobs: ChatLogprobs | None
    finish_reason: Finish
    steps: list[StepReply] | None = None


class DeltaChoice(BaseModel):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: Finish | None
    steps: list[StepReply] | None = None


class TextChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Finish | None
    steps: list[StepReply] | None = None


class Reply(BaseModel):
    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage | None = None
    timings: Timings | None = None
    speculative: SpeculativeReply | None = None


class ChatReply(Reply):
    choices: list[ChatChoice]


class ChatChunk(Reply):
    choices: list[DeltaChoice]


class CompletionReply(Reply):
    choices: list[TextChoice]


class Card(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "slipstream"
    max_model_len: int
    chat: bool = Field(description="Whether the checkpoint has a chat template; completions always work.")
    speculative: dict[str, Any]


class Models(BaseModel):
    object: Literal["list"] = "list"
    data: list[Card]


class Tokens(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]


class Text(BaseModel):
    prompt: str


class Status(BaseModel):
    status: str


class Version(BaseModel):
    version: str
