"""llama.cpp's server as a client sees it. HTTP costs a millisecond an answer."""

from __future__ import annotations

import http.client
import json
from typing import Any
from urllib.parse import urlsplit


class Client:
    """eos_ids: the ids that end an answer. timings: llama.cpp's own, of the last answer."""

    def __init__(self, address: str, eos_ids: list[int]) -> None:
        self._at = urlsplit(address)
        self._eos_ids = eos_ids
        self.timings: dict[str, Any] = {}

    def answer(self, ids: list[int], max_tokens: int) -> list[int]:
        """The ids of a greedy answer, the end token included, by no cache of prompts."""
        told = self._post(
            "/completion",
            {
                "prompt": ids,
                "n_predict": max_tokens,
                "temperature": 0.0,
                "top_k": 1,
                "cache_prompt": False,
                "return_tokens": True,
            },
        )
        out = [int(token) for token in told["tokens"]]
        if told["stop_type"] == "eos" and (not out or out[-1] not in self._eos_ids):
            out.append(self._eos_ids[0])  # it generated one, and leaves it out of what it tells
        self.timings = told["timings"]
        return out

    def told(self) -> dict[str, Any]:
        inside = (self.timings["prompt_ms"] + self.timings["predicted_ms"]) / 1e3
        return {
            "drafted": self.timings.get("draft_n", 0),
            "accepted": self.timings.get("draft_n_accepted", 0),
            "seconds_inside": inside,
        }

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
