"""A conversation as tokens, and which of them the assistant said.

The mask must speak about the very tokens that serving sees: the template's rendering of the question,
then what the target wrote. So an answer's place is found by rendering the conversation up to it, and the
two renderings must agree token by token; where they do not, the template is refused and not guessed at.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from slipstream.errors import ParameterError
from slipstream.prompts.rows import Message
from slipstream.train.samples import Sample

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_TURNS = ("user", "assistant", "user", "assistant")
_PROBE = ("zebra", "walnut", "harbour", "copper")


def question_tokens(tokenizer: Any, messages: Sequence[Message], where: str = "") -> tuple[int, ...]:
    """The conversation so far, ready for the assistant's next answer."""
    return _render(tokenizer, messages, where, add_generation_prompt=True)


def conversation_sample(
    tokenizer: Any, messages: Sequence[Message], end_ids: frozenset[int] | Sequence[int], where: str = ""
) -> Sample:
    """A conversation that has its answers. loss is True on the assistant's words and on the token that
    ends each answer (the first of `end_ids` in it), False on all the template adds.

    A template that marks the assistant's words itself ({% generation %}) is asked; for all others the
    prefix rule of this module holds. ParameterError when the template breaks it or drops the answers.
    """
    answers = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    if not answers:
        raise ParameterError(f"{_at(where)}there is no assistant's turn to learn from")
    if marks_generation(tokenizer):
        return _marked(tokenizer, messages, where)
    whole = _render(tokenizer, messages, where)
    loss = [False] * len(whole)
    for i in answers:
        before = question_tokens(tokenizer, messages[:i], where)
        after = _render(tokenizer, messages[: i + 1], where)
        if after[: len(before)] != before or whole[: len(after)] != after:
            raise ParameterError(
                f"{_at(where)}the chat template writes a conversation differently once it goes on, so the"
                " assistant's tokens cannot be told from the template's: let the target answer instead"
                " (without --keep-answers), or use a template with {% generation %} marks"
            )
        end = next((t + 1 for t in range(len(before), len(after)) if after[t] in end_ids), len(after))
        if end == len(before):
            raise ParameterError(
                f"{_at(where)}the chat template leaves out what the assistant says: this model cannot be"
                " trained on conversations; give plain prompts and --no-chat-template"
            )
        loss[len(before) : end] = [True] * (end - len(before))
    return Sample(whole, tuple(loss))


def marks_generation(tokenizer: Any) -> bool:
    """Whether the template itself marks what the assistant says."""
    template = tokenizer.chat_template
    return isinstance(template, str) and _GENERATION.search(template) is not None


def check_template(tokenizer: Any) -> None:
    """ParameterError unless the template asks for an answer, and writes it when there is one."""
    messages = [{"role": r, "content": text} for r, text in zip(_TURNS, _PROBE, strict=True)]
    asked = question_tokens(tokenizer, messages[:1])
    answered = tokenizer.decode(list(_render(tokenizer, messages[:2], "")))
    if _PROBE[0] not in tokenizer.decode(list(asked)) or _PROBE[1] not in answered:
        raise ParameterError(
            "the chat template does not write the assistant's turns, so there is nothing to learn from them:"
            " use another model, or give plain prompts and --no-chat-template"
        )


def check_mask(tokenizer: Any, end_ids: frozenset[int] | Sequence[int]) -> None:
    """ParameterError unless the assistant's words can be told from the template's in a conversation of two
    turns, which learning from given answers needs."""
    messages = [{"role": r, "content": text} for r, text in zip(_TURNS, _PROBE, strict=True)]
    sample = conversation_sample(tokenizer, messages, end_ids)
    learned = tokenizer.decode([t for t, on in zip(sample.tokens, sample.loss, strict=True) if on])
    if any((word in learned) != (role == "assistant") for role, word in zip(_TURNS, _PROBE, strict=True)):
        raise ParameterError(
            "the chat template's marks do not hold just the assistant's words: drop --keep-answers and let"
            " the target answer"
        )


def _marked(tokenizer: Any, messages: Sequence[Message], where: str) -> Sample:
    encoded = _apply(tokenizer, messages, where, return_assistant_tokens_mask=True)
    tokens, mask = tuple(encoded["input_ids"]), tuple(bool(m) for m in encoded["assistant_masks"])
    if not any(mask):
        raise ParameterError(f"{_at(where)}the chat template marks nothing as the assistant's")
    return Sample(tokens, mask)


def _render(tokenizer: Any, messages: Sequence[Message], where: str, **options: Any) -> tuple[int, ...]:
    return tuple(int(t) for t in _apply(tokenizer, messages, where, **options)["input_ids"])


def _apply(tokenizer: Any, messages: Sequence[Message], where: str, **options: Any) -> Any:
    if not tokenizer.chat_template:
        raise ParameterError("this model has no chat template: give plain prompts and --no-chat-template")
    try:
        return tokenizer.apply_chat_template([dict(m) for m in messages], return_dict=True, **options)
    except Exception as error:  # templates are programs of the model's author and raise what they like
        raise ParameterError(f"{_at(where)}the chat template refuses these messages: {error}") from error


def _at(where: str) -> str:
    return f"{where}: " if where else ""
