"""Heads go out and come back tensor for tensor, in every layout; what an engine would compute otherwise is
refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slipstream.errors import DrafterError
from slipstream.export.heads import kind_of
from slipstream.export.hf import export_hf
from slipstream.export.sglang import export_sglang
from slipstream.export.target import read_parts
from slipstream.export.vllm import export_vllm
from slipstream.heads.io import load_eagle, load_medusa, save_eagle, save_medusa
from slipstream.model.parts import ModelParts
from slipstream.testing.heads import random_eagle, random_medusa
from slipstream.testing.tiny import save_tiny, tiny_model

LAYERS, TAPS = 6, (1, 3, 5)
MODEL = tiny_model(layers=LAYERS)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("target") / "t", model=MODEL)


def saved_eagle(folder: Path, version: int = 3, **config: Any) -> Path:
    if version == 3:
        config.setdefault("aux_layers", TAPS)
    save_eagle(random_eagle(MODEL, version, **config), folder)
    return folder


def written(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    tensors = {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}
    return tensors, json.loads((folder / "config.json").read_text())


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


def test_parts_of_a_target_are_those_of_the_loaded_model(target: Path, tmp_path: Path) -> None:
    read, loaded = read_parts(target), ModelParts.of(MODEL)
    assert read.fingerprint == loaded.fingerprint
    assert torch.equal(read.lm_head.weight, loaded.lm_head.weight)  # type: ignore[arg-type]
    tied = tiny_model(tie=True)
    parts = read_parts(save_tiny(tmp_path, model=tied))
    assert torch.equal(parts.lm_head.weight, tied.get_output_embeddings().weight)  # type: ignore[union-attr,arg-type]


def test_kinds_are_told_apart(target: Path, tmp_path: Path) -> None:
    save_medusa(random_medusa(MODEL), tmp_path / "m")
    assert kind_of(target) == "draft_model" and kind_of(tmp_path / "m") == "medusa"
    assert kind_of(saved_eagle(tmp_path / "e3")) == "eagle3"
    assert kind_of(saved_eagle(tmp_path / "e1", 1)) == "eagle"


@pytest.mark.parametrize("reduced", [None, 64])
@pytest.mark.parametrize("layout", ["published", "speculators"])
def test_eagle3_for_vllm(target: Path, tmp_path: Path, layout: Any, reduced: int | None) -> None:
    config: dict[str, Any] = {"norm_before_residual": True, "draft_vocab_size": reduced}
    source = saved_eagle(tmp_path / "in", dtype=torch.bfloat16, **config)
    report = export_vllm(source, tmp_path / "out", target, layout=layout)
    assert report.kind == "eagle3" and "0.10.0 and newer" in report.takes
    tensors, raw = written(tmp_path / "out")
    assert same(tensors, written(source)[0])
    assert raw["eagle_aux_hidden_state_layer_ids"] == list(TAPS)  # vLLM counts as we do
    for name in (
        "norm_before_residual",
        "draft_vocab_size",
        "target_hidden_size",
        "norm_before_fc",
        "fc_norm",
    ):
        assert name in raw, "a default that readers disagree about"
    assert raw["norm_before_residual"] is True
    head = load_eagle(tmp_path / "out", ModelParts.of(MODEL))
    first = load_eagle(source, ModelParts.of(MODEL))
    assert head.config == first.config and same(head.state_dict(), first.state_dict())
    if layout == "speculators":
        assert raw["speculators_model_type"] == "eagle3" and "model_type" not in raw
        assert raw["transformer_layer_config"]["model_type"] == "llama"
        assert raw["transformer_layer_config"]["num_aux_hidden_states"] == len(TAPS)
        assert raw["speculators_config"]["verifier"]["name_or_path"] == str(target)
        assert raw["speculators_config"]["verifier"]["architectures"] == ["LlamaForCausalLM"]
        assert report.start == f"vllm serve {tmp_path / 'out'}"
    else:
        assert raw["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == list(TAPS)


def test_eagle3_for_sglang_counts_outputs_from_zero(target: Path, tmp_path: Path) -> None:
    source = saved_eagle(tmp_path / "in", draft_vocab_size=64)
    report = export_sglang(source, tmp_path / "out", target)
    tensors, raw = written(tmp_path / "out")
    assert same(tensors, written(source)[0])
    assert raw["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 2, 4]
    assert raw["eagle_aux_hidden_state_layer_ids"] == [0, 2, 4]
    assert any("outputs of layers" in change for change in report.changes)
    # and back: our own note leaves no doubt
    assert load_eagle(tmp_path / "out", ModelParts.of(MODEL)).config.aux_layers == TAPS


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_shared_lm_head_stays_shared(target: Path, tmp_path: Path, engine: str) -> None:
    """draft_vocab_size with no lm_head beside it leaves a random head in SGLang (sglang#27829)."""
    source = saved_eagle(tmp_path / "in", own_lm_head=False)
    (export_vllm if engine == "vllm" else export_sglang)(source, tmp_path / "out", target)
    tensors, raw = written(tmp_path / "out")
    assert raw["draft_vocab_size"] is None and "lm_head.weight" not in tensors


def test_eagle1(target: Path, tmp_path: Path) -> None:
    source = saved_eagle(tmp_path / "in", 1)
    export_vllm(source, tmp_path / "v", target)
    tensors, raw = written(tmp_path / "v")
    assert same(tensors, written(source)[0]) and raw["architectures"] == ["LlamaForCausalLM"]
    assert not [
        n for n in tensors if "input_layernorm" in n or n in ("norm.weight", "lm_head.weight", "fc.bias")
    ]
    report = export_sglang(source, tmp_path / "s", target)
    tensors, raw = written(tmp_path / "s")
    bias = tensors.pop("fc.bias")
    assert same(tensors, written(source)[0]) and not bias.any() and bias.shape == (32,)
    assert (
        raw["architectures"] == ["LlamaForCausalLMEagle"] and "--speculative-algorithm EAGLE " in report.start
    )


def test_a_bias_goes_only_where_there_is_a_place_for_it(target: Path, tmp_path: Path) -> None:
    head = random_eagle(MODEL, 1, fc_bias=True)
    save_eagle(head, tmp_path / "in")
    with pytest.raises(DrafterError, match="fc.bias, and vLLM's EAGLE heads have none"):
        export_vllm(tmp_path / "in", tmp_path / "no", target)
    export_sglang(tmp_path / "in", tmp_path / "s", target)
    assert same(written(tmp_path / "s")[0], written(tmp_path / "in")[0])
    head.body["fc"].bias.data.zero_()  # type: ignore[operator,union-attr]
    save_eagle(head, tmp_path / "zero")
    report = export_vllm(tmp_path / "zero", tmp_path / "v", target)
    assert "fc.bias" not in written(tmp_path / "v")[0] and "left out" in report.changes[0]
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"norm_before_residual": True}, "norm_before_residual"),
        ({"attention_bias": True}, "no bias in its attention"),
        ({"num_layers": 2}, "one layer, not 2"),
        ({"aux_layers": (0, 2, 4)}, "taps after 0 layers"),
        ({"aux_layers": (2, 4, 6)}, "taps after 6 layers"),
    ],
)
def test_what_sglang_would_compute_otherwise_is_refused(
    target: Path, tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    source = saved_eagle(tmp_path / "in", **config)
    with pytest.raises(DrafterError, match=message):
        export_sglang(source, tmp_path / "out", target)
    export_vllm(source, tmp_path / "v", target)  # vLLM takes all of these


def test_taps_out_of_order_are_refused(target: Path, tmp_path: Path) -> None:
    source = saved_eagle(tmp_path / "in", aux_layers=(3, 1, 5))
    with pytest.raises(DrafterError, match="layers ascending"):
        export_vllm(source, tmp_path / "out", target)


@pytest.mark.parametrize(("output", "reduced"), [("own", None), ("target", None), ("target", 64)])
def test_medusa_for_vllm(target: Path, tmp_path: Path, output: str, reduced: int | None) -> None:
    heads = random_medusa(MODEL, num_heads=3, num_layers=2, output=output, draft_vocab_size=reduced)
    save_medusa(heads, tmp_path / "in")
    report = export_vllm(tmp_path / "in", tmp_path / "out", target, num_speculative_tokens=5)
    assert report.takes == "vllm 0.8.5 to 0.32.0 (its sources were read up to 0.33.0)"
    assert '"num_speculative_tokens": 3' in report.start, "no more tokens than heads"
    tensors, raw = written(tmp_path / "out")
    for h, head in enumerate(heads.heads):
        for layer in (0, 1):
            assert torch.equal(tensors[f"blocks.{h}.layers.{layer}.weight"], head[layer].linear.weight)  # type: ignore[index]
            assert torch.equal(tensors[f"blocks.{h}.layers.{layer}.bias"], head[layer].linear.bias)  # type: ignore[index]
        if output == "own":
            assert torch.equal(tensors[f"lm_heads.{h}.weight"], head[2].weight)  # type: ignore[index]
    assert raw["medusa_fc_bias"] is True and raw["original_lm_head"] is (output == "target")
    assert raw["num_heads"] == 3 and raw["num_hidden_layers"] == 2
    # vLLM 0.32.0 refuses a checkpoint with a token_map (bench/vllm_loads.py met it): zero rows stand for it
    assert raw["truncated_vocab_size"] == raw["vocab_size"] and "token_map" not in tensors
    assert any("194 of 258" in change for change in report.changes) == bool(reduced)
    if output == "target":
        weight = MODEL.get_output_embeddings().weight  # type: ignore[union-attr]
        drafted = heads.vocab.target_ids()
        assert torch.equal(tensors["lm_head.weight"][drafted], weight[drafted])  # type: ignore[index]
        others = torch.ones(258, dtype=torch.bool)
        others[drafted] = False
        assert not tensors["lm_head.weight"][others].any() and int(others.sum()) == 258 - (reduced or 258)


def test_medusa_that_no_engine_takes(target: Path, tmp_path: Path) -> None:
    save_medusa(random_medusa(MODEL, draft_vocab_size=64), tmp_path / "in")
    with pytest.raises(DrafterError, match="over the whole vocabulary"):
        export_vllm(tmp_path / "in", tmp_path / "out", target)
    with pytest.raises(DrafterError, match="SGLang has no Medusa"):
        export_sglang(tmp_path / "in", tmp_path / "out", target)
    assert not (tmp_path / "out").exists()


def test_as_published(target: Path, tmp_path: Path) -> None:
    source = saved_eagle(tmp_path / "in", draft_vocab_size=64)
    export_hf(source, tmp_path / "out", target)
    tensors, _ = written(tmp_path / "out")
    assert {n for n in tensors if "layers" in n} == set() and any(n.startswith("midlayer.") for n in tensors)
    head = load_eagle(tmp_path / "out", ModelParts.of(MODEL))
    assert same(head.state_dict(), load_eagle(source, ModelParts.of(MODEL)).state_dict())
    medusa = random_medusa(MODEL, draft_vocab_size=64)
    save_medusa(medusa, tmp_path / "m")
    export_hf(tmp_path / "m", tmp_path / "m2", target)
    assert same(load_medusa(tmp_path / "m2").state_dict(), medusa.state_dict())


@pytest.mark.parametrize("engine", ["vllm", "sglang", "hf"])
def test_a_draft_model_is_copied_whole(target: Path, tmp_path: Path, engine: str) -> None:
    draft = save_tiny(tmp_path / "d", layers=1, dtype=torch.bfloat16)
    (draft / "slipstream.json").write_text("{}")  # our store's manifest, of no use elsewhere
    out = tmp_path / "small"
    export = {"vllm": export_vllm, "sglang": export_sglang, "hf": export_hf}[engine]
    report = export(draft, out, target)
    names = {p.name for p in draft.iterdir()} - {"slipstream.json"}
    assert {p.name for p in out.iterdir()} == names
    assert all((out / n).read_bytes() == (draft / n).read_bytes() for n in names)
    assert str(out) in report.start
    other = save_tiny(tmp_path / "other", vocab_size=300, layers=1)
    with pytest.raises(DrafterError, match="300 tokens and .* of 258"):
        export(other, tmp_path / "no", target)
    assert not [p for p in tmp_path.iterdir() if p.name.startswith("no")]


def test_folders_must_not_mislead_an_engine(target: Path, tmp_path: Path) -> None:
    draft = save_tiny(tmp_path / "d", layers=1)
    with pytest.raises(DrafterError, match="contains 'eagle-'.*another folder"):
        export_vllm(draft, tmp_path / "my-Eagle-draft", target)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("mine")
    with pytest.raises(DrafterError, match="not empty"):
        export_vllm(draft, tmp_path / "full", target)
    assert (tmp_path / "full" / "x").read_text() == "mine"
    export_vllm(saved_eagle(tmp_path / "e"), tmp_path / "eagle3-head", target)  # that is what it is


def test_heads_of_another_target_are_refused(target: Path, tmp_path: Path) -> None:
    other = save_tiny(tmp_path / "wide", hidden=64, layers=LAYERS)
    source = saved_eagle(tmp_path / "in", 1)
    with pytest.raises(DrafterError, match="hidden size 32, this target has 64"):
        export_vllm(source, tmp_path / "out", other)
    save_eagle(
        random_eagle(MODEL, 3, aux_layers=TAPS), tmp_path / "noted", provenance={"target_fingerprint": "0"}
    )
    with pytest.raises(DrafterError, match="trained on another target"):
        export_vllm(tmp_path / "noted", tmp_path / "out", target)
    assert not (tmp_path / "out").exists()
