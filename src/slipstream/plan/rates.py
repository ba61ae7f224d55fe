"""What this machine gives at most: memory read a second, and arithmetic of a matrix product."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch

from slipstream.model.int8 import Int8Product, float_product, product, quantise_input

_READ_BYTES = {"cpu": 1 << 28, "cuda": 1 << 31}
_SIDE = {"cpu": 1024, "cuda": 8192}


def best_seconds(work: Callable[[], object], device: torch.device, repeats: int = 5) -> float:
    """The shortest of some runs after a warm-up; the device has finished when a run ends."""
    found = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - began)
    return min(found[1:])


@torch.inference_mode()
def bandwidth(device: torch.device, size: int | None = None) -> float:
    """Bytes a second read from memory, by summing a tensor that no cache holds."""
    count = (size or _READ_BYTES[device.type]) // 4
    values = torch.ones(count, dtype=torch.float32, device=device)
    return count * 4 / best_seconds(values.sum, device)


@torch.inference_mode()
def matrix_rate(device: torch.device, dtype: torch.dtype, side: int | None = None) -> float:
    """Operations a second of a square matrix product, two a multiply-add."""
    side = side or _SIDE[device.type]
    left = torch.ones((side, side), dtype=dtype, device=device)
    return 2 * side**3 / best_seconds(lambda: left @ left, device)


@torch.inference_mode()
def int8_rate(side: int | None = None) -> float:
    """The same of int8 weights, on a CPU."""
    side = side or _SIDE["cpu"]
    made = Int8Product([(torch.ones((side, side), dtype=torch.int8), torch.ones(side))], None)
    left = torch.ones((side, side))
    if made.whole:
        work = partial(product, quantise_input(left)[0], made.kept, made.scales, made.zeros)
    else:
        work = partial(float_product, left, made.kept, made.scales)
    return 2 * side**3 / best_seconds(work, torch.device("cpu"))
