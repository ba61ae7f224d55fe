"""llama.cpp's server as a peer: asked over HTTP, which costs a millisecond an answer."""

from __future__ import annotations

import http.client
import json
from abc import ABC, abstractmethod
from typing import Any
from urllib.parse import urlsplit


class LlamaCpp(ABC):
    """config: eos_ids end an answer; speculative is as `llamacpp_params.parameters` takes it."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self._at = urlsplit(self.start())
        self._timings: dict[str, Any] = {}
        self.about = self.build()

    @abstractmethod
    def start(self) -> str:
        """A server that is ready; gives its address."""

    @abstractmethod
    def stop(self) -> None: ...

    @abstractmethod
    def build(self) -> dict[str, Any]:
        """Which build it is."""

    def answer(self, setting: str, ids: list[int], max_tokens: int) -> list[int]:
        body = {
            "prompt": ids,
            "n_predict": max_tokens,
            "temperature": 0.0,
            "top_k": 1,
            "cache_prompt": False,
            "return_tokens": True,
        }
        told = self._post("/completion", body)
        out = [int(token) for token in told["tokens"]]
        ends = self.config["eos_ids"]
        if told["stop_type"] == "eos" and (not out or out[-1] not in ends):
            out.append(ends[0])  # it generated one, and leaves it out of what it tells
        self._timings = told["timings"]
        return out

    def told(self) -> dict[str, Any]:
        inside = (self._timings["prompt_ms"] + self._timings["predicted_ms"]) / 1e3
        return {
            "drafted": self._timings.get("draft_n", 0),
            "accepted": self._timings.get("draft_n_accepted", 0),
            "seconds_inside": inside,
        }

    def forget(self) -> None:
        """`ngram_mod` remembers what it saw of other requests: a new server does not."""
        if "ngram_mod" in self.config["speculative"]:
            self.stop()
            self._at = urlsplit(self.start())

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        # A line of its own each time: the server hangs up on one that rested for some seconds.
        line = http.client.HTTPConnection(self._at.hostname or "127.0.0.1", self._at.port, timeout=3600)
        try:
            line.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            response = line.getresponse()
            told = json.loads(response.read())
        finally:
            line.close()
        if response.status != 200:
            raise RuntimeError(f"llama.cpp answered {response.status}: {told.get('error', told)}")
        return told
