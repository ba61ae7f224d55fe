"""Grammars under speculation: the tokens are those of plain masked decoding, whatever was drafted."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from itertools import product
from typing import Any

import llguidance
import pytest
import torch
from llguidance.hf import from_tokenizer

from slipstream.core.draft import Drafter
from slipstream.core.params import GrammarSpec, SamplingParams
from slipstream.drafters.base import TargetInfo
from slipstream.drafters.draft_model import DraftModelConfig, ModelDrafter
from slipstream.drafters.ngram import NgramConfig, NgramDrafter
from slipstream.drafters.none import NoConfig, NoDrafter
from slipstream.engine.engine import Engine
from slipstream.errors import ParameterError
from slipstream.logits.grammar import WHITE_SPACE, Grammars
from slipstream.logits.pipeline import LogitsPipeline
from slipstream.model.runner import Runner
from slipstream.testing.adversaries import FunctionDrafter, RandomBudgets, any_of, random_chain, random_tree
from slipstream.testing.tiny import EOS_ID, tiny_model, tiny_tokenizer

VOCAB = 258
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["alpha", "beta"]},
        "tags": {"type": "array", "items": {"type": "integer", "maximum": 99}, "maxItems": 2},
    },
    "required": ["name", "kind", "tags"],
    "additionalProperties": False,
}
SPECS = {
    "schema": GrammarSpec("json_schema", json.dumps(SCHEMA)),
    "regex": GrammarSpec("regex", r"(yes|yellow|no), [0-9]{3}-[a-f]+!"),
    "lark": GrammarSpec("lark", 'start: "<call>" /[a-z]{1,5}/ ("," /[0-9]/)* "</call>"'),
}
PROMPTS = [b"abcabc", b"x", b"tell me more "]


@lru_cache
def tokenizer() -> Any:
    return tiny_tokenizer(VOCAB)


@lru_cache
def grammars() -> Grammars:
    return Grammars(tokenizer(), VOCAB, frozenset({EOS_ID}))


def make_model() -> Any:
    return tiny_model("llama", vocab_size=VOCAB, seed=5)


@lru_cache
def runner() -> Runner:
    return Runner(make_model(), pack=False)


def params_of(name: str, temperature: float) -> SamplingParams:
    extra: dict[str, Any] = {"top_k": 20, "repetition_penalty": 1.1} if temperature else {}
    return SamplingParams(max_tokens=60, temperature=temperature, grammar=SPECS[name], **extra)


REQUESTS = [
    (prompt, params_of(name, temperature), 40 + i)
    for i, (name, temperature, prompt) in enumerate(product(SPECS, (0.0, 0.9), PROMPTS))
]


@lru_cache
def reference() -> list[list[int]]:
    """One token at a time through the whole model, with a matcher that is made anew for every token."""
    model = make_model()
    table = from_tokenizer(tokenizer(), n_vocab=VOCAB, eos_token=[EOS_ID])
    blank: Any = {"whitespace_pattern": WHITE_SPACE}
    read = {
        "json_schema": lambda text: llguidance.LLMatcher.grammar_from_json_schema(text, defaults=blank),
        "regex": llguidance.LLMatcher.grammar_from_regex,
        "lark": llguidance.LLMatcher.grammar_from_lark,
    }
    outputs = []
    for prompt, params, seed in REQUESTS:
        assert params.grammar is not None
        tokens = list(prompt)
        plain = LogitsPipeline(params.with_(grammar=None), VOCAB, frozenset({EOS_ID}), len(prompt))
        while len(tokens) - len(prompt) < 60 and (len(tokens) == len(prompt) or tokens[-1] != EOS_ID):
            with torch.inference_mode():
                row = model(torch.tensor([tokens])).logits[0, -1]  # [V]
            matcher = llguidance.LLMatcher(table, read[params.grammar.kind](params.grammar.source))
            assert matcher.consume_tokens(tokens[len(prompt) :])
            allowed = matcher.compute_logit_bias()
            scores = plain.scores(row, tokens).clone()
            scores[torch.tensor([not a for a in allowed[:VOCAB]])] = float("-inf")
            free = LogitsPipeline(
                params.with_(grammar=None, repetition_penalty=1.0), VOCAB, frozenset(), len(prompt)
            )
            tokens.append(free.token(scores, tokens, seed, len(tokens)))
        outputs.append(tokens[len(prompt) :])
    return outputs


def drafters() -> dict[str, Drafter]:
    info = TargetInfo(VOCAB, 2048)
    known = {seed: out for (_, _, seed), out in zip(REQUESTS, reference(), strict=True)}
    small = Runner(tiny_model("llama", vocab_size=VOCAB, layers=1, seed=6), pack=False)
    return {
        "none": NoDrafter(NoConfig(), info),
        "ngram": NgramDrafter(NgramConfig(min_n=1), info),
        "draft_model": ModelDrafter(DraftModelConfig("tiny"), info, small),
        "wild": FunctionDrafter(any_of([random_chain(VOCAB), random_tree(known, VOCAB)])),
    }


@pytest.mark.parametrize("name", ["none", "ngram", "draft_model", "wild"])
def test_every_drafter_gives_the_tokens_of_plain_masked_decoding(name: str) -> None:
    controller = RandomBudgets() if name in ("wild", "ngram") else None
    engine = Engine(
        runner(), drafters()[name], vocab_size=VOCAB, eos_ids={EOS_ID}, grammars=grammars(),
        controller=controller, max_rows=5,
    )  # fmt: skip
    told: dict[int, list[int]] = {}
    ids = [engine.add(tuple(p), params, seed=seed) for p, params, seed in REQUESTS]
    for event in engine.run():
        told.setdefault(event.seq_id, []).extend(event.tokens)
    assert [told[i] for i in ids] == reference()
    forced = engine.counts.sources["grammar"]
    assert forced.accepted_tokens == forced.draft_tokens > 100  # what is forced is always right here
    assert engine.counts.tau > 1.3


def test_the_references_end_and_are_what_was_asked_for() -> None:
    ended = 0
    for (_, params, _), output in zip(REQUESTS, reference(), strict=True):
        if output[-1] != EOS_ID:
            continue
        ended += 1
        text, grammar = bytes(output[:-1]).decode(), params.grammar
        assert grammar is not None
        if grammar.kind == "json_schema":
            value = json.loads(text)
            assert set(value) == set(SCHEMA["properties"]) and value["kind"] in ("alpha", "beta")
        elif grammar.kind == "regex":
            assert re.fullmatch(grammar.source, text)
        else:
            assert re.fullmatch(r"<call>[a-z]{1,5}(,[0-9])*</call>", text)
    assert ended > len(REQUESTS) / 2


def test_a_grammar_answers_about_any_continuation_in_any_order() -> None:
    grammar = grammars()(SPECS["regex"])
    once = {text: grammar.allowed(text) for text in (b"", b"ye", b"yes, 12", b"no, 123-a")}
    assert grammar.allowed(b"nonsense") is None
    for text in reversed(list(once)):
        again, first = grammar.allowed(text), once[text]
        assert again is not None and first is not None and torch.equal(again, first)
    assert bytes(grammar.forced(b"n", 9)) == b"o, " and grammar.forced(b"", 9) == []
    assert grammar.accepts(b"ye", b"llow, x") == 6


def test_a_wrong_grammar_is_told() -> None:
    for kind, source in (
        ("regex", "(a"),
        ("json_schema", "{"),
        ("json_schema", '{"type": "wat"}'),
        ("lark", "?"),
    ):
        with pytest.raises(ParameterError, match=kind):
            grammars()(GrammarSpec(kind, source))  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match="grammar"):
        SamplingParams(grammar=SPECS["regex"], min_tokens=3)
    with pytest.raises(ParameterError, match="end token"):
        Grammars(tokenizer(), VOCAB, frozenset())(SPECS["regex"])
