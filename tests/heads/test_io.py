"""Published layouts: exact names, bit-exact round trips, and every bad checkpoint refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.errors import DrafterError, SlipstreamError
from slipstream.heads.io import load_eagle, load_medusa, save_eagle, save_medusa
from slipstream.model.parts import ModelParts
from slipstream.testing.heads import random_eagle, random_medusa
from slipstream.testing.tiny import tiny_model

H, V, DRAFT = 32, 24, 7
Tensors = dict[str, torch.Tensor]


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(torch.bfloat16)


def write(folder: Path, file: str, tensors: Tensors, config: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / file)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def medusa_tensors(heads: int = 2, layers: int = 1, prefix: str = "") -> Tensors:
    found: Tensors = {}
    for h in range(heads):
        for layer in range(layers):
            found[f"{prefix}{h}.{layer}.linear.weight"] = noise(H, H) + h
            found[f"{prefix}{h}.{layer}.linear.bias"] = noise(H) + layer
        found[f"{prefix}{h}.{layers}.weight"] = noise(V, H) - h
    return found


def layer_tensors(prefix: str, wide: bool) -> Tensors:
    width = 2 * H if wide else H
    found = {
        f"{prefix}.self_attn.q_proj.weight": noise(32, width),
        f"{prefix}.self_attn.k_proj.weight": noise(16, width),
        f"{prefix}.self_attn.v_proj.weight": noise(16, width),
        f"{prefix}.self_attn.o_proj.weight": noise(H, 32),
        f"{prefix}.mlp.gate_proj.weight": noise(48, H),
        f"{prefix}.mlp.up_proj.weight": noise(48, H),
        f"{prefix}.mlp.down_proj.weight": noise(H, 48),
        f"{prefix}.post_attention_layernorm.weight": noise(H),
    }
    if wide:
        found |= {f"{prefix}.input_layernorm.weight": noise(H), f"{prefix}.hidden_norm.weight": noise(H)}
    return found


def d2t(ids: list[int]) -> torch.Tensor:
    return torch.tensor(ids) - torch.arange(len(ids))


IDS = [0, 2, 3, 9, 10, 20, 23]
LLAMA = {
    "model_type": "llama",
    "hidden_size": H,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": V,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 1024,
}
EAGLE1 = {**LLAMA, "architectures": ["LlamaForCausalLM"]}
EAGLE3 = {**LLAMA, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFT}


def eagle1_tensors() -> Tensors:
    return {"fc.weight": noise(H, 2 * H), **layer_tensors("layers.0", False)}


def eagle3_tensors(layer: str = "midlayer") -> Tensors:
    return {
        "fc.weight": noise(H, 3 * H),
        **layer_tensors(layer, True),
        "norm.weight": noise(H),
        "lm_head.weight": noise(DRAFT, H),
        "d2t": d2t(IDS),
        "t2d": torch.zeros(V, dtype=torch.bool).index_fill(0, torch.tensor(IDS), True),
    }


@pytest.fixture(scope="module")
def target() -> ModelParts:
    return ModelParts.of(tiny_model(vocab_size=V, layers=8))


def same(a: Tensors, b: Tensors) -> bool:
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


# -- layouts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["", "medusa_heads."])
@pytest.mark.parametrize("layers", [1, 2])
def test_medusa_layout_round_trips(tmp_path: Path, target: ModelParts, prefix: str, layers: int) -> None:
    tensors = medusa_tensors(layers=layers, prefix=prefix)
    # as published: the config names fewer heads than the file has
    config = {"medusa_num_heads": 1, "medusa_num_layers": layers, "base_model_name_or_path": "x/y"}
    heads = load_medusa(write(tmp_path / "in", "medusa_lm_head.safetensors", tensors, config), target)
    assert heads.config.num_heads == 2 and heads.config.num_layers == layers
    save_medusa(heads, tmp_path / "out", prefix=bool(prefix))
    assert same(load_file(tmp_path / "out" / "medusa_lm_head.safetensors"), tensors)
    again = load_medusa(tmp_path / "out", target)
    assert again.config == heads.config and same(again.state_dict(), heads.state_dict())


def test_medusa_pickle_is_read_without_running_code(tmp_path: Path, target: ModelParts) -> None:
    (tmp_path / "config.json").write_text("{}")
    torch.save(medusa_tensors(), tmp_path / "medusa_lm_head.pt")
    assert load_medusa(tmp_path, target).config.num_heads == 2
    torch.save({"0.0.linear.weight": Path("x")}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(DrafterError, match="convert it to safetensors"):
        load_medusa(tmp_path, target)


def test_medusa_additions_round_trip(tmp_path: Path, target: ModelParts) -> None:
    """What the published layout cannot say: the target's own output, and a draft vocabulary."""
    model = tiny_model(vocab_size=V)
    for output in ("own", "target"):
        for size in (None, DRAFT):
            heads = random_medusa(model, output=output, draft_vocab_size=size)
            save_medusa(heads, tmp_path / f"{output}{size}")
            again = load_medusa(tmp_path / f"{output}{size}", target)
            assert again.config == heads.config and same(again.state_dict(), heads.state_dict())


def test_eagle1_layout_round_trips(tmp_path: Path, target: ModelParts) -> None:
    for extra in ({}, {"embed_tokens.weight": noise(V, H)}, {"fc.bias": noise(H)}):
        tensors = {**eagle1_tensors(), **extra}
        head = load_eagle(write(tmp_path / "in", "model.safetensors", tensors, EAGLE1), target)
        assert head.config.version == 1 and head.config.own_embedding == ("embed_tokens.weight" in extra)
        assert head.config.rope["rope_theta"] == 500000.0 and head.config.rms_norm_eps == 1e-5
        save_eagle(head, tmp_path / "out")
        assert same(load_file(tmp_path / "out" / "model.safetensors"), tensors)
        assert load_eagle(tmp_path / "out", target).config == head.config


@pytest.mark.parametrize("layer", ["midlayer", "layers.0"])
def test_eagle3_layout_round_trips(tmp_path: Path, target: ModelParts, layer: str) -> None:
    tensors = eagle3_tensors(layer)
    head = load_eagle(write(tmp_path / "in", "model.safetensors", tensors, EAGLE3), target)
    assert head.config.version == 3 and head.config.aux_layers == (2, 4, 5)
    assert head.vocab.target_ids().tolist() == IDS
    save_eagle(head, tmp_path / "out", midlayer=layer == "midlayer")
    assert same(load_file(tmp_path / "out" / "model.safetensors"), tensors)
    assert load_eagle(tmp_path / "out", target).config == head.config
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["norm_before_residual"] is False and written["draft_vocab_size"] == DRAFT
    assert written["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]


def test_eagle3_without_a_draft_vocabulary_may_share_the_lm_head(tmp_path: Path, target: ModelParts) -> None:
    tensors = {k: v for k, v in eagle3_tensors().items() if k not in ("lm_head.weight", "d2t", "t2d")}
    config = {k: v for k, v in EAGLE3.items() if k != "draft_vocab_size"}
    head = load_eagle(write(tmp_path, "model.safetensors", tensors, config), target)
    assert not head.config.own_lm_head and head.vocab.size == V
    out = head.logits(torch.randn(2, H).bfloat16().to(head.body["fc"].weight.dtype))  # type: ignore[arg-type]
    assert out.shape == (2, V) and not out.isnan().any()


def test_other_spellings_of_the_config(tmp_path: Path, target: ModelParts) -> None:
    old = {"model_type": "eagle", "model": EAGLE1}
    folder = write(tmp_path / "old", "model.safetensors", eagle1_tensors(), old)
    assert load_eagle(folder, target).config.version == 1
    speculators = {
        "speculators_model_type": "eagle3",
        "transformer_layer_config": LLAMA,
        "draft_vocab_size": DRAFT,
        "norm_before_residual": True,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
    }
    folder = write(tmp_path / "spec", "model.safetensors", eagle3_tensors("layers.0"), speculators)
    head = load_eagle(folder, target)
    assert head.config.norm_before_residual and head.config.aux_layers == (1, 2, 3)
    del speculators["norm_before_residual"]
    write(tmp_path / "spec", "model.safetensors", eagle3_tensors("layers.0"), speculators)
    with pytest.raises(DrafterError, match="norm_before_residual"):
        load_eagle(folder, target)


def test_tapped_layers_are_never_guessed(tmp_path: Path, target: ModelParts) -> None:
    def layers(listed: list[int], **options: Any) -> tuple[int, ...]:
        config = {**EAGLE3, "eagle_config": {"eagle_aux_hidden_state_layer_ids": listed}}
        folder = write(tmp_path, "model.safetensors", eagle3_tensors(), config)
        return load_eagle(folder, target, **options).config.aux_layers

    assert layers([0, 3, 8]) == (0, 3, 8)
    with pytest.raises(DrafterError, match="aux_layers=output if it is from SGLang"):
        layers([1, 3, 4])
    assert layers([1, 3, 4], aux="after") == (1, 3, 4)
    assert layers([1, 3, 4], aux="output") == (2, 4, 5)
    with pytest.raises(DrafterError, match="taps the layers \\[0, 3, 9\\] of a target that has 8"):
        layers([0, 3, 9])


# -- refusals ---------------------------------------------------------------------------------------

Change = Callable[[Tensors, dict[str, Any]], object]


def drop(name: str) -> Change:
    return lambda t, c: t.pop(name)


def rename(old: str, new: str) -> Change:
    return lambda t, c: t.update({new: t.pop(old)})


def put(name: str, tensor: torch.Tensor) -> Change:
    return lambda t, c: t.update({name: tensor})


def say(**config: Any) -> Change:
    return lambda t, c: c.update(config)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (drop("1.0.linear.bias"), "1.0.linear.bias \\[32\\] is missing"),
        (drop("0.1.weight"), "0.1.weight \\[24, 32\\] is missing"),
        (rename("1.0.linear.bias", "1.0.linear.bais"), "bais has no place.*is it 1.0.linear.bias"),
        (put("0.0.linear.weight", noise(H, H + 1)), "hidden size 33, this target has 32"),
        (put("1.0.linear.weight", noise(H, H + 1)), "1.0.linear.weight has the shape \\[32, 33\\]"),
        (
            put("1.1.weight", noise(V + 1, H)),
            "1.1.weight has the shape \\[25, 32\\] and must",
        ),
        (put("0.1.weight", noise(V + 1, H)), "vocabulary size 25, this target has 24"),
        (say(medusa_num_heads=3), "2.0.linear.weight \\[32, 32\\] is missing"),
        (say(vocab_size=99), "vocabulary size 99, this target has 24"),
        (say(hidden_size=64), "hidden size 64, this target has 32"),
        (say(draft_vocab_size=DRAFT), "d2t \\[7\\] is missing"),
        (put("1.0.linear.weight", torch.full((H, H), float("nan"))), "hold NaN in 1.0.linear.weight"),
        (lambda t, c: t.clear() or t.update(x=noise(2)), "0.0.linear.weight is missing"),
        (say(medusa_num_heads=10**9), "2.0.linear.weight \\[32, 32\\] is missing"),
        (say(medusa_num_layers=10**9), "0.1.linear.weight \\[32, 32\\] is missing"),
        (rename("1.0.linear.weight", "999999999.0.linear.weight"), "1.0.linear.weight .* is missing"),
        (put("1.0.linear.weight", torch.full((H, H), float("-inf"))), "too large for torch.* in 1.0.linear"),
        (say(medusa_num_heads="many"), "config.json does not describe draft heads \\(ValueError"),
        (say(hidden_size=None), "config.json does not describe draft heads \\(TypeError"),
        (say(medusa_num_layers=0), "num_layers 0: it must be at least 1"),
        (say(draft_vocab_size=-3), "draft_vocab_size -3: it must be at least 1"),
        (say(medusa_output="both"), "medusa_output 'both'; it is own or target"),
        (put("0.0.linear.weight", torch.tensor(1.0)), "config.json does not describe draft heads"),
    ],
)
def test_bad_medusa_checkpoints_are_refused(
    tmp_path: Path, target: ModelParts, change: Change, match: str
) -> None:
    tensors, config = medusa_tensors(), {"medusa_num_heads": 2, "medusa_num_layers": 1}
    change(tensors, config)
    with pytest.raises(DrafterError, match=match) as caught:
        load_medusa(write(tmp_path, "medusa_lm_head.safetensors", tensors, config), target)
    assert "\n" not in str(caught.value)


EAGLE1_CHANGES: list[tuple[Change, str]] = [
    (drop("fc.weight"), "fc.weight \\[32, 64\\] is missing"),
    (drop("layers.0.mlp.up_proj.weight"), "layers.0.mlp.up_proj.weight \\[48, 32\\] is missing"),
    (
        rename("layers.0.mlp.up_proj.weight", "layers.0.mlp.upproj.weight"),
        "is it layers.0.mlp.up_proj",
    ),
    (put("layers.0.input_layernorm.weight", noise(H)), "layers.0.input_layernorm.weight has no place"),
    (put("norm.weight", noise(H)), "norm.weight has no place"),
    (put("lm_head.weight", noise(V, H)), "lm_head.weight has no place"),
    (put("fc.weight", noise(H, H)), "fc.weight has the shape \\[32, 32\\] and must have \\[32, 64\\]"),
    (say(hidden_size=64, head_dim=8), "hidden size 64, this target has 32"),
    (say(vocab_size=32000), "vocabulary size 32000, this target has 24"),
    (say(hidden_act="gelu"), "hidden_act 'gelu'"),
    (say(rope_scaling={"rope_type": "longrope", "factor": 2.0}), "rope type 'longrope'"),
    (lambda t, c: c.pop("vocab_size"), "must give vocab_size"),
    (say(num_hidden_layers=10**9), "layers.1.input_layernorm.weight .* is missing"),
    (say(num_hidden_layers=0), "num_layers 0: it must be at least 1"),
    (say(num_attention_heads=0), "config.json does not describe draft heads \\(ZeroDivisionError"),
    (say(num_key_value_heads=3), "4 attention heads of size 8 on 3 key-value heads"),
    (say(intermediate_size="large"), "config.json does not describe draft heads \\(ValueError"),
    (say(intermediate_size=-1), "intermediate_size -1: it must be at least 1"),
    (say(intermediate_size=10**15), "config.json does not describe draft heads"),
    (say(rope_theta="far"), "config.json does not describe draft heads"),
    (say(rope_scaling={"rope_type": "llama3"}), "config.json does not describe draft heads"),
    (say(architectures=7), "config.json does not describe draft heads"),
]
EAGLE3_CHANGES: list[tuple[Change, str]] = [
    (drop("d2t"), "d2t \\[7\\] is missing, and they draft only 7 of 24"),
    (drop("lm_head.weight"), "lm_head.weight \\[7, 32\\] is missing"),
    (drop("norm.weight"), "norm.weight \\[32\\] is missing"),
    (drop("midlayer.hidden_norm.weight"), "layers.0.hidden_norm.weight \\[32\\] is missing"),
    (put("lm_head.weight", noise(V, H)), "lm_head.weight has the shape \\[24, 32\\]"),
    (put("d2t", d2t([0, 2, 3, 9, 10, 20, 24])), "outside the target's vocabulary of 24"),
    (put("d2t", d2t([0, 2, 2, 9, 10, 20, 23])), "same target token"),
    (put("d2t", d2t(IDS)[:5]), "d2t has the shape \\[5\\]"),
    (put("d2t", d2t(IDS).float()), "whole numbers"),
    (put("t2d", torch.ones(V, dtype=torch.bool)), "t2d is not the set"),
    (put("fc.weight", noise(H, 2 * H)), "fc.weight has the shape \\[32, 64\\] and must have \\[32, 96\\]"),
    (put("fc.bias", noise(H)), "fc.bias has no place"),
    (put("midlayer.self_attn.q_norm.weight", noise(8)), "q_norm.weight has no place"),
    (put("midlayer.mlp.up_proj.weight", torch.full((48, H), float("nan"))), "NaN in layers.0.mlp.up_proj"),
    (say(target_hidden_size=64), "hidden size 64, this target has 32"),
    (say(norm_before_fc=True), "sets norm_before_fc"),
    (say(fc_norm=True), "sets fc_norm"),
    (say(eagle_config={"norm_output": True}), "sets norm_output"),
    (say(eagle_config={"use_aux_hidden_state": False}), "use_aux_hidden_state"),
    (say(draft_vocab_size=V + 1), "exceeds the target's 24"),
    (say(draft_vocab_size=0), "draft_vocab_size 0: it must be at least 1"),
    (say(eagle_config=[1]), "config.json does not describe draft heads"),
    (say(eagle_aux_hidden_state_layer_ids="2, 4"), "config.json does not describe draft heads"),
    (
        say(speculators_model_type="eagle3", norm_before_residual=True),
        "config.json does not describe draft heads",
    ),
]


@pytest.mark.parametrize(("change", "match"), EAGLE1_CHANGES)
def test_bad_eagle1_checkpoints_are_refused(
    tmp_path: Path, target: ModelParts, change: Change, match: str
) -> None:
    tensors, config = eagle1_tensors(), dict(EAGLE1)
    change(tensors, config)
    with pytest.raises(DrafterError, match=match):
        load_eagle(write(tmp_path, "model.safetensors", tensors, config), target)


@pytest.mark.parametrize(("change", "match"), EAGLE3_CHANGES)
def test_bad_eagle3_checkpoints_are_refused(
    tmp_path: Path, target: ModelParts, change: Change, match: str
) -> None:
    tensors, config = eagle3_tensors(), dict(EAGLE3)
    change(tensors, config)
    with pytest.raises(DrafterError, match=match):
        load_eagle(write(tmp_path, "model.safetensors", tensors, config), target)


def test_bad_folders_are_refused(tmp_path: Path, target: ModelParts) -> None:
    with pytest.raises(SlipstreamError, match="no folder"):
        load_medusa(tmp_path / "none", target)
    with pytest.raises(SlipstreamError, match="no config.json"):
        load_eagle(tmp_path, target)
    (tmp_path / "config.json").write_text(json.dumps(EAGLE1))
    with pytest.raises(SlipstreamError, match="no weights; looked for model.safetensors"):
        load_eagle(tmp_path, target)
    (tmp_path / "model.safetensors").write_bytes(b"junk")
    with pytest.raises(SlipstreamError, match="cannot be read"):
        load_eagle(tmp_path, target)
    for map_ in ("{}", '{"weight_map": ["a"]}'):
        (tmp_path / "model.safetensors.index.json").write_text(map_)
        with pytest.raises(SlipstreamError, match="index.json names no files of tensors"):
            load_eagle(tmp_path, target)


def test_heads_know_the_target_they_were_trained_on(tmp_path: Path) -> None:
    mine, other = tiny_model(vocab_size=V, seed=1), tiny_model(vocab_size=V, seed=2)
    parts = ModelParts.of(mine)
    note = {"target_fingerprint": parts.fingerprint}
    save_eagle(random_eagle(mine), tmp_path / "eagle", provenance=note)
    save_medusa(random_medusa(mine), tmp_path / "medusa", provenance=note)
    load_eagle(tmp_path / "eagle", parts)
    load_medusa(tmp_path / "medusa", parts)
    for load in (load_eagle, load_medusa):
        folder = tmp_path / load.__name__.removeprefix("load_")
        with pytest.raises(DrafterError, match="trained on another target"):
            load(folder, ModelParts.of(other))  # type: ignore[operator]
    halved = tiny_model(vocab_size=V, seed=1).to(torch.bfloat16)
    assert ModelParts.of(halved).fingerprint == parts.fingerprint
