"""With the same seed, speculative output is the output of plain decoding, token for token.

The reference is `plain_decode`, which shares neither cache nor attention nor loop with the engine.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from typing import Any

import pytest

from slipstream.control import Fixed
from slipstream.control.fixed import FixedConfig
from slipstream.core.draft import Drafter
from slipstream.core.params import SamplingParams
from slipstream.drafters.base import TargetInfo
from slipstream.drafters.draft_model import DraftModelConfig, ModelDrafter
from slipstream.drafters.ngram import NgramConfig, NgramDrafter
from slipstream.drafters.none import NoConfig, NoDrafter
from slipstream.engine.engine import Engine
from slipstream.errors import DrafterError
from slipstream.model.runner import Runner
from slipstream.testing.adversaries import FunctionDrafter, RandomBudgets, adversaries, wrong_root
from slipstream.testing.oracle import Request, plain_decode, run_all
from slipstream.testing.tiny import tiny_model

WIDTH, VOCAB, EOS = 48, 45, 7  # the head has three ids of padding
INFO = TargetInfo(vocab_size=VOCAB, context=2048)

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"kind": "llama"},
    "llama-1-layer-tied": {"kind": "llama", "layers": 1, "tie": True},
    "qwen2": {"kind": "qwen2", "tie": True},
    "qwen3": {"kind": "qwen3"},
    "mistral-window": {"kind": "mistral", "sliding_window": 6},
    "gemma3-mixed": {
        "kind": "gemma3_text",
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}
EXTRAS: tuple[dict[str, Any], ...] = (
    {},
    {"top_k": 6},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"repetition_penalty": 1.4},
    {"presence_penalty": 1.2, "frequency_penalty": 0.7},
    {"logit_bias": {3: 4.0, EOS: 3.0, 5: float("-inf")}},
    {"bad_words": ((3,), (4, 9), (11, 2, 6))},
    {"min_tokens": 8, "logit_bias": {EOS: 6.0}, "stop_token_ids": (1, 2)},
    {
        "top_k": 12,
        "top_p": 0.95,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": -0.4,
        "logit_bias": {EOS: 2.0},
        "bad_words": ((8,), (12, 13)),
        "min_tokens": 5,
    },
)


def _requests() -> list[Request]:
    found = []
    for i, (temperature, extra) in enumerate(product((0.0, 0.7, 1.5), EXTRAS)):
        length = (1, 2, 6, 13, 21)[i % 5]
        prompt = tuple((5 * i + 3 * j * j + j) % WIDTH for j in range(length))  # padding ids as well
        params = SamplingParams(max_tokens=9 + i % 6, temperature=temperature, **extra)
        found.append(Request(prompt, params, 1000 + i))
    return found


REQUESTS = _requests()


def make_model(name: str) -> Any:
    return tiny_model(vocab_size=WIDTH, seed=3, **MODELS[name])


@lru_cache
def reference(name: str) -> dict[int, list[int]]:
    """Seed -> what plain decoding says."""
    twin = make_model(name)
    return {r.seed: plain_decode(twin, r, vocab_size=VOCAB, eos_ids={EOS}) for r in REQUESTS}


@lru_cache
def runner(name: str) -> Runner:
    return Runner(make_model(name), pack=False)


@lru_cache
def draft_runner() -> Runner:
    return Runner(tiny_model("llama", vocab_size=WIDTH, layers=1, seed=8), pack=False)


def drafters(name: str) -> dict[str, Drafter]:
    built: dict[str, Drafter] = {
        key: FunctionDrafter(f) for key, f in adversaries(reference(name), VOCAB, WIDTH).items()
    }
    built["none"] = NoDrafter(NoConfig(), INFO)
    built["ngram"] = NgramDrafter(NgramConfig(min_n=1), INFO)
    built["draft_model"] = ModelDrafter(DraftModelConfig("tiny"), INFO, draft_runner())
    return built


DRAFTERS = (*adversaries({}, VOCAB, WIDTH), "none", "ngram", "draft_model")


def engine_of(name: str, drafter: Drafter, controller: Any, **options: Any) -> Engine:
    return Engine(runner(name), drafter, vocab_size=VOCAB, eos_ids={EOS}, controller=controller, **options)


def test_the_references_are_not_trivial() -> None:
    for name in MODELS:
        outputs = reference(name)
        assert any(o[-1] == EOS for o in outputs.values()), name
        assert any(len(o) == r.params.max_tokens for o, r in zip(outputs.values(), REQUESTS, strict=True))
        assert len({t for o in outputs.values() for t in o}) > 20, name


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("name", MODELS)
def test_any_mix_of_rows_gives_the_tokens_of_plain_decoding(name: str, drafter: str) -> None:
    """Random budgets a row and step, fewer slots than requests, prompts read in pieces of 5."""
    engine = engine_of(name, drafters(name)[drafter], RandomBudgets(), max_rows=7, chunk=5)
    assert run_all(engine, REQUESTS) == list(reference(name).values())
    if drafter == "right":
        assert engine.counts.tau > 2
    assert len(engine.runner.cache) == 0


@pytest.mark.parametrize("gamma", range(9))
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_every_fixed_draft_length_gives_the_tokens_of_plain_decoding(drafter: str, gamma: int) -> None:
    some = REQUESTS[gamma % 5 :: 5]
    engine = engine_of("llama", drafters("llama")[drafter], Fixed(FixedConfig(gamma)), max_rows=4, chunk=512)
    assert run_all(engine, some) == [reference("llama")[r.seed] for r in some]
    if drafter in ("wrong", "nothing", "none") or gamma == 0:
        assert engine.counts.accepted_tokens == 0
    if drafter == "right":
        assert engine.counts.accepted_tokens == engine.counts.draft_tokens


@pytest.mark.parametrize("arrive", [1, 3])
@pytest.mark.parametrize("name", ["llama", "mistral-window"])
def test_rows_that_join_while_others_run_change_nothing(name: str, arrive: int) -> None:
    order = [*REQUESTS[::2], *REQUESTS[1::2]][:18]
    engine = engine_of(name, drafters(name)["any_of"], RandomBudgets(salt=1), max_rows=5, chunk=4)
    assert run_all(engine, order, arrive=arrive) == [reference(name)[r.seed] for r in order]


def test_a_row_alone_and_in_company_gives_the_same_tokens() -> None:
    engine = engine_of("qwen3", drafters("qwen3")["any_of"], RandomBudgets(), max_rows=1)
    assert run_all(engine, REQUESTS[:12]) == [reference("qwen3")[r.seed] for r in REQUESTS[:12]]


def test_other_seeds_give_other_tokens() -> None:
    """The comparison can fail: at T > 0 the seed decides."""
    request = REQUESTS[-10]
    twin = make_model("llama")
    outputs = {
        tuple(plain_decode(twin, Request(request.prompt, request.params, s), vocab_size=VOCAB, eos_ids={EOS}))
        for s in range(8)
    }
    assert len(outputs) == 8


def test_a_draft_with_another_root_is_refused() -> None:
    engine = engine_of("llama", FunctionDrafter(wrong_root), None)
    engine.add((1, 2, 3), SamplingParams(max_tokens=4))
    with pytest.raises(DrafterError, match="rooted its draft"):
        list(engine.run())
    engine.cancel(0)
    engine.apply_cancels()
