"""What a drafter is predicted to hold before it is loaded, and what it holds."""

from __future__ import annotations

import gc
import json
import re
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import slipstream
from slipstream.core.estimate import MemoryEstimate
from slipstream.core.params import SamplingParams
from slipstream.drafters import list_drafters
from slipstream.drafters._suffix_tree import GrowingTree, SuffixTree
from slipstream.drafters.crossvocab import CrossVocabDrafter
from slipstream.drafters.ngram import NgramConfig, _Index
from slipstream.engine.session import Session
from slipstream.errors import DrafterError, ModelError, ParameterError
from slipstream.model import catalogue, load
from slipstream.model.blueprint import Blueprint
from slipstream.model.hub import HubMiss
from slipstream.model.int8 import quantise_linears
from slipstream.model.packed import weight_bytes
from slipstream.plan import memory
from slipstream.plan.memory import plan_memory
from slipstream.testing.heads import save_random_heads
from slipstream.testing.quantised import every_size, lacks_int8
from slipstream.testing.tiny import save_tiny, tiny_model

VOCAB = 4608
WIDE = {"vocab_size": VOCAB, "hidden": 256}  # a head large enough to be kept as int8
ROOT = Path(__file__).parents[2]


needs_int8 = pytest.mark.skipif(lacks_int8(), reason="this CPU has no int8 products")


def words() -> list[int]:
    """Numbers for the words and signs of our own documents: as natural as text gets in a test."""
    text = "".join(p.read_text(encoding="utf-8") for p in sorted((ROOT / "docs").glob("*.md")))
    known: dict[str, int] = {}
    return [known.setdefault(w, len(known)) % VOCAB for w in re.findall(r"\w+|[^\w\s]", text)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """target, draft, tied, and in heads/ one folder of each kind."""
    root = tmp_path_factory.mktemp("models")
    target = tiny_model("llama", max_position_embeddings=1024, **WIDE)
    save_random_heads(target, root / "heads")
    save_tiny(root / "target", model=target)
    save_tiny(root / "draft", layers=1, seed=1, max_position_embeddings=1024, **WIDE)
    (root / "ids.json").write_text(json.dumps(list(range(100, VOCAB))))
    save_tiny(root / "tied", kind="qwen2", tie=True, layers=2, seed=1, dtype=torch.bfloat16, **WIDE)
    return root


@pytest.fixture(autouse=True)
def nothing_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(load, "cached_snapshot", lambda *_: None)
    monkeypatch.setattr(load, "fetch_from_hub", lambda *_, **__: HubMiss("the hub is away"))


SPECS = {
    "none": ["none"],
    "ngram": ["ngram", "ngram:max_n=3,min_n=1"],
    "suffix": ["suffix:max_tokens=1500", "suffix:remember=false"],
    "recycle": ["recycle", "recycle:k=3"],
    "draft_model": [
        "draft_model:model={}/draft",
        "draft_model:model={}/tied,dtype=bfloat16,width=3",
        "draft_model:model={}/draft,quantise=int8",
        "draft_model:model={}/tied,quantise=int8",
        "draft_model:model={0}/draft,draft_vocab={0}/ids.json",
        "draft_model:model={0}/tied,quantise=int8,draft_vocab={0}/ids.json",
    ],
    "selfspec": ["selfspec:exit=1"],
    "crossvocab": ["crossvocab:model={}/draft", "crossvocab:model={}/draft,mode=intersect"],
    "medusa": [
        "medusa:heads={}/heads/medusa",
        "medusa:heads={}/heads/medusa_reduced",
        "medusa:heads={}/heads/medusa,quantise=int8",
    ],
    "eagle": [
        "eagle:heads={}/heads/eagle1,top_k=1",
        "eagle:heads={}/heads/eagle3",
        "eagle:heads={}/heads/eagle3,choices=0+1+0.0+0.1+0.0.0",
    ],
    "cascade": [
        "cascade:drafters=suffix(max_tokens=1500)+draft_model(model={}/draft)",
        "cascade:mode=merge,drafters=ngram+recycle",
    ],
}
EVERY = [
    pytest.param(s, marks=[needs_int8] if "int8" in s else []) for specs in SPECS.values() for s in specs
]
SIZES = ((400, 2), (700, 1), (400, 1))  # context and rows; one slot is 512 columns wide or a multiple
PYTHON = ("ngram", "suffix", "cascade")  # hold Python objects, of which tracemalloc tells below


def test_no_drafter_is_left_out() -> None:
    assert set(SPECS) == {d["name"] for d in list_drafters() if d["where"] == "built in"}


@pytest.fixture(scope="module")
def session(models: Path) -> Iterator[Session]:
    with slipstream.load(str(models / "target")) as loaded:
        yield loaded


def use(session: Session, spec: str) -> None:
    """Draft with this, its stores filled: that is what is predicted."""
    session.use(spec)
    for part in getattr(session.drafter, "parts", [session.drafter]):
        store = getattr(part, "store", None)
        while store is not None and store.num_tokens + 500 <= 1500:
            at = 2000 + 500 * len(store)
            store.add(words()[at : at + 500])


@pytest.mark.parametrize(
    ("spec", "context", "rows"),
    [pytest.param(*p.values, c, r, marks=p.marks) for p, (c, r) in zip(EVERY, cycle(SIZES))],
)
def test_what_is_predicted_is_held_and_what_is_told_is_allocated(
    models: Path, session: Session, spec: str, context: int, rows: int
) -> None:
    spec = spec.format(models)
    plan = plan_memory(str(models / "target"), spec, context=context, rows=rows)
    use(session, spec)
    # Rows as long as the context, most of each a text.
    prompts = [words()[i * context : (i + 1) * context - 14] for i in range(rows)]
    running = [session.submit(p, SamplingParams(ignore_eos=True, max_tokens=14))[0] for p in prompts]
    while all(row.num_output < 9 for row in running):
        session.engine.step()
    told, allocated = session.drafter.memory_bytes, _allocated(session)
    if isinstance(session.drafter, CrossVocabDrafter):  # tells of a tokenizer and dicts as well
        told = session.drafter.runner.memory_bytes
    if not spec.startswith(PYTHON):
        assert allocated == pytest.approx(told, rel=0.03, abs=2000)
    list(session.engine.run())
    held = max(session.engine.drafter_peak_bytes, session.drafter.memory_bytes)
    session.drafter.shutdown()
    assert plan.drafter.unknown == ""
    assert held == pytest.approx(plan.drafter.total, rel=0.1)
    assert (held > 10_000) == (not spec.startswith(("none", "selfspec")))


@pytest.mark.parametrize("context", [400, 700])
def test_the_targets_own_memory_is_predicted(models: Path, session: Session, context: int) -> None:
    plan = plan_memory(str(models / "target"), context=context, rows=2)
    session.use("none")
    rows = [session.submit([5 + i] * (context - 10))[0] for i in (0, 1)]
    while not all(row.num_output for row in rows):
        session.engine.step()
    assert session.engine.runner.memory_bytes == plan.target.total
    session.cancel(rows)


@needs_int8
@pytest.mark.parametrize("embedding", ["plain", "int8"])
@pytest.mark.parametrize("kind", ["target", "tied", "gemma"])
def test_the_memory_of_an_int8_target_is_predicted(
    models: Path, tmp_path: Path, kind: str, embedding: str
) -> None:
    path = models / kind
    if kind == "gemma":
        path = save_tiny(tmp_path / kind, kind="gemma3_text", tie=True, dtype=torch.bfloat16, **WIDE)
    precision = {"weights": "int8", "embedding": embedding}
    plan = plan_memory(str(path), context=600, **precision)
    with slipstream.load(str(path), **precision) as session:
        (row,) = session.submit([5] * 590)
        while not row.num_output:
            session.engine.step()
        runner = session.engine.runner
        assert runner.memory_bytes == plan.target.total
        assert sum(_tensors(runner, set()).values()) == pytest.approx(plan.target.total, rel=0.03)
    if kind == "target":  # a tied head gets numbers of its own, and is the only layer of this size
        assert plan.target.weights < plan_memory(str(path)).target.weights


@needs_int8
def test_drafters_of_an_int8_target_are_predicted(models: Path) -> None:
    """They share its layers and its table, and what they copy of them is theirs."""
    table = models / "heads/eagle3_with_table"
    if not table.exists():
        _with_a_copy_of_the_table(models, table)
    precision = {"weights": "int8", "embedding": "int8"}
    with every_size(), slipstream.load(str(models / "target"), **precision) as session:
        for spec in (f"medusa:heads={models}/heads/medusa_reduced", f"eagle:heads={table}"):
            plan = plan_memory(str(models / "target"), spec, context=100, **precision)
            assert session.use(spec).memory_bytes == plan.drafter.weights


def _allocated(session: Session) -> int:
    """Bytes of all tensors and arrays that the drafter reaches and the target does not."""
    of_target = _tensors(session.engine.runner, set())
    seen = {id(session.engine.runner), id(session.engine.runner.model), *of_target}
    return sum(_tensors(session.drafter, seen).values())


def _tensors(start: Any, known: set[int]) -> dict[int, int]:
    """Address of a storage or an array -> its bytes."""
    found: dict[int, int] = {}
    seen, waiting = set(known), [start]
    while waiting:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, (str, bytes, int, float, type)):
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            if value.is_mkldnn:
                found[id(value)] = value.numel() * value.dtype.itemsize
            elif value.untyped_storage().data_ptr() not in known:
                found[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        elif isinstance(value, np.ndarray):
            found[id(value)] = value.nbytes
        elif isinstance(value, dict):
            waiting.extend(value.values())
        elif isinstance(value, (list, tuple, set, frozenset)):
            waiting.extend(value)
        else:
            waiting.extend(vars(value).values() if hasattr(value, "__dict__") else ())
            slots = (s for kind in type(value).__mro__ for s in getattr(kind, "__slots__", ()))
            waiting.extend(getattr(value, s) for s in slots if hasattr(value, s))
    return found


def test_what_python_allocates_for_an_index_is_told() -> None:
    text = words()[:4000]  # so many that few of its numbers are small ones, which Python keeps once
    for make in (lambda: _grown_tree(text), lambda: _grown_index(text), lambda: _added(text)):
        gc.collect()
        tracemalloc.start()
        try:
            made = make()
            gc.collect()
            held, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert made.memory_bytes == pytest.approx(held, rel=0.1)


def _grown_tree(text: list[int]) -> GrowingTree:
    tree = GrowingTree()
    tree.extend(text)
    return tree


def _added(text: list[int]) -> SuffixTree:
    tree = SuffixTree()
    tree.add(text)
    return tree


def _grown_index(text: list[int]) -> _Index:
    index = _Index(NgramConfig(branches=3))
    index.extend(text)
    return index


# -- models without data ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "tie"), [("llama", False), ("qwen2", True), ("mistral", False), ("gemma3_text", True)]
)
def test_a_blueprint_has_the_bytes_of_the_model(tmp_path: Path, kind: str, tie: bool) -> None:
    path = save_tiny(tmp_path / "m", kind=kind, tie=tie, dtype=torch.bfloat16, **WIDE)
    for dtype in ("bfloat16", "float32"):
        blueprint = Blueprint.of(str(path), dtype=dtype)
        loaded = load.load(str(path), dtype=dtype).model
        assert blueprint.weight_bytes == weight_bytes(loaded)
        assert all(p.device.type == "meta" for p in blueprint.model.parameters())
        if dtype == "bfloat16" and not lacks_int8():
            assert quantise_linears(loaded) > 0
            assert Blueprint.of(str(path), weights="int8").weight_bytes == weight_bytes(loaded)


def test_positions_that_depend_on_data_do_not_hinder(tmp_path: Path) -> None:
    """Dynamic RoPE reads the largest position, which a model without data has not."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    plain = Blueprint.of(str(save_tiny(tmp_path / "plain")))
    dynamic = Blueprint.of(str(save_tiny(tmp_path / "dynamic", rope_parameters=rope)))
    assert dynamic.cache_bytes(600) == plain.cache_bytes(600) == 2 * 2 * 2 * 8 * 4 * 1024


@pytest.mark.parametrize("entry", catalogue.CATALOGUE, ids=lambda e: e.name)
def test_the_catalogue_knows_the_size_of_what_is_not_here(entry: catalogue.CatalogueModel) -> None:
    blueprint = Blueprint.of(entry.name, dtype="bfloat16")
    assert sum(p.numel() for p in blueprint.model.parameters()) == entry.parameters
    assert f"slipstream pull {entry.name}" in blueprint.notes[0]
    heads = entry.hidden // entry.heads
    assert blueprint.cache_bytes(512) == 512 * 2 * entry.layers * entry.kv_heads * heads * 2


def test_a_shared_embedding_is_not_counted_twice(models: Path, session: Session, tmp_path: Path) -> None:
    """EAGLE checkpoints ship a copy of the target's table, which is dropped when they are loaded."""
    heads = tmp_path / "eagle3"
    heads.mkdir()
    tensors = load_file(models / "heads/eagle3/model.safetensors")
    table = load_file(models / "target/model.safetensors")["model.embed_tokens.weight"]
    (heads / "config.json").write_text((models / "heads/eagle3/config.json").read_text())
    totals = []
    for extra in ({}, {"embed_tokens.weight": table}, {"embed_tokens.weight": table + 1}):
        save_file({**tensors, **extra}, heads / "model.safetensors", {"format": "pt"})
        plan = plan_memory(str(models / "target"), f"eagle:heads={heads}", context=100)
        assert session.use(f"eagle:heads={heads}").memory_bytes == plan.drafter.weights
        totals.append(plan.drafter.weights)
    assert totals[0] == totals[1] == totals[2] - table.nbytes


def _with_a_copy_of_the_table(models: Path, folder: Path) -> None:
    """The EAGLE-3 head and the target's embedding."""
    folder.mkdir()
    tensors = load_file(models / "heads/eagle3/model.safetensors")
    table = load_file(models / "target/model.safetensors")["model.embed_tokens.weight"]
    (folder / "config.json").write_text((models / "heads/eagle3/config.json").read_text())
    save_file({**tensors, "embed_tokens.weight": table}, folder / "model.safetensors", {"format": "pt"})


# -- verdicts and mistakes ---------------------------------------------------------------------------


def test_the_verdict_and_the_largest_context(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = f"draft_model:model={models / 'draft'}"
    plan = plan_memory(str(models / "target"), spec, rows=40)
    assert plan.context == 1024 and plan.fits and plan.advice
    tight = replace(plan, available=plan.needed - 1)
    assert not tight.fits and tight.largest_context == 512
    assert "--context 512" in tight.advice and "a smaller --batch" in tight.advice
    assert "--dtype bfloat16" in tight.advice
    again = plan_memory(str(models / "target"), spec, rows=40, context=512)
    assert replace(again, available=tight.available).fits
    assert replace(plan, available=1000).largest_context == 0
    assert "--context" not in replace(plan, available=1000).advice
    monkeypatch.setattr(memory.memory, "available", lambda: 1000)
    assert not plan_memory(str(models / "target")).fits


def test_a_stranger_that_tells_nothing_is_unknown_and_so_is_what_has_it(models: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(
        "from slipstream.drafters.none import NoConfig, NoDrafter\n"
        "from slipstream.core.draft import Drafter\n"
        "class Mine(Drafter):\n    name, Config = 'mine', NoConfig\n"
        "    def propose(self, requests): return []\n"
    )
    plan = plan_memory(str(models / "target"), f"{mine}:Mine")
    assert "'mine' does not tell" in plan.drafter.unknown and plan.drafter.total == 0
    both = plan_memory(str(models / "target"), f"cascade:drafters=recycle+{mine}:Mine")
    assert "'mine' does not tell" in both.drafter.unknown
    assert both.drafter.tables == plan_memory(str(models / "target"), "recycle").drafter.tables > 0


def test_estimates_add_up() -> None:
    one = MemoryEstimate(1, 20, 300, ("a",), "x")
    two = MemoryEstimate(1, 20, 300, ("a", "b"), "")
    assert one + two == MemoryEstimate(2, 40, 600, ("a", "b"), "x") and (one + two).total == 642


@pytest.mark.parametrize(
    ("spec", "error", "told"),
    [
        ("draft_model:model=some/where", ModelError, "some/where is not on this machine"),
        ("draft_model:model=./nowhere", ModelError, "there is no folder ./nowhere"),
        ("draft_model:model={}/draft,dtype=int3", ParameterError, "dtype must be"),
        ("medusa:heads={}/nowhere", DrafterError, "there is no folder"),
        ("eagle:heads={}/heads", DrafterError, "holds no draft heads"),
        ("nonsense", DrafterError, "unknown drafter"),
        (
            "medusa:heads={}/heads/medusa,choices={}/nowhere.json",
            ParameterError,
            "nowhere.json cannot be read",
        ),
        ("medusa:heads={}/heads/medusa,topk=1x1x1x1x1x1", ParameterError, "the tree is 6 deep"),
        ("recycle:choices={}/nowhere.json", ParameterError, "nowhere.json cannot be read"),
        ("selfspec:exit=99", ParameterError, "selfspec:exit must be below the model's"),
        ("selfspec:skip=99", ParameterError, "skip names layer 99"),
    ],
)
def test_a_mistake_is_told(models: Path, spec: str, error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=re.escape(told)):
        plan_memory(str(models / "target"), spec.replace("{}", str(models)))
    with pytest.raises(ModelError, match="slipstream pull some/target"):
        plan_memory("some/target", "none")
