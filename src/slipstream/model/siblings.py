"""Linear layers that read one tensor in turn: projections to query, key and value; gate and up.

Which those are is tried out, not looked up: in one forward, siblings that are called one after another with
the same tensor, which nobody has changed meanwhile. No large weight is read for that: every linear layer
gives zeros, laid out as a part of a wider product is, so a model whose code cannot take that fails here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from slipstream.model.packed import KernelLinear, packable


@dataclass(frozen=True)
class _Call:
    name: str
    layer: nn.Linear | KernelLinear
    given: torch.Tensor  # the very input
    copy: torch.Tensor

    @property
    def parent(self) -> str:
        return self.name.rpartition(".")[0]

    def may_join(self, first: _Call) -> bool:
        """Whether its weight can lie below the other's and its call comes with the same numbers."""
        mine, other = self.layer, first.layer
        return (
            isinstance(mine, nn.Linear)
            and isinstance(other, nn.Linear)
            and self.given is first.given
            and self.parent == first.parent
            and mine.weight.dtype == other.weight.dtype
            and (mine.bias is None) == (other.bias is None)
            and (self.given.is_meta or torch.equal(self.copy, first.copy))
        )


def find_siblings(model: nn.Module, forward: Callable[[], object]) -> list[tuple[str, ...]]:
    """Groups of plain linear layers of a model, by their names from it, each in the order of the calls.

    forward: calls the model with a few tokens. The model may be without data. None are found in one that
    cannot be called so.
    """
    free = packable(model)
    if len(free) < 2:
        return []
    calls: list[_Call] = []
    with ExitStack() as stack:
        for name, module in model.named_modules():
            if type(module) is nn.Linear or isinstance(module, KernelLinear):
                stack.enter_context(replaced(module, _recorder(calls, name, module)))
        try:
            forward()
        except Exception:  # whatever a model's own code raises: it is refused elsewhere, or has no data
            return []
    return [tuple(c.name for c in group) for group in _groups(calls, free) if len(group) > 1]


def _recorder(calls: list[_Call], name: str, layer: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    def call(x: torch.Tensor) -> torch.Tensor:
        calls.append(_Call(name, layer, x, x.clone()))
        return x.new_zeros(*x.shape[:-1], layer.out_features + 1)[..., :-1]

    return call


def _groups(calls: Sequence[_Call], free: dict[str, nn.Linear]) -> Iterator[list[_Call]]:
    """Runs of calls that may be one. A layer that is called more than once a forward stays alone."""
    times: dict[str, int] = {}
    for call in calls:
        times[call.name] = times.get(call.name, 0) + 1
    group: list[_Call] = []
    for call in calls:
        alone = call.name not in free or times[call.name] > 1
        if group and (alone or not call.may_join(group[0])):
            yield group
            group = []
        if not alone:
            group.append(call)
    if group:
        yield group


@contextmanager
def replaced(module: nn.Module, forward: Any) -> Iterator[None]:
    """`module.forward` is another function inside the block. Hooks stay, and so does a `forward` that was put
    on the module, as accelerate does."""
    before = vars(module).get("forward")
    module.forward = forward  # shadows the method
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before
