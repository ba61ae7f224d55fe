"""What the trainer expects is what the engine measures: the same rounds, the same counts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from slipstream.core.params import SamplingParams
from slipstream.core.stats import DraftCounts
from slipstream.drafters import build_drafter
from slipstream.drafters.base import TargetInfo
from slipstream.drafters.draft_model import DraftModelConfig, ModelDrafter
from slipstream.engine.engine import Engine
from slipstream.heads.medusa import MedusaConfig, MedusaHeads
from slipstream.model.parts import ModelParts
from slipstream.model.runner import Runner
from slipstream.model.trainable import Trainable
from slipstream.testing.heads import random_eagle
from slipstream.testing.tiny import tiny_model
from slipstream.train.acceptance import Acceptance, answers, measure
from slipstream.train.draft_lm import DraftMethod
from slipstream.train.eagle import EagleMethod
from slipstream.train.medusa import MedusaMethod
from slipstream.train.method import Method
from slipstream.train.samples import Sample

from .tiny_source import QUICK, TinySource, collate, quick_fit, written_samples

V = 24
TOKENS = 30


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """A target that is neither trivial to guess nor hopeless."""
    return tiny_model(vocab_size=V, seed=4, initializer_range=0.25)


@pytest.fixture(scope="module")
def source(model: PreTrainedModel) -> TinySource:
    prompts = [[i % V, (3 * i + 1) % V, (7 * i) % V] for i in range(40)]
    written = written_samples(model, prompts, TOKENS)
    return TinySource(model, written[8:], written[:8])


def measured(model: PreTrainedModel, spec: Any, samples: list[Sample]) -> DraftCounts:
    info = TargetInfo(V, 2048, dtype="float32", model=model)
    with Engine(Runner(model, pack=False), build_drafter(spec, info)) as engine:
        for sample in samples:
            prompt = sample.tokens[: sample.loss.index(True)]
            engine.add(prompt, SamplingParams(temperature=0.0, max_tokens=TOKENS))
        for _ in engine.run():
            pass
        return engine.counts


def same(expected: Acceptance, counts: DraftCounts) -> None:
    """To the last round. The engine drafts nothing beyond max_tokens, so it counts a little less."""
    assert (expected.rounds, expected.tokens) == (counts.passes, counts.emitted)
    assert all(a >= b for a, b in zip(expected.accepted, counts.accepted_at, strict=False))
    assert expected.tau > 1.05 and expected.accepted[0] < expected.offered[0]
    assert expected.tau == pytest.approx(counts.tau, rel=0.1)


def methods(model: PreTrainedModel) -> dict[str, Method]:
    parts = ModelParts.of(model)
    lm_head = model.get_output_embeddings().weight
    return {
        "medusa": MedusaMethod(MedusaHeads(MedusaConfig(32, V, 3)).start(lm_head), parts),
        "eagle1": EagleMethod(random_eagle(model, 1).start(), parts, depth=3, noise=0.0),
        "eagle3": EagleMethod(random_eagle(model, 3, draft_vocab_size=12).start(), parts, depth=3),
        "draft": DraftMethod(Trainable(tiny_model(vocab_size=V, layers=1, seed=1), None), parts, depth=3),
    }


@pytest.mark.parametrize("name", ["medusa", "eagle1", "eagle3", "draft"])
def test_expected_rounds_are_those_of_the_engine(
    model: PreTrainedModel, source: TinySource, tmp_path: Path, name: str
) -> None:
    method = methods(model)[name]
    fitted = quick_fit(method, source, tmp_path, replace(QUICK, lr=5e-3))
    samples = list(source.heldout)
    if name == "medusa":  # its tree, from the accuracies that were written beside it
        same(fitted.acceptance, measured(model, f"medusa:heads={tmp_path}", samples))
    elif name == "draft":
        assert isinstance(method, DraftMethod)
        loaded = Runner(AutoModelForCausalLM.from_pretrained(tmp_path).eval(), pack=False)
        config = DraftModelConfig(model="", num_speculative_tokens=3)
        info = TargetInfo(V, 2048, dtype="float32", model=model)
        same(fitted.acceptance, measured(model, ModelDrafter(config, info, loaded), samples))
    else:
        spec = f"eagle:heads={tmp_path},top_k=1,num_speculative_tokens=3"
        same(fitted.acceptance, measured(model, spec, samples))


def test_answers_are_the_runs_of_the_mask() -> None:
    assert answers(torch.tensor([0, 1, 1, 0, 0, 1])) == [(1, 3), (5, 6)]
    assert answers(torch.tensor([0, 0])) == []


class Told(Method):
    """Ranks as given."""

    depth = 2

    def __init__(self, ranks: list[list[int]]) -> None:
        super().__init__()
        self._ranks = torch.tensor([ranks])

    wanted = property(lambda self: None)  # type: ignore[assignment]

    def forward(self, *_: Any) -> dict[str, torch.Tensor]:
        raise NotImplementedError

    def ranks(self, batch: Any) -> torch.Tensor:
        return self._ranks

    def save(self, *_: Any) -> None:
        raise NotImplementedError


def test_a_walk_by_hand() -> None:
    """Seven answer tokens at 1 … 7. The state before root 0 is missing; root 1 accepts two, root 4 none,
    root 5 one, and root 7 has nothing left."""
    model = tiny_model(vocab_size=V)
    sample = Sample(tuple(range(8)), (False, *[True] * 7))
    ranks = [[9, 9], [0, 0], [9, 9], [9, 9], [1, 0], [0, 2], [0, 9], [9, 9]]
    found = measure(Told(ranks), [collate(model, [sample])])
    assert (found.rounds, found.tokens) == (4, 7)
    assert found.offered == [3, 2] and found.accepted == [2, 1]
    assert found.tau == pytest.approx(1 + 2 / 3 + 2 / 3 * 1 / 2)
    assert found.positions == [6, 5] and found.right[0][:2] == [3, 1] and found.right[1][:3] == [2, 0, 1]
