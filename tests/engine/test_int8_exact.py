"""An int8 target is another model, and exact with itself: speculation, batches and trees change no token.

The reference is plain decoding in the same engine, one request at a time. (A reference with other attention
kernels would not do: rounding activations to int8 steps makes differences of the last bit visible.)
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import slipstream
from slipstream.core.draft import Drafter
from slipstream.core.params import SamplingParams
from slipstream.drafters.none import NoConfig, NoDrafter
from slipstream.engine.engine import Engine
from slipstream.errors import SlipstreamError
from slipstream.model.int8 import Int8Linear
from slipstream.model.load import load
from slipstream.model.packed import PackedLinear
from slipstream.model.runner import Runner
from slipstream.testing.adversaries import FunctionDrafter, RandomBudgets, adversaries
from slipstream.testing.heads import save_random_heads
from slipstream.testing.oracle import Request, run_all
from slipstream.testing.quantised import every_size, kernels, lacks_int8, one_scale_for_all_rows
from slipstream.testing.tiny import EOS_ID, save_tiny, tiny_model

pytestmark = pytest.mark.skipif(lacks_int8(), reason="this CPU has no int8 products")

VOCAB = 258
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"kind": "llama", "dtype": torch.bfloat16},
    "qwen2": {"kind": "qwen2", "tie": True},
    "qwen3": {"kind": "qwen3", "dtype": torch.bfloat16},
    "mistral-window": {"kind": "mistral", "sliding_window": 6},
    "gemma3-mixed": {
        "kind": "gemma3_text",
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
        "tie": True,
        "dtype": torch.bfloat16,
    },
}
DRAFTERS = ("right", "right_until", "wrong", "any_of", "too_long", "random_chain", "random_tree")


def _requests() -> list[Request]:
    found = []
    extras: tuple[dict[str, Any], ...] = (
        {},
        {"top_p": 0.9, "top_k": 40},
        {"repetition_penalty": 1.3, "min_p": 0.05},
    )
    for i, (temperature, extra) in enumerate(product((0.0, 0.7, 1.3), extras)):
        length = (1, 2, 6, 13, 21)[i % 5]
        prompt = tuple((5 * i + 3 * j * j + j) % VOCAB for j in range(length))
        found.append(Request(prompt, SamplingParams(max_tokens=14, temperature=temperature, **extra), 70 + i))
    return found


REQUESTS = _requests()


@pytest.fixture(scope="module")
def runners(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Runner]]:
    root = tmp_path_factory.mktemp("int8")
    built = {}
    with pytest.MonkeyPatch.context() as patch, every_size():
        patch.setenv("SLIPSTREAM_CACHE", str(root / "cache"))
        for name, config in MODELS.items():
            path = save_tiny(root / name, seed=3, **config)
            embedding = "int8" if config.get("tie") else "plain"
            model = load(str(path), weights="int8", embedding=embedding).model
            built[name] = Runner(model, pack=True)
        yield built


def decode(
    runner: Runner, drafter: Drafter | None, controller: Any = None, **options: Any
) -> list[list[int]]:
    drafter = drafter or NoDrafter(NoConfig(), None)  # type: ignore[arg-type]
    engine = Engine(runner, drafter, vocab_size=VOCAB, eos_ids={EOS_ID}, controller=controller, **options)
    outputs = run_all(engine, REQUESTS)
    engine.abandon()
    return outputs


_known: dict[str, list[list[int]]] = {}


def alone(runners: dict[str, Runner], name: str) -> dict[int, list[int]]:
    """Seed -> what plain decoding says, one request at a time."""
    if name not in _known:
        _known[name] = decode(runners[name], None, max_rows=1)
    return {r.seed: tokens for r, tokens in zip(REQUESTS, _known[name], strict=True)}


def test_the_models_are_int8_and_the_references_not_trivial(runners: dict[str, Runner]) -> None:
    for name, runner in runners.items():
        kinds = {type(m) for m in runner.model.modules()}
        assert Int8Linear in kinds and PackedLinear not in kinds and torch.nn.Linear not in kinds
        outputs = alone(runners, name).values()
        assert len({t for tokens in outputs for t in tokens}) > 30, name


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("name", MODELS)
def test_any_mix_of_rows_gives_the_tokens_of_plain_decoding_alone(
    runners: dict[str, Runner], name: str, drafter: str
) -> None:
    """Random budgets a row and step, fewer slots than requests, prompts read in pieces of 5."""
    known = alone(runners, name)
    built = FunctionDrafter(adversaries(known, VOCAB, VOCAB)[drafter])
    found = decode(runners[name], built, RandomBudgets(), max_rows=5, chunk=5)
    assert found == list(known.values())


@pytest.mark.parametrize("name", MODELS)
def test_a_batch_gives_the_tokens_of_rows_alone(runners: dict[str, Runner], name: str) -> None:
    assert decode(runners[name], None, max_rows=8) == list(alone(runners, name).values())


@pytest.mark.skipif("whole numbers" not in kernels(), reason="this CPU has no int8 products of whole numbers")
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_with_one_activation_scale_for_all_rows_it_fails(runners: dict[str, Runner], name: str) -> None:
    """The tests above can fail: then a row depends on what is computed beside it."""
    with one_scale_for_all_rows():
        plain = decode(runners[name], None, max_rows=1)
        known = {r.seed: tokens for r, tokens in zip(REQUESTS, plain, strict=True)}
        built = FunctionDrafter(adversaries(known, VOCAB, VOCAB)["wrong"])
        assert decode(runners[name], built, RandomBudgets(), max_rows=1) != plain
        assert decode(runners[name], None, max_rows=8) != plain


# -- the ways of drafting that share the target's parts ------------------------------------------------

SPECS = (
    "ngram:min_n=1",
    "selfspec:exit=1",
    "draft_model:model={}/target,width=2",
    "draft_model:model={}/target,quantise=int8",
    "draft_model:model={0}/target,quantise=int8,draft_vocab={0}/ids.json",
    "medusa:heads={}/heads/medusa",
    "medusa:heads={}/heads/medusa_reduced,quantise=int8",
    "eagle:heads={}/heads/eagle1",
    "eagle:heads={}/heads/eagle3",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("drafters")
    model = tiny_model("llama", seed=3, layers=3)
    save_random_heads(model, root / "heads")
    (root / "ids.json").write_text(json.dumps(list(range(0, VOCAB, 2))))
    save_tiny(root / "target", model=model, dtype=torch.bfloat16)
    with pytest.MonkeyPatch.context() as patch, every_size():
        patch.setenv("SLIPSTREAM_CACHE", str(root / "cache"))
        yield root


@lru_cache
def answers(folder: Path, spec: str, embedding: str) -> tuple[list[tuple[int, ...]], int]:
    """Tokens of sampled answers, and how many of them were drafted and accepted."""
    params = SamplingParams(max_tokens=24, temperature=0.8, seed=5)
    options = {"weights": "int8", "embedding": embedding}
    with slipstream.load(str(folder / "target"), spec.format(folder), **options) as session:
        found = session.generate([[5, 17, 3, 9], [7], [4, 4, 200]], params)
        return [c.tokens for c in found], session.engine.counts.accepted_tokens


@pytest.mark.parametrize("embedding", ["plain", "int8"])
@pytest.mark.parametrize("spec", SPECS)
def test_drafters_of_all_kinds_change_no_token(folder: Path, spec: str, embedding: str) -> None:
    expected, _ = answers(folder, "none", embedding)
    found, accepted = answers(folder, spec, embedding)
    assert found == expected
    if spec.startswith("draft_model"):  # the target itself, in bfloat16 or int8
        assert accepted > 5


def test_heads_read_the_states_of_the_int8_target(folder: Path) -> None:
    """Features differ from the plain target's, but little."""
    seen = {}
    for weights in ("plain", "int8"):
        with slipstream.load(
            str(folder / "target"), f"eagle:heads={folder}/heads/eagle3", weights=weights
        ) as session:
            observe, kept = session.drafter.observe, []

            def spy(observations: Any, kept: list[Any] = kept, observe: Any = observe) -> None:
                kept += [f for seen in observations for f in seen.features.values()]
                observe(observations)

            session.drafter.observe = spy  # type: ignore[method-assign]
            session.generate([5, 17, 3, 9, 80, 33], SamplingParams(max_tokens=1))
            seen[weights] = torch.cat([f.float() for f in kept if len(f) == 5])
    error = (seen["int8"] - seen["plain"]).norm() / seen["plain"].norm()
    assert 1e-4 < float(error) < 0.1


def test_a_drafter_is_not_told_to_load_an_int8_model(folder: Path) -> None:
    """What it loads has its own options."""
    with slipstream.load(str(folder / "target"), weights="int8") as session:
        assert not {"weights", "embedding"} & session.info.options.keys()
        with pytest.raises(SlipstreamError, match="quantise"):
            session.use("draft_model:model=x,quantise=int4")
