"""int8 linear layers: rows on their own, close to the float weights, counted as what they are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from slipstream.core.params import SamplingParams
from slipstream.drafters.base import TargetInfo
from slipstream.drafters.draft_model import DraftModelConfig, ModelDrafter
from slipstream.engine.engine import Engine
from slipstream.errors import ModelError
from slipstream.model import int8
from slipstream.model.embedding import Int8Embedding
from slipstream.model.identity import weights_hash
from slipstream.model.int8 import Int8Linear, quantise_linears, require_int8
from slipstream.model.pack import ROWS, PackRow
from slipstream.model.packed import weight_bytes
from slipstream.model.runner import Runner
from slipstream.testing.quantised import kernel, kernels, lacks_int8
from slipstream.testing.tiny import save_tiny, tiny_model, tiny_tokenizer

needs_int8 = pytest.mark.skipif(lacks_int8(), reason="this CPU has no int8 products")


@pytest.fixture(params=["whole numbers", "floats"])
def product(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param not in kernels():
        pytest.skip(f"this CPU has no int8 products of {request.param}")
    with kernel(request.param):
        yield request.param


def inputs(rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of very different size: with one scale for all, the small ones would vanish."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, width, generator=generator) * torch.logspace(-3, 3, rows)[:, None]
    return x.to(dtype)


def linear(dtype: torch.dtype, bias: bool = True, inner: int = 96, out: int = 200) -> nn.Linear:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        return nn.Linear(inner, out, bias=bias).to(dtype).requires_grad_(False)


@pytest.mark.usefixtures("product")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bits_of_a_row_do_not_depend_on_the_others(dtype: torch.dtype) -> None:
    layer, x = Int8Linear.of(linear(dtype)), inputs(64, 96, dtype)
    together = layer(x)
    assert together.dtype == dtype and together.shape == (64, 200)
    for rows in range(1, 65):
        padded = torch.cat((x[64 - rows :], torch.zeros(-rows % ROWS, 96, dtype=dtype)))  # as a pack is
        assert torch.equal(layer(padded)[:rows], together[64 - rows :])
        assert torch.equal(layer(x[:rows]), together[:rows])
    assert torch.equal(x, inputs(64, 96, dtype))  # not written to


@pytest.mark.usefixtures("product")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_row_is_within_two_percent(dtype: torch.dtype, bias: bool) -> None:
    plain, x = linear(dtype, bias), inputs(16, 96, dtype)
    expected, found = plain(x).float(), Int8Linear.of(plain)(x).float()
    assert ((found - expected).norm(dim=-1) / expected.norm(dim=-1)).max() < 0.02


@pytest.mark.skipif("floats" not in kernels(), reason="this CPU has no products of floats by int8 weights")
def test_steps_are_not_padded_where_each_row_is_multiplied_by_itself() -> None:
    with kernel("floats"):
        model = tiny_model("qwen2", seed=3)
        plain = Runner(model, pack=False)
        assert plain.block == ROWS
        plain.close()
        quantise_linears(model, smallest=0)
        runner = Runner(model, pack=True)
        assert runner.block == 1
        runner.cache.open(0)
        assert runner.forward([PackRow(0, [1])]).pack.input_ids.shape == (1, 1)
        model.lm_head = nn.Linear(model.config.hidden_size, model.config.vocab_size)
        runner.parts_replaced()
        assert runner.block == ROWS


@pytest.mark.usefixtures("product")
@pytest.mark.parametrize("inner", [16, 50, 97])
def test_any_number_of_columns_is_multiplied_right(inner: int) -> None:
    plain, x = linear(torch.float32, inner=inner, out=37), inputs(5, inner, torch.float32)
    layer = Int8Linear.of(plain)
    found, expected = layer(x), plain(x)
    assert ((found - expected).norm(dim=-1) / expected.norm(dim=-1)).max() < 0.02
    assert torch.equal(layer.stored(), int8.quantise(plain.weight)[0])


@pytest.mark.usefixtures("product")
def test_a_row_of_zeros_gives_the_bias_and_batch_dimensions_are_kept() -> None:
    plain = linear(torch.float32)
    assert torch.equal(Int8Linear.of(plain)(torch.zeros(2, 3, 96)), plain.bias.expand(2, 3, -1))


@pytest.mark.usefixtures("product")
def test_rows_of_the_weight_can_be_had_back() -> None:
    """As the product sees them: the scaled whole numbers themselves."""
    plain = linear(torch.float32)
    quantised, scales = int8.quantise(plain.weight)
    ids = torch.tensor([3, 199, 0, 3])
    found = Int8Linear.of(plain).rows(ids)
    assert torch.equal(found, (quantised.float() * scales[:, None])[ids])
    assert (found - plain.weight[ids]).abs().max() <= scales.max() / 2


@needs_int8
@pytest.mark.parametrize("tie", [True, False])
def test_a_models_linears_and_head_are_replaced_and_their_bytes_counted(tie: bool) -> None:
    model = tiny_model("qwen2", tie=tie)
    inner = [m for m in model.modules() if isinstance(m, nn.Linear)]
    elements = sum(m.weight.numel() for m in inner)
    rest = sum(p.nbytes for p in model.parameters()) - 4 * elements
    if tie:
        rest += 4 * model.lm_head.weight.numel()  # the embedding stays
    assert quantise_linears(model) == 0  # none is large enough to gain
    assert quantise_linears(model, smallest=0) == len(inner)
    assert not [m for m in model.modules() if type(m) is nn.Linear]
    scales = sum(
        s.nbytes + z.nbytes
        for m in model.modules()
        if isinstance(m, Int8Linear)
        for s, z in [(m.scales, m.zeros)]
    )
    buffers = sum(b.nbytes for b in model.buffers()) - scales
    assert weight_bytes(model) == elements + rest + scales + buffers
    assert isinstance(model.lm_head, Int8Linear)


@needs_int8
def test_an_int8_model_runs_trees_and_drafts_without_changing_a_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(int8, "SMALLEST", 0)
    path = save_tiny(tmp_path / "draft", kind="qwen2", tie=True, seed=3, dtype=torch.bfloat16)
    target = Runner(tiny_model("qwen2", tie=True, seed=3), pack=False)
    info = TargetInfo(target.vocab_size, target.context, tokenizer=tiny_tokenizer())
    outputs, held = [], {}
    for spec in (None, "none", "int8"):
        drafter = None
        if spec is not None:
            config = DraftModelConfig(str(path), width=2, quantise=spec)  # type: ignore[arg-type]
            drafter = ModelDrafter(config, info)
        engine = Engine(target, drafter)  # type: ignore[arg-type]
        params = SamplingParams(max_tokens=25, temperature=0.8)
        ids = [engine.add([5, 9, 2 + i], params, seed=i) for i in (0, 1)]
        rows = [engine.find(i) for i in ids]
        list(engine.run())
        outputs.append([row.output for row in rows if row is not None])
        if drafter is not None:
            held[spec] = drafter.memory_bytes
            assert engine.counts.accepted_tokens > 10
            drafter.shutdown()
    assert outputs[0] == outputs[1] == outputs[2]
    assert 0 < held["int8"] < held["none"]


def test_where_there_is_no_int8_the_error_names_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="leave out quantise=int8"):
        require_int8("cuda")
    monkeypatch.setattr(int8, "product", lambda u, *_: torch.full((len(u), 16), 32767.0))
    assert "overflow" in int8.whole_numbers_fail()

    def missing(*_: object) -> None:
        raise NotImplementedError("Could not run 'onednn::qlinear_prepack'")

    monkeypatch.setattr(int8.torch.ops, "onednn", SimpleNamespace(qlinear_prepack=missing))
    assert "no product of whole numbers" in int8.whole_numbers_fail()
    monkeypatch.setattr(int8, "uses_whole_numbers", lambda: False)
    monkeypatch.setattr(int8, "float_product", lambda x, *_: torch.randn(len(x), 5))
    with pytest.raises(ModelError, match=r"are wrong: leave out quantise=int8"):
        require_int8()
    monkeypatch.setattr(int8, "float_product", missing)
    with pytest.raises(ModelError, match=r"no product of int8 weights.*leave out quantise=int8"):
        require_int8()


@needs_int8
@pytest.mark.parametrize("change", ["numbers", "scales"])
def test_the_hash_of_the_weights_tells_int8_models_apart(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fine-tuning may leave everything alone but the linear layers."""
    monkeypatch.setattr(int8, "SMALLEST", 0)

    def hashed(changed: bool) -> str:
        model = tiny_model("qwen2", seed=3)
        weight = model.model.layers[1].mlp.up_proj.weight.detach()
        if changed:
            weight.neg_() if change == "numbers" else weight.mul_(1.001)
        quantise_linears(model)
        return weights_hash(model)

    assert hashed(False) == hashed(False) != hashed(True)


def test_the_hash_of_the_weights_sees_an_int8_embedding() -> None:
    def hashed(number: int, scale: float) -> str:
        table, scales = torch.full((4, 8), number, dtype=torch.int8), torch.full((4,), scale)
        return weights_hash(nn.Sequential(Int8Embedding(table, scales, nn.Embedding(4, 8))))

    assert hashed(3, 0.5) == hashed(3, 0.5)
    assert len({hashed(3, 0.5), hashed(4, 0.5), hashed(3, 0.5000001)}) == 3
