"""Every argument of transformers' `generate` is honoured or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GenerationConfig

import slipstream
from slipstream.drafters.none import NoConfig, NoDrafter
from slipstream.errors import CapacityError, DrafterError, ParameterError, SlipstreamError
from slipstream.integrations import fields
from slipstream.testing.tiny import tiny_model

MODEL = tiny_model("llama")
IDS = torch.randint(0, 250, (1, 12), generator=torch.Generator().manual_seed(0))


def run(**options: Any) -> list[list[int]]:
    return slipstream.generate(MODEL, IDS, **options).tolist()  # type: ignore[union-attr]


@pytest.mark.parametrize("name", fields.field_names())
def test_every_field_is_handled_or_harmless_or_refused(name: str) -> None:
    kinds = [name in fields.HANDLED, name in fields.HARMLESS, name in fields.REFUSED]
    assert sum(kinds) == 1
    default = GenerationConfig._get_default_generation_params().get(name)
    fields.resolve(MODEL, None, {name: default})
    if name in fields.REFUSED:
        assert fields.asks_nothing(default, fields.REFUSED[name][0])
        for neutral in fields.REFUSED[name][0]:
            fields.resolve(MODEL, None, {name: neutral})
        with pytest.raises(ParameterError, match=f"^{name}=.* is not supported"):
            run(max_new_tokens=3, **{name: 0.123})
        config = GenerationConfig(max_new_tokens=3)
        setattr(config, name, 0.123)
        with pytest.raises(ParameterError, match=f"^{name}=.* is not supported"):
            run(generation_config=config)


def test_our_defaults_are_those_of_transformers() -> None:
    theirs = GenerationConfig._get_default_generation_params()
    assert {name: theirs[name] for name in fields.DEFAULTS} == fields.DEFAULTS


def test_a_field_of_a_later_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    names = fields.field_names()
    monkeypatch.setattr(fields, "field_names", lambda: [*names, "brand_new"])
    fields.resolve(MODEL, None, {})
    with pytest.raises(ParameterError, match="brand_new=3 is not supported"):
        fields.resolve(MODEL, None, {"brand_new": 3})


@pytest.mark.parametrize("name", sorted(fields._CALL))
def test_arguments_of_the_call_are_refused_by_name(name: str) -> None:
    expected = run(max_new_tokens=3)
    assert run(max_new_tokens=3, **{name: None}) == expected
    with pytest.raises(ParameterError, match=f"^{name} is not supported"):
        run(max_new_tokens=3, **{name: torch.ones(1, 2)})


def test_unknown_arguments_get_a_hint() -> None:
    with pytest.raises(ParameterError, match="did you mean 'max_new_tokens'"):
        run(max_new_token=3)
    with pytest.raises(ParameterError, match="no argument 'zzz'"):
        run(zzz=3)


def test_the_call_comes_before_the_configuration_before_the_model() -> None:
    model = tiny_model("llama")
    model.generation_config.max_new_tokens = 3
    model.generation_config.repetition_penalty = 1.4
    model.generation_config.eos_token_id = int(MODEL.generate(IDS, do_sample=False, max_new_tokens=2)[0, -1])

    def agree(**options: Any) -> None:
        expected = model.generate(IDS, do_sample=False, **options)
        assert slipstream.generate(model, IDS, do_sample=False, **options).tolist() == expected.tolist()

    config = GenerationConfig(max_new_tokens=6, repetition_penalty=1.1)
    for options in ({}, {"generation_config": config}, {"eos_token_id": None}, {"repetition_penalty": 1.0}):
        agree(**options)
        agree(max_new_tokens=9, **options)
    assert config.max_new_tokens == 6


def test_a_checkpoint_that_samples_can_be_decoded_greedily() -> None:
    model = tiny_model("llama")
    model.generation_config.update(do_sample=True, temperature=0.6, top_k=20, top_p=0.9)
    model.generation_config.cache_implementation = "hybrid"
    expected = MODEL.generate(IDS, do_sample=False, max_new_tokens=8).tolist()
    assert slipstream.generate(model, IDS, do_sample=False, max_new_tokens=8).tolist() == expected
    sampled = slipstream.generate(model, IDS, max_new_tokens=8, seed=3)
    explicit = run(do_sample=True, temperature=0.6, top_k=20, top_p=0.9, max_new_tokens=8, seed=3)
    assert sampled.tolist() == explicit


def test_sampling_arguments_without_sampling_are_told() -> None:
    expected = run(max_new_tokens=4)
    with pytest.warns(UserWarning, match="temperature=0.7 has no effect without do_sample=True"):
        assert run(max_new_tokens=4, temperature=0.7) == expected
    assert run(max_new_tokens=4, temperature=0.0, top_k=50, top_p=1.0) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ({"max_new_tokens": 2.5}, "max_new_tokens must be a whole number"),
        ({"max_length": 12}, "set max_new_tokens instead"),
        ({"max_new_tokens": 5000}, "set max_new_tokens to at most 2036"),
        ({"do_sample": True, "temperature": 0.0}, "set do_sample=False"),
        ({"do_sample": True, "temperature": -1.0}, "temperature must be"),
        ({"do_sample": True, "top_p": 1.5}, "top_p must be"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be from 1e-06 to 1e+06"),
        ({"num_return_sequences": 2}, "set do_sample=True"),
        ({"bad_words_ids": [[]]}, "bad_words_ids"),
        ({"bad_words_ids": [[5, 100000]]}, "bad_words_ids names token 100000"),
        ({"sequence_bias": {(1, 2): 1.0}}, "only single tokens"),
        ({"sequence_bias": {(100000,): 1.0}}, "sequence_bias names token 100000"),
        ({"stop_strings": ["a"]}, "pass tokenizer="),
        ({"stop_strings": [""]}, "not empty"),
        ({"eos_token_id": "end"}, "eos_token_id must be a whole number"),
        ({"seed": "x"}, "seed must be a whole number"),
        ({"generation_config": {"max_new_tokens": 3}}, "must be a GenerationConfig, not a dict"),
        ({"attention_mask": torch.ones(1, 5)}, "shape of input_ids"),
        ({"attention_mask": torch.zeros(1, 12)}, "all padding"),
        ({"attention_mask": torch.tensor([[1] * 5 + [0] + [1] * 6])}, "has a hole"),
        ({"input_ids": IDS}, "give one of them"),
        ({"drafter": "none", "prompt_lookup_num_tokens": 3}, "different drafters"),
        ({"assistant_model": MODEL, "prompt_lookup_num_tokens": 3}, "different drafters"),
        ({"assistant_model": "gpt2"}, "str is not a transformers model"),
        ({"drafter": "nonsense"}, "unknown drafter"),
        ({"drafter": "draft_model:model=/nowhere"}, "/nowhere"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_values_that_cannot_be_used_are_refused_in_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SlipstreamError) as caught:
        run(**({"max_new_tokens": 3} | options if "max_length" not in options else options))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_prompts_of_other_shapes_are_refused() -> None:
    for bad in (
        [1, 2],
        torch.ones(3, dtype=torch.long),
        torch.ones(1, 3),
        torch.ones(1, 0, dtype=torch.long),
    ):
        with pytest.raises(ParameterError, match="input_ids"):
            slipstream.generate(MODEL, bad, max_new_tokens=3)
    with pytest.raises(ParameterError, match="token_type_ids is not supported"):
        slipstream.generate(MODEL, {"input_ids": IDS, "token_type_ids": IDS}, max_new_tokens=3)
    with pytest.raises(ParameterError, match="given twice"):
        slipstream.generate(MODEL, {"input_ids": IDS}, input_ids=IDS, max_new_tokens=3)


def test_a_draft_model_by_name_needs_the_tokenizer() -> None:
    from slipstream.model.vocab import shared_vocabulary

    with pytest.raises(DrafterError, match="pass the target's tokenizer"):
        shared_vocabulary(None, object(), 10, 10)


def test_the_context_may_be_filled_and_not_exceeded() -> None:
    small = tiny_model("llama", max_position_embeddings=32)
    assert slipstream.generate(small, IDS, max_length=32, eos_token_id=None).shape == (1, 32)
    assert slipstream.generate(small, IDS, eos_token_id=None).shape == (1, 32)
    with pytest.raises(CapacityError, match="at most 20"):
        slipstream.generate(small, IDS, max_length=33)


def test_a_built_drafter_serves_many_calls() -> None:
    drafter = NoDrafter(NoConfig(), None)  # type: ignore[arg-type]
    closed: list[int] = []
    drafter.shutdown = lambda: closed.append(1)  # type: ignore[method-assign]
    assert run(max_new_tokens=4, drafter=drafter) == run(max_new_tokens=4, drafter=drafter)
    assert not closed
