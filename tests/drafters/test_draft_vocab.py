"""draft_model:draft_vocab: fewer tokens are drafted, with fewer rows of the head, and the output stays."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import slipstream
from slipstream.core.draft import Draft, Drafter, DraftRequest
from slipstream.core.params import SamplingParams
from slipstream.drafters import _draft_vocab
from slipstream.drafters._draft_vocab import DraftVocabulary
from slipstream.drafters._growth import DynamicGrowth
from slipstream.drafters._model_growth import Reading, grow_with
from slipstream.drafters.base import TargetInfo
from slipstream.drafters.draft_model import DraftModelConfig, ModelDrafter
from slipstream.errors import DrafterError, ParameterError
from slipstream.model.house import house_model
from slipstream.model.int8 import Int8Linear
from slipstream.model.load import load
from slipstream.model.pack import PackRow
from slipstream.model.packed import KernelLinear, can_pack
from slipstream.model.runner import Runner
from slipstream.plan.memory import plan_memory
from slipstream.prompts.corpus import corpus
from slipstream.testing.quantised import every_size, lacks_int8
from slipstream.testing.tiny import EOS_ID, save_tiny, tiny_model, tiny_tokenizer

VOCAB = 24  # as of `bench`
LISTED = [0, 2, 3, 5, 7, 8, 11, 14, 15, 16, 20, 23]
TOKENS = [1, 2, 3, 1, 2, 3, 1]
INFO = TargetInfo(VOCAB, 2048)
needs_int8 = pytest.mark.skipif(lacks_int8(), reason="this CPU has no int8 products")


def draft_runner() -> Runner:
    """The target of `bench` with noise on its weights; a new one every time, since its head is replaced."""
    model = tiny_model("llama", vocab_size=VOCAB, layers=1, seed=1)
    generator = torch.Generator().manual_seed(5)
    for weight in model.parameters():
        weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.02)
    return Runner(model, pack=False)


@pytest.fixture
def listed(tmp_path: Path) -> str:
    path = tmp_path / "ids.json"
    path.write_text(json.dumps(LISTED[::-1] + LISTED[:2]))  # any order, and some twice
    return str(path)


def drafter(draft_vocab: str, **options: Any) -> ModelDrafter:
    return ModelDrafter(DraftModelConfig("tiny", draft_vocab=draft_vocab, **options), INFO, draft_runner())


def watched(built: Drafter) -> list[Draft]:
    """Every draft it makes from now on."""
    seen: list[Draft] = []
    propose = built.propose

    def spy(requests: Sequence[DraftRequest]) -> list[Draft]:
        seen.extend(drafts := propose(requests))
        return drafts

    built.propose = spy  # type: ignore[method-assign]
    return seen


# -- what is drafted ---------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"width": 3, "min_confidence": 0.05}])
def test_the_output_is_plain_decodings_and_only_listed_tokens_are_drafted(
    listed: str, bench: Any, options: dict[str, Any]
) -> None:
    seen: list[list[Draft]] = []

    def build() -> Drafter:
        built = drafter(listed, num_speculative_tokens=16, **options)
        seen.append(watched(built))
        return built

    counts = bench.assert_same_sample(build)
    assert counts.accepted_tokens > 20
    drafted = {token for drafts in seen for draft in drafts for token in draft.tree.tokens[1:]}
    assert drafted <= set(LISTED) and len(drafted) > 6


@pytest.mark.parametrize("width", [1, 3])
def test_the_tree_is_that_of_the_whole_head_with_all_others_forbidden(
    listed: str, bench: Any, width: int
) -> None:
    using, whole = drafter(listed, width=width), draft_runner()
    request = replace(bench.ask(TOKENS, 3, 9), scored=True)
    (draft,) = using.propose([request])
    banned = torch.ones(VOCAB, dtype=torch.bool).index_fill(0, torch.tensor(LISTED), False)
    growth = DynamicGrowth(width, 3, 9, scored=True, greedy_path=True)
    whole.cache.open(0)
    grow_with(whole, [Reading(0, TOKENS, growth)], VOCAB, banned=banned)
    expected = growth.draft(TOKENS[-1], "")
    assert draft.tree == expected.tree and draft.tree.num_drafted >= 3
    assert draft.scores == pytest.approx(expected.scores, rel=1e-4)


def test_a_sampled_draft_has_a_law_that_is_zero_outside(listed: str, bench: Any) -> None:
    using, whole = drafter(listed, sampled=True), draft_runner()
    params = SamplingParams(temperature=0.7)
    (draft,) = using.propose([replace(bench.ask(TOKENS, 4), params=params, seed=3)])
    whole.cache.open(0)
    logits = whole.forward([PackRow(0, [*TOKENS, *draft.tree.tokens[1:]])]).logits
    assert logits is not None and draft.q is not None and draft.tree.num_drafted == 4
    for node in range(4):
        row = logits[len(TOKENS) - 1 + node, LISTED].double()
        expected = torch.zeros(VOCAB, dtype=torch.float64)
        expected[LISTED] = (row / 0.7).softmax(-1)
        found = draft.q[node]
        assert found is not None and torch.allclose(found, expected, atol=1e-5)
        assert set(found.nonzero().flatten().tolist()) <= set(LISTED)
        assert draft.tree.tokens[node + 1] in LISTED


def test_all_tokens_as_a_list_change_nothing(tmp_path: Path, bench: Any) -> None:
    path = tmp_path / "all.json"
    path.write_text(json.dumps(list(range(VOCAB))))
    drafts = []
    for text in ("", str(path), str(VOCAB), "999"):  # a number that needs no counting, and no tokenizer
        built = drafter(text, width=2)
        assert built.runner.model.lm_head.out_features == VOCAB
        assert built.memory_bytes == draft_runner().memory_bytes
        drafts.append(built.propose([bench.ask(TOKENS, 4, 8)])[0])
    assert all(d.tree == drafts[0].tree for d in drafts)


# -- the head ------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A target, and tied and untied drafts of its vocabulary."""
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    save_tiny(tmp_path / "target", seed=1)
    for name, tie in (("tied", True), ("untied", False)):
        save_tiny(tmp_path / name, kind="qwen2", tie=tie, seed=2, dtype=torch.bfloat16)
    (tmp_path / "ids.json").write_text(json.dumps(list(range(1, 258, 3))))
    return tmp_path


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("quantise", ["none", pytest.param("int8", marks=needs_int8)])
@pytest.mark.parametrize("name", ["tied", "untied"])
def test_the_head_has_the_listed_rows_alone_and_is_predicted_to_the_byte(
    folder: Path, name: str, quantise: str, dtype: str
) -> None:
    spec = (
        f"draft_model:model={folder / name},quantise={quantise},dtype={dtype},draft_vocab={folder}/ids.json"
    )
    with every_size(), slipstream.load(str(folder / "target"), spec) as session:
        built = session.drafter
        assert isinstance(built, ModelDrafter)
        ids = sorted({*range(1, 258, 3), EOS_ID})  # the end of an answer is always among them
        model, head = built.runner.model, built.runner.model.lm_head
        if quantise == "none" and not can_pack(model) and not isinstance(head, KernelLinear):
            pytest.skip("this CPU has no packed kernels")
        assert isinstance(head, Int8Linear if quantise == "int8" else KernelLinear)
        assert max(m.out_features for m in model.modules() if isinstance(m, KernelLinear)) == len(ids)
        whole = load(str(folder / name), weights="int8" if quantise == "int8" else "plain", dtype=dtype).model
        expected = whole.lm_head
        rows = expected.rows(torch.tensor(ids)) if quantise == "int8" else expected.weight[ids]
        assert torch.equal(head.rows(torch.arange(len(ids))), rows)  # the same numbers
        assert torch.equal(model.get_input_embeddings().weight, whole.get_input_embeddings().weight)
        plan = plan_memory(str(folder / "target"), spec, context=100)
        assert built.memory_bytes == plan.drafter.weights + plan.drafter.tables
        assert plan.drafter.tables == 8 * len(ids)
        found = session.generate([[5, 9, 2], [7]], SamplingParams(max_tokens=20, temperature=0.8, seed=4))
        session.use("none")
        plain = session.generate([[5, 9, 2], [7]], SamplingParams(max_tokens=20, temperature=0.8, seed=4))
        assert [c.tokens for c in found] == [c.tokens for c in plain]


@needs_int8
def test_the_int8_copy_of_a_checkpoint_is_one_for_all_lists(folder: Path) -> None:
    with every_size(), slipstream.load(str(folder / "target")) as session:
        for option in ("", f",draft_vocab={folder}/ids.json"):
            session.use(f"draft_model:model={folder}/tied,quantise=int8{option}")
    assert len(list((folder / "cache" / "int8").iterdir())) == 1


# -- which tokens --------------------------------------------------------------------------------------


@pytest.fixture
def counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A small corpus; one entry for each time it is read."""
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    reads: list[int] = []

    def small() -> dict[str, tuple[str, ...]]:
        reads.append(1)
        return {"code": ("aaab",) * 100, "prose": ("cc", "dz")}

    monkeypatch.setattr(_draft_vocab, "corpus", small)
    return reads


def common(size: int, vocab: int = 258, ends: tuple[int, ...] = (EOS_ID,), tokens: int = 258) -> str:
    found = DraftVocabulary(size).ids(tiny_tokenizer(tokens), vocab, ends)
    assert found is not None
    return "".join(chr(i) if i < 256 else "$" for i in found.tolist())


def test_the_commonest_tokens_are_counted_once_a_tokenizer(counted: list[int], tmp_path: Path) -> None:
    """Shares of code: a 3/4, b 1/4; of prose: c 2/4, d and z 1/4. Ends are in, and count."""
    assert common(3) == "ac$" and common(4) == "abc$" and common(5) == "abcd$"
    assert common(8, ends=()) == "\0\1\2abcdz"  # what never came: small ids
    assert common(1) == "$" and common(2, ends=(EOS_ID, 256, 300)) == "$$"
    assert common(4, vocab=99, ends=()) == "\0\1ab"  # of ids below 99
    assert len(counted) == 1
    assert common(2, tokens=259) == "a$" and len(counted) == 2
    for file in (tmp_path / "cache" / "frequency").iterdir():
        file.write_text('{"format": 1, "kinds": {"code": {"ids": [1], "counts": []}}}')
    assert common(3) == "ac$" and len(counted) == 3  # damaged: made anew
    assert common(3) == "ac$" and len(counted) == 3


def test_a_number_is_predicted_to_the_byte(counted: list[int], folder: Path) -> None:
    for size in (1, 40, 258):
        spec = f"draft_model:model={folder}/untied,draft_vocab={size}"
        plan = plan_memory(str(folder / "target"), spec, context=100)
        with slipstream.load(str(folder / "target"), spec) as session:
            assert session.drafter.memory_bytes == plan.drafter.weights + plan.drafter.tables
            assert session.drafter.runner.model.lm_head.out_features == size


def test_the_corpus_has_what_answers_are_made_of() -> None:
    """A fifth of a trained vocabulary, by counting, is most of text that was not counted."""
    found = corpus()
    assert sum(map(len, found["code"])) > 500_000 and sum(map(len, found["prose"])) > 50_000
    path = house_model("tiny")
    assert path is not None
    tokenizer = load(str(path)).tokenizer
    vocab = len(tokenizer)
    ids = DraftVocabulary(vocab // 5).ids(tokenizer, vocab, ())
    assert ids is not None
    docs = sorted((Path(__file__).parents[2] / "docs").glob("*.md"))
    text = torch.tensor(tokenizer("\n".join(p.read_text(encoding="utf-8") for p in docs))["input_ids"])
    covered = float(torch.isin(text, ids).double().mean())
    first = float((text < vocab // 5).double().mean())
    assert covered > 0.6 and covered > first


# -- mistakes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("0", "1 or more"),
        ("-3", "1 or more"),
        ("no.json", "no file"),
        pytest.param("9" * 5000, "no file", id="a long number"),
        ("~nobody-of-this-name/ids.json", "leads nowhere"),
    ],
)
def test_a_wrong_option_is_told_before_anything_is_loaded(text: str, told: str) -> None:
    with pytest.raises(ParameterError, match=told):
        DraftModelConfig("tiny", draft_vocab=text)
    with pytest.raises(ParameterError, match=told):
        slipstream.load("nowhere", f"draft_model:model=x,draft_vocab={text}")


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("[1, 2", "cannot be read as JSON"),
        ("[]", "must hold a list of token ids"),
        ("[1.5]", "must hold a list of token ids"),
        ("[-1]", "must hold a list of token ids"),
        ("7", "must hold a list of token ids"),
        ('{"counts": [1]}', "must hold a list of token ids"),
        ("[9000]", "lists no token that the draft model could draft"),
        ('{"tokenizer": "another", "ids": [1]}', "those of another tokenizer"),
    ],
)
def test_a_wrong_file_is_told(tmp_path: Path, content: str, told: str) -> None:
    path = tmp_path / "ids.json"
    path.write_text(content)
    info = replace(INFO, tokenizer=tiny_tokenizer())
    with pytest.raises(ParameterError, match=told) as caught:
        ModelDrafter(DraftModelConfig("tiny", draft_vocab=str(path)), info, draft_runner())
    assert "slipstream train vocab" in str(caught.value) and "\n" not in str(caught.value)


def test_without_a_tokenizer_nothing_can_be_counted() -> None:
    with pytest.raises(DrafterError, match="give a file of ids"):
        drafter("5")
