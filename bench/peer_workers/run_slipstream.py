"""Slipstream as a peer among peers: one target, its drafters by turns, through the public API."""

from __future__ import annotations

from typing import Any

import torch
from protocol import serve

import slipstream
from common import versions
from drafters import Workshop
from slipstream import SamplingParams


class Slipstream:
    def __init__(self, config: dict[str, Any]) -> None:
        """weights: "bf16", or another that `slipstream.load` knows. settings: name -> drafter."""
        torch.set_num_threads(config["threads"])
        weights = config["weights"]
        options = {} if weights == "bf16" else {"weights": weights}
        self._session = slipstream.load(config["target"], dtype="bfloat16", **options)
        self._workshop = Workshop(self._session.info, config["draft"])
        self._specs = config["settings"]
        self._drafters = {name: self._workshop.build(spec) for name, spec in self._specs.items()}
        self.about = {"versions": versions()}

    def answer(self, setting: str, ids: list[int], max_tokens: int) -> list[int]:
        self._session.engine.set_drafter(self._drafters[setting])
        done = self._session.generate(ids, SamplingParams(max_tokens=max_tokens, temperature=0.0))
        self._counts = done.counts
        return list(done.tokens)

    def told(self) -> dict[str, Any]:
        return {"drafted": self._counts.draft_tokens, "accepted": self._counts.accepted_tokens}

    def forget(self) -> None:
        for name, drafter in self._drafters.items():
            if drafter.learns:
                self._drafters[name] = self._workshop.build(self._specs[name])
                drafter.shutdown()


serve(Slipstream)
