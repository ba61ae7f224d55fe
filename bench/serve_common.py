"""What the benches of the server share: starting one, asking it, and reading its metrics."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from slipstream.errors import ParameterError

START_SECONDS = 900.0


@dataclass
class Served:
    """A running server. process: None if it is somebody else's."""

    url: str
    model: str
    process: psutil.Process | None = None

    def metrics(self) -> dict[str, float]:
        """Samples by name, labels left out and added up."""
        told: dict[str, float] = {}
        for line in httpx.get(f"{self.url}/metrics", timeout=60).text.splitlines():
            if not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                key = name.split("{")[0].split(":")[-1]
                told[key] = told.get(key, 0.0) + float(value)
        return told

    @property
    def resident_bytes(self) -> int:
        assert self.process is not None
        return int(self.process.memory_info().rss)


@contextmanager
def serve(model: str, *options: str, log: Path) -> Iterator[Served]:
    """`slipstream serve` on a free port, with its log in a file; ended at the end."""
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "slipstream.cli.main", "serve", model, "--port", "0", *options]
    with log.open("w", encoding="utf-8") as out:
        child = subprocess.Popen(command, stdout=out, stderr=out)
        try:
            url = _address(child, log)
            yield Served(url, find_model(url), psutil.Process(child.pid))
        finally:
            child.terminate()
            child.wait(120)


def _address(child: subprocess.Popen[bytes], log: Path) -> str:
    """Where `slipstream serve` says it is, once it answers there."""

    def ready() -> str | None:
        found = re.search(r"at (http://\S+)", log.read_text(encoding="utf-8"))
        return found[1] if found and answers(f"{found[1]}/ready") else None

    return wait_until(child, ready, log)


def answers(url: str) -> bool:
    """Whether a GET gives 200."""
    try:
        return httpx.get(url, timeout=60).status_code == 200
    except httpx.TransportError:
        return False


def wait_until(child: subprocess.Popen[bytes], ready: Callable[[], str | None], log: Path) -> str:
    """What `ready` gives, once it gives something. ParameterError if the server ends before, or is late."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        found = ready()
        if found is not None:
            return found
        if child.poll() is not None:
            raise ParameterError(f"the server ended: {log.read_text(encoding='utf-8')[-500:]}")
        time.sleep(0.2)
    raise ParameterError(f"the server was not ready within {START_SECONDS:.0f} s: see {log}")


def find_model(url: str) -> str:
    """The first model that a server lists."""
    return str(httpx.get(f"{url}/v1/models", timeout=60).json()["data"][0]["id"])


@dataclass
class Reply:
    """One answer as a client saw it: seconds since it was asked for. tokens: as the server counts them."""

    first: float
    whole: float
    tokens: int
    text: str = ""
    arrivals: list[float] = field(default_factory=list)


async def ask(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> Reply:
    """A streamed chat or completion; raises httpx.HTTPStatusError for what is refused."""
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    whole = {**body, "stream": True, "stream_options": {"include_usage": True}}
    began = time.perf_counter()
    reply = Reply(0.0, 0.0, 0)
    async with client.stream("POST", url + path, json=whole) as response:
        if response.status_code != 200:
            await response.aread()
            response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise RuntimeError(chunk["error"]["message"])
            for choice in chunk["choices"]:
                text = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
                if text:
                    reply.arrivals.append(time.perf_counter() - began)
                    reply.text += text
            if chunk.get("usage"):
                reply.tokens = int(chunk["usage"]["completion_tokens"])
    reply.whole = time.perf_counter() - began
    reply.first = reply.arrivals[0] if reply.arrivals else reply.whole
    return reply
