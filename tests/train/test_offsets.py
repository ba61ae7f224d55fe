"""Off by one: on a target with a known rule every head is right at exactly its own offset, in the engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from slipstream.core.draft import Drafter
from slipstream.core.params import SamplingParams
from slipstream.core.stats import DraftCounts
from slipstream.drafters import build_drafter
from slipstream.drafters.base import TargetInfo
from slipstream.drafters.draft_model import DraftModelConfig, ModelDrafter
from slipstream.engine.engine import Engine
from slipstream.heads.eagle import EagleHead
from slipstream.heads.medusa import MedusaConfig, MedusaHeads
from slipstream.model.parts import ModelParts
from slipstream.model.runner import Runner
from slipstream.model.trainable import Trainable
from slipstream.testing.heads import greedy_next, memoryless_model, random_eagle
from slipstream.testing.tiny import tiny_model
from slipstream.train.draft_lm import DraftMethod
from slipstream.train.eagle import EagleMethod
from slipstream.train.losses import IGNORE
from slipstream.train.medusa import MedusaMethod
from slipstream.train.samples import Batch

from .tiny_source import TinySource, quick_fit, ruled_samples

V = 24
HEADS = 3


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return memoryless_model(vocab_size=V)


@pytest.fixture(scope="module")
def source(model: PreTrainedModel) -> TinySource:
    samples = ruled_samples(model, V)
    return TinySource(model, samples, samples[:4])


def drafted(model: PreTrainedModel, spec: str | Drafter) -> DraftCounts:
    """Counts of the engine on all tokens in turn."""
    info = TargetInfo(V, 2048, dtype="float32", model=model)
    after = greedy_next(model).tolist()
    with Engine(Runner(model, pack=False), build_drafter(spec, info)) as engine:
        for token in range(V):
            engine.add([token, after[token]], SamplingParams(temperature=0.0, max_tokens=1 + 2 * (HEADS + 1)))
        for _ in engine.run():
            pass
        return engine.counts


def heads_for(model: PreTrainedModel, **config: object) -> MedusaHeads:
    heads = MedusaHeads(MedusaConfig(int(model.config.hidden_size), V, HEADS, **config))  # type: ignore[arg-type]
    return heads.start(ModelParts.of(model).embedding)


def test_medusa_heads_are_right_at_their_own_offsets(
    model: PreTrainedModel, source: TinySource, tmp_path: Path
) -> None:
    method = MedusaMethod(heads_for(model), ModelParts.of(model))
    fitted = quick_fit(method, source, tmp_path)
    assert fitted.acceptance.tau == HEADS + 1
    counts = drafted(model, f"medusa:heads={tmp_path},topk={'x'.join('1' * HEADS)}")
    assert counts.tested_at[0] == 2 * V
    assert all(rate > 0.99 for rate in counts.conditional_acceptance)


@pytest.mark.parametrize("shifted", range(HEADS))
def test_one_shifted_head_is_seen_in_the_engine(
    model: PreTrainedModel, source: TinySource, tmp_path: Path, shifted: int
) -> None:
    class Shifted(MedusaMethod):
        def aligned(self, batch: Batch) -> torch.Tensor:
            labels = super().aligned(batch)
            labels[:, :-1, shifted] = labels[:, 1:, shifted].clone()
            labels[:, -1, shifted] = IGNORE
            return labels

    quick_fit(Shifted(heads_for(model), ModelParts.of(model)), source, tmp_path)
    counts = drafted(model, f"medusa:heads={tmp_path},topk={'x'.join('1' * HEADS)}")
    rates = counts.conditional_acceptance
    assert all(rate > 0.99 for rate in rates[:shifted])
    assert rates[shifted] < 0.2


def eagle_for(model: PreTrainedModel, version: int) -> EagleHead:
    return random_eagle(model, version).start(seed=1)


@pytest.mark.parametrize("version", [1, 3])
def test_eagle_heads_are_right_at_every_depth(
    model: PreTrainedModel, source: TinySource, tmp_path: Path, version: int
) -> None:
    method = EagleMethod(eagle_for(model, version), ModelParts.of(model), steps=HEADS, depth=HEADS, noise=0.0)
    fitted = quick_fit(method, source, tmp_path)
    assert fitted.acceptance.tau == HEADS + 1
    counts = drafted(model, f"eagle:heads={tmp_path},top_k=1,num_speculative_tokens={HEADS}")
    assert all(rate > 0.99 for rate in counts.conditional_acceptance)


@pytest.mark.parametrize("version", [1, 3])
def test_eagle_targets_one_too_late_are_seen_in_the_engine(
    model: PreTrainedModel, source: TinySource, tmp_path: Path, version: int
) -> None:
    class Shifted(EagleMethod):
        def _step_loss(self, batch: Batch, outputs: torch.Tensor, i: int) -> torch.Tensor:
            features = {**batch.features, "last": batch.features["last"].roll(-1, 1)}
            return super()._step_loss(replace(batch, features=features), outputs, i)

    method = Shifted(eagle_for(model, version), ModelParts.of(model), steps=1, depth=HEADS, noise=0.0)
    quick_fit(method, source, tmp_path)
    counts = drafted(model, f"eagle:heads={tmp_path},top_k=1,num_speculative_tokens={HEADS}")
    assert counts.conditional_acceptance[0] < 0.2


@pytest.mark.parametrize("loss", ["sft", "forward_kl", "reverse_kl", "tv"])
def test_a_draft_learns_the_rule(
    model: PreTrainedModel, source: TinySource, tmp_path: Path, loss: str
) -> None:
    draft = Trainable(tiny_model(vocab_size=V, layers=1, seed=5, initializer_range=0.1), None)
    method = DraftMethod(draft, ModelParts.of(model), loss=loss, depth=HEADS)  # type: ignore[arg-type]
    quick_fit(method, source, tmp_path / "draft")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "draft").eval()
    info = TargetInfo(V, 2048, dtype="float32", model=model)
    drafter = ModelDrafter(
        DraftModelConfig(model="", num_speculative_tokens=HEADS), info, Runner(loaded, pack=False)
    )
    assert all(rate > 0.99 for rate in drafted(model, drafter).conditional_acceptance)
