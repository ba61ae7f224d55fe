"""The loss mask holds what the assistant says and nothing of the template, or the template is refused."""

from __future__ import annotations

import pytest

from slipstream.errors import ParameterError
from slipstream.testing.tiny import EOS, EOS_ID, tiny_tokenizer
from slipstream.train.template import check_mask, check_template, conversation_sample, question_tokens

TALK = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "good day"},
    {"role": "user", "content": "more"},
    {"role": "assistant", "content": "no"},
]
CHATML = (
    "{% for m in messages %}{{ '<' + m.role + '>\n' + m.content + '" + EOS + "\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>\n' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ '<' + m.role + '>' }}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content + '" + EOS + "' }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
MISMARKED = MARKED.replace("m.role == 'assistant'", "m.role == 'user'")
FORGETFUL = (  # as templates do that drop the thinking of earlier turns
    "{% for m in messages %}<{{ m.role }}>{% if m.role != 'assistant' or loop.last %}{{ m.content }}"
    "{% endif %}" + EOS + "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
MUTE = (
    "{% for m in messages %}{% if m.role != 'assistant' %}<{{ m.role }}>{{ m.content }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
UNLIKE = (  # what comes before an answer is not what asks for it
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}" + EOS + "{% endfor %}"
    "{% if add_generation_prompt %}<assistant><think>{% endif %}"
)


def tokenizer_with(template):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def parts(tokenizer, sample):
    """The learned pieces and all else, as text."""
    pieces, last = [], False
    for token, on in zip(sample.tokens, sample.loss, strict=True):
        if on and not last:
            pieces.append([])
        if on:
            pieces[-1].append(token)
        last = on
    rest = [t for t, on in zip(sample.tokens, sample.loss, strict=True) if not on]
    return [tokenizer.decode(p) for p in pieces], tokenizer.decode(rest)


@pytest.mark.parametrize("template", [None, CHATML, MARKED], ids=["tiny", "chatml", "marked"])
def test_only_the_assistants_words_and_their_end_are_learned(template):
    tokenizer = tiny_tokenizer() if template is None else tokenizer_with(template)
    check_template(tokenizer)
    check_mask(tokenizer, {EOS_ID})
    sample = conversation_sample(tokenizer, TALK, {EOS_ID})
    learned, rest = parts(tokenizer, sample)
    assert learned == ["good day" + EOS, "no" + EOS]
    assert "be brief" in rest and "hello" in rest and "more" in rest and "no" not in rest
    assert list(sample.tokens) == list(tokenizer.apply_chat_template(TALK, return_dict=True)["input_ids"])


@pytest.mark.parametrize("template", [None, CHATML], ids=["tiny", "chatml"])
def test_an_answer_begins_right_behind_the_tokens_that_serving_asks_with(template):
    tokenizer = tiny_tokenizer() if template is None else tokenizer_with(template)
    sample = conversation_sample(tokenizer, TALK, {EOS_ID})
    for turn in (2, 4):
        asked = question_tokens(tokenizer, TALK[:turn])
        at = len(asked)
        assert sample.tokens[:at] == asked
        assert sample.loss[at] and not sample.loss[at - 1]


@pytest.mark.parametrize(
    ("template", "told"),
    [
        (FORGETFUL, "differently once it goes on"),
        (UNLIKE, "differently once it goes on"),
        (MUTE, "leaves out|differently"),
        (MISMARKED, "do not hold just the assistant's words"),
    ],
    ids=["forgetful", "unlike", "mute", "mismarked"],
)
def test_a_template_whose_answers_cannot_be_told_from_it_is_refused(template, told):
    with pytest.raises(ParameterError, match=told):
        check_mask(tokenizer_with(template), {EOS_ID})


@pytest.mark.parametrize(
    ("template", "told"),
    [
        (MUTE, "does not write the assistant's turns"),
        ("{% for m in messages %}{{ m.role }}" + EOS + "{% endfor %}", "does not write"),
        (None, "no chat template"),
        ("{{ raise_exception('no such luck') }}", "refuses these messages: no such luck"),
    ],
    ids=["mute", "roles", "none", "raises"],
)
def test_a_template_without_the_assistants_turns_is_refused(template, told):
    with pytest.raises(ParameterError, match=told):
        check_template(tokenizer_with(template))


@pytest.mark.parametrize("template", [FORGETFUL, UNLIKE], ids=["forgetful", "unlike"])
def test_a_template_that_can_only_ask_serves_for_answers_of_the_target(template):
    check_template(tokenizer_with(template))


def test_the_row_is_named_when_the_template_refuses_it():
    tokenizer = tokenizer_with("{{ raise_exception('roles!') }}")
    with pytest.raises(ParameterError, match=r"a\.jsonl, line 3: the chat template refuses"):
        conversation_sample(tokenizer, TALK, {EOS_ID}, "a.jsonl, line 3")
    with pytest.raises(ParameterError, match="no assistant's turn"):
        conversation_sample(tokenizer, TALK[:2], {EOS_ID})
