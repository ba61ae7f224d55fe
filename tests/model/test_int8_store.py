"""int8 targets: made once, a layer at a time, kept whole or not at all, and nearly the plain model."""

from __future__ import annotations

import json
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import slipstream
from slipstream.errors import CapacityError, ModelError, ParameterError
from slipstream.model import int8, int8_store, load, memory, skip
from slipstream.model.embedding import Int8Embedding, input_table
from slipstream.model.int8 import Int8Linear
from slipstream.model.load import LoadedModel
from slipstream.model.packed import weight_bytes
from slipstream.model.parts import ModelParts
from slipstream.model.store import MANIFEST, Store
from slipstream.testing.quantised import every_size, lacks_int8
from slipstream.testing.tiny import save_tiny, tiny_model

pytestmark = [
    pytest.mark.usefixtures("no_hub"),
    pytest.mark.skipif(lacks_int8(), reason="this CPU has no int8 products"),
]
IDS = torch.tensor([[5, 17, 3, 200, 9, 0, 257, 5]])


@pytest.fixture(autouse=True)
def all_layers() -> Iterator[None]:
    with every_size():
        yield


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return save_tiny(tmp_path / "tiny", kind="qwen2", tie=True, dtype=torch.bfloat16)


def load_int8(path: Path, **options: Any) -> LoadedModel:
    return load.load(str(path), weights="int8", **options)


@torch.inference_mode()
def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=IDS, use_cache=False).logits[0]
    return found


def kept(store: Store) -> list[Path]:
    root = store.root / "int8"
    return sorted(root.iterdir()) if root.is_dir() else []


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One entry a conversion."""
    made: list[str] = []
    convert = int8_store._convert

    def spy(model: Any, folder: Path, *rest: Any) -> None:
        made.append(folder.name)
        convert(model, folder, *rest)

    monkeypatch.setattr(int8_store, "_convert", spy)
    return made


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


# -- what it is -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "tie"),
    [("llama", False), ("qwen2", True), ("qwen3", False), ("mistral", False), ("gemma3_text", True)],
)
@pytest.mark.parametrize("embedding", ["plain", "int8"])
def test_it_is_nearly_the_model_and_its_other_parts_are_untouched(
    tmp_path: Path, kind: str, tie: bool, embedding: str
) -> None:
    path = save_tiny(tmp_path / "m", kind=kind, tie=tie)
    plain, loaded = load.load(str(path)).model, load_int8(path, embedding=embedding)
    model = loaded.model
    assert (loaded.weights, loaded.embedding) == ("int8", embedding)
    assert loaded.weight_bytes == weight_bytes(model) < 0.65 * weight_bytes(plain)
    linears = {n: m for n, m in plain.named_modules() if isinstance(m, torch.nn.Linear)}
    assert {n for n, m in model.named_modules() if isinstance(m, Int8Linear)} == set(linears)
    own = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, own[name]), name
    table = model.get_input_embeddings()
    assert isinstance(table, Int8Embedding) == (embedding == "int8")
    assert 1e-4 < relative(logits(model), logits(plain)) < 0.1


def test_it_is_what_quantising_in_memory_gives(path: Path) -> None:
    twin = load.load(str(path), dtype="bfloat16").model  # as it is stored
    int8.quantise_linears(twin)
    assert torch.equal(logits(load_int8(path).model), logits(twin))


def test_a_tied_int8_model_has_no_float_table_and_one_set_of_numbers(path: Path) -> None:
    model = load_int8(path, embedding="int8").model
    assert not [n for n, p in model.named_parameters() if p.numel() >= 258 * 32]
    table, ids = model.get_input_embeddings(), torch.arange(258)
    assert torch.equal(table.rows(ids), model.lm_head.rows(ids).bfloat16())
    assert torch.equal(table(IDS), table.rows(IDS))


def test_an_embedding_that_does_more_than_look_up_still_does(tmp_path: Path) -> None:
    path = save_tiny(tmp_path / "gemma", kind="gemma3_text", tie=True)
    scaled, plain = load_int8(path, embedding="int8").model, load.load(str(path)).model
    found, expected = scaled.get_input_embeddings()(IDS), plain.get_input_embeddings()(IDS)
    assert found.shape == expected.shape == (1, 8, 32)
    assert 1e-4 < relative(found, expected) < 0.02
    assert relative(scaled.get_input_embeddings().rows(IDS), expected) > 0.5  # √32 is missing


def test_who_it_is_for_stays_the_same(path: Path) -> None:
    """Heads and tuned settings are found by fingerprints of the checkpoint's numbers."""
    plain = load.load(str(path)).model
    for embedding in ("plain", "int8"):
        model = load_int8(path, embedding=embedding).model
        assert ModelParts.of(model).fingerprint == ModelParts.of(plain).fingerprint
        assert skip.fingerprint(model) == skip.fingerprint(plain)
        parts, ids = ModelParts.of(model), torch.tensor([7, 0, 99])
        assert relative(parts.lm_head_rows(ids).weight, ModelParts.of(plain).lm_head_rows(ids).weight) < 0.02
        assert parts.lm_head_rows(ids).weight.dtype == parts.embedding.dtype == torch.bfloat16
        assert relative(parts.embed(ids), plain.get_input_embeddings()(ids)) < 0.02
        assert input_table(model).shape == (258, 32)


def test_keys_and_values_stay_in_the_models_dtype(path: Path) -> None:
    with slipstream.load(str(path), weights="int8", embedding="int8") as session:
        (row,) = session.submit([5, 9, 3])
        session.engine.step()
        slot = session.engine.runner.cache._slots[row.id]
        assert {t.dtype for pair in slot.layers.values() for t in pair} == {torch.bfloat16}
        assert session.info.weights == "int8" and session.info.dtype == "bfloat16"


# -- what is kept ----------------------------------------------------------------------------------


def test_it_is_made_once_for_every_dtype_and_embedding(
    path: Path, store: Store, conversions: list[str]
) -> None:
    first = logits(load_int8(path).model)
    assert torch.equal(logits(load_int8(path).model), first)
    load_int8(path, embedding="int8")
    assert load_int8(path, dtype="float32").model.dtype == torch.float32
    assert len(conversions) == 1 and [f.name for f in kept(store)] == conversions
    moved = path.with_name("moved")
    shutil.copytree(path, moved)
    load_int8(moved)
    assert len(conversions) == 1  # known by what is in it
    with torch.no_grad():
        other = tiny_model("qwen2", tie=True)
        other.model.layers[0].mlp.up_proj.weight[0, 0] += 1.0
    save_tiny(path, model=other, dtype=torch.bfloat16)
    assert not torch.equal(logits(load_int8(path).model), first)
    assert len(conversions) == 2


@pytest.mark.parametrize(
    "harm", ["no manifest", "damaged manifest", "cut", "lost", "header", "sizes", "names"]
)
def test_what_is_damaged_is_made_anew(
    path: Path, store: Store, conversions: list[str], monkeypatch: pytest.MonkeyPatch, harm: str
) -> None:
    monkeypatch.setattr(int8_store, "PART_BYTES", 8_000)  # several files
    first = logits(load_int8(path).model)
    (folder,) = kept(store)
    parts = sorted(folder.glob("part-*.safetensors"))
    assert len(parts) > 2
    record = json.loads((folder / MANIFEST).read_text())
    if harm == "no manifest":
        (folder / MANIFEST).unlink()
    elif harm == "damaged manifest":
        (folder / MANIFEST).write_text('{"format": 1, ')
    elif harm == "cut":
        with parts[1].open("r+b") as file:
            file.truncate(1000)
    elif harm == "lost":
        parts[-1].unlink()
    elif harm == "header":
        with parts[0].open("r+b") as file:
            file.write(b"\xff" * 16)
    elif harm == "sizes":
        record["names"]["model.layers.0.mlp.up_proj"] = record["names"]["model.layers.0.mlp.down_proj"]
    else:
        del record["names"]["model.layers.0.mlp.up_proj"]
    if harm in ("sizes", "names"):
        (folder / MANIFEST).write_text(json.dumps(record))
    assert torch.equal(logits(load_int8(path).model), first)
    assert len(conversions) == 2 and kept(store) == [folder]
    load_int8(path)
    assert len(conversions) == 2


def test_what_is_interrupted_leaves_nothing(path: Path, store: Store, recorder: Any) -> None:
    def interrupted(done: int) -> None:
        raise KeyboardInterrupt

    recorder.at = interrupted
    load.load(str(path), progress=recorder)  # nothing to convert, nothing to hash
    with pytest.raises(KeyboardInterrupt):
        load_int8(path, progress=recorder)
    assert kept(store) == []


def test_of_two_at_once_one_makes_it_and_the_other_waits(
    path: Path, conversions: list[str], recorder: Any
) -> None:
    waits, found, errors = threading.Event(), [], []
    note, silent = recorder.note, recorder.at

    class First:
        """Goes on when the other one waits."""

        def stage(self, text: str, total: int) -> None:
            self.converting = text.startswith("quantising")
            if self.converting:
                started.set()
                assert waits.wait(60)

        at, note = staticmethod(silent), staticmethod(silent)

    def noted(text: str) -> None:
        note(text)
        waits.set()

    def first() -> None:
        try:
            found.append(logits(load_int8(path, progress=First()).model))
        except BaseException as error:
            errors.append(error)
            raise

    started = threading.Event()
    recorder.note = noted
    thread = threading.Thread(target=first)
    thread.start()
    assert started.wait(60)
    second = logits(load_int8(path, progress=recorder).model)
    thread.join()
    assert not errors and torch.equal(found[0], second)
    assert len(conversions) == 1
    assert "another slipstream process is preparing" in recorder.notes[0]


# -- memory and mistakes ----------------------------------------------------------------------------


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_neither_making_nor_loading_it_takes_the_plain_model_into_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorder: Any
) -> None:
    """Memory of the process itself; pages of a mapped checkpoint are the system's to take back."""
    layers, hidden = 8, 512
    path = save_tiny(
        tmp_path / "big", layers=layers, hidden=hidden, intermediate_size=4 * hidden, dtype=torch.bfloat16
    )
    weights = 2 * layers * (4 * hidden * hidden - hidden * hidden + 12 * hidden * hidden)
    assert weights > 60_000_000
    monkeypatch.setattr(int8_store, "PART_BYTES", 4 << 20)
    largest = 4 * hidden * hidden

    def anonymous() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

    load.load(str(path))  # what is imported and kept by the allocator
    before, most = anonymous(), []
    recorder.at = lambda done: most.append(anonymous() - before)
    model = load_int8(path, progress=recorder).model
    # a part that waits, a layer as float32 and what is made of it
    assert max(most) < (4 << 20) + 4 * 4 * largest < weights
    held = anonymous() - before
    assert held < 0.75 * weights  # half, and what the allocator keeps
    assert weight_bytes(model) < 0.6 * weights


def test_what_does_not_fit_is_refused_before_anything_is_made(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_tiny(tmp_path / "untied")
    plain, small = (load.load(str(path)).weight_bytes, load_int8(path).weight_bytes)
    shutil.rmtree(store.root)
    monkeypatch.setattr(memory, "available", lambda: (plain + small) // 2)
    with pytest.raises(CapacityError, match="as float32 needs"):
        load.load(str(path))
    load_int8(path)
    shutil.rmtree(store.root)
    monkeypatch.setattr(memory, "available", lambda: small)
    with pytest.raises(CapacityError, match="as int8 needs"):
        load_int8(path)
    assert kept(store) == []


def test_mistakes_are_told(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for options, told in (
        ({"weights": "int4"}, "weights must be plain or int8, not 'int4'"),
        ({"weights": "int8", "embedding": "x"}, "embedding must be plain or int8, not 'x'"),
        ({"embedding": "int8"}, "goes with weights int8"),
    ):
        for function in (load.load, slipstream.load):
            with pytest.raises(ParameterError, match=told):
                function(str(path), **options)
    with pytest.raises(ParameterError, match="loaded before, without int8"):
        slipstream.load(load.load(str(path)), weights="int8")
    monkeypatch.setattr(int8, "uses_whole_numbers", lambda: False)
    monkeypatch.setattr(int8, "float_product", lambda x, *_: torch.zeros(len(x), 5))
    with pytest.raises(ModelError, match=r"are wrong: leave out weights=int8"):
        load_int8(path)


def test_a_table_that_others_use_as_well_is_not_taken_away(path: Path) -> None:
    model = load.load(str(path)).model
    model.extra = torch.nn.Embedding(1, 1)
    model.extra.weight = model.get_input_embeddings().weight
    loaded = load_int8(path)
    (folder,) = kept(Store.default())
    found = int8_store.Int8Weights.open(folder, model)
    assert found is not None and loaded.weights == "int8"
    with pytest.raises(ModelError, match="also used by extra"):
        int8_store.use_int8(model, found, embedding=True)
