"""Tiny checkpoints that configurations name, on disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.export.vllm import export_vllm
from slipstream.heads.io import save_eagle, save_medusa
from slipstream.testing.heads import random_eagle, random_medusa
from slipstream.testing.tiny import save_tiny, tiny_model


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """target, draft (same vocabulary), other (another), wide (an EAGLE head for a wider target), eagle1,
    eagle3, medusa: folders.
    """
    return build(tmp_path_factory.mktemp("checkpoints"))


def build(root: Path) -> dict[str, str]:
    model, wide = tiny_model(layers=6), tiny_model(layers=6, hidden=64)
    target, wider = save_tiny(root / "target", model=model), save_tiny(root / "wider", model=wide)
    save_tiny(root / "draft", layers=1)
    save_tiny(root / "other", layers=1, vocab_size=300)
    taps = (2, 3, 4)
    save_eagle(random_eagle(model, 1), root / "raw1")
    save_eagle(random_eagle(model, 3, aux_layers=taps, draft_vocab_size=64), root / "raw3")
    save_eagle(random_eagle(wide, 1, hidden_size=64), root / "raww")
    save_medusa(random_medusa(model, num_heads=3), root / "rawm")
    for name, raw, base in (
        ("eagle1", "raw1", target),
        ("eagle3", "raw3", target),
        ("wide", "raww", wider),
        ("medusa", "rawm", target),
    ):
        export_vllm(root / raw, root / f"head-{name}", base)
    names = {name: str(root / f"head-{name}") for name in ("eagle1", "eagle3", "wide", "medusa")}
    return {**names, **{name: str(root / name) for name in ("target", "draft", "other")}}
