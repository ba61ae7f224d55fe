"""Trains EAGLE-1 on a tiny target into argv[1]; tests kill it."""

import sys
from pathlib import Path

import torch

from slipstream.model.parts import ModelParts
from slipstream.testing.heads import random_eagle
from slipstream.testing.tiny import tiny_model
from slipstream.train.eagle import EagleMethod
from slipstream.train.fit import fit
from slipstream.train.provenance import TargetNote
from slipstream.train.settings import FitSettings

sys.path.insert(0, str(Path(__file__).parents[1]))
from train.test_methods import samples  # type: ignore[import-not-found]
from train.tiny_source import TinySource  # type: ignore[import-not-found]


def run(folder: Path) -> None:
    model = tiny_model(vocab_size=24)
    parts = ModelParts.of(model)
    fit(
        EagleMethod(random_eagle(model, 1), parts, steps=2, depth=2),
        TinySource(model, samples(1, (9, 7, 12, 5, 8, 11, 6)), samples(2, (9, 7))),
        folder,
        FitSettings(lr=1e-3, steps=120, batch_size=2, checkpoint_every=10, measure_every=25),
        TargetNote("tiny", parts.fingerprint),
        draw=False,
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(Path(sys.argv[1]))
