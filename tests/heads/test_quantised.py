"""int8 heads, and the cascade for machines with little memory: Medusa heads and an int8 draft model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from slipstream.cli.main import build_app
from slipstream.core.draft import Draft, Drafter, DraftRequest
from slipstream.core.params import SamplingParams
from slipstream.drafters import build_drafter
from slipstream.drafters.base import TargetInfo
from slipstream.drafters.cascade import CascadeDrafter
from slipstream.drafters.medusa import MedusaDrafter
from slipstream.errors import ModelError
from slipstream.heads.io import save_eagle, save_medusa
from slipstream.model import int8
from slipstream.model.int8 import Int8Linear
from slipstream.testing.heads import random_eagle, random_medusa
from slipstream.testing.quantised import every_size as all_sizes
from slipstream.testing.quantised import lacks_int8
from slipstream.testing.tiny import save_tiny, tiny_model

PROMPTS = [[5, 17, 3, 9, 11, 2], [7], [4, 4]]
Info = Callable[[Any], TargetInfo]


needs_int8 = pytest.mark.skipif(lacks_int8(), reason="this CPU has no int8 products")


@pytest.fixture
def every_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The linears of tiny models are too small to gain and would be left as they are."""
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    with all_sizes():
        yield


def record_drafts(drafter: Drafter) -> list[int]:
    """The first two tokens of every draft that is proposed from now on."""
    seen: list[int] = []
    propose = drafter.propose

    def spy(requests: Sequence[DraftRequest]) -> list[Draft]:
        drafts = propose(requests)
        seen.extend(token for draft in drafts for token in draft.tree.tokens[1:3])
        return drafts

    drafter.propose = spy  # type: ignore[method-assign]
    return seen


HEADS = (
    "medusa:heads={}/medusa,nodes=15",
    "medusa:heads={}/rows,nodes=15",
    "eagle:heads={}/v1",
    "eagle:heads={}/v3",
)


@needs_int8
@pytest.mark.parametrize("spec", HEADS)
def test_int8_heads_draft_nearly_the_same_and_hold_less(
    spec: str, every_size: None, tmp_path: Path, run: Any, info: Info
) -> None:
    model = tiny_model(vocab_size=48)
    save_medusa(random_medusa(model), tmp_path / "medusa")
    save_medusa(random_medusa(model, output="target", draft_vocab_size=30), tmp_path / "rows")
    for version in (1, 3):
        save_eagle(random_eagle(model, version, scale=0.15), tmp_path / f"v{version}")
    params = SamplingParams(max_tokens=20, temperature=0.8)
    expected = run(model, None, PROMPTS, params).tokens
    held, drafted = {}, {}
    for quantise in ("none", "int8"):
        drafter = build_drafter(f"{spec.format(tmp_path)},quantise={quantise}", info(model))
        held[quantise] = drafter.memory_bytes
        drafted[quantise] = record_drafts(drafter)
        assert run(model, drafter, PROMPTS, params).tokens == expected
    assert held["int8"] < 0.6 * held["none"]  # a quarter of the fp32 weights, and scales
    same = sum(a == b for a, b in zip(*drafted.values(), strict=True))
    assert same > 0.7 * len(drafted["none"])


@needs_int8
def test_a_reduced_copy_of_the_lm_head_is_the_drafters_and_counted(
    every_size: None, tmp_path: Path, info: Info
) -> None:
    model = tiny_model(vocab_size=48)
    sizes = {}
    for count in (10, 30):
        save_medusa(random_medusa(model, output="target", draft_vocab_size=count), tmp_path / str(count))
        sizes[count] = build_drafter(f"medusa:heads={tmp_path / str(count)}", info(model)).memory_bytes
    # rows of the head in fp32, d2t's whole numbers
    assert sizes[30] - sizes[10] == 20 * (32 * 4 + 8)
    built = build_drafter(f"medusa:heads={tmp_path / '30'},quantise=int8", info(model))
    assert isinstance(built, MedusaDrafter)
    assert any(isinstance(m, Int8Linear) and m.out_features == 30 for m in built._own.modules())
    assert not any(isinstance(m, Int8Linear) for m in model.modules())  # the target stays as it is


def test_heads_on_a_gpu_are_not_quantised(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, info: Info
) -> None:
    def refuse(device: Any) -> None:
        raise ModelError(f"int8 draft weights are for the CPU, not {device}: leave out quantise=int8")

    monkeypatch.setattr(int8, "require_int8", refuse)
    model = tiny_model(vocab_size=24)
    save_medusa(random_medusa(model), tmp_path / "medusa")
    save_eagle(random_eagle(model), tmp_path / "eagle")
    for name in ("medusa", "eagle"):
        with pytest.raises(ModelError, match="leave out quantise=int8"):
            build_drafter(f"{name}:heads={tmp_path / name},quantise=int8", info(model))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """target, draft (the target with noise on its weights) and heads."""
    model = tiny_model("qwen2", tie=True, seed=3, initializer_range=1.0)
    save_medusa(random_medusa(model), tmp_path / "heads")
    save_tiny(tmp_path / "target", model=model)
    draft = tiny_model("qwen2", tie=True, seed=3, initializer_range=1.0)
    generator = torch.Generator().manual_seed(5)
    for weight in draft.parameters():
        weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.03)
    save_tiny(tmp_path / "draft", model=draft)
    return tmp_path


@needs_int8
@pytest.mark.parametrize("mode", ["first,min_score=0.7", "merge"])
@pytest.mark.parametrize("temperature", ["0", "0.8"])
def test_medusa_and_an_int8_draft_model_in_one_cascade(
    mode: str, temperature: str, every_size: None, saved: Path
) -> None:
    """The command of docs/drafters.md: the text of plain decoding, and counts of each part."""
    heads = f"medusa(heads={saved / 'heads'},nodes=7,quantise=int8)"
    parts = f"{heads}+draft_model(model={saved / 'draft'},quantise=int8)"
    options = ["--model", str(saved / "target"), "--drafter", f"cascade:drafters={parts},mode={mode}"]
    options += ["--temperature", temperature, "--seed", "5", "--max-tokens", "60", "--compare", "--json"]
    done = CliRunner().invoke(build_app(), ["run", *options, "abcabc"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["identical"] and len(found["tokens"]) == 60
    medusa, model = found["sources"]["medusa"], found["sources"]["draft_model"]
    assert medusa["draft_tokens"] > 0 and model["accepted_tokens"] > 0
    if mode == "merge":
        assert found["drafted_tokens"] <= medusa["draft_tokens"] + model["draft_tokens"]
    else:
        assert found["drafted_tokens"] == medusa["draft_tokens"] + model["draft_tokens"]


@needs_int8
def test_the_cascade_holds_what_its_int8_parts_hold(every_size: None, saved: Path) -> None:
    import slipstream

    held = {}
    for quantise in ("none", "int8"):
        spec = (
            f"cascade:drafters=medusa(heads={saved / 'heads'},quantise={quantise})"
            f"+draft_model(model={saved / 'draft'},quantise={quantise})"
        )
        with slipstream.load(str(saved / "target"), drafter=spec) as session:
            assert isinstance(session.drafter, CascadeDrafter)
            held[quantise] = session.drafter.memory_bytes
            assert held[quantise] == sum(part.memory_bytes for part in session.drafter.parts)
    assert held["int8"] < 0.6 * held["none"]
