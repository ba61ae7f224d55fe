"""Resolving and loading: every source, every refusal. Tiny random models, no network."""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from slipstream.errors import CapacityError, ModelError, ParameterError, SlipstreamError
from slipstream.model import checkpoint, convert, load, memory, store
from slipstream.model.generation import generation_defaults
from slipstream.model.progress import size
from slipstream.testing.tiny import EOS_ID, save_tiny, save_tiny_gguf, tiny_model, tiny_tokenizer

pytestmark = pytest.mark.usefixtures("no_hub")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny(tmp_path / "tiny")


def refusal(spec: str | Path, kind: type[SlipstreamError] = ModelError, **options: object) -> str:
    """The message with which loading is refused; it must be one line."""
    with pytest.raises(kind) as error:
        load.load(str(spec), **options)  # type: ignore[arg-type]
    text = str(error.value)
    assert "\n" not in text and len(text) < 700
    return text


def edit(path: Path, **values: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


# --- what loads


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral", "gemma3_text"])
def test_loads_a_folder_ready_to_run(tmp_path, kind):
    made = tiny_model(kind, seed=3)
    path = save_tiny(tmp_path / "m", model=made)
    loaded = load.load(str(path))
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(loaded.model(ids).logits, made(ids).logits)
    assert not loaded.model.training and not any(p.requires_grad for p in loaded.model.parameters())
    assert loaded.name == "m" and loaded.path == path
    assert loaded.weight_bytes == 4 * sum(p.numel() for p in made.parameters())
    assert loaded.generation_config.eos_ids == {EOS_ID}
    assert loaded.tokenizer.decode(loaded.tokenizer("héllo")["input_ids"]) == "héllo"


def test_tied_weights_count_once(tmp_path):
    tied = load.load(str(save_tiny(tmp_path / "tied", tie=True)))
    untied = load.load(str(save_tiny(tmp_path / "untied")))
    assert untied.weight_bytes - tied.weight_bytes == 4 * 258 * 32


@pytest.mark.parametrize(
    ("stored", "asked", "got"),
    [
        (torch.float32, "auto", torch.float32),
        (torch.bfloat16, "bfloat16", torch.bfloat16),
        (torch.float16, "float16", torch.float16),
        (torch.float32, "bf16", torch.bfloat16),
        (torch.bfloat16, "fp32", torch.float32),
    ],
)
def test_dtype(tmp_path, stored, asked, got):
    assert load.load(str(save_tiny(tmp_path / "m", dtype=stored)), dtype=asked).model.dtype == got


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("fast", "got"), [(True, torch.bfloat16), (False, torch.float32)])
def test_half_precision_is_loaded_as_what_this_cpu_computes_fast(tmp_path, monkeypatch, stored, fast, got):
    monkeypatch.setattr(load, "computes_bfloat16", lambda: fast)
    assert load.load(str(save_tiny(tmp_path / "m", dtype=stored))).model.dtype == got


def test_sharded_weights_load(tmp_path):
    model = tiny_model()
    path = save_tiny(tmp_path / "m", model=model)
    (path / "model.safetensors").unlink()
    model.save_pretrained(path, max_shard_size="60kB")
    assert len(list(path.glob("*.safetensors"))) > 1
    loaded = load.load(str(path))
    assert torch.equal(loaded.model.lm_head.weight, model.lm_head.weight)


def test_loading_prints_nothing_and_restores_the_settings(folder, capfd):
    verbosity = transformers.utils.logging.get_verbosity()
    filters = list(warnings.filters)
    load.load(str(folder))
    assert capfd.readouterr() == ("", "")
    assert transformers.utils.logging.get_verbosity() == verbosity
    assert transformers.utils.logging.is_progress_bar_enabled()
    assert warnings.filters == filters


# --- GGUF


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_a_gguf_file_is_converted_once(tmp_path, kind, capfd, monkeypatch):
    model = tiny_model(kind, vocab_size=260)
    path = save_tiny_gguf(tmp_path / "t.gguf", model)
    capfd.readouterr()
    loaded = load.load(str(path))
    assert capfd.readouterr() == ("", "")
    assert loaded.name == "t" and loaded.model.dtype == load.choose_dtype("auto", "bfloat16", "cpu")
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], tensor.bfloat16()), name
    assert loaded.tokenizer("é<|eos|>")["input_ids"] == [195, 169, EOS_ID]
    assert loaded.tokenizer.chat_template
    monkeypatch.setattr(convert, "convert_gguf", None)  # not called again
    assert load.load(str(path)).path == loaded.path
    copy = tmp_path / "copies" / "t.gguf"
    copy.parent.mkdir()
    copy.write_bytes(path.read_bytes())
    assert load.resolve(str(copy)) == loaded.path


def test_a_changed_gguf_file_is_another_model(tmp_path):
    path = save_tiny_gguf(tmp_path / "t.gguf", tiny_model("qwen2", vocab_size=260))
    first = load.resolve(str(path))
    save_tiny_gguf(path, tiny_model("qwen2", vocab_size=260, seed=1))
    assert load.resolve(str(path)) != first


def test_the_file_hash_is_remembered(tmp_path, monkeypatch):
    path = save_tiny_gguf(tmp_path / "t.gguf", tiny_model("qwen2", vocab_size=260))
    first = load.resolve(str(path))
    monkeypatch.setattr(store, "sha256_of", None)
    assert load.resolve(str(path)) == first


@pytest.mark.parametrize("harm", ["no manifest", "damaged manifest", "cut weights", "lost file"])
def test_a_converted_folder_that_is_not_whole_is_never_used(tmp_path, harm):
    path = save_tiny_gguf(tmp_path / "t.gguf", tiny_model("qwen2", vocab_size=260))
    folder = load.resolve(str(path))
    if harm == "no manifest":
        (folder / store.MANIFEST).unlink()
    elif harm == "damaged manifest":
        (folder / store.MANIFEST).write_text('{"format": 1, ')
    elif harm == "lost file":
        (folder / "config.json").unlink()
    else:
        os.truncate(folder / "model.safetensors", 1000)
    assert store.manifest(folder) is None and load.local_folder(str(path)) is None
    assert load.resolve(str(path)) == folder and store.manifest(folder) is not None
    load.load(str(folder))


def test_a_conversion_that_is_interrupted_leaves_no_folder(tmp_path, monkeypatch):
    path = save_tiny_gguf(tmp_path / "t.gguf", tiny_model("qwen2", vocab_size=260))

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(store, "seal", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load.resolve(str(path))
    assert list((store.cache_dir() / "models").iterdir()) == []


def test_the_catalogue_conversion_writes_all_end_tokens(tmp_path, recorder):
    path = save_tiny_gguf(tmp_path / "t.gguf", tiny_model("qwen2", vocab_size=260))
    folder = convert.convert_gguf(path, tmp_path / "out", recorder, sha256="0" * 64, eos_ids=(257, 259))
    assert load.load(str(folder)).generation_config.eos_ids == {257, 259}


def test_a_cut_gguf_file_is_refused(tmp_path):
    path = save_tiny_gguf(tmp_path / "t.gguf", tiny_model("qwen2", vocab_size=260))
    os.truncate(path, path.stat().st_size - 5000)
    assert "not a whole GGUF file" in refusal(path) and "download it again" in refusal(path)
    path.write_bytes(b"hello")
    assert "download it again" in refusal(path)


def test_a_gguf_of_an_unknown_architecture_is_refused(tmp_path):
    import gguf

    writer = gguf.GGUFWriter(str(tmp_path / "t.gguf"), "nonesuch")
    writer.add_name("x")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    text = refusal(tmp_path / "t.gguf")
    assert "cannot be converted" in text and "nonesuch" in text and "safetensors" in text


# --- what is not found


def test_an_unknown_name_lists_where_it_was_looked_for():
    text = refusal("qwen2.5-coder-0.6b")
    assert "unknown model 'qwen2.5-coder-0.6b'" in text and "the hub is away" in text
    assert "no such folder or .gguf file" in text and "did you mean qwen2.5-coder-0.5b" in text
    assert "did you mean" not in refusal("org/other")


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("", "no model was named"),
        ("./nowhere", "there is no folder ./nowhere"),
        ("/a/b/c", "there is no folder"),
        ("nowhere.gguf", "there is no file nowhere.gguf: check the path"),
        ("ba d\nname", "there is no folder"),
    ],
)
def test_a_path_that_leads_nowhere(spec, says):
    with pytest.raises(ModelError, match=says):
        load.load(spec)


def test_a_plain_file_is_refused(folder):
    assert "give its folder" in refusal(folder / "model.safetensors")


# --- what is damaged


def test_a_folder_without_config(tmp_path):
    (tmp_path / "x.gguf").touch()
    assert f"pass the file itself: {tmp_path}/x.gguf" in refusal(tmp_path)
    (tmp_path / "x.gguf").unlink()
    assert "has no config.json" in refusal(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_damaged_json(folder, name):
    (folder / name).write_text('{"a": ')
    assert name in refusal(folder) and "fetch it again" in refusal(folder)
    (folder / name).write_text("[1]")
    assert "must hold a JSON object" in refusal(folder)


def test_a_damaged_tokenizer(folder):
    (folder / "tokenizer.json").write_text('{"version": "1.0", ')
    assert "cannot be loaded" in refusal(folder) and str(folder) in refusal(folder)


def test_no_tokenizer(folder):
    (folder / "tokenizer.json").unlink()
    assert "has no tokenizer" in refusal(folder) and "save_pretrained" in refusal(folder)


@pytest.mark.parametrize("keep", [0, 5, 400, -1])
def test_cut_weights(folder, keep):
    path = folder / "model.safetensors"
    os.truncate(path, keep if keep >= 0 else path.stat().st_size + keep)
    text = refusal(folder)
    assert "model.safetensors" in text and "fetch it again" in text


def test_weights_with_a_header_that_is_not_json(folder):
    path = folder / "model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[8] = 0
    path.write_bytes(raw)
    assert "header" in refusal(folder) and "fetch it again" in refusal(folder)


def test_a_missing_shard(tmp_path):
    model = tiny_model()
    path = save_tiny(tmp_path / "m", model=model)
    (path / "model.safetensors").unlink()
    model.save_pretrained(path, max_shard_size="60kB")
    shard = sorted(path.glob("*.safetensors"))[1]
    shard.unlink()
    assert f"lacks {shard.name}" in refusal(path) and "download" in refusal(path)
    edit(path / "model.safetensors.index.json", weight_map={"x": "../../etc/passwd"})
    assert "points outside its folder" in refusal(path)


def test_a_shard_without_a_promised_tensor(folder):
    index = {"weight_map": {"model.norm.weight": "model.safetensors", "more.weight": "model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "lacks the tensor more.weight" in refusal(folder)


def test_missing_weights_are_not_filled_with_random_numbers(folder):
    edit(folder / "config.json", num_hidden_layers=3, layer_types=None)
    text = refusal(folder)
    assert "lacks the weight model.layers.2" in text and "fetch it again" in text


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_layers_that_the_config_does_not_count_are_refused(tmp_path, kind):
    folder = save_tiny(tmp_path / "tiny", kind=kind, layers=3)
    edit(folder / "config.json", num_hidden_layers=1, layer_types=None)
    text = refusal(folder)
    assert "stores layers that its config.json does not count" in text and "model.layers.1." in text
    edit(folder / "config.json", num_hidden_layers=2, num_nextn_predict_layers=1)
    assert load.load(str(folder)).model.config.num_hidden_layers == 2  # the third one predicts ahead


def test_tensors_that_a_model_has_no_use_for_are_left_alone(tmp_path):
    folder = save_tiny(tmp_path / "tiny", kind="llama", layers=2)
    tensors = load_file(folder / "model.safetensors")
    for name in (
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.layers.9.self_attn.rotary_emb.inv_freq",
        "mtp.layers.9.self_attn.q_proj.weight",
        "visual.layers.9.self_attn.q_proj.weight",
        "model.mtp_layers.9.self_attn.q_proj.weight",
        "value_head.weight",
    ):
        tensors[name] = torch.ones(2)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert load.load(str(folder)).model.config.num_hidden_layers == 2


@pytest.mark.parametrize("prefix", ["", "model."])
def test_surplus_layers_are_like_the_models_own_and_behind_them(prefix):
    own = [f"model.layers.{i}.mlp.up_proj.weight" for i in range(3)]
    unused = [f"{prefix}layers.{i}.mlp.up_proj.weight" for i in (2, 3, 4)]
    unused += [f"{prefix}layers.3.enorm.weight", "vision.layers.7.mlp.up_proj.weight", "lm_head.bias"]
    assert checkpoint.surplus_layers(unused, own, "model", {}) == unused[1:3]
    for config in ({"num_nextn_predict_layers": 1}, {"text_config": {"num_mtp_layers": 1}}):
        assert checkpoint.surplus_layers(unused, own, "model", config) == unused[2:3]


def test_weights_of_another_shape_are_refused(folder):
    edit(folder / "config.json", intermediate_size=48)
    refusal(folder)


def test_pickled_weights_are_refused(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "pickled weights (pytorch_model.bin)" in refusal(folder) and "safetensors" in refusal(folder)
    (folder / "pytorch_model.bin").unlink()
    assert "has no weights" in refusal(folder)


def test_a_file_without_permission(folder, monkeypatch):
    def forbidden(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_bytes", forbidden)  # tests may run as root, for whom chmod is nothing
    text = refusal(folder)
    assert "config.json" in text and "Permission denied" in text and "permissions" in text


def test_a_model_that_is_not_causal(folder):
    edit(folder / "config.json", is_encoder_decoder=True)
    assert "encoder-decoder" in refusal(folder)


def test_an_unknown_kind(folder):
    edit(folder / "config.json", model_type="nonesuch")
    assert "unknown to transformers" in refusal(folder) and "update transformers" in refusal(folder)


def test_remote_code_never_runs_unasked(folder, tmp_path):
    """Code in the folder that would leave a mark does not run, known kind or not."""
    mark = tmp_path / "mark"
    (folder / "evil.py").write_text(f"open({str(mark)!r}, 'w')\nclass C: pass\n")
    code = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.C"}
    edit(folder / "config.json", auto_map=code)
    edit(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.C", None]})
    load.load(str(folder))  # a kind transformers knows: its own class is used
    edit(folder / "config.json", model_type="nonesuch")
    assert "--trust-remote-code" in refusal(folder)
    assert not mark.exists()


# --- memory


def test_too_little_memory_is_said_before_loading(folder, monkeypatch):
    monkeypatch.setattr(memory, "available", lambda: 100_000)
    monkeypatch.setattr(load, "_from_pretrained", None)  # not reached
    text = refusal(folder, CapacityError)
    assert "needs 147 kB of memory and 100 kB are available" in text and "bfloat16" in text
    text = refusal(folder, CapacityError, dtype="float32")
    assert "as float32" in text


def test_memory_that_runs_out_anyway_is_said(folder, tmp_path, monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 9 bytes\nmore")

    gguf = save_tiny_gguf(tmp_path / "t.gguf", tiny_model("qwen2", vocab_size=260))
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", fail)
    assert "memory ran out" in refusal(folder, CapacityError)
    assert "memory ran out" in refusal(gguf, CapacityError)


def test_too_little_memory_to_convert(tmp_path, monkeypatch):
    path = save_tiny_gguf(tmp_path / "t.gguf", tiny_model("qwen2", vocab_size=260))
    monkeypatch.setattr(memory, "available", lambda: 1000)
    assert "converting t.gguf" in refusal(path, CapacityError)


@pytest.mark.parametrize("version", [1, 2])
def test_container_limits_count(tmp_path, version):
    (tmp_path / "proc/self").mkdir(parents=True)
    if version == 2:
        own = tmp_path / "sys/fs/cgroup/a/b"
        (tmp_path / "proc/self/cgroup").write_text("0::/a/b\n")
        limit, used, cache = "memory.max", "memory.current", "inactive_file"
    else:
        own = tmp_path / "sys/fs/cgroup/memory/a/b"
        (tmp_path / "proc/self/cgroup").write_text("5:cpu:/x\n4:memory:/a/b\n0::/\n")
        limit, used, cache = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
    own.mkdir(parents=True)
    (own / limit).write_text("max\n" if version == 2 else str(2**63 - 4096))
    (own / used).write_text("700\n")
    (own.parent / limit).write_text("1000\n")
    (own.parent / used).write_text("800\n")
    (own.parent / "memory.stat").write_text(f"anon 1\n{cache} 300\n")
    assert memory.cgroup_limit(tmp_path) == 1000
    assert memory._cgroup_room(tmp_path) == 500
    assert memory.cgroup_limit(tmp_path / "none") is None


@pytest.mark.skipif(sys.platform == "win32", reason="no such limit")
def test_the_process_limit_counts(monkeypatch):
    import resource

    monkeypatch.setattr(resource, "getrlimit", lambda which: (1 << 60, 1 << 60))
    room = memory._process_room()
    assert room is not None and 0 < room < 1 << 60
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1000, 1000))
    assert memory.available() == 0


def test_bytes_follow_the_dtype(tmp_path):
    found = checkpoint.inspect(save_tiny(tmp_path / "m", dtype=torch.bfloat16))
    assert found.dtype == "bfloat16" and found.bytes_as(2) == found.stored_bytes
    assert found.bytes_as(4) == 2 * found.stored_bytes


# --- options and defaults


def test_a_wrong_dtype_or_device(folder):
    assert "bfloat16" in refusal(folder, ParameterError, dtype="int3")
    assert "device must be cpu" in refusal(folder, ParameterError, device="toaster")
    if not torch.cuda.is_available():
        assert "use cpu" in refusal(folder, ParameterError, device="cuda")


@pytest.mark.parametrize(
    ("generation", "config", "tokenizer", "eos"),
    [
        ({"eos_token_id": [5, 6]}, {"eos_token_id": 7}, 8, {5, 6}),
        ({"eos_token_id": 5}, {}, 8, {5}),
        ({}, {"eos_token_id": [7]}, 8, {7}),
        ({}, {"text_config": {"eos_token_id": 9}}, 8, {9}),
        ({"eos_token_id": None}, {"eos_token_id": -1}, 8, {8}),
        ({}, {}, None, set()),
    ],
)
def test_end_tokens(generation, config, tokenizer, eos):
    assert generation_defaults(generation, config, tokenizer).eos_ids == eos


def test_generation_values_are_read_and_checked():
    got = generation_defaults({"temperature": 0.7, "top_k": 20, "top_p": 1, "do_sample": True}, {}, None)
    assert (got.temperature, got.top_k, got.top_p, got.do_sample, got.min_p) == (0.7, 20, 1.0, True, None)
    for bad in ({"eos_token_id": "</s>"}, {"temperature": "hot"}, {"top_k": 1.5}, {"min_p": 10**400}):
        key, *_ = bad
        with pytest.raises(
            ModelError, match=rf"^/here/generation_config\.json: {key} must be .*mend it there"
        ):
            generation_defaults(bad, {}, None, Path("/here"))
    for bad in ({"eos_token_id": "</s>"}, {"text_config": {"eos_token_id": 1.5}}, {"bos_token_id": "<s>"}):
        with pytest.raises(ModelError, match=r"^/here/config\.json: [be]os_token_id must be"):
            generation_defaults({}, bad, None, Path("/here"))


def test_sizes_read_well():
    assert [size(n) for n in (7, 1234, 98_700_000, 491_400_064, 3_554_176_000)] == [
        "7 bytes",
        "1.23 kB",
        "98.7 MB",
        "491 MB",
        "3.55 GB",
    ]


def test_the_tiny_tokenizer_takes_any_text_and_vocabulary():
    tokenizer = tiny_tokenizer(300)
    text = "".join(map(chr, range(1, 600))) + "日本\n\t  <x>"
    ids = tokenizer(text)["input_ids"]
    assert ids == list(text.encode()) and tokenizer.decode(ids) == text and len(tokenizer) == 300
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<user>hi<|eos|><assistant>"
