"""How a drafter is trained: the options of the loop."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from slipstream.errors import ParameterError


@dataclass(frozen=True, slots=True)
class FitSettings:
    """How to train. The first block decides the weights; the second when to look, save and stop.

    steps: 0 takes them from epochs. warmup: the share of steps over which the rate rises. floor: the rate's
    share at the end. clip: largest norm of the gradients. max_tokens and minutes: 0 is no limit; minutes are
    of this call. heldout_batches: measured each time, 0 is all.
    """

    lr: float = 1e-3
    epochs: float = 2.0
    steps: int = 0
    batch_size: int = 8
    accumulation: int = 1
    warmup: float = 0.1
    floor: float = 0.0
    clip: float = 1.0
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    seed: int = 0
    precision: Literal["fp32", "bf16"] = "fp32"

    device: str = "cpu"
    max_tokens: int = 0
    minutes: float = 0.0
    checkpoint_every: int = 100
    measure_every: int = 100
    heldout_batches: int = 0

    def __post_init__(self) -> None:
        for name, least in (("batch_size", 1), ("accumulation", 1), ("checkpoint_every", 1)):
            if getattr(self, name) < least:
                raise ParameterError(f"{name} must be at least {least}, not {getattr(self, name)}")
        for name in ("steps", "max_tokens", "minutes", "measure_every", "heldout_batches", "weight_decay"):
            if getattr(self, name) < 0:
                raise ParameterError(f"{name} must be 0 or more, not {getattr(self, name)}")
        for name in ("lr", "epochs", "weight_decay", "minutes", "warmup", "floor"):
            if not math.isfinite(getattr(self, name)):
                raise ParameterError(f"{name} must be a number, not {getattr(self, name)}")
        if math.isnan(self.clip):
            raise ParameterError(f"clip must be a number, not {self.clip}")
        for name, most in (("epochs", 1_000_000), ("lr", 1000), ("weight_decay", 1000)):
            if getattr(self, name) > most:
                raise ParameterError(f"{name} must be at most {most}, not {getattr(self, name):g}")
        if not -(1 << 63) <= self.seed < 1 << 63:
            raise ParameterError(f"seed must fit into 64 bits, not {self.seed}")
        if self.lr <= 0 or self.clip <= 0 or (not self.steps and self.epochs <= 0):
            raise ParameterError("lr, clip and epochs must be more than 0")
        if not 0 <= self.warmup < 1 or not 0 <= self.floor <= 1:
            raise ParameterError("warmup must be in [0, 1) and floor in [0, 1]")

    def decisive(self) -> dict[str, Any]:
        """What a resumed run must have in common with the one before it."""
        free = ("device", "max_tokens", "minutes", "checkpoint_every", "measure_every", "heldout_batches")
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items() if k not in free}

    def rate(self, step: int, total: int) -> float:
        """The learning rate's share in step 0, 1, … of total: linear warm-up, then half a cosine."""
        warm = math.ceil(self.warmup * total)
        if step < warm:
            return (step + 1) / warm
        along = (step - warm) / max(1, total - warm)
        return self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * along))
