"""Layers that read the same input quantise it once: projections to query, key and value; gate and up.

Which layers those are is tried out, not looked up: in one forward, siblings that are called one after another
with the same tensor, which nobody has changed meanwhile. The numbers are the same as without.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from slipstream.model.int8 import Int8Linear, SharedInput
from slipstream.model.pack import PackRow
from slipstream.model.runner import Runner

_TOKENS = [1, 2, 3]


@dataclass(frozen=True)
class _Call:
    layer: Int8Linear
    parent: str
    given: torch.Tensor  # the very input
    copy: torch.Tensor


def share_inputs(runner: Runner) -> int:
    """Let int8 layers of a runner's model share their quantised inputs; gives the number of groups."""
    calls = _record(runner)
    groups = [group for group in _siblings(calls) if len(group) > 1]
    for group in groups:
        shared = SharedInput(len(group))
        for call in group:
            call.layer.shared = shared
    return len(groups)


def _record(runner: Runner) -> list[_Call]:
    """Every int8 layer's call of one small forward, in order."""
    calls: list[_Call] = []
    handles = []
    for name, module in runner.model.named_modules():
        if isinstance(module, Int8Linear):
            parent = name.rpartition(".")[0]

            def entering(layer: nn.Module, args: tuple[torch.Tensor, ...], parent: str = parent) -> None:
                assert isinstance(layer, Int8Linear)
                calls.append(_Call(layer, parent, args[0], args[0].clone()))

            handles.append(module.register_forward_pre_hook(entering))
    slot = -1
    runner.cache.open(slot)
    try:
        with runner.altered(None):
            runner.forward([PackRow(slot, _TOKENS)], logits="none", taps=False)
    finally:
        runner.cache.close(slot)
        for handle in handles:
            handle.remove()
    return calls


def _siblings(calls: list[_Call]) -> Iterator[list[_Call]]:
    """Runs of calls that may share. A layer that is called more than once a forward shares nothing."""
    times: dict[int, int] = {}
    for call in calls:
        times[id(call.layer)] = times.get(id(call.layer), 0) + 1
    group: list[_Call] = []
    for call in calls:
        first = group[0] if group else None
        same = (
            first is not None
            and call.given is first.given
            and call.parent == first.parent
            and torch.equal(call.copy, first.copy)
            and times[id(call.layer)] == times[id(first.layer)] == 1
        )
        if not same:
            if group:
                yield group
            group = []
        group.append(call)
    if group:
        yield group
