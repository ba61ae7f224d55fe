"""Step time without a machine at hand: the larger of memory traffic and arithmetic (Williams et al. 2009).

    T(rows, nodes, context) = max(bytes / bandwidth, operations / rate) + layers · layer_seconds

with tokens = rows · nodes; bytes are the weights once, the keys and values of every row's context once and
those of the new tokens; operations are two a weight and token, and the attention's. An estimate: real kernels
have overheads and steps of their own, which only a measurement shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from slipstream.cost.curve import StepTime
from slipstream.cost.machines import Machine
from slipstream.cost.shape import ModelShape

Floats = NDArray[np.float64]
MEMORY, COMPUTE = "memory-bound", "compute-bound"
EXTRA = (1, 4, 8, 16)  # how many more tokens to verify, in every report


@dataclass(frozen=True)
class Roofline:
    """Step times of a model on a machine; also the draft times of that model as a drafter, a token a pass."""

    machine: Machine
    shape: ModelShape

    def memory_seconds(self, rows: int, nodes: ArrayLike, context: float = 0.0) -> Floats:
        tokens = rows * np.asarray(nodes, dtype=np.float64)
        read = np.vectorize(self.shape.read_bytes, otypes=[float])(tokens)
        moved = read + (rows * context + tokens) * self.shape.kv_bytes
        return np.asarray(moved / (self.machine.bandwidth * self.machine.reached_bandwidth))

    def compute_seconds(self, rows: int, nodes: ArrayLike, context: float = 0.0) -> Floats:
        tokens = rows * np.asarray(nodes, dtype=np.float64)
        rate = self.machine.flops_of(self.shape.dtype) * self.machine.reached_flops
        return np.asarray(tokens * self.shape.flops(context) / rate)

    def seconds(self, rows: int, nodes: ArrayLike, context: float = 0.0) -> Floats:
        longer = np.maximum(
            self.memory_seconds(rows, nodes, context), self.compute_seconds(rows, nodes, context)
        )
        return longer + self.shape.layers * self.machine.layer_seconds

    def relative_error(self, rows: int, nodes: ArrayLike, context: float = 0.0) -> Floats:
        return np.zeros_like(np.asarray(nodes, dtype=np.float64))

    def draft_seconds(self, rows: int, depth: int, nodes: int, context: float = 0.0) -> float:
        """A pass a level; a level of a tree has nodes / depth tokens a row."""
        return depth * float(self.seconds(rows, nodes / depth, context)) if depth else 0.0

    def draft_error(self, rows: int, depth: int, nodes: int) -> float:
        return 0.0

    def intensity(self, rows: int, nodes: float, context: float = 0.0) -> float:
        """Operations a byte of such a step; the machine's ridge point is the one to compare it with."""
        tokens = rows * nodes
        moved = self.shape.read_bytes(tokens) + (rows * context + tokens) * self.shape.kv_bytes
        return tokens * self.shape.flops(context) / moved

    def regime(self, rows: int, nodes: float = 1, context: float = 0.0) -> str:
        ridge = self.machine.ridge(self.shape.dtype)
        return COMPUTE if self.intensity(rows, nodes, context) >= ridge else MEMORY

    def compute_bound_from(self, context: float = 0.0, limit: int = 1 << 20) -> int | None:
        """The smallest batch whose plain step is compute-bound; None: reading keys keeps it memory-bound."""
        rows = 1
        while rows <= limit and self.regime(rows, 1, context) == MEMORY:
            rows *= 2
        if rows > limit:
            return None
        low, high = rows // 2, rows
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.regime(middle, 1, context) == COMPUTE else (middle, high)
        return high


@dataclass(frozen=True)
class Free:
    """A drafter without a model (n-gram, suffix): its time is not counted."""

    def draft_seconds(self, rows: int, depth: int, nodes: int, context: float = 0.0) -> float:
        return 0.0

    def draft_error(self, rows: int, depth: int, nodes: int) -> float:
        return 0.0


def extra_cost(
    step: StepTime, rows: int, context: float = 0.0, extra: Sequence[int] = EXTRA
) -> dict[int, float]:
    """What verifying so many more tokens a row adds, as a share of the plain step."""
    plain = float(step.seconds(rows, 1, context))
    times = step.seconds(rows, [1 + k for k in extra], context)
    return {k: float(t) / plain - 1 for k, t in zip(extra, times, strict=True)}


def measured_regime(step: StepTime, rows: int, context: float = 0.0) -> str:
    """Compute-bound where further tokens cost at least half of what they would in proportion.

    With T = memory + arithmetic · tokens that is where arithmetic takes the longer part. The mean over 1, 4
    and 8 more tokens a row is taken, so that a single kink does not decide.
    """
    shares = [cost / k for k, cost in extra_cost(step, rows, context, (1, 4, 8)).items()]
    return COMPUTE if sum(shares) / len(shares) >= 0.5 else MEMORY


def spare_tokens(step: StepTime, rows: int, context: float = 0.0, price: float = 0.1, most: int = 16) -> int:
    """How many more tokens a row can be verified before the step takes `price` longer, up to `most`."""
    costs = extra_cost(step, rows, context, range(1, most + 1))
    return next((k - 1 for k, cost in costs.items() if cost > price), most)
