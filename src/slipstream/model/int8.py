"""Linear layers with int8 weights, of targets and drafts: half the memory and memory traffic of bfloat16.

PyTorch's own oneDNN product of uint8 activations and int8 weights. Weights have a scale per output channel,
activations one per *row*, applied outside the kernel: with the kernel's own scale, one for all rows, a
row's result would depend on its neighbours. Activations are unsigned around a zero point of 128 because
signed ones fall to a slow reference kernel. The relative error is about 1 %.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from slipstream.errors import ModelError
from slipstream.model.embedding import Int8Embedding
from slipstream.model.packed import KernelLinear, can_pack, pack_linears, release_pages, weight_bytes

Quantise = Literal["none", "int8"]
INT8_FIX = "leave out weights=int8 (--weights int8)"
ZERO_POINT = 128
_PART = 4096
# Weights below this are left alone: quantising the activations costs more time than the saved traffic.
# At 8 rows on two cores int8 takes 0.13 ms for 896x896 (packed bf16: 0.08) and 0.34 for 896x4864 (0.42).
SMALLEST = 1 << 20
CHANNEL_BYTES = 8  # a scale and the kernel's zero point for each output channel
LARGEST = 127  # of a quantised weight or activation: symmetric, so -128 is not used


class Int8Linear(KernelLinear):
    """`x @ weight.T + bias`; input [..., in_features] of any float dtype, output of the same dtype.

    With x ≈ r·(u - 128), r = max|x| / 127 per row, and weight ≈ s·w per channel:
    y = r·s·(u - 128)·w, where the product of integers is exact.
    """

    zeros: torch.Tensor
    scales: torch.Tensor

    def __init__(self, weight: torch.Tensor, scales: torch.Tensor, bias: nn.Parameter | None) -> None:
        """weight int8 [out, in] and scales float32 [out], as `quantise` gives them; the weight is copied."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.packed = torch.ops.onednn.qlinear_prepack(weight, None)
        self.register_buffer("scales", scales, persistent=False)  # [out]
        self.register_buffer("zeros", torch.zeros(self.out_features, dtype=torch.int32), persistent=False)
        self.bias = bias
        self.shared: SharedInput | None = None

    @classmethod
    def of(cls, linear: nn.Linear) -> Int8Linear:
        return cls(*quantise(linear.weight.detach()), linear.bias)

    @property
    def weight_bytes(self) -> int:
        return self.in_features * self.out_features

    def stored(self) -> torch.Tensor:
        """The weight's whole numbers, int8 [out, in], a copy."""
        dense: torch.Tensor = self.packed.to_dense()  # [in, out], the kernel's own order
        return dense.t()

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """These rows of the weight, as the product sees them, float32 [n, in]."""
        return self.stored()[ids].float() * self.scales[ids, None]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        quantised, row = quantise_input(x) if self.shared is None else self.shared.quantise(x)
        # float32 until the scale is in: bfloat16 times a float32 column takes up to four times as long
        y = product(quantised, self.packed, self.scales, self.zeros).mul_(row)  # [rows, out]
        if self.bias is not None:
            y += self.bias
        return y.to(x.dtype).view(*x.shape[:-1], self.out_features)


def quantise_input(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., in] as uint8 [rows, in], and its scales [rows, 1]."""
    flat = x.reshape(-1, x.shape[-1]).float()  # [rows, in]
    row = activation_scales(flat)  # [rows, 1]
    # The cast cuts off, so half a step more rounds: all numbers are above 0.
    return flat.div(row).add_(ZERO_POINT + 0.5).to(torch.uint8), row


class SharedInput:
    """What `quantise_input` gave to the first of some layers that are called in turn with one tensor.

    It is let go of with the last of them.
    """

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._left = 0
        self._input: torch.Tensor | None = None
        self._given: tuple[torch.Tensor, torch.Tensor] | None = None

    def quantise(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As `quantise_input`; x must not be changed between the layers' calls."""
        if self._given is None or self._input is not x:
            self._input, self._given, self._left = x, quantise_input(x), self._layers
        given = self._given
        self._left -= 1
        if not self._left:
            self._input = self._given = None
        return given


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


def require_int8(device: str | torch.device = "cpu", fix: str = "leave out quantise=int8") -> None:
    """ModelError unless this machine computes int8 products, and right. fix: what to do then.

    Asked by experiment: without the CPU's own int8 dot products (VNNI) there is no kernel, a slow one, or
    one whose 16-bit sums overflow, and the largest values show that.
    """
    if torch.device(device).type != "cpu":
        raise ModelError(f"int8 weights are for the CPU, not {device}: {fix}")
    rows, inner, out = 8, 64, 16
    activations = torch.full((rows, inner), 255, dtype=torch.uint8)
    weight = torch.full((out, inner), LARGEST, dtype=torch.int8)
    try:
        packed = torch.ops.onednn.qlinear_prepack(weight, None)
        found = product(activations, packed, torch.ones(out), torch.zeros(out, dtype=torch.int32))
    except (AttributeError, NotImplementedError, RuntimeError) as error:
        raise ModelError(
            f"this PyTorch has no int8 product for this CPU ({type(error).__name__}): {fix}"
        ) from error
    if not bool((found == (255 - ZERO_POINT) * LARGEST * inner).all()):
        raise ModelError(f"this CPU's int8 products overflow (it has no VNNI): {fix}")


def quantise_linears(model: nn.Module, smallest: int | None = None) -> int:
    """Replace plain `nn.Linear`s in place, the head too, and free their weights; gives the number replaced.

    smallest: weights with fewer elements are left as they are, to be packed (`packed.pack_linears`); None is
    `SMALLEST`. A head that shares its weight with the embedding gets an int8 copy of its own and the
    embedding keeps the weight: rows of an embedding are looked up, not multiplied. Raises ModelError, see
    `require_int8`.
    """
    require_int8(next(model.parameters()).device)
    count = 0
    for found in quantisable(model, smallest):
        setattr(found.parent, found.name, Int8Linear.of(found.linear))
        if not found.shared:
            release_pages(found.linear.weight)
        count += 1
    gc.collect()
    return count


def prepare_linears(model: nn.Module, quantise: Quantise = "none") -> None:
    """Give the linear layers of a draft their fastest kernels, in place: int8 if asked for, and packed ones
    for the rest where this machine has them. Raises ModelError, see `require_int8`."""
    if quantise == "int8":
        quantise_linears(model)
    if can_pack(model):
        pack_linears(model)


def quantised_bytes(model: nn.Module, embedding: bool = False) -> int:
    """What `weight_bytes` is of a model with int8 linear layers, for one that has none yet and may be without
    data. embedding: its table of input embeddings is int8, too."""
    total = weight_bytes(model)
    for found in quantisable(model, embedding=embedding):
        total += int8_bytes(found.linear.weight)
        total -= 0 if found.shared else found.linear.weight.nbytes
    if embedding:
        table = model.get_input_embeddings().weight  # type: ignore[operator]
        total += Int8Embedding.bytes_of(*table.shape) - table.nbytes
    return total


def gains(weight: torch.Tensor) -> bool:
    """Whether a weight [out, in] is large enough for int8 to be faster."""
    return weight.numel() >= SMALLEST


def int8_bytes(weight: torch.Tensor) -> int:
    """What an int8 copy of a weight [out, in] takes."""
    return weight.numel() + len(weight) * CHANNEL_BYTES


@dataclass(frozen=True)
class Quantisable:
    """A linear layer, where it is, its name from the model, and whether an embedding has the same weight."""

    parent: nn.Module
    name: str
    path: str
    linear: nn.Linear
    shared: bool


def quantisable(
    model: nn.Module, smallest: int | None = None, *, embedding: bool = False
) -> Iterator[Quantisable]:
    """The linear layers that gain: plain ones of at least `smallest` elements; None is `SMALLEST`.

    embedding: the embedding's own weight will be gone, so a head that shares it counts whatever its size.
    """
    least = SMALLEST if smallest is None else smallest
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    for path, parent in list(model.named_modules()):
        for name, child in list(parent.named_children()):
            if type(child) is not nn.Linear:
                continue
            shared = id(child.weight) in embeddings
            if child.weight.numel() >= least or (embedding and shared):
                yield Quantisable(parent, name, f"{path}.{name}" if path else name, child, shared)
