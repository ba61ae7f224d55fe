"""Layers that read one tensor in turn are one product: with the numbers they have alone, and no others."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import slipstream
from slipstream.core.params import SamplingParams
from slipstream.model import int8
from slipstream.model.blueprint import Blueprint
from slipstream.model.identity import weights_hash
from slipstream.model.int8 import Int8Linear, quantise, quantise_linears
from slipstream.model.load import load
from slipstream.model.pack import ROWS, PackRow
from slipstream.model.packed import KernelLinear, PackedLinear, can_pack, pack_linears, weight_bytes
from slipstream.model.runner import Runner, siblings
from slipstream.model.skip import fingerprint
from slipstream.plan.memory import plan_memory
from slipstream.testing.quantised import lacks_int8
from slipstream.testing.tiny import save_tiny, tiny_model

LAYERS, INNER = 3, 96
SIZES = (64, 16, 24)
KINDS = ["llama", "qwen2", "qwen3", "mistral", "gemma3_text"]
needs_int8 = pytest.mark.skipif(lacks_int8(), reason="this CPU has no int8 products")
FORMATS = [
    pytest.param("int8", torch.float32, marks=needs_int8),
    pytest.param("int8", torch.bfloat16, marks=needs_int8),
    pytest.param("packed", torch.float32),
    pytest.param("packed", torch.bfloat16),
]


def plain(dtype: torch.dtype, bias: bool = True) -> list[nn.Linear]:
    """Layers of one input, of different widths."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        made = [nn.Linear(INNER, out, bias=bias).to(dtype).requires_grad_(False) for out in SIZES]
    if not can_pack(made[0]):
        pytest.skip(f"this CPU has no packed {dtype} kernels")
    return made


def together(kind: str, layers: list[nn.Linear]) -> list[Any]:
    if kind == "packed":
        return list(PackedLinear.together(layers))
    return list(Int8Linear.together([quantise(one.weight) for one in layers], [one.bias for one in layers]))


def alone(kind: str, layers: list[nn.Linear]) -> list[Any]:
    return [PackedLinear.of(one) if kind == "packed" else Int8Linear.of(one) for one in layers]


def inputs(rows: int, dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    return torch.randn(rows, INNER, generator=torch.Generator().manual_seed(seed)).to(dtype)


def held(kind: str = "qwen2", pack: bool = False, **config: Any) -> Runner:
    return Runner(tiny_model(kind, layers=LAYERS, **config), pack=pack)


def logits(runner: Runner, tokens: list[int]) -> torch.Tensor:
    runner.cache.open(0)
    found = runner.forward([PackRow(0, tokens)]).logits
    runner.cache.close(0)
    assert found is not None
    return found


def products(model: nn.Module) -> set[int]:
    return {id(m.product) for m in model.modules() if isinstance(m, KernelLinear)}


# -- one product -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("kind", "dtype"), FORMATS)
def test_each_layer_computes_what_it_computes_alone(kind: str, dtype: torch.dtype, bias: bool) -> None:
    """int8: sums of whole numbers, so bit for bit; else as far as rounding goes."""
    layers = plain(dtype, bias)
    for rows in (1, 2, 7, 8, 16, 19, 64):
        x = inputs(rows, dtype)
        for joined, single in zip(together(kind, layers), alone(kind, layers), strict=True):
            found, expected = joined(x), single(x)
            assert found.shape == expected.shape and found.dtype == dtype
            if kind == "int8":
                assert torch.equal(found, expected)
            else:
                torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("kind", "dtype"), FORMATS)
def test_the_bits_of_a_row_do_not_depend_on_the_others(kind: str, dtype: torch.dtype) -> None:
    """In multiples of `ROWS`, as steps are padded; int8 in any number."""
    layers, x = together(kind, plain(dtype)), inputs(64, dtype)
    whole = [layer(x) for layer in layers]
    for rows in range(1, 65) if kind == "int8" else range(ROWS, 65, ROWS):
        part = x[:rows].clone()
        for layer, expected in zip(layers, whole, strict=True):
            assert torch.equal(layer(part), expected[:rows])


@pytest.mark.parametrize(("kind", "dtype"), FORMATS)
def test_they_compute_once_and_keep_nothing(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers, x, y = together(kind, plain(dtype)), inputs(8, dtype), inputs(8, dtype, seed=3)
    product = layers[0].product
    expected = {
        id(t): [product.compute(t)[..., a:b] for a, b in ((0, 64), (64, 80), (80, 104))] for t in (x, y)
    }
    computed: list[int] = []
    compute = product.compute

    def counting(t: torch.Tensor) -> torch.Tensor:
        computed.append(id(t))
        return compute(t)

    monkeypatch.setattr(product, "compute", counting)
    for _ in range(2):
        for layer, right in zip(layers, expected[id(x)], strict=True):
            assert torch.equal(layer(x), right)
        assert product._input is None and product._given is None
    assert computed == [id(x)] * 2
    # In any order, with other tensors between, and one layer again and again: the right numbers.
    for which, given in ((0, x), (1, y), (2, x), (2, x), (2, x), (2, y), (0, y), (1, x), (0, x)):
        assert torch.equal(layers[which](given), expected[id(given)][which])
    same = x.clone()  # equal numbers, but another tensor
    assert torch.equal(layers[1](same), expected[id(x)][1]) and computed[-1] == id(same)


@pytest.mark.parametrize(("kind", "dtype"), FORMATS)
def test_each_has_its_own_rows_bytes_and_bias(kind: str, dtype: torch.dtype) -> None:
    layers = plain(dtype)
    joined, single = together(kind, layers), alone(kind, layers)
    for one, other, layer in zip(joined, single, layers, strict=True):
        ids = torch.tensor([0, 15, 3, 3])
        assert torch.equal(one.rows(ids), other.rows(ids))
        assert (one.in_features, one.out_features) == (other.in_features, other.out_features)
        assert torch.equal(one.bias, layer.bias) and isinstance(one.bias, nn.Parameter)
        if kind == "packed":
            assert torch.equal(one.dense(), layer.weight)
        else:
            assert torch.equal(one.stored(), quantise(layer.weight)[0])
    assert [weight_bytes(m) for m in joined] == [weight_bytes(m) for m in single]
    assert weight_bytes(nn.ModuleList(joined)) == weight_bytes(nn.ModuleList(single))


# -- which they are --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_queries_keys_and_values_and_gate_and_up_are_found_by_trying(kind: str) -> None:
    model = tiny_model(kind, layers=LAYERS)
    before = {name: p.clone() for name, p in model.named_parameters()}
    implementation = model.config._attn_implementation
    found = siblings(model)
    names = [tuple(name.rpartition(".")[2] for name in group) for group in found]
    assert names == [("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")] * LAYERS
    assert model.config._attn_implementation == implementation
    assert all("forward" not in vars(m) for m in model.modules())
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    with torch.device("meta"):
        hollow = type(model)(model.config)
    assert siblings(hollow) == found  # as a blueprint has it


class Changes(nn.Module):
    """Writes into its input between two layers, calls one of them twice, or needs memory without gaps."""

    def __init__(self, inner: Any, how: str) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = inner.gate_proj, inner.up_proj, inner.down_proj
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.gate_proj(x)
        if self.how == "adds":
            x += 1.0  # the same object
        elif self.how == "twice":
            gate = gate + self.gate_proj(x)
        elif self.how == "views":
            gate = gate.view(-1).view(gate.shape)
        found: torch.Tensor = self.down_proj(torch.sigmoid(gate) * self.up_proj(x))
        return found


@pytest.mark.parametrize("how", ["adds", "twice", "views"])
@pytest.mark.parametrize("quantised", [pytest.param(True, marks=needs_int8), False])
def test_layers_that_cannot_be_one_stay_alone(how: str, quantised: bool) -> None:
    outputs = []
    for merge in (False, True):
        model = tiny_model("qwen2", layers=LAYERS)
        model.model.layers[0].mlp = Changes(model.model.layers[0].mlp, how)
        groups = siblings(model) if merge else []
        assert len(groups) == (0 if how == "views" or not merge else 2 * LAYERS - 1)
        assert not any(name.startswith("model.layers.0.mlp") for group in groups for name in group)
        if quantised:
            quantise_linears(model, smallest=0, groups=groups)
        elif can_pack(model):
            pack_linears(model, groups)
        outputs.append(logits(Runner(model, pack=False, check=False), [1, 2, 3]))
    if quantised:
        assert torch.equal(*outputs)
    else:
        torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-4)


def test_layers_of_which_some_have_a_bias_stay_alone() -> None:
    model = tiny_model("qwen2", layers=1)
    model.model.layers[0].self_attn.k_proj.bias = None
    assert [len(group) for group in siblings(model)] == [2]


def test_a_model_that_slipstream_cannot_run_has_none() -> None:
    model = tiny_model("llama")
    model.config.layer_types = ["linear_attention"] * 2
    assert siblings(model) == []


# -- in a model ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_packed_model_has_four_products_a_layer_and_is_the_model(kind: str, dtype: torch.dtype) -> None:
    model = tiny_model(kind, layers=LAYERS).to(dtype)
    if not can_pack(model):
        pytest.skip(f"this CPU has no packed {dtype} kernels")
    told = weight_bytes(model), weights_hash(model), fingerprint(model)
    tokens = [5, 17, 3, 200, 9, 0, 31, 5, 8]
    unpacked = Runner(model, pack=False)
    before = logits(unpacked, tokens)
    unpacked.close()
    runner = Runner(model, pack=True)
    assert len(products(model)) == 4 * LAYERS + 1
    assert (weight_bytes(model), weights_hash(model), fingerprint(model)) == told
    found = logits(runner, tokens)
    error = float((found - before).float().norm() / before.float().norm())
    assert error < (1e-5 if dtype == torch.float32 else 0.05)


@needs_int8
@pytest.mark.parametrize("kind", KINDS)
def test_an_int8_model_multiplies_four_times_a_layer_with_the_same_bits(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, outputs, counts = [5, 17, 3, 200, 9, 0, 31, 5, 8], [], []
    for merge in (False, True):
        model = tiny_model(kind, layers=LAYERS)
        assert quantise_linears(model, smallest=0, groups=siblings(model) if merge else ()) == 7 * LAYERS + 1
        runner, count, real = Runner(model, pack=True), [0], int8.Int8Product.compute

        def counting(self: Any, x: torch.Tensor, count: list[int] = count, real: Any = real) -> Any:
            count[0] += 1
            return real(self, x)

        with monkeypatch.context() as patch:
            patch.setattr(int8.Int8Product, "compute", counting)
            outputs.append(logits(runner, tokens))
        counts.append(count[0])
    assert counts == [7 * LAYERS + 1, 4 * LAYERS + 1]
    assert torch.equal(*outputs)


@needs_int8
@pytest.mark.parametrize("tie", [True, False])
def test_small_layers_of_a_large_group_are_int8_and_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tie: bool
) -> None:
    """Queries 32·32, keys and values 16·32 each: 2048 in all. gate and up 64·32 each."""
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    path = str(save_tiny(tmp_path / "m", kind="qwen2", tie=tie, dtype=torch.bfloat16))
    for least, names in (
        (2048, {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj", "lm_head"}),
        (2049, {"gate_proj", "up_proj", "lm_head"}),
        (4097, {"lm_head"}),
    ):
        monkeypatch.setattr(int8, "SMALLEST", least)
        model = load(path, weights="int8").model
        found = {n.rpartition(".")[2] for n, m in model.named_modules() if isinstance(m, Int8Linear)}
        assert found == names
        told = weight_bytes(model)
        assert Blueprint.of(path, weights="int8").weight_bytes == told
        runner = Runner(model, pack=True)
        assert runner.weight_bytes == told
        assert len(products(model)) == 2 * 4 + 1 or not can_pack(model)
        assert plan_memory(path, context=64, weights="int8").target.weights == told


@needs_int8
def test_a_merged_int8_model_is_the_stored_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(int8, "SMALLEST", 0)
    model = load(str(save_tiny(tmp_path / "m", kind="qwen2", seed=4)), weights="int8").model
    original = dict(tiny_model("qwen2", seed=4).named_modules())
    for name, module in model.named_modules():
        if isinstance(module, Int8Linear):
            quantised, scales = quantise(original[name].weight)
            assert torch.equal(module.rows(torch.arange(len(scales))), quantised.float() * scales[:, None])
            assert torch.equal(module.scales, scales)


@pytest.mark.parametrize("weights", ["plain", pytest.param("int8", marks=needs_int8)])
def test_selfspec_on_top_changes_no_token_and_counts_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: str
) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(int8, "SMALLEST", 0)
    path = str(save_tiny(tmp_path / "m", layers=LAYERS, seed=3))
    params = SamplingParams(max_tokens=20, temperature=0.8, seed=5)
    outputs = []
    for spec in ("none", "selfspec:skip=a1+m2,min_confidence=0", "selfspec:exit=2,min_confidence=0"):
        with slipstream.load(path, spec, weights=weights) as session:
            outputs.append([c.tokens for c in session.generate([[5, 17, 3, 9], [7]], params)])
            if spec.startswith("selfspec:skip"):
                # attention 96·32, MLP 192·32, head 258·32 numbers
                whole = LAYERS * (96 + 192) + 258
                assert session.drafter.cost == pytest.approx(1 - (96 + 192) / whole, abs=0.02)
    assert outputs[0] == outputs[1] == outputs[2]


@pytest.mark.parametrize("weights", ["plain", pytest.param("int8", marks=needs_int8)])
def test_what_is_let_go_of_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: str) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(int8, "SMALLEST", 0)
    with slipstream.load(str(save_tiny(tmp_path / "m")), weights=weights) as session:
        session.generate([5, 17, 3], SamplingParams(max_tokens=3))
        model = session.info.model
        kept = [weakref.ref(m.product) for m in model.modules() if isinstance(m, KernelLinear)]
    assert kept
    del session, model
    gc.collect()
    assert not any(ref() is not None for ref in kept)
