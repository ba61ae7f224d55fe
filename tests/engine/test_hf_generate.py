"""`slipstream.generate` gives what `model.generate` gives, and gives the model back as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import slipstream
from slipstream.errors import ModelError, ParameterError
from slipstream.testing.tiny import tiny_model, tiny_tokenizer

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 16},
    "gemma3_text": {"sliding_window": 16},
}
MODELS = {kind: tiny_model(kind, **config) for kind, config in FAMILIES.items()}
LLAMA = MODELS["llama"]
TOKENIZER = tiny_tokenizer()
WIDTH = 20


def prompts(rows: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 250, (rows, WIDTH), generator=torch.Generator().manual_seed(seed))


def left_padded(ids: torch.Tensor, *lengths: int) -> torch.Tensor:
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        mask[row, -length:] = 1
    return mask


def agree(model: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    expected = model.generate(ids, do_sample=False, **options)
    given = slipstream.generate(model, ids, do_sample=False, **options)
    assert given.dtype == expected.dtype
    assert given.tolist() == expected.tolist()
    return given


def common_tokens(model: Any, ids: torch.Tensor, count: int = 3) -> list[int]:
    """Tokens the model says by itself, so that they end or forbid something."""
    said = model.generate(ids, do_sample=False, max_new_tokens=30, eos_token_id=None)[:, WIDTH:]
    values, counts = said.unique(return_counts=True)
    return values[counts.argsort(descending=True)][:count].tolist()


@pytest.mark.parametrize("kind", FAMILIES)
def test_greedy_is_token_for_token_that_of_transformers(kind: str) -> None:
    model, ids = MODELS[kind], prompts(3)
    agree(model, ids[:1], max_new_tokens=48)
    agree(model, ids, attention_mask=left_padded(ids, 13, 20, 4), max_new_tokens=40, pad_token_id=3)


@pytest.mark.filterwarnings("ignore:Unfeasible length")
@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.3},
        {"min_new_tokens": 9},
        {"min_length": WIDTH + 12},
        {"min_new_tokens": 50},
        {"max_length": WIDTH + 7},
        {"suppress_tokens": [10, 11, 999]},
        {"sequence_bias": {(7,): 4.0, (9,): -2.0}},
        {"sequence_bias": [[[7], 4.0]]},
    ],
    ids=lambda o: next(iter(o)),
)
def test_options_mean_the_same(kind: str, options: dict[str, Any]) -> None:
    model, ids = MODELS[kind], prompts(3, seed=1)
    ends = common_tokens(model, ids)
    length = {} if "max_length" in options else {"max_new_tokens": 30}
    mask = left_padded(ids, 20, 5, 11)
    agree(model, ids, attention_mask=mask, eos_token_id=ends, pad_token_id=200, **length, **options)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_bad_words_are_never_said(kind: str) -> None:
    model, ids = MODELS[kind], prompts(2, seed=2)
    said = model.generate(ids, do_sample=False, max_new_tokens=20)[:, WIDTH:].tolist()
    words = [[said[0][0]], said[0][3:5], said[1][1:4], [257]]
    given = agree(model, ids, max_new_tokens=30, bad_words_ids=words)
    assert said[0][0] not in given[:, WIDTH:].flatten().tolist()


def test_rows_end_apart_and_are_filled_with_padding() -> None:
    ids = prompts(6, seed=3)
    ends = common_tokens(LLAMA, ids, 2)
    given = agree(LLAMA, ids, max_new_tokens=40, eos_token_id=ends, pad_token_id=255)
    assert 255 in given[:, WIDTH:].flatten().tolist()
    agree(LLAMA, ids, max_new_tokens=40, eos_token_id=ends)  # filled with the first end token
    agree(LLAMA, ids, max_new_tokens=40, eos_token_id=ends[0])
    agree(LLAMA, ids, max_new_tokens=40, eos_token_id=None)
    agree(LLAMA, ids, max_new_tokens=40, eos_token_id=torch.tensor(ends))


@pytest.mark.parametrize("eos", [257, None], ids=["padded", "without an end token"])
@pytest.mark.parametrize("least", [0, 12])
def test_stop_strings_end_where_transformers_ends(eos: int | None, least: int) -> None:
    ids = prompts(4, seed=4) % 96 + 30
    said = LLAMA.generate(ids, do_sample=False, max_new_tokens=30, eos_token_id=None)[:, WIDTH:]
    strings = [TOKENIZER.decode(row[6:8].tolist()) for row in said[:2]]
    strings = [s for s in strings if s and "�" not in s] or [TOKENIZER.decode([int(said[0, 5])])]
    options = {"stop_strings": strings, "tokenizer": TOKENIZER, "eos_token_id": eos, "min_new_tokens": least}
    agree(LLAMA, ids, max_new_tokens=30, **options)
    agree(LLAMA, ids, max_new_tokens=30, **(options | {"stop_strings": strings[0]}))


def test_a_stop_string_may_begin_in_the_prompt() -> None:
    for seed in range(20):
        ids = prompts(1, seed) % 64 + 40
        first = int(LLAMA.generate(ids, do_sample=False, max_new_tokens=1)[0, -1])
        if 32 < first < 127:  # a letter, so that it is text by itself
            break
    word = TOKENIZER.decode([int(ids[0, -1]), first])
    options = {"stop_strings": [word], "tokenizer": TOKENIZER}
    assert agree(LLAMA, ids, max_new_tokens=9, **options).shape[1] == WIDTH + 1


def test_the_default_length_is_that_of_transformers() -> None:
    with pytest.warns(UserWarning, match="max_length"):
        expected = LLAMA.generate(prompts(), do_sample=False)
    assert slipstream.generate(LLAMA, prompts()).tolist() == expected.tolist()


def test_without_a_prompt_the_beginning_token_is_one() -> None:
    expected = LLAMA.generate(do_sample=False, max_new_tokens=5)
    assert slipstream.generate(LLAMA, max_new_tokens=5).tolist() == expected.tolist()


def test_padding_is_found_without_a_mask() -> None:
    ids = prompts(2, seed=6)
    ids[0, :9] = 255
    agree(LLAMA, ids, max_new_tokens=20, pad_token_id=255)
    agree(LLAMA, ids, max_new_tokens=20, pad_token_id=255, eos_token_id=255)


def test_pad_tokens_inside_a_prompt_need_a_mask() -> None:
    ids = prompts(1, seed=6)
    ids[0, 9] = 255
    with pytest.raises(ParameterError, match="pad token 255 inside.*pass attention_mask"):
        slipstream.generate(LLAMA, ids, max_new_tokens=5, pad_token_id=255)
    agree(LLAMA, ids, max_new_tokens=5, pad_token_id=255, attention_mask=torch.ones_like(ids))


def test_right_padding_continues_the_prompt_itself() -> None:
    ids = prompts(1, seed=7)
    padded = torch.cat((ids, torch.full((1, 6), 255)), dim=1)
    mask = (torch.arange(WIDTH + 6) < WIDTH).long()[None]
    given = slipstream.generate(LLAMA, {"input_ids": padded, "attention_mask": mask}, max_new_tokens=15)
    expected = LLAMA.generate(ids, do_sample=False, max_new_tokens=15)
    assert given[:, : WIDTH + 6].tolist() == padded.tolist()
    assert given[:, WIDTH + 6 :].tolist() == expected[:, WIDTH:].tolist()


def test_inputs_come_in_every_usual_form() -> None:
    encoded = TOKENIZER(["def f(x):", "a"], return_tensors="pt", padding=True, padding_side="left")
    expected = LLAMA.generate(**encoded, do_sample=False, max_new_tokens=8).tolist()
    assert slipstream.generate(LLAMA, encoded, max_new_tokens=8).tolist() == expected
    assert slipstream.generate(LLAMA, **encoded, max_new_tokens=8).tolist() == expected
    ids, mask = encoded["input_ids"], encoded["attention_mask"]
    assert slipstream.generate(LLAMA, ids, attention_mask=mask.bool(), max_new_tokens=8).tolist() == expected
    given = slipstream.generate(LLAMA, encoded, max_new_tokens=8, return_dict_in_generate=True)
    assert given.sequences.tolist() == expected == given["sequences"].tolist()
    assert given.scores is None and given.counts.emitted > 0


def state(model: Any) -> dict[str, Any]:
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    return {
        "config": model.config.to_dict(),
        "attention": model.config._attn_implementation_internal,
        "generation": model.generation_config.to_dict(),
        "training": [m.training for m in model.modules()],
        "types": [type(m) for m in model.modules()],
        "hooks": [len(getattr(m, h)) for m in model.modules() for h in hooks],
        "weights": [(n, p.data_ptr(), p.requires_grad, p._version) for n, p in model.named_parameters()],
        "attributes": sorted(vars(model)),
        "random": torch.get_rng_state().tolist(),
    }


class Interrupts:
    """A streamer that stops the call after some tokens."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error = error
        self.calls = 0

    def put(self, value: torch.Tensor) -> None:
        self.calls += 1
        if self.calls == 4:
            raise self.error

    def end(self) -> None:
        raise AssertionError


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_model_is_given_back_as_it_was(kind: str, attention: str) -> None:
    model, helper = tiny_model(kind, attn_implementation=attention), tiny_model(kind, seed=1)
    model.set_attn_implementation(attention)
    model.train()
    model.model.layers[1].eval()
    helper.train()
    ids = prompts(1, seed=8)
    model.generate(ids, do_sample=False, max_new_tokens=2)  # what transformers itself leaves behind
    before, helper_before = state(model), state(helper)
    expected = slipstream.generate(LLAMA if kind == "llama" else MODELS[kind], ids, max_new_tokens=9)
    for error in (KeyboardInterrupt, RuntimeError):
        with pytest.raises(error):
            slipstream.generate(
                model, ids, streamer=Interrupts(error), assistant_model=helper, max_new_tokens=9
            )
        assert state(model) == before and state(helper) == helper_before
    with pytest.raises(ParameterError):
        slipstream.generate(model, ids, max_new_tokens=9, num_beams=2)
    for _ in range(2):
        given = slipstream.generate(model, ids, assistant_model=helper, max_new_tokens=9)
        assert state(model) == before and state(helper) == helper_before
        if attention == "sdpa" and kind == "llama":
            assert given.tolist() == expected.tolist()
    assert (
        model.eval().generate(ids, do_sample=False, max_new_tokens=9).tolist()
        == slipstream.generate(model, ids, max_new_tokens=9).tolist()
    )


def test_a_held_model_is_refused_and_stays_held() -> None:
    class Nested:
        def put(self, value: torch.Tensor) -> None:
            with pytest.raises(ModelError, match="held by a Slipstream engine"):
                slipstream.generate(LLAMA, prompts(), max_new_tokens=3)

        def end(self) -> None:
            pass

    given = slipstream.generate(LLAMA, prompts(), max_new_tokens=6, streamer=Nested())
    assert given.tolist() == slipstream.generate(LLAMA, prompts(), max_new_tokens=6).tolist()


def test_models_that_cannot_be_run_are_refused_with_the_reason() -> None:
    split = tiny_model("llama")
    split.model.embed_tokens.to("meta")
    with pytest.raises(ModelError, match="offloaded"):
        slipstream.generate(split, prompts(), max_new_tokens=3)
    with pytest.raises(ModelError, match="unwrap it"):
        slipstream.generate(torch.nn.Sequential(LLAMA), prompts(), max_new_tokens=3)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="language modelling head"):
        slipstream.generate(LLAMA.model, prompts(), max_new_tokens=3)
    broken = tiny_model("llama")

    def refuse(*_: Any) -> None:
        raise NotImplementedError("no kernel for int3\nat line 5")

    broken.model.layers[0].mlp.register_forward_pre_hook(refuse)
    before = state(broken)
    with pytest.raises(ModelError, match=r"NotImplementedError: no kernel for int3\); load it unquantised"):
        slipstream.generate(broken, prompts(), max_new_tokens=3)
    assert state(broken) == before
