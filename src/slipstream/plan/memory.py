"""Will it fit? The memory of a target and a drafter, predicted before either is loaded.

The target's numbers come from its modules without data (`model.blueprint`), the drafter's from itself
(`Drafter.predict_memory`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from slipstream.core.estimate import MemoryEstimate
from slipstream.drafters import TargetShape, predict_memory
from slipstream.errors import ModelError
from slipstream.model import memory
from slipstream.model.blueprint import Blueprint
from slipstream.model.cache import WIDTH
from slipstream.model.int8 import INT8_FIX, require_int8


@dataclass(frozen=True)
class MemoryPlan:
    """What decoding would take, in bytes. drafter: beyond the target. available: what may be taken now.

    dtype: of the target's weights, where `weights` (and `embedding`) are not int8. context: tokens of a row.
    rows: sequences at once.
    """

    model: str
    drafter_spec: str
    dtype: str
    device: str
    context: int
    rows: int
    target: MemoryEstimate
    drafter: MemoryEstimate
    available: int
    weights: str = "plain"
    embedding: str = "plain"

    @property
    def needed(self) -> int:
        """Both, and a twentieth of the weights to work in."""
        return self.target.total + self.drafter.total + (self.target.weights + self.drafter.weights) // 20

    @property
    def fits(self) -> bool:
        """False is certain; True is not where something of the drafter is unknown."""
        return self.needed <= self.available

    @property
    def largest_context(self) -> int:
        """Most tokens of a row, a multiple of the cache's width, for which it would fit; 0 if none."""
        growing = self.target.cache + self.drafter.cache
        fixed = self.needed - growing
        if not growing or fixed > self.available:
            return 0
        tokens = self.context * (self.available - fixed) // growing
        return min(tokens // WIDTH * WIDTH, self.context)

    @property
    def advice(self) -> str:
        """What to do if it does not fit."""
        ways = []
        if 0 < self.largest_context < self.context:
            ways.append(f"--context {self.largest_context}")
        if self.rows > 1:
            ways.append("a smaller --batch")
        if self.dtype == "float32" and self.weights == "plain":
            ways.append("--dtype bfloat16, which halves the weights")
        if self.weights == "plain" and _has_int8(self.device):
            ways.append("--weights int8, a model of its own that is nearly the same")
        if self.drafter.total > self.needed // 20:
            ways.append("a drafter that holds less (slipstream drafters)")
        return f"close other programs, or try {', '.join([*ways, 'a smaller model'])}"


def plan_memory(
    model: str,
    drafter: str = "none",
    *,
    context: int | None = None,
    rows: int = 1,
    dtype: str = "auto",
    device: str = "cpu",
    weights: str = "plain",
    embedding: str = "plain",
    trust_remote_code: bool = False,
) -> MemoryPlan:
    """Nothing is downloaded or loaded. context: None is the model's own, which is also the most.

    rows >= 1. weights, embedding: as to `slipstream.load`. Raises ParameterError, ModelError, DrafterError
    for what could not be loaded, as loading would.
    """
    if weights == "int8":
        require_int8(device, INT8_FIX)
    shape = Blueprint.of(
        model,
        dtype=dtype,
        device=device,
        weights=weights,
        embedding=embedding,
        trust_remote_code=trust_remote_code,
    )
    tokens = min(context or shape.runner.context, shape.runner.context)
    chosen = str(shape.dtype).removeprefix("torch.")
    target = TargetShape(
        shape.runner.vocab_size, tokens, rows, chosen, device, shape, trust_remote_code=trust_remote_code
    )
    return MemoryPlan(
        model=model,
        drafter_spec=drafter,
        dtype=chosen,
        device=device,
        context=tokens,
        rows=rows,
        target=MemoryEstimate(shape.weight_bytes, shape.cache_bytes(tokens, rows), notes=shape.notes),
        drafter=predict_memory(drafter, target),
        available=available(device),
        weights=weights,
        embedding=embedding,
    )


def _has_int8(device: str) -> bool:
    try:
        require_int8(device)
    except ModelError:
        return False
    return True


def available(device: str) -> int:
    """Bytes that may still be taken of the device's memory."""
    where = torch.device(device)
    return torch.cuda.mem_get_info(where)[0] if where.type == "cuda" else memory.available()
