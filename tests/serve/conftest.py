"""One tiny model for all server tests, and ways to put a server around it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import openai
import pytest

import slipstream
from slipstream import Session
from slipstream.drafters import build_drafter
from slipstream.serve.binding import Binding, listen
from slipstream.serve.limits import Limits
from slipstream.serve.metrics import Metrics
from slipstream.serve.server import Server
from slipstream.serve.service import Options, Service
from slipstream.serve.worker import Worker
from slipstream.testing.tiny import save_tiny, tiny_tokenizer


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("serve") / "target", kind="qwen2", seed=1)


@pytest.fixture(scope="session")
def draft_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("serve") / "draft", kind="llama", layers=1, seed=2)


@pytest.fixture(scope="module")
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


@dataclass
class Running:
    """A server in a thread, on a port of its own, and the session it serves."""

    url: str
    session: Session
    worker: Worker
    port: int

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, **options)


@contextmanager
def running(session: Session, drafters: dict[str, Any] | None = None, **options: Any) -> Iterator[Running]:
    """Serve `session`; options are those of Limits, Options and Binding."""
    chosen = drafters or {}
    built = {name: build_drafter(chosen.get(name, name), session.info) for name in ("ngram", "none", *chosen)}

    def take(kind: type[Any], **given: Any) -> Any:
        names = {f.name for f in fields(kind)}
        return kind(**given, **{k: options.pop(k) for k in list(options) if k in names})

    limits = take(Limits)
    worker = Worker(session, limits, Metrics("tiny"), drafters=built, default="ngram")
    service = Service(session, worker, limits, take(Options, names=("tiny",)))
    server = Server(service, take(Binding, port=0))
    assert not options
    listening = listen(server.binding.host, 0)
    port = listening.getsockname()[1]
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    try:
        yield Running(f"http://127.0.0.1:{port}", session, worker, port)
    finally:
        server.handle_exit(2, None)
        thread.join(30)
        listening.close()
        assert not thread.is_alive() and not worker.alive


@pytest.fixture(scope="session")
def server(folder: Path, draft_folder: Path) -> Iterator[Running]:
    with slipstream.load(str(folder), max_rows=8) as loaded:
        small = {"draft_model": f"draft_model:model={draft_folder}", "suffix": "suffix"}
        small["twin"] = f"draft_model:model={folder}"  # always right where the target is greedy
        with running(loaded, small) as made:
            yield made


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A model without a chat template."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    folder = save_tiny(tmp_path_factory.mktemp("bare") / "target", kind="qwen2", seed=1, tokenizer=tokenizer)
    with slipstream.load(str(folder), max_rows=2) as session, running(session) as made:
        yield made


@pytest.fixture
def client(server: Running) -> openai.OpenAI:
    return server.client()
