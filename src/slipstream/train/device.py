"""Where training runs: accelerate's set-up, batches on the device, and whether all of it fits."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from slipstream.errors import CapacityError, TrainingError
from slipstream.model import memory
from slipstream.model.progress import size
from slipstream.train.method import Method
from slipstream.train.samples import Batch
from slipstream.train.settings import FitSettings

_OPTIMIZER_BYTES = 12  # of a trained float32 parameter beside itself: its gradient and two moments


def require_memory(method: Method, settings: FitSettings) -> None:
    """CapacityError unless weights, gradients and moments of what is trained fit."""
    if settings.device != "cpu":
        free = torch.cuda.mem_get_info(settings.device)[0]
    else:
        free = memory.available()
    held = sum(p.numel() for p in method.trained().values())
    needed = held * _OPTIMIZER_BYTES
    if needed > free:
        raise CapacityError(
            f"training {held:,} parameters needs {size(needed)} more memory and {size(free)} are free: train"
            " fewer (--lora, fewer heads, a smaller --draft-vocab), or close other programs"
        )


@contextmanager
def accelerated(settings: FitSettings) -> Iterator[Any]:
    """An Accelerator for these settings; its process-wide state is put back."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    before = os.environ.get("ACCELERATE_USE_CPU")
    accelerator = Accelerator(
        cpu=settings.device == "cpu",
        mixed_precision="bf16" if settings.precision == "bf16" else "no",
    )
    try:
        if accelerator.num_processes > 1:
            raise TrainingError("training runs in one process: start it without a distributed launcher")
        yield accelerator
    finally:
        accelerator.free_memory()
        AcceleratorState._reset_state(True)
        if before is None:
            os.environ.pop("ACCELERATE_USE_CPU", None)


def on_device(batch: Batch, device: torch.device) -> Batch:
    return replace(
        batch,
        tokens=batch.tokens.to(device),
        loss=batch.loss.to(device),
        lengths=batch.lengths.to(device),
        features={k: v.to(device) for k, v in batch.features.items()},
        logits=None if batch.logits is None else (batch.logits[0].to(device), batch.logits[1].to(device)),
    )
