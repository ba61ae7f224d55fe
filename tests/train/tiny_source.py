"""What the tests of training share: a source computed from a tiny target, and a quick run of the loop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from slipstream.core.draft import Needs
from slipstream.core.params import SamplingParams
from slipstream.drafters import build_drafter
from slipstream.drafters.base import TargetInfo
from slipstream.engine.engine import Engine
from slipstream.model.parts import ModelParts
from slipstream.model.runner import Runner
from slipstream.model.taps import Taps
from slipstream.testing.heads import greedy_next
from slipstream.train.fit import Fitted, fit
from slipstream.train.method import Method
from slipstream.train.provenance import TargetNote
from slipstream.train.samples import Batch, Sample, Split
from slipstream.train.settings import FitSettings


@torch.no_grad()
def collate(
    model: PreTrainedModel, samples: Sequence[Sample], layers: tuple[int, ...] = (0, 1, 2), top: int = 0
) -> Batch:
    """Samples with the target's states, as capture gives them; `top` logits instead of the last states."""
    width = max(len(s.tokens) for s in samples)
    size, hidden = len(samples), int(model.config.hidden_size)
    tokens = torch.zeros(size, width, dtype=torch.int64)
    loss = torch.zeros(size, width, dtype=torch.bool)
    keys: tuple[int | str, ...] = layers if top else (*layers, "last")
    features: dict[int | str, torch.Tensor] = {k: torch.zeros(size, width, hidden) for k in keys}
    values, ids = torch.zeros(size, width, top), torch.zeros(size, width, top, dtype=torch.int64)
    for b, sample in enumerate(samples):
        length = len(sample.tokens)
        tokens[b, :length] = torch.tensor(sample.tokens)
        loss[b, :length] = torch.tensor(sample.loss)
        with Taps(model, Needs(layers, last_hidden=True)).capture() as seen:
            logits = model(input_ids=tokens[b : b + 1, :length], use_cache=False).logits[0]
        for key in keys:
            features[key][b, :length] = seen[key]
        if top:
            best = logits.topk(top)
            values[b, :length], ids[b, :length] = best.values, best.indices
    lengths = torch.tensor([len(s.tokens) for s in samples])
    return Batch(tokens, loss, lengths, features, (values, ids) if top else None)


@dataclass
class TinySource:
    """Batches of a tiny target, computed once."""

    model: PreTrainedModel
    train: Sequence[Sample]
    heldout: Sequence[Sample]
    layers: tuple[int, ...] = (0, 1, 2)
    top: int = 0
    made: dict[Any, Batch] = field(default_factory=dict)
    asked: list[int] = field(default_factory=list)

    @property
    def manifest(self) -> Mapping[str, Any]:
        fingerprint = ModelParts.of(self.model).fingerprint
        return {"kind": "tiny", "samples": len(self.train), "target": {"fingerprint": fingerprint}}

    def size(self, split: Split) -> int:
        return len(self.train if split == "train" else self.heldout)

    def batches(
        self, split: Split, *, epoch: int, batch_size: int, seed: int, skip: int = 0
    ) -> Iterator[Batch]:
        samples = self.train if split == "train" else self.heldout
        order = list(range(len(samples)))
        if split == "train":
            generator = torch.Generator().manual_seed(1000 * seed + epoch)
            order = torch.randperm(len(samples), generator=generator).tolist()
        for at in range(skip * batch_size, len(order), batch_size):
            chosen = tuple(order[at : at + batch_size])
            if (split, chosen) not in self.made:
                self.made[split, chosen] = collate(
                    self.model, [samples[i] for i in chosen], self.layers, self.top
                )
            yield self.made[split, chosen]


def ruled_samples(model: PreTrainedModel, count: int, length: int = 12, prompt: int = 2) -> list[Sample]:
    """Texts that follow a memoryless target's rule from every token on."""
    after = greedy_next(model).tolist()
    samples = []
    for start in range(count):
        tokens = [start % len(after)]
        while len(tokens) < length:
            tokens.append(after[tokens[-1]])
        samples.append(Sample(tuple(tokens), tuple(i >= prompt for i in range(length))))
    return samples


def written_samples(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], max_tokens: int = 24
) -> list[Sample]:
    """Prompts with the target's own greedy answers, through the engine."""
    samples = []
    runner = Runner(model, pack=False)
    info = TargetInfo(runner.vocab_size, runner.context)
    with Engine(runner, build_drafter("none", info)) as engine:
        for prompt in prompts:
            row = engine.find(
                engine.add(list(prompt), SamplingParams(temperature=0.0, max_tokens=max_tokens))
            )
            for _ in engine.run():
                pass
            assert row is not None
            tokens = tuple(row.tokens)
            samples.append(Sample(tokens, tuple(i >= len(prompt) for i in range(len(tokens)))))
    return samples


QUICK = FitSettings(
    lr=2e-2, steps=60, batch_size=24, warmup=0.05, checkpoint_every=1000, measure_every=0, clip=10.0
)


def quick_fit(
    method: Method, source: TinySource, out: Path, settings: FitSettings = QUICK, **rest: Any
) -> Fitted:
    target = TargetNote("tiny", ModelParts.of(source.model).fingerprint)
    return fit(method, source, out, settings, target, **{"draw": False, **rest})
