"""llama.cpp's own server, in this process through xllamacpp; asked over HTTP, which costs a millisecond."""

from __future__ import annotations

import http.client
import json
from typing import Any
from urllib.parse import urlsplit

import xllamacpp
from llamacpp_params import about, parameters
from protocol import serve


class LlamaCpp:
    def __init__(self, config: dict[str, Any]) -> None:
        """As `llamacpp_params.parameters`; eos_ids: the ids that end an answer."""
        self._config = config
        self._start()
        self.about = about()

    def _start(self) -> None:
        self._server = xllamacpp.Server(parameters(self._config))
        at = urlsplit(self._server.listening_address)
        self._line = http.client.HTTPConnection(at.hostname or "127.0.0.1", at.port, timeout=3600)

    def answer(self, setting: str, ids: list[int], max_tokens: int) -> list[int]:
        body = {
            "prompt": ids,
            "n_predict": max_tokens,
            "temperature": 0.0,
            "top_k": 1,
            "cache_prompt": False,
            "return_tokens": True,
        }
        self._line.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
        response = self._line.getresponse()
        told = json.loads(response.read())
        if response.status != 200:
            raise RuntimeError(f"llama.cpp answered {response.status}: {told.get('error', told)}")
        out = [int(token) for token in told["tokens"]]
        ends = self._config["eos_ids"]
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
        if "ngram_mod" in (self._config.get("speculative") or {}):
            self._line.close()
            del self._server
            self._start()


serve(LlamaCpp)
