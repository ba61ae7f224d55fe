"""Linear layers packed once into oneDNN's own weight layout.

PyTorch's ordinary `Linear` reorders its bf16 weight on every call. Its own operators also take a
weight that was reordered before, which is what this module does, once, in place, so that weights
are never kept twice. Measured by `bench/foundation.py`.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import sys

import torch
from torch import nn

PACKABLE = (torch.bfloat16, torch.float32)


class KernelLinear(nn.Module):
    """A linear layer whose weight only a kernel can read, and which is therefore no parameter."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weight, bias not counted."""
        raise NotImplementedError

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """These rows of the weight [n, in_features], a copy."""
        raise NotImplementedError


class PackedLinear(KernelLinear):
    """`x @ weight.T + bias` with a packed weight; input [..., in_features] of the weight's dtype."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.dtype = linear.weight.dtype
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None)
        self.bias = linear.bias

    @property
    def weight_bytes(self) -> int:
        return self.in_features * self.out_features * self.dtype.itemsize

    def dense(self) -> torch.Tensor:
        """The weight [out_features, in_features] as it was, a copy."""
        weight: torch.Tensor = self.packed.to_dense()
        return weight

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        return self.dense()[ids]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return y


def can_pack(model: nn.Module) -> bool:
    """Whether this machine and the model's dtype have packed kernels."""
    parameter = next(model.parameters(), None)
    return (
        parameter is not None
        and parameter.device.type == "cpu"
        and parameter.dtype in PACKABLE
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and (parameter.dtype != torch.bfloat16 or torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def pack_linears(model: nn.Module) -> int:
    """Replace every plain `nn.Linear` in place and free its weight; gives the number replaced.

    A head that shares its weight with the embedding stays as it is: packing it would keep it twice.
    """
    shared = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is not nn.Linear or id(child.weight) in shared:
                continue
            setattr(parent, name, PackedLinear(child))
            release_pages(child.weight)
            count += 1
    gc.collect()
    return count


_MADV_PAGEOUT = 21  # Linux 5.4: give clean pages back now; they are read again if touched


def release_pages(tensor: torch.Tensor) -> None:
    """Let go of the file pages behind a tensor that was read from a mapped checkpoint.

    A mapping lives until its last tensor dies, and the embedding does not, so without this the whole
    file would stay resident beside its packed copy. Advice only: it changes no data, and where the
    system does not know it, nothing happens.
    """
    if not sys.platform.startswith("linux") or tensor.device.type != "cpu":
        return
    start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (tensor.data_ptr() + tensor.nbytes - start) // mmap.PAGESIZE * mmap.PAGESIZE
    if length > 0:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _MADV_PAGEOUT)


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all weights, packed ones included, each counted once."""
    plain = {id(p): p.nbytes for p in [*model.parameters(), *model.buffers()]}
    packed = sum(m.weight_bytes for m in model.modules() if isinstance(m, KernelLinear))
    return sum(plain.values()) + packed
