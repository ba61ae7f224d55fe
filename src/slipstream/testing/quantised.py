"""int8 in tests: whether this CPU has it, tiny models that are int8 throughout, and a wrong recipe."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch

from slipstream.errors import SlipstreamError
from slipstream.model import int8


def lacks_int8() -> bool:
    """Whether this CPU has no products of int8 weights."""
    try:
        int8.require_int8()
    except SlipstreamError:
        return True
    return False


@contextmanager
def every_size() -> Iterator[None]:
    """Layers of any size are made int8 inside: those of tiny models are too small to gain."""
    with mock.patch.object(int8, "SMALLEST", 0):
        yield


def kernels() -> list[str]:
    """The products of int8 weights that this CPU has: whole numbers, floats."""
    failures = {"whole numbers": int8.whole_numbers_fail, "floats": int8.floats_fail}
    return [name for name, fails in failures.items() if not fails()]


@contextmanager
def kernel(name: str) -> Iterator[None]:
    """One of `kernels` multiplies what is made int8 inside."""
    with mock.patch.object(int8, "uses_whole_numbers", lambda: name == "whole numbers"):
        yield


@contextmanager
def one_scale_for_all_rows() -> Iterator[None]:
    """The recipe of whole numbers that must not be: the largest of all rows scales activations, so neighbours
    matter."""

    def together(flat: torch.Tensor) -> torch.Tensor:
        return (flat.abs().amax().clamp_min(1e-30) / int8.LARGEST).expand(len(flat), 1)

    with mock.patch.object(int8, "activation_scales", together):
        yield
