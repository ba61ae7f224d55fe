"""llama.cpp's own server, in this process through xllamacpp."""

from __future__ import annotations

from typing import Any

import xllamacpp
from llamacpp_http import Client
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
        self._client = Client(self._server.listening_address, self._config["eos_ids"])

    def answer(self, setting: str, ids: list[int], max_tokens: int) -> list[int]:
        return self._client.answer(ids, max_tokens)

    def told(self) -> dict[str, Any]:
        return self._client.told()

    def forget(self) -> None:
        """`ngram_mod` remembers what it saw of other requests: a new server does not."""
        if "ngram_mod" in self._config["speculative"]:
            del self._server
            self._start()


serve(LlamaCpp)
