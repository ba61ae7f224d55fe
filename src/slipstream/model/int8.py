"""Linear layers with int8 weights, of targets and drafts: half the memory and memory traffic of bfloat16.

Weights have a scale per output channel. Two kernels of PyTorch's own multiply them:

- *whole numbers*, on CPUs with int8 dot products (VNNI, AMX): oneDNN's product of uint8 activations and int8
  weights. Activations have a scale per *row*, applied outside the kernel: with the kernel's own scale, one
  for all rows, a row's result would depend on its neighbours. They are unsigned around a zero point of 128
  because signed ones fall to a slow reference kernel. The relative error is about 1 %.
- *floats*, on all others: bfloat16 activations, sums in float32, row by row. Only the weights' error is left.
  Slower at many rows, but the weights are read as bytes, where there is not even a fast bfloat16.

Both take the same numbers, so what is kept on disk serves either; the models are two, nearly the same.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import nn

from slipstream.errors import ModelError
from slipstream.model.embedding import Int8Embedding
from slipstream.model.pack import ROWS
from slipstream.model.packed import (
    Groups,
    KernelLinear,
    Product,
    can_pack,
    joined_biases,
    linears,
    pack_linears,
    put,
    release_pages,
    starts,
    units,
    weight_bytes,
)

Quantise = Literal["none", "int8"]
INT8_FIX = "leave out weights=int8 (--weights int8)"
ZERO_POINT = 128
_PART = 4096
_WIDE = 16  # numbers that the float kernel reads at once, of a row that is as long as a multiple of them
# Weights below this are left alone: quantising the activations costs more time than the saved traffic.
# At 8 rows on two cores int8 takes 0.13 ms for 896x896 (packed bf16: 0.08) and 0.34 for 896x4864 (0.42).
SMALLEST = 1 << 20
CHANNEL_BYTES = 8  # a scale and the kernel's zero point for each output channel
LARGEST = 127  # of a quantised weight or activation: symmetric, so -128 is not used


class Int8Product(Product):
    """With weight ≈ s·w per channel. Of whole numbers, with x ≈ r·(u - 128), r = max|x| / 127 per row:
    y = r·s·(u - 128)·w, where the product of integers is exact. Of floats: y = s·(x·w). Either way layers
    together have the bits that each has alone."""

    def __init__(
        self, weights: Sequence[tuple[torch.Tensor, torch.Tensor]], bias: torch.Tensor | None
    ) -> None:
        """weights int8 [each out, in] and their scales float32 [out], as `quantise` gives them, are copied;
        bias [sum of out]."""
        super().__init__(len(weights))
        (weight, scales), *others = weights
        if others:
            weight, scales = (torch.cat(parts) for parts in zip(*weights, strict=True))
        self.out_features, self.in_features = weight.shape
        self.whole = uses_whole_numbers()
        self.kept = torch.ops.onednn.qlinear_prepack(weight, None) if self.whole else _widened(weight)
        self.scales = scales  # [out]
        self.zeros = torch.zeros(self.out_features, dtype=torch.int32)
        self.bias = bias

    def stored(self) -> torch.Tensor:
        """The weight's whole numbers, int8 [out, in], a copy."""
        if not self.whole:
            return self.kept[:, : self.in_features].clone()
        dense: torch.Tensor = self.kept.to_dense()  # [in, out], the kernel's own order
        return dense.t()

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """float32 [n, in]"""
        return self.stored()[ids].float() * self.scales[ids, None]

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        if self.whole:
            quantised, row = quantise_input(x)
            # float32 until the scale is in: bfloat16 times a float32 column takes up to four times as long
            y = product(quantised, self.kept, self.scales, self.zeros).mul_(row)  # [rows, out]
        else:
            y = float_product(x.reshape(-1, self.in_features), self.kept, self.scales)
        if self.bias is not None:
            y += self.bias
        return y.to(x.dtype).view(*x.shape[:-1], self.out_features)


class Int8Linear(KernelLinear):
    """`x @ weight.T + bias`; input [..., in_features] of any float dtype, output of the same dtype."""

    product: Int8Product
    zeros: torch.Tensor
    scales: torch.Tensor

    def __init__(
        self, product: Int8Product, start: int, out_features: int, bias: nn.Parameter | None
    ) -> None:
        super().__init__(product, start, out_features, bias)
        for name in ("scales", "zeros"):  # views: counted as this layer's part of the product's
            part = getattr(product, name)[start : start + out_features]  # [out]
            self.register_buffer(name, part, persistent=False)

    @classmethod
    def of(cls, linear: nn.Linear) -> Int8Linear:
        return cls.together([quantise(linear.weight.detach())], [linear.bias])[0]

    @classmethod
    def together(
        cls, weights: Sequence[tuple[torch.Tensor, torch.Tensor]], biases: Sequence[nn.Parameter | None]
    ) -> list[Int8Linear]:
        """Layers of one input, all or none of them with a bias, as one product. weights: as of it."""
        bias, parts = joined_biases(biases)
        product = Int8Product(weights, bias)
        sizes = [len(weight) for weight, _ in weights]
        return [cls(product, *part) for part in zip(starts(sizes), sizes, parts, strict=True)]

    @property
    def weight_bytes(self) -> int:
        return self.in_features * self.out_features

    def stored(self) -> torch.Tensor:
        """The weight's whole numbers, int8 [out, in], a copy."""
        return self.product.stored()[self.start : self.start + self.out_features]


def quantise_input(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., in] as uint8 [rows, in], and its scales [rows, 1]."""
    flat = x.reshape(-1, x.shape[-1]).float()  # [rows, in]
    row = activation_scales(flat)  # [rows, 1]
    # The cast cuts off, so half a step more rounds: all numbers are above 0.
    return flat.div(row).add_(ZERO_POINT + 0.5).to(torch.uint8), row


def activation_scales(flat: torch.Tensor) -> torch.Tensor:
    """A scale for each of the rows [rows, in], float32 [rows, 1]: one for all would make them depend on each
    other."""
    return flat.abs().amax(-1, keepdim=True).clamp_min_(1e-30).div_(LARGEST)


def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight [out, in] as int8 and its scales, float32 [out]."""
    quantised = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(len(weight))
    for start in range(0, len(weight), _PART):  # in parts: a head in float32 may be a gigabyte
        part = slice(start, start + _PART)
        rows = weight[part].float()  # [part, in]
        scales[part] = rows.abs().amax(1).clamp_min_(1e-30).div_(LARGEST)
        quantised[part] = rows.div(scales[part, None]).round_().to(torch.int8)
    return quantised, scales


def product(
    quantised: torch.Tensor,
    packed: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
) -> torch.Tensor:
    """(u - 128) @ w.T · scales, float32 [rows, out], from uint8 [rows, in] and a packed weight."""
    y: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
        quantised, 1.0, ZERO_POINT, packed, scales, zeros, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return y


def float_product(x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """x @ w.T · scales, float32 [rows, out], from rows [rows, in] and an int8 weight `_widened` [out, …].

    The kernel's own scales would be bfloat16.
    """
    rows = torch.nn.functional.pad(x.to(torch.bfloat16), (0, weight.shape[1] - x.shape[1])).contiguous()
    y: torch.Tensor = torch.ops.aten._weight_int8pack_mm(rows, weight, _ones(len(weight)))
    return y.float().mul_(scales)


def _widened(weight: torch.Tensor) -> torch.Tensor:
    """A copy of a weight [out, in], with zeros up to a multiple of `_WIDE`."""
    return torch.nn.functional.pad(weight, (0, -weight.shape[1] % _WIDE)).clone()


@cache
def _ones(size: int) -> torch.Tensor:
    return torch.ones(size, dtype=torch.bfloat16)


@cache
def uses_whole_numbers() -> bool:
    """Whether int8 weights are multiplied as whole numbers here, or as floats."""
    return not whole_numbers_fail()


def require_int8(device: str | torch.device = "cpu", fix: str = "leave out quantise=int8") -> None:
    """ModelError unless this machine computes with int8 weights, and right. fix: what to do then."""
    if torch.device(device).type != "cpu":
        raise ModelError(f"int8 weights are for the CPU, not {device}: {fix}")
    why = "" if uses_whole_numbers() else floats_fail()
    if why:
        raise ModelError(f"{why}: {fix}")


def floats_fail() -> str:
    """Why the float kernel cannot be used; nothing where it can. Asked by experiment."""
    weight = (torch.arange(5 * 40).reshape(5, 40) % 251 - 125).to(torch.int8)
    x = (torch.arange(9 * 40).reshape(9, 40) % 7 - 3).float()
    try:
        found = float_product(x, _widened(weight), torch.full((5,), 0.5))
        alone = [float_product(row[None], _widened(weight), torch.full((5,), 0.5)) for row in x]
    except (AttributeError, NotImplementedError, RuntimeError) as error:
        return f"this PyTorch has no product of int8 weights for this CPU ({type(error).__name__})"
    want = (x @ weight.float().T * 0.5).to(torch.bfloat16).float()
    if not torch.allclose(found, want, rtol=0.01) or not torch.equal(found, torch.cat(alone)):
        return "this CPU's products of int8 weights are wrong"
    return ""


def whole_numbers_fail() -> str:
    """Why the kernel of whole numbers cannot be used; nothing where it can.

    Asked by experiment: without the CPU's own int8 dot products (VNNI) there is no kernel, a slow one, or
    one whose 16-bit sums overflow, and the largest values show that.
    """
    rows, inner, out = 8, 64, 16
    activations = torch.full((rows, inner), 255, dtype=torch.uint8)
    weight = torch.full((out, inner), LARGEST, dtype=torch.int8)
    try:
        packed = torch.ops.onednn.qlinear_prepack(weight, None)
        found = product(activations, packed, torch.ones(out), torch.zeros(out, dtype=torch.int32))
    except (AttributeError, NotImplementedError, RuntimeError) as error:
        return f"this PyTorch has no product of whole numbers for this CPU ({type(error).__name__})"
    if not bool((found == (255 - ZERO_POINT) * LARGEST * inner).all()):
        return "this CPU's products of whole numbers overflow (it has no VNNI)"
    return ""


def quantise_linears(model: nn.Module, smallest: int | None = None, groups: Groups = ()) -> int:
    """Replace plain `nn.Linear`s in place, the head too, and free their weights; gives the number replaced.

    smallest: weights with fewer elements are left as they are, to be packed (`packed.pack_linears`); None is
    `SMALLEST`. Those of a group become one product, and their elements are counted together. A head that
    shares its weight with the embedding gets an int8 copy of its own and the embedding keeps the weight: rows
    of an embedding are looked up, not multiplied. Raises ModelError, see `require_int8`.
    """
    require_int8(next(model.parameters()).device)
    found = {one.path: one for one in quantisable(model, smallest, groups=groups)}
    count = len(found)
    for names in units(found, groups):
        layers = [found.pop(name) for name in names]
        weights = [quantise(one.linear.weight.detach()) for one in layers]
        made = Int8Linear.together(weights, [one.linear.bias for one in layers])
        for one, layer in zip(layers, made, strict=True):
            put(model, one.path, layer)
            if not one.shared:
                release_pages(one.linear.weight)
    gc.collect()
    return count


def prepare_linears(model: nn.Module, quantise: Quantise = "none", groups: Groups = ()) -> None:
    """Give the linear layers of a draft their fastest kernels, in place: int8 if asked for, and packed ones
    for the rest where this machine has them; groups as one. Raises ModelError, see `require_int8`."""
    if quantise == "int8":
        quantise_linears(model, groups=groups)
    if can_pack(model):
        pack_linears(model, groups)


def quantised_bytes(model: nn.Module, embedding: bool = False, groups: Groups = ()) -> int:
    """What `weight_bytes` is of a model with int8 linear layers, for one that has none yet and may be without
    data. embedding: its table of input embeddings is int8, too. groups: of layers that become one product."""
    total = weight_bytes(model)
    for found in quantisable(model, embedding=embedding, groups=groups):
        total += int8_bytes(found.linear.weight)
        total -= 0 if found.shared else found.linear.weight.nbytes
    if embedding:
        table = model.get_input_embeddings().weight  # type: ignore[operator]
        total += Int8Embedding.bytes_of(*table.shape) - table.nbytes
    return total


def block_of(model: nn.Module) -> int:
    """Into how many tokens steps of a model are cut: one where every linear layer multiplies floats by int8
    weights, which makes each row by itself and takes longer for every row, else `ROWS`."""
    layers = [m for m in model.modules() if isinstance(m, (nn.Linear, KernelLinear))]
    alone = all(isinstance(m, Int8Linear) and not m.product.whole for m in layers)
    return 1 if layers and alone else ROWS


def gains(weight: torch.Tensor) -> bool:
    """Whether a weight [out, in] is large enough for int8 to be faster."""
    return weight.numel() >= SMALLEST


def int8_bytes(weight: torch.Tensor) -> int:
    """What an int8 copy of a weight [out, in] takes."""
    return weight.numel() + len(weight) * CHANNEL_BYTES


@dataclass(frozen=True)
class Quantisable:
    """A linear layer, its name from the model, and whether an embedding has the same weight."""

    path: str
    linear: nn.Linear
    shared: bool


def quantisable(
    model: nn.Module, smallest: int | None = None, *, embedding: bool = False, groups: Groups = ()
) -> Iterator[Quantisable]:
    """The linear layers that gain: plain ones that have, or whose group has, at least `smallest` elements;
    None is `SMALLEST`.

    embedding: the embedding's own weight will be gone, so a head that shares it counts whatever its size.
    """
    least = SMALLEST if smallest is None else smallest
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    found = linears(model)
    elements = {
        path: sum(found[name].weight.numel() for name in names)
        for names in units(found, groups)
        for path in names
    }
    for path, linear in found.items():
        shared = id(linear.weight) in embeddings
        if elements[path] >= least or (embedding and shared):
            yield Quantisable(path, linear, shared)
