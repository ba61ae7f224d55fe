"""What people pass as a prompt: text, token ids, or a chat; one or many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from operator import index
from typing import Any, SupportsIndex, cast

from slipstream.core.params import SamplingParams
from slipstream.errors import CapacityError, ParameterError

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]


def is_single(prompts: object) -> bool:
    """Whether this is one prompt, not a list of them."""
    if isinstance(prompts, str):
        return True
    if not isinstance(prompts, Sequence):
        raise ParameterError(f"a prompt is text, token ids or a chat, not {type(prompts).__name__}")
    return len(prompts) > 0 and all(
        isinstance(p, (int, Integral, Mapping)) and not isinstance(p, bool) for p in prompts
    )


def encode(tokenizer: Any, prompt: Prompt, **template_options: Any) -> list[int]:
    """Token ids of one prompt. Text is taken as it is; a chat goes through the model's template."""
    if not isinstance(prompt, Sequence):
        raise ParameterError(f"a prompt is text, token ids or a chat, not {type(prompt).__name__}")
    if isinstance(prompt, str):
        if not prompt:
            raise ParameterError("the prompt is empty; give some text")
        ids = list(need_tokenizer(tokenizer)(prompt)["input_ids"])
        if not ids:
            raise ParameterError("the prompt has no tokens; give some text")
        return ids
    if not len(prompt):
        raise ParameterError("the prompt is empty; give at least one token or message")
    if isinstance(prompt[0], Mapping):
        return chat_ids(tokenizer, cast("Sequence[Mapping[str, Any]]", prompt), **template_options)
    return [_token_id(t) for t in prompt]


def _token_id(value: object) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        return index(cast("SupportsIndex", value))
    except TypeError:
        raise ParameterError(
            f"prompt token {value!r} is {type(value).__name__}, not a whole number"
        ) from None


def chat_ids(tokenizer: Any, messages: Sequence[Mapping[str, Any]], **template_options: Any) -> list[int]:
    """Token ids of a chat, ready for the assistant's answer."""
    tokenizer = need_tokenizer(tokenizer)
    if not tokenizer.chat_template:
        raise ParameterError("this model has no chat template; give plain text (--no-chat-template)")
    try:
        encoded = tokenizer.apply_chat_template(
            [dict(m) for m in messages], add_generation_prompt=True, return_dict=True, **template_options
        )
    except Exception as error:  # templates are programs of the model's author and raise what they like
        raise ParameterError(f"the model's chat template refuses these messages: {error}") from error
    return list(encoded["input_ids"])


def question_ids(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Token ids of a chat, as `chat_ids`; where the model has no template, of a single question as plain
    text."""
    if need_tokenizer(tokenizer).chat_template or len(messages) > 1:
        return chat_ids(tokenizer, messages)
    return encode(tokenizer, messages[0]["content"])


def need_tokenizer(tokenizer: Any) -> Any:
    if tokenizer is None:
        raise ParameterError("text and chats need a tokenizer; give token ids, or pass a tokenizer")
    return tokenizer


def check_request(
    prompt: Sequence[int], params: SamplingParams, vocab_size: int, context: int, has_text: bool
) -> None:
    """Refuse what could never be decoded: CapacityError if the context is too small, else ParameterError.

    vocab_size: rows of the model's embedding. has_text: whether tokens can be decoded, as stop strings need.
    """
    if not isinstance(params, SamplingParams):
        raise ParameterError(f"params must be SamplingParams, not {type(params).__name__}")
    if not isinstance(prompt, Sequence):
        raise ParameterError(f"a prompt is a list of token ids, not {type(prompt).__name__}")
    if not prompt:
        raise ParameterError("the prompt is empty; give at least one token")
    if {*map(type, prompt)} != {int}:
        for token in prompt:
            _token_id(token)
    bad = next((t for t in prompt if not 0 <= t < vocab_size), None)
    if bad is not None:
        raise ParameterError(f"prompt token {bad} is outside the model's vocabulary of {vocab_size}")
    room = context - len(prompt)
    if room < 1:
        raise CapacityError(
            f"the prompt has {len(prompt)} tokens and the context holds {context}, with at least one"
            " to generate; shorten the prompt"
        )
    for token in (*params.logit_bias, *params.stop_token_ids):
        if not 0 <= token < vocab_size:
            raise ParameterError(f"token id {token} is outside the vocabulary of {vocab_size}")
    if params.stop and not has_text:
        raise ParameterError("stop strings need a tokenizer; use stop_token_ids")
