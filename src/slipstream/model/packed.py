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
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence

import torch
from torch import nn

PACKABLE = (torch.bfloat16, torch.float32)


Groups = Sequence[Sequence[str]]
"""Names of linear layers from the model: together those that read one tensor in turn (`siblings`)."""


class Product(ABC):
    """The packed weight of one layer, or of layers that are called in turn with one tensor: their weights lie
    one below the other, the first to be called computes for all of them, and each gets its own columns."""

    in_features: int
    out_features: int  # of all layers

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._left = 0
        self._input: torch.Tensor | None = None
        self._given: torch.Tensor | None = None

    @abstractmethod
    def compute(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in_features] times the weight, with the bias [..., out_features]."""

    @abstractmethod
    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """These rows of the weight [n, in_features], a copy."""

    def columns(self, x: torch.Tensor, start: int, end: int) -> torch.Tensor:
        """One layer's part [..., end - start] of what `compute` gives; it may be a view.

        x must not be changed between the layers' calls. It is let go of with the last of them; another tensor
        is computed anew, by whichever layer it comes.
        """
        if self._layers == 1:
            return self.compute(x)
        if self._given is None or self._input is not x:
            self._input, self._given, self._left = x, self.compute(x), self._layers
        given = self._given
        self._left -= 1
        if not self._left:
            self._input = self._given = None
        return given[..., start:end]


class KernelLinear(nn.Module):
    """A linear layer whose weight only a kernel can read, and which is therefore no parameter.

    Its weight is some rows of a product's, from `start` on; so is its bias of the product's bias.
    """

    def __init__(self, product: Product, start: int, out_features: int, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.product, self.start = product, start
        self.in_features, self.out_features = product.in_features, out_features
        self.bias = bias

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weight, bias not counted."""
        raise NotImplementedError

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """These rows of the weight [n, in_features], as the product sees them, a copy."""
        return self.product.rows(ids + self.start)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product.columns(x, self.start, self.start + self.out_features)


def joined_biases(
    biases: Sequence[nn.Parameter | None],
) -> tuple[torch.Tensor | None, list[nn.Parameter | None]]:
    """The biases of a product's layers, which all or none of them have: end to end, and as parts of that."""
    given = [b.detach() for b in biases if b is not None]
    if len(given) < 2:
        return biases[0], list(biases)
    whole = torch.cat(given)  # [out]
    parts = [whole[at : at + len(b)] for at, b in zip(starts(map(len, given)), given, strict=True)]
    return whole, [nn.Parameter(part, requires_grad=False) for part in parts]


def starts(sizes: Iterable[int]) -> Iterator[int]:
    """Where each of the parts of these sizes begins."""
    at = 0
    for size in sizes:
        yield at
        at += size


class PackedProduct(Product):
    """Of oneDNN's own layout; inputs are of the weight's dtype."""

    def __init__(self, weights: Sequence[torch.Tensor], bias: torch.Tensor | None) -> None:
        """weights [each out, in]; bias [sum of them]."""
        super().__init__(len(weights))
        weight = weights[0] if len(weights) == 1 else torch.cat(list(weights))
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        self.bias = bias

    def dense(self) -> torch.Tensor:
        """The weight [out_features, in_features] as it was, a copy."""
        weight: torch.Tensor = self.packed.to_dense()
        return weight

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        return self.dense()[ids]

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return y


class PackedLinear(KernelLinear):
    """`x @ weight.T + bias` with a packed weight; input [..., in_features] of the weight's dtype."""

    product: PackedProduct

    @classmethod
    def of(cls, linear: nn.Linear) -> PackedLinear:
        return cls.together([linear])[0]

    @classmethod
    def together(cls, layers: Sequence[nn.Linear]) -> list[PackedLinear]:
        """Layers of one input, one dtype, and all or none of them with a bias, as one product."""
        bias, biases = joined_biases([layer.bias for layer in layers])
        product = PackedProduct([layer.weight.detach() for layer in layers], bias)
        sizes = [layer.out_features for layer in layers]
        return [cls(product, *part) for part in zip(starts(sizes), sizes, biases, strict=True)]

    @property
    def weight_bytes(self) -> int:
        return self.in_features * self.out_features * self.product.dtype.itemsize

    def dense(self) -> torch.Tensor:
        """The weight [out_features, in_features] as it was, a copy."""
        return self.product.dense()[self.start : self.start + self.out_features]


def can_pack(model: nn.Module) -> bool:
    """Whether this machine and the model's dtype have packed kernels."""
    parameter = next(model.parameters(), None)
    return (
        parameter is not None
        and parameter.device.type == "cpu"
        and parameter.dtype in PACKABLE
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and (parameter.dtype != torch.bfloat16 or computes_bfloat16())
    )


def computes_bfloat16() -> bool:
    """Whether this CPU has fast products of bfloat16. Without AVX-512 (or Arm's instructions for it) they are
    made of single conversions: a step of a 1.5B took 0.68 s on two AVX2 cores, and 0.36 s in float32."""
    return bool(
        torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    """The plain `nn.Linear`s below a model, by their names from it; one in two places is there twice."""
    return {
        f"{path}.{name}" if path else name: child
        for path, parent in model.named_modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear
    }


def packable(model: nn.Module) -> dict[str, nn.Linear]:
    """Those of `linears` whose weight no embedding shares."""
    shared = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    return {name: linear for name, linear in linears(model).items() if id(linear.weight) not in shared}


def units(names: Collection[str], groups: Groups = ()) -> list[Sequence[str]]:
    """The names: those of a group together where all of it is among them, the others alone."""
    whole = [group for group in groups if all(name in names for name in group)]
    grouped = {name for group in whole for name in group}
    return [*whole, *((name,) for name in names if name not in grouped)]


def put(model: nn.Module, name: str, module: nn.Module) -> None:
    """Let a module of that name from the model be this one."""
    parent, _, own = name.rpartition(".")
    setattr(model.get_submodule(parent), own, module)


def pack_linears(model: nn.Module, groups: Groups = ()) -> int:
    """Replace every plain `nn.Linear` in place and free its weight; gives the number replaced.

    Those of a group become one product. A head that shares its weight with the embedding stays as it is:
    packing it would keep it twice.
    """
    found = packable(model)
    count = len(found)
    for names in units(found, groups):
        layers = [found.pop(name) for name in names]
        for name, layer, packed in zip(names, layers, PackedLinear.together(layers), strict=True):
            put(model, name, packed)
            release_pages(layer.weight)
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
