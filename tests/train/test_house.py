"""Models and drafters that come with Slipstream are found by name, and by the target they are for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import slipstream
from slipstream.core.params import SamplingParams
from slipstream.errors import DrafterError
from slipstream.heads.io import save_medusa
from slipstream.model import house
from slipstream.model.blueprint import Blueprint
from slipstream.model.house import house_drafter, house_models
from slipstream.model.load import load, local_folder, resolve
from slipstream.model.parts import ModelParts
from slipstream.testing.heads import random_medusa
from slipstream.testing.tiny import save_tiny, tiny_model

ROOT = Path(__file__).parents[2]


def test_a_house_model_and_its_drafters_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, other = tiny_model(seed=1), tiny_model(seed=2)
    folder = save_tiny(tmp_path / "little" / "target", model=model)
    for name, one in (("a", other), ("b", model)):
        note = {"kind": "medusa", "target_fingerprint": ModelParts.of(one).fingerprint}
        save_medusa(random_medusa(one), tmp_path / "little" / name, provenance=note)
    (tmp_path / "little" / "broken").mkdir()
    (tmp_path / "little" / "broken" / "slipstream.json").write_text("{")
    monkeypatch.setattr(house, "ROOTS", (tmp_path / "nowhere", tmp_path))
    assert house_models() == {"little": folder}
    assert resolve("Little") == local_folder("little") == folder and load("little").name == "little"
    with slipstream.load("little") as session:
        plain = session.generate("hello", SamplingParams(max_tokens=12, ignore_eos=True))
        session.use("medusa:topk=1x1x1")
        drafted = session.generate("hello", SamplingParams(max_tokens=12, ignore_eos=True))
        assert drafted.tokens == plain.tokens and drafted.counts.draft_tokens
        with pytest.raises(DrafterError, match=r"no eagle for this target.*eagle:heads=FOLDER.*train eagle"):
            session.use("eagle")
        with pytest.raises(DrafterError, match=r"draft_model:model=FOLDER.*train draft"):
            session.use("draft_model")
    fingerprint = ModelParts.of(model).fingerprint
    assert house_drafter("medusa", fingerprint).name == "b"
    assert Blueprint.of("little").fingerprint == fingerprint


def test_the_house_models_can_be_trained(tmp_path: Path) -> None:
    """Every stage of `make tiny-models`, on almost nothing; a second call has nothing left to train."""
    command = [sys.executable, str(ROOT / "bench" / "tiny_models.py"), "--quick", str(tmp_path)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    names = {p.name for p in (tmp_path / "house").iterdir()}
    assert names == {"target", "draft", "medusa", "eagle", "report.json"}
    assert not list((tmp_path / "house").rglob("checkpoints"))
