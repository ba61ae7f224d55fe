"""A tiny target that all tests of the proof share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import slipstream
from slipstream.engine.session import Session
from slipstream.testing.tiny import save_tiny


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that the command line calls tiny."""
    return save_tiny(tmp_path_factory.mktemp("proof") / "tiny", kind="qwen2", seed=1)


@pytest.fixture
def session(folder: Path) -> Iterator[Session]:
    with slipstream.load(str(folder)) as loaded:
        yield loaded
