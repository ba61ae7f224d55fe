"""transformers' `generate`: one target and one assistant in memory, its settings by turns."""

from __future__ import annotations

from typing import Any

import torch
from protocol import serve

from common import versions
from foundation import hf_settings


class Transformers:
    def __init__(self, config: dict[str, Any]) -> None:
        """settings: name -> that of `foundation.hf_settings`."""
        torch.set_num_threads(config["threads"])
        settings = hf_settings(config["target"], config["draft"])
        self._settings = {name: settings[of] for name, of in config["settings"].items()}
        self.about = {"versions": versions()}

    def answer(self, setting: str, ids: list[int], max_tokens: int) -> list[int]:
        return self._settings[setting](ids, max_tokens)

    def told(self) -> dict[str, Any]:
        return {}

    def forget(self) -> None:
        pass


serve(Transformers)
