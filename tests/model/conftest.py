"""What the tests of this folder share: a cache of their own, no network, progress that remembers."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.model import load as load_module
from slipstream.model.hub import HubMiss
from slipstream.model.store import Store


class Recorder:
    """Progress that keeps what it was told."""

    def __init__(self) -> None:
        self.stages: list[tuple[str, int]] = []
        self.dones: list[int] = []
        self.notes: list[str] = []

    def stage(self, text: str, total: int, unit: str = "") -> None:
        self.stages.append((text, total))

    def at(self, done: int) -> None:
        self.dones.append(done)

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    return Store.default()


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def away(repo_id: str, **_: object) -> HubMiss:
        return HubMiss("the hub is away")

    monkeypatch.setattr(load_module, "fetch_from_hub", away)
