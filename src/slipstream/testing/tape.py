"""What a CUDA graph does, on a CPU: a step's operators are written down once and run again without Python.

So a step that is right only because its Python runs again (it reads a length, it makes a tensor anew, it
asks for a value) is found out without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from slipstream.model.graphs import RecordError

T = TypeVar("T")
_ASKS = ("aten::_local_scalar_dense", "aten::item", "aten::nonzero", "aten::is_nonzero", "aten::equal")


class OpTape:
    """A `Recorder`. recorded: how often; replayed: how often one of them was run again."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def record(self, work: Callable[[], T]) -> Callable[[], T]:
        with _Writing() as tape:
            outputs = work()
        self.recorded += 1

        def replay() -> T:
            self.replayed += 1
            tape.run()
            return outputs

        return replay

    def forget(self) -> None:
        """The counts stay."""


class _Writing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Operators in order, with the very tensors they read and gave."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Any]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.name().split(".")[0] in _ASKS:
            raise RecordError(f"a step cannot ask for a value: {func}")
        given = func(*args, **(kwargs or {}))
        self._calls.append((func, args, kwargs or {}, tree_leaves(given)))
        return given

    @torch.inference_mode()
    def run(self) -> None:
        """Again, into the same memory."""
        for func, args, kwargs, given in self._calls:
            for old, new in zip(given, tree_leaves(func(*args, **kwargs)), strict=True):
                # A view, or what was changed in place, is where it was.
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)
