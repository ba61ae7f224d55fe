"""Drafts nothing: plain decoding through the same loop, the baseline of every comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.drafters.base import (
    Draft,
    Drafter,
    DraftRequest,
    MemoryEstimate,
    TargetInfo,
    TargetShape,
    empty_draft,
)


@dataclass(frozen=True, slots=True)
class NoConfig:
    """No options."""


class NoDrafter(Drafter):
    name = "none"
    Config = NoConfig
    num_speculative_tokens = 0

    def __init__(self, config: NoConfig, target: TargetInfo) -> None:
        pass

    @classmethod
    def predict_memory(cls, config: NoConfig, target: TargetShape) -> MemoryEstimate:
        return MemoryEstimate()

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [empty_draft(r) for r in requests]
