"""A draft model with another tokenizer: the target's sample in text mode, its law in intersect mode."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from slipstream.control.base import Controller
from slipstream.core.draft import Budget, Draft, Drafter, DraftRequest
from slipstream.core.noise import Purpose, uniform
from slipstream.core.params import SamplingParams
from slipstream.core.spec import make_config
from slipstream.drafters.base import TargetInfo
from slipstream.drafters.crossvocab import CrossVocabConfig, CrossVocabDrafter
from slipstream.drafters.none import NoConfig, NoDrafter
from slipstream.engine.engine import Engine
from slipstream.errors import DrafterError, ParameterError
from slipstream.logits.pipeline import LogitsPipeline
from slipstream.model.pack import PackRow
from slipstream.model.runner import Runner
from slipstream.model.translate import Translator, shared_tokens, token_bytes
from slipstream.testing.tiny import save_tiny, tiny_model, tiny_tokenizer

LETTERS = "abcdefghijklmnopqrstuvwxyz.,!?ABCDEFGH"  # and a space: 39 tokens
MERGES = ["t h", "th e", "i n", "Ġ a", "Ġ the", "a b", "ab c"]


def tokenizer(order: Sequence[str], merges: Sequence[str] = (), special: Sequence[str] = ()) -> Any:
    """Byte-level BPE over a small alphabet."""
    names = [*order, *(m.replace(" ", "") for m in merges)]
    pairs = [tuple(m.split(" ")) for m in merges]
    inner = Tokenizer(models.BPE(vocab={n: i for i, n in enumerate(names)}, merges=pairs))  # type: ignore[arg-type]
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token=special[0] if special else None,
        clean_up_tokenization_spaces=False,
    )


CHARACTERS = [*LETTERS, "Ġ"]
VOCAB = len(CHARACTERS)
PERMUTED = [CHARACTERS[(7 * i + 3) % VOCAB] for i in range(VOCAB)]
PROMPTS = [[(7 * i + 3 * j * j) % VOCAB for j in range(n)] for i, n in enumerate((1, 9, 17, 5, 30))]


@lru_cache
def target() -> Runner:
    return Runner(tiny_model("llama", vocab_size=VOCAB, seed=3), pack=False)


@lru_cache
def twin(noise: float = 0.01) -> Runner:
    """The target with its vocabulary in another order and some noise."""
    model = tiny_model("llama", vocab_size=VOCAB, seed=3)
    order = [CHARACTERS.index(c) for c in PERMUTED]
    for weight in (model.model.embed_tokens.weight, model.lm_head.weight):
        weight.copy_(weight[order].clone())
    generator = torch.Generator().manual_seed(5)
    for weight in model.parameters():
        weight.add_(torch.randn(weight.shape, generator=generator), alpha=noise)
    return Runner(model, pack=False)


@lru_cache
def merged() -> Runner:
    return Runner(tiny_model("qwen2", vocab_size=VOCAB + len(MERGES) + 1, seed=7), pack=False)


INFO = TargetInfo(VOCAB, 2048, tokenizer=tokenizer(CHARACTERS))
DRAFTS: dict[str, Any] = {
    "permuted": (twin, tokenizer(PERMUTED)),
    "merged": (merged, tokenizer(CHARACTERS, MERGES, ["<end>"])),
}


def drafter(draft: str = "permuted", **options: Any) -> CrossVocabDrafter:
    runner, words = DRAFTS[draft]
    return CrossVocabDrafter(CrossVocabConfig("tiny", **options), INFO, runner(), words)


class RandomBudgets(Controller):
    def plan(self, rows: Any) -> list[Budget]:
        return [Budget.chain(int(uniform(r.seq_id, r.position, Purpose.DRAFT) * 7)) for r in rows]


def run(using: Drafter, temperature: float, controller: Controller | None = None) -> tuple[Any, Engine]:
    engine = Engine(target(), using, vocab_size=VOCAB, controller=controller, max_rows=3, chunk=8)
    ids = [
        engine.add(p, SamplingParams(max_tokens=15 + 3 * i, temperature=temperature, seed=50 + i))
        for i, p in enumerate(PROMPTS)
    ]
    rows = [engine.find(i) for i in ids]
    list(engine.run())
    return [row.output for row in rows if row is not None], engine


def acceptance(engine: Engine) -> float:
    return engine.counts.accepted_tokens / engine.counts.draft_tokens


@lru_cache
def plain(temperature: float) -> Any:
    return run(NoDrafter(NoConfig(), INFO), temperature)[0]


@pytest.mark.parametrize("controller", [None, RandomBudgets()], ids=["fixed", "random"])
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize(("mode", "temperature"), [("text", 0.0), ("text", 0.8), ("intersect", 0.0)])
def test_the_tokens_are_those_of_plain_decoding(
    mode: str, temperature: float, draft: str, controller: Controller | None
) -> None:
    using = drafter(draft, mode=mode, min_confidence=0.05)
    outputs, engine = run(using, temperature, controller)
    assert outputs == plain(temperature)
    assert engine.counts.draft_tokens > 0
    if draft == "permuted":
        assert acceptance(engine) > (0.08 if temperature else 0.3)
    assert len(using.runner.cache) == 0


@pytest.mark.parametrize("mode", ["text", "intersect"])
def test_the_target_under_another_vocabulary_is_always_right(mode: str) -> None:
    config = CrossVocabConfig("tiny", mode=mode)  # type: ignore[arg-type]
    _, engine = run(CrossVocabDrafter(config, INFO, twin(0.0), DRAFTS["permuted"][1]), 0.0)
    assert acceptance(engine) == 1.0


def request(tokens: list[int], depth: int = 4, temperature: float = 0.0, seed: int = 1) -> DraftRequest:
    return DraftRequest(0, tokens, 1, Budget.chain(depth), SamplingParams(temperature=temperature), seed)


def test_a_rewritten_text_is_read_again_from_the_first_token_that_differs() -> None:
    """`t` becomes `the`: the draft's last token changes although the target only appended."""
    using, words = drafter("merged"), DRAFTS["merged"][1]
    computed: list[list[int]] = []
    forward = using.runner.forward

    def spy(rows: Any, **options: Any) -> Any:
        computed.append(list(rows[0].tokens))
        return forward(rows, **options)

    using.runner.forward = spy  # type: ignore[method-assign]
    try:
        for text, read in (("we go in t", None), ("we go in the", 1), ("we go in thex", 1), ("we go", 1)):
            computed.clear()
            (draft,) = using.propose([request(INFO.tokenizer(text)["input_ids"])])
            assert computed[0] == words(text)["input_ids"][-(read or 99) :]
            whole = replace(request(INFO.tokenizer(text)["input_ids"]), seq_id=1)
            assert using.propose([whole])[0].tree == draft.tree
            using.close(1)
    finally:
        using.runner.forward = forward  # type: ignore[method-assign]
        using.close(0)


# -- the law ------------------------------------------------------------------------------------------


def chi_square_z(counts: Counter[tuple[int, ...]], law: dict[tuple[int, ...], float], total: int) -> float:
    """How far from the law, in standard deviations (Wilson-Hilferty); rare cells pooled."""
    cells: list[tuple[float, float]] = []
    rare_count, rare_mass = 0.0, 0.0
    for key, mass in law.items():
        if mass * total < 5:
            rare_count, rare_mass = rare_count + counts[key], rare_mass + mass
        else:
            cells.append((counts[key], mass * total))
    if rare_mass:
        cells.append((rare_count, rare_mass * total))
    freedom = len(cells) - 1
    statistic = sum((seen - wanted) ** 2 / wanted for seen, wanted in cells)
    spread = 2 / (9 * freedom)
    return float(((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread))


PROMPT = [3, 1, 4, 1, 5]
LAW_PARAMS = SamplingParams(max_tokens=3, temperature=1.2, top_k=4)


def true_law() -> dict[tuple[int, ...], float]:
    pipeline, held = LogitsPipeline(LAW_PARAMS, VOCAB, frozenset(), len(PROMPT)), target()
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        longer = {}
        for path, mass in law.items():
            held.cache.open(0)
            row = held.forward([PackRow(0, [*PROMPT, *path])], logits="last").logits
            held.cache.close(0)
            assert row is not None
            probs = pipeline.probs(row[0], [*PROMPT, *path])
            longer.update({(*path, t): mass * float(probs[t]) for t in probs.nonzero().flatten().tolist()})
        law = longer
    return law


class Untruthful(Drafter):
    """Says that its tokens were drawn from the law they were not drawn from."""

    name, needs, num_speculative_tokens = "untruthful", CrossVocabDrafter.needs, 2

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner

    def propose(self, requests: Any) -> list[Draft]:
        drafts = self.inner.propose(requests)
        flat = torch.full((VOCAB,), 1 / VOCAB, dtype=torch.float64)
        return [Draft(d.tree, (*([flat] * d.tree.num_drafted), None)) for d in drafts]


def sample(using: Drafter, total: int) -> tuple[Counter[tuple[int, ...]], Engine]:
    engine = Engine(target(), using, vocab_size=VOCAB, max_rows=100)
    rows = [engine.find(engine.add(PROMPT, LAW_PARAMS, seed=seed)) for seed in range(total)]
    list(engine.run())
    return Counter(tuple(row.output) for row in rows if row is not None), engine


def test_intersect_mode_keeps_the_law() -> None:
    law, total = true_law(), 600
    config = CrossVocabConfig("tiny", mode="intersect", num_speculative_tokens=2)
    using = CrossVocabDrafter(config, INFO, twin(0.05), DRAFTS["permuted"][1])  # right, but not too often
    counts, engine = sample(using, total)
    assert set(counts) <= set(law)
    assert 0.2 < acceptance(engine) < 0.95
    assert chi_square_z(counts, law, total) < 4
    wrong, _ = sample(Untruthful(using), total)
    assert chi_square_z(wrong, law, total) > 6  # the test can fail


def test_q_is_the_law_of_the_shared_tokens_renormalised() -> None:
    using = drafter("merged", mode="intersect")
    tokens = INFO.tokenizer("the abc in the")["input_ids"]
    (draft,) = using.propose([request(tokens, temperature=0.7)])
    using.close(0)
    words = DRAFTS["merged"][1]
    held, (ours, theirs) = merged(), shared_tokens(INFO.tokenizer, words, VOCAB, len(words))
    held.cache.open(0)
    logits = held.forward([PackRow(0, words("the abc in the")["input_ids"])], logits="last").logits
    held.cache.close(0)
    assert logits is not None and draft.q is not None and draft.q[0] is not None
    expected = torch.zeros(VOCAB, dtype=torch.float64)
    expected[ours] = (logits[0, theirs].double() / 0.7).softmax(0)
    torch.testing.assert_close(draft.q[0], expected, rtol=1e-5, atol=1e-7)
    for q, token in zip(draft.q[:-1], draft.tree.tokens[1:], strict=True):
        assert q is not None and float(q[token]) > 0


def test_greedy_drafts_from_shared_tokens_tell_their_probabilities_among_these() -> None:
    asked = replace(request(INFO.tokenizer("the abc in the")["input_ids"]), scored=True)
    using = drafter("merged", mode="intersect")
    (draft,) = using.propose([asked])
    using.close(0)
    words = DRAFTS["merged"][1]
    held, (ours, theirs) = merged(), shared_tokens(INFO.tokenizer, words, VOCAB, len(words))
    to_draft = dict(zip(ours.tolist(), theirs.tolist(), strict=True))
    read = words("the abc in the")["input_ids"]
    drafted = [to_draft[t] for t in draft.tree.tokens[1:]]
    held.cache.open(0)
    logits = held.forward([PackRow(0, [*read, *drafted])]).logits
    held.cache.close(0)
    assert logits is not None and draft.scores is not None and len(drafted) == 4 and draft.q is None
    laws = logits[len(read) - 1 : -1, theirs].softmax(-1)
    likely = [float(law.max()) for law in laws]
    assert [int(theirs[law.argmax()]) for law in laws] == drafted
    assert draft.scores == pytest.approx([math.prod(likely[:n]) for n in range(5)], rel=1e-4)
    text = drafter("merged")
    assert text.propose([asked])[0].scores is None  # the target's tokens are not those that were scored
    text.close(0)


# -- tokenizers ---------------------------------------------------------------------------------------


def sentencepiece() -> Any:
    """▁ for spaces, bytes as <0xNN>, a start token in front."""
    names = ["<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", *"abehit", "▁a", "▁t", "th", "he"]
    vocab = {n: i for i, n in enumerate(names)}
    merges = [("▁", "a"), ("▁", "t"), ("t", "h"), ("h", "e")]
    inner = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    inner.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in ("<s>", "</s>")])
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")


def test_tokens_are_matched_by_their_bytes_across_conventions() -> None:
    bytewise, pieces = tiny_tokenizer(), sentencepiece()
    values = token_bytes(pieces, len(pieces))
    assert values[:2] == [None, None] and values[2 + 0xE9] == b"\xe9"
    assert values[-4:] == [b" a", b" t", b"th", b"he"]
    assert token_bytes(bytewise, len(bytewise)) == [*(bytes([b]) for b in range(256)), None, None]
    ours, theirs = shared_tokens(DRAFTS["merged"][1], pieces, VOCAB + 7, len(pieces))
    pairs = {values[t]: token_bytes(DRAFTS["merged"][1], 99)[o] for o, t in zip(ours, theirs, strict=True)}
    assert all(a == b for a, b in pairs.items()) and {b" a", b"th", b"a", b" "} <= set(pairs)
    assert b" the" not in pairs
    assert len(set(ours.tolist())) == len(set(theirs.tolist())) == len(ours)


@pytest.mark.parametrize("text", ["the abc in", "né 😀 a", " the", "the ", "a"])
def test_text_goes_there_and_back(text: str) -> None:
    """Every cut of the target's tokens: the rest, drafted in the other's tokens, comes back as it was."""
    for ours, theirs in [(tiny_tokenizer(), sentencepiece()), (sentencepiece(), tiny_tokenizer())]:
        translator = Translator(ours, theirs)
        tokens = ours(text, add_special_tokens=False)["input_ids"]
        for cut in range(1, len(tokens)):
            known = ours.decode(tokens[:cut]).rstrip("\ufffd")
            back = translator.to_target(tokens[:cut], ours.decode(tokens)[len(known) :])
            assert back in (tokens[cut:], [])
            read = theirs.decode(translator.to_draft(tokens[:cut]), skip_special_tokens=True)
            assert read.strip() == known.strip()


def test_nothing_is_drafted_where_the_text_melts_with_the_root() -> None:
    words = DRAFTS["merged"][1]
    translator = Translator(words, INFO.tokenizer)
    (a,), (t,) = words("a")["input_ids"], words("t")["input_ids"]
    assert translator.to_target([a, t], "he") == []  # t + he is the one token `the`
    assert translator.to_target([a, t], "x") == words("x")["input_ids"]
    assert translator.to_target([t, a], "") == []
    # an unusual way to write `the` further back does not matter
    assert (
        translator.to_target([*words("t")["input_ids"], *words("h")["input_ids"], a], "x")
        == (words("x")["input_ids"])
    )


def test_special_tokens_are_kept_where_both_have_them_and_never_drafted() -> None:
    ours = tokenizer(CHARACTERS, (), ["<end>", "<turn>"])
    translator = Translator(ours, DRAFTS["merged"][1])
    end, turn = ours.convert_tokens_to_ids(["<end>", "<turn>"])
    a, b = ours("a")["input_ids"][0], ours("b")["input_ids"][0]
    draft = DRAFTS["merged"][1]
    assert translator.to_draft([a, end, b, turn, a]) == draft("a<end>ba")["input_ids"]
    x = draft("x")["input_ids"][0]
    assert translator.drafted_text([x], [x, draft.eos_token_id, x]) == "x"
    assert Translator(tiny_tokenizer(), sentencepiece()).to_draft([97])[0] == sentencepiece().bos_token_id


# -- loading and mistakes -----------------------------------------------------------------------------


def test_it_loads_by_its_name(tmp_path: Path) -> None:
    words = tokenizer(PERMUTED, (), ["<end>"])
    path = save_tiny(tmp_path / "draft", kind="llama", vocab_size=VOCAB + 1, tokenizer=words)
    using = CrossVocabDrafter(CrossVocabConfig(str(path)), INFO)
    assert using.propose([request([1, 2, 3])])[0].tree.num_drafted > 0
    assert using.memory_bytes > 0
    using.shutdown()
    assert using.runner.cache.memory_bytes == 0


@pytest.mark.parametrize(
    "options", [{"mode": "guess"}, {"num_speculative_tokens": "-1"}, {"min_confidence": "2"}]
)
def test_bad_options_are_errors_of_one_line(options: dict[str, str]) -> None:
    with pytest.raises(ParameterError) as caught:
        make_config(CrossVocabConfig, "crossvocab", {"model": "x", **options})
    assert "\n" not in str(caught.value)


def test_what_cannot_work_is_said() -> None:
    config = CrossVocabConfig("tiny", mode="intersect")
    with pytest.raises(DrafterError, match="target has none"):
        CrossVocabDrafter(config, TargetInfo(VOCAB, 2048), twin(), INFO.tokenizer)
    with pytest.raises(DrafterError, match="mode=text"):
        CrossVocabDrafter(config, INFO, twin(), tokenizer(["ß"]))
