"""One tiny model for all server tests, and ways to put a server around it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import slipstream
from slipstream import Session
from slipstream.drafters import build_drafter
from slipstream.serve.limits import Limits
from slipstream.serve.metrics import Metrics
from slipstream.serve.worker import Worker
from slipstream.testing.tiny import save_tiny


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("serve") / "target", kind="qwen2", seed=1)


@pytest.fixture(scope="session")
def draft_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("serve") / "draft", kind="llama", layers=1, seed=2)


@pytest.fixture
def session(folder: Path) -> Iterator[Session]:
    with slipstream.load(str(folder), max_rows=3) as loaded:
        yield loaded


@pytest.fixture
def make_worker(session: Session) -> Iterator[Callable[..., Worker]]:
    """A started worker over `session`; ended with the test."""
    made: list[Worker] = []

    def make(limits: Limits | None = None, start: bool = True, **more: Any) -> Worker:
        drafters = {name: build_drafter(name, session.info) for name in ("ngram", "none")}
        drafters |= more.pop("drafters", {})
        options: dict[str, Any] = {"drafters": drafters, "default": "ngram", **more}
        worker = Worker(session, limits or Limits(), Metrics("tiny"), **options)
        made.append(worker)
        if start:
            worker.start()
        return worker

    yield make
    for worker in made:
        worker.shutdown(0.0)
        assert not worker.alive
