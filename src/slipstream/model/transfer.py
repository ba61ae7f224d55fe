"""Numbers made here, onto the device that computes, without waiting for it."""

from __future__ import annotations

import torch


def put(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """values, which lie in main memory, on the device. On a CPU they are themselves.

    A copy out of ordinary memory makes the host wait until all that the GPU has to do is done; out of pinned
    memory it is one more thing to do. PyTorch gives the pinned memory out again only when it is done.
    """
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)
