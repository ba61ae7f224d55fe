"""Recording what a step launches on a GPU, to launch it again at once: CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

from slipstream.errors import ModelError
from slipstream.model.quiet import first_line

T = TypeVar("T")
_WARM_UPS = 2  # a first call may choose kernels, load them and take memory: nothing to record


class RecordError(ModelError):
    """What was to be recorded did something that a recording cannot hold."""


class Recorder(Protocol):
    """Turns work on tensors that stay where they are into work without Python."""

    def record(self, work: Callable[[], T]) -> Callable[[], T]:
        """Called, the result does again what `work` did to its tensors, on what they hold then, and gives the
        same outputs, filled anew. Raises RecordError."""

    def forget(self) -> None:
        """Nothing that was recorded is there any more."""


class CudaGraphs:
    """`Recorder` by CUDA graphs, which share one pool of memory: they run one after the other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], T]) -> Callable[[], T]:
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            aside.wait_stream(current)
            with torch.cuda.stream(aside):
                for _ in range(_WARM_UPS):
                    work()
            current.wait_stream(aside)
            graph = torch.cuda.CUDAGraph()
            try:
                # Other threads of a server may talk to the GPU meanwhile.
                with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                    outputs = work()
            except RuntimeError as error:
                torch.cuda.set_stream(current)  # a capture that fails leaves its own in place
                raise RecordError(f"a step cannot become a CUDA graph: {first_line(error)}") from error

        def replay() -> T:
            graph.replay()
            return outputs

        return replay

    def forget(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()  # a pool ends with its last graph
