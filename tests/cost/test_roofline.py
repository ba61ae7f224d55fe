"""Shapes, machines and rooflines: counted against real models, and the arithmetic against itself."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from slipstream.cost.machines import DTYPE_BYTES, MACHINES, Machine, find_machine, read_machine
from slipstream.cost.roofline import COMPUTE, MEMORY, Roofline, extra_cost, measured_regime, spare_tokens
from slipstream.cost.shape import ModelShape, read_shape, shape_of
from slipstream.errors import ParameterError

LLAMA_8B = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}  # fmt: skip
SHAPE = shape_of(LLAMA_8B, "llama-8b")
H100 = MACHINES["h100-sxm"]


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("llama", {}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"head_dim": 64}),
        ("mistral", {}),
        ("gemma3_text", {"head_dim": 64, "tie_word_embeddings": True}),
        ("gpt2", {"n_embd": 512, "n_layer": 4, "n_head": 8}),
        ("gpt_neox", {"num_key_value_heads": 8}),
        ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
        (
            "qwen2_moe",
            {"num_experts": 6, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 512},
        ),
    ],
)
def test_parameters_are_those_of_the_real_model(kind: str, more: dict[str, object]) -> None:
    common = {
        "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4,
        "intermediate_size": 1536, "vocab_size": 3000, "tie_word_embeddings": False,
    }  # fmt: skip
    if kind == "gpt2":
        common = {"vocab_size": 3000}
    config = AutoConfig.for_model(kind, **{**common, **more})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    counted = sum(p.numel() for p in model.parameters())
    if kind == "gpt2":
        counted -= config.n_positions * config.n_embd  # learned positions are a table, not a product
    assert shape_of(config.to_dict(), kind).parameters == pytest.approx(counted, rel=0.01)


def test_a_known_model_by_hand() -> None:
    assert SHAPE.parameters == pytest.approx(8.03e9, rel=0.001)
    assert SHAPE.weight_bytes == pytest.approx(16.06e9, rel=0.001)
    assert SHAPE.kv_bytes == 2 * 32 * 8 * 128 * 2  # 128 KiB a token
    assert SHAPE.attention_flops(1000) == 4 * 32 * 32 * 128 * 1000
    assert SHAPE.flops(0) == pytest.approx(2 * (SHAPE.parameters - 4096 * 128256), rel=0.001)


def test_verifying_more_tokens_reads_more_experts() -> None:
    mixture = shape_of({**LLAMA_8B, "num_local_experts": 8, "num_experts_per_tok": 2}, "moe")
    once, many = mixture.read_bytes(1), mixture.read_bytes(64)
    assert once < 0.4 * many and many <= mixture.weight_bytes
    assert SHAPE.read_bytes(1) == SHAPE.read_bytes(64)
    # Two tokens hit 2·2 − 4/8 experts on average: by enumeration of uniform choices of 2 of 8
    per_expert = mixture.layers * mixture.expert_parameters * 2
    assert mixture.read_bytes(2) - mixture.read_bytes(1) == pytest.approx(1.5 * per_expert)


def test_step_time_is_the_larger_of_memory_and_arithmetic() -> None:
    line = Roofline(H100, SHAPE)
    fixed = 32 * H100.layer_seconds
    read = SHAPE.read_bytes(1) / (3350e9 * 0.8)
    assert float(line.seconds(1, 1)) == pytest.approx(read + fixed, rel=1e-3)
    flops = 4096 * SHAPE.flops(0) / (989e12 * 0.6)
    assert float(line.seconds(64, 64)) == pytest.approx(flops + fixed, rel=1e-6)
    with_context = float(line.seconds(64, 1, 8192)) - float(line.seconds(64, 1, 0))
    assert with_context == pytest.approx(64 * 8192 * SHAPE.kv_bytes / (3350e9 * 0.8), rel=1e-3)


def test_the_regime_changes_at_the_ridge_point() -> None:
    line = Roofline(H100, SHAPE)
    assert H100.ridge("bfloat16") == pytest.approx(989e12 * 0.6 / (3350e9 * 0.8))
    turn = line.compute_bound_from()
    assert turn is not None and line.regime(turn) == COMPUTE and line.regime(turn - 1) == MEMORY
    memory, compute = line.memory_seconds(turn, 1), line.compute_seconds(turn, 1)
    assert float(compute) == pytest.approx(float(memory), rel=0.02)
    assert measured_regime(line, 1) == MEMORY and measured_regime(line, 4 * turn) == COMPUTE
    # Long contexts are read by every row, so no batch makes them compute-bound.
    assert line.compute_bound_from(context=8192) is None


def test_verification_is_nearly_free_at_batch_one_and_dear_at_a_large_batch() -> None:
    line = Roofline(H100, SHAPE)
    assert all(cost < 0.05 for cost in extra_cost(line, 1).values())
    large = extra_cost(line, 512)
    assert large[1] > 0.8 and large[4] < large[8] < large[16]


def test_a_draft_is_a_pass_a_level() -> None:
    line = Roofline(H100, SHAPE)
    assert line.draft_seconds(1, 4, 4) == pytest.approx(4 * float(line.seconds(1, 1)))
    assert line.draft_seconds(1, 0, 0) == 0.0


def test_a_coarser_dtype_reads_less() -> None:
    eight = shape_of(LLAMA_8B, "x", dtype="int8")
    assert eight.read_bytes(1) == SHAPE.read_bytes(1) / 2
    assert eight.kv_bytes == SHAPE.kv_bytes
    assert set(DTYPE_BYTES) >= {"float32", "bfloat16", "int4"}


def test_several_gpus_are_one_large_one() -> None:
    four = find_machine("H100").times(4)
    assert four.memory == 4 * H100.memory and four.price == pytest.approx(4 * (H100.price or 0))
    assert float(Roofline(four, SHAPE).memory_seconds(1, 1)) == pytest.approx(
        float(Roofline(H100, SHAPE).memory_seconds(1, 1)) / 4
    )
    with pytest.raises(ParameterError, match="at least 1"):
        H100.times(0)


@pytest.mark.parametrize(
    ("name", "found"),
    [("H100 SXM", "h100-sxm"), ("NVIDIA A100-80GB", "a100-80gb"), ("rtx 4090", "rtx-4090"),
     ("4090", "rtx-4090"),     ("NVIDIA GeForce RTX 3090", "rtx-3090"), ("b200", "b200")],
)  # fmt: skip
def test_machines_are_found_as_people_write_them(name: str, found: str) -> None:
    assert find_machine(name).name == found


def test_all_machines_are_plausible() -> None:
    for machine in MACHINES.values():
        assert 8e9 <= machine.memory <= 1e12 and 5e10 <= machine.bandwidth <= 1e13
        assert machine.flops_of("bfloat16") >= machine.flops_of("float32")
        assert 1 < machine.ridge("bfloat16") < 1000
        assert machine.price is None or 0 < machine.price < 20


@pytest.mark.parametrize(("name", "hint"), [("h100s", "h100"), ("a1000", "a100"), ("rtx4090", "rtx-4090")])
def test_an_unknown_gpu_is_refused_with_close_names(name: str, hint: str) -> None:
    with pytest.raises(ParameterError, match=f"unknown GPU '{name}': did you mean .*{hint}"):
        find_machine(name)


def test_a_gpu_with_no_close_name_lists_all() -> None:
    with pytest.raises(ParameterError, match="known are a10, .* Describe any other in a JSON file"):
        find_machine("zzz")


def test_a_described_machine(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    told = {"name": "mine", "memory_gb": 10, "bandwidth_gbs": 100, "tflops": {"float32": 1}, "price": 0.5}
    file.write_text(json.dumps(told))
    machine = find_machine(str(file))
    assert machine == read_machine(file) and machine.bandwidth == 100e9
    assert machine.flops_of("int4") == 1e12
    for key, value, words in (
        ("price", -1, "price must be a positive number, not -1"),
        ("bandwidth_gbs", "fast", "bandwidth_gbs must be a positive number"),
        ("tflops", {}, "tflops must be like"),
        ("memory_gb", None, "memory_gb"),
        ("bandwidth_gbs", 1e300, "which no machine has: check its unit"),
        ("bandwidth_gbs", 1e-300, "which no machine has: check its unit"),
        ("tflops", {"float32": 10**400}, "which no machine has: check its unit"),
        ("tflops", {"float32": float("nan")}, "must be a positive number, not nan"),
        ("pirce", 1, "unknown field 'pirce'; there are name"),
        ("name", ["x"], "name must be a text"),
        ("layer_seconds", -1, "layer_seconds must be a number of 0 or more"),
    ):
        file.write_text(json.dumps({**told, key: value}))
        with pytest.raises(ParameterError, match=words):
            read_machine(file)
    file.write_text(json.dumps({**told, "layer_seconds": 0}))
    assert read_machine(file).layer_seconds == 0  # as a CPU's is
    for count, words in ((0, "at least 1, not 0"), (10**400, "at most 1000000")):
        with pytest.raises(ParameterError, match=words):
            machine.times(count)
    file.write_text(json.dumps({"name": "x"}))
    with pytest.raises(ParameterError, match="memory_gb is missing"):
        read_machine(file)
    for text, words in (("{", "not JSON"), ("[]", "JSON object")):
        file.write_text(text)
        with pytest.raises(ParameterError, match=words):
            read_machine(file)
    with pytest.raises(ParameterError, match="no arithmetic rate"):
        Machine("bare", 1, 1).flops_of("float32")


def test_a_config_is_read_from_a_file_or_its_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    assert read_shape(tmp_path) == read_shape(tmp_path / "config.json")
    assert read_shape(tmp_path).name == tmp_path.name
    with pytest.raises(ParameterError, match="cannot be read .File name too long."):
        read_shape(tmp_path / ("x" * 300))
    nested = shape_of({"model_type": "gemma3", "text_config": LLAMA_8B}, "x")
    assert nested.parameters == SHAPE.parameters


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be at least 1"),
        ({"vocab_size": "many"}, "vocab_size must be a whole number"),
        ({"torch_dtype": "float7"}, "unknown dtype 'float7'"),
        ({"text_config": "llama"}, "text_config must be an object"),
        ({"num_attention_heads": [8, "x"]}, "num_attention_heads must be a whole number"),
        ({"hidden_size": 10**400}, "hidden_size is more than any model has"),
        ({"num_experts": 8, "num_experts_per_tok": 0}, "num_experts_per_tok must be at least 1"),
        ({"quantization_config": {"quant_method": "odd"}}, "quantised .odd., in which width is not known"),
    ],
)
def test_a_config_that_says_too_little_is_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(ParameterError, match=words):
        shape_of({**LLAMA_8B, **change}, "x")


def test_a_mixture_with_latent_attention_is_the_published_size() -> None:
    # config.json of DeepSeek-V3: 671 billion parameters of which 37 see a token (arXiv 2412.19437, embeddings
    # counted once more there), 576 cached numbers a token and layer (512 + 64)
    shape = shape_of(
        {
            "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61,
            "num_attention_heads": 128, "num_key_value_heads": 128, "intermediate_size": 18432,
            "vocab_size": 129280, "tie_word_embeddings": False, "n_routed_experts": 256,
            "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
            "first_k_dense_replace": 3, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64, "v_head_dim": 128,
            "quantization_config": {"quant_method": "fp8"},
        },
        "v3",
    )  # fmt: skip
    assert shape.parameters == pytest.approx(671e9, rel=0.002)
    assert shape.active_parameters + shape.vocab * shape.hidden == pytest.approx(37e9, rel=0.02)
    assert shape.kv_bytes == 61 * 576 * 2 and shape.dtype == "float8"
    assert shape.read_bytes(1) < 0.06 * shape.weight_bytes < shape.read_bytes(4096) < shape.weight_bytes


def test_latent_attention_has_the_parameters_of_the_real_model() -> None:
    config = AutoConfig.for_model(
        "deepseek_v3", hidden_size=512, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=8,
        intermediate_size=1536, vocab_size=3000, n_routed_experts=8, n_shared_experts=1,
        num_experts_per_tok=2, moe_intermediate_size=256, first_k_dense_replace=1, kv_lora_rank=64,
        q_lora_rank=96, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32, n_group=2, topk_group=1,
        tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    counted = sum(p.numel() for p in model.parameters())
    assert shape_of(config.to_dict(), "v3").parameters == pytest.approx(counted, rel=0.01)


@pytest.mark.parametrize(
    ("told", "dtype"),
    [
        ({"quant_method": "gptq", "bits": 8}, "int8"),
        ({"quant_method": "awq", "w_bit": 4}, "int4"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "int4"),
        ({"quant_method": "mxfp4"}, "int4"),
    ],
)
def test_a_quantised_checkpoint_is_read_as_what_it_is(told: dict[str, object], dtype: str) -> None:
    config = {**LLAMA_8B, "torch_dtype": "bfloat16", "quantization_config": told}
    assert shape_of(config, "x").dtype == dtype
    assert shape_of(config, "x", "bfloat16").weight_bytes > shape_of(config, "x").weight_bytes


def test_heads_are_the_embedding_where_the_family_has_them_so() -> None:
    plain = {k: v for k, v in LLAMA_8B.items() if k != "tie_word_embeddings"}
    assert shape_of({**plain, "model_type": "gemma2"}, "x").tied and not shape_of(plain, "x").tied
    assert not shape_of({**plain, "model_type": "phi"}, "x").tied
    one = {k: v for k, v in plain.items() if k != "num_key_value_heads"}
    assert shape_of({**one, "model_type": "falcon", "multi_query": True}, "x").kv_heads == 1


def test_curves_take_arrays() -> None:
    line = Roofline(H100, SHAPE)
    assert line.seconds(2, np.array([1, 2, 3])).shape == (3,)
    assert isinstance(SHAPE, ModelShape) and line.relative_error(1, [1, 2]).tolist() == [0, 0]


def test_the_measured_regime_is_told_by_what_more_tokens_cost() -> None:
    from slipstream.cost.curve import Point, StepCurve

    def line(memory: float, arithmetic: float) -> StepCurve:
        times = {n: memory + arithmetic * n for n in (1, 2, 5, 9, 17)}
        return StepCurve(Point(1, n, 0, t) for n, t in times.items())

    assert measured_regime(line(1.0, 0.9), 1) == MEMORY and measured_regime(line(1.0, 1.1), 1) == COMPUTE
    assert spare_tokens(line(1.0, 0.03), 1) == 3 and spare_tokens(line(1.0, 1.0), 1) == 0
    assert spare_tokens(line(1.0, 0.0), 1) == 16
