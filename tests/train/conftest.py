"""What the tests of this folder share: a tiny target on disk, loaded with its tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import slipstream
from slipstream.engine.session import Session
from slipstream.model.identity import identity
from slipstream.testing.tiny import save_tiny


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("target"), layers=3, seed=7)


@pytest.fixture(scope="session")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another target with the same tokenizer and the same shape."""
    return save_tiny(tmp_path_factory.mktemp("other"), layers=3, seed=8)


@pytest.fixture
def opened() -> Iterator[Callable[..., Session]]:
    """Opens sessions that are closed after the test."""
    sessions: list[Session] = []

    def open_(folder: Path, drafter: str = "none", **options: Any) -> Session:
        sessions.append(slipstream.load(str(folder), drafter, **options))
        return sessions[-1]

    yield open_
    for session in sessions:
        session.close()


@pytest.fixture
def session(opened: Callable[..., Session], target_folder: Path) -> Session:
    return opened(target_folder)


@pytest.fixture
def target(session: Session) -> dict[str, Any]:
    return identity(session.info.model, session.tokenizer, "tiny")
