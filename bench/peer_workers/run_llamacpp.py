"""llama.cpp's own server, in this process through xllamacpp."""

from __future__ import annotations

from typing import Any

import xllamacpp
from llamacpp_http import LlamaCpp
from llamacpp_params import about, parameters
from protocol import serve


class Xllamacpp(LlamaCpp):
    def start(self) -> str:
        self._server = xllamacpp.Server(parameters(self.config))
        return str(self._server.listening_address)

    def stop(self) -> None:
        del self._server

    def build(self) -> dict[str, Any]:
        return about()


serve(Xllamacpp)
