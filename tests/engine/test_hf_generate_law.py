"""Sampling, drafters and streamers of `slipstream.generate`."""

from __future__ import annotations

from dataclasses import MISSING
from dataclasses import fields as dataclass_fields
from itertools import product
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList, TextIteratorStreamer, TextStreamer
from transformers import MinPLogitsWarper as MinP
from transformers import TemperatureLogitsWarper as Temperature
from transformers import TopKLogitsWarper as TopK
from transformers import TopPLogitsWarper as TopP

import slipstream
from slipstream.drafters import find_drafter, list_drafters
from slipstream.errors import ParameterError
from slipstream.testing.tiny import tiny_model, tiny_tokenizer

MODEL, HELPER = tiny_model("llama"), tiny_model("llama", seed=1, layers=1)
TOKENIZER = tiny_tokenizer()
IDS = torch.tensor([[5, 6, 7, 5, 6, 7, 5, 6]])
TINY_VOCAB = 12


TRAINED = ("draft_model", "medusa", "eagle")  # nothing that was trained comes with a random target


def built_in() -> list[str]:
    """Drafters that need no option, and the draft model, which is given loaded."""
    names = [d["name"] for d in list_drafters() if d["where"] == "built in" and d["name"] not in TRAINED]
    free = []
    for name in names:
        needed = [
            f
            for f in dataclass_fields(find_drafter(name).Config)  # type: ignore[attr-defined]
            if f.default is MISSING and f.default_factory is MISSING
        ]
        if not needed:
            free.append(name)
    return [*free, "assistant_model", "prompt_lookup", "self"]


def drafting(name: str) -> dict[str, Any]:
    return {
        "assistant_model": {"assistant_model": HELPER},
        # A twin of the target: nearly everything it drafts is accepted.
        "self": {"assistant_model": tiny_model("llama"), "num_assistant_tokens": 6},
        "cascade": {"drafter": "cascade:drafters=suffix+ngram(branches=2)"},
        "selfspec": {"drafter": "selfspec:exit=1,min_confidence=0"},
        "prompt_lookup": {"prompt_lookup_num_tokens": 5, "max_matching_ngram_size": 3},
    }.get(name, {"drafter": name})


@pytest.mark.parametrize("name", built_in())
def test_every_drafter_gives_the_same_tokens(name: str) -> None:
    ids = torch.randint(0, 250, (3, 9), generator=torch.Generator().manual_seed(2))
    for options in (
        {"repetition_penalty": 1.1},
        {"do_sample": True, "temperature": 0.3, "top_k": 5, "seed": 4},
        {"do_sample": True, "top_p": 0.9, "min_p": 0.01, "seed": 5, "num_return_sequences": 2},
    ):
        plain = slipstream.generate(MODEL, ids, drafter="none", max_new_tokens=20, **options)
        given = slipstream.generate(MODEL, ids, max_new_tokens=20, **drafting(name), **options)
        assert given.tolist() == plain.tolist()


def test_a_perfect_assistant_is_accepted() -> None:
    given = slipstream.generate(
        MODEL, IDS, max_new_tokens=28, eos_token_id=None, return_dict_in_generate=True, **drafting("self")
    )
    assert given.counts.acceptance_rate > 0.99 and given.counts.tau > 4
    schedule = {"num_assistant_tokens_schedule": "heuristic", "assistant_confidence_threshold": 0.2}
    slower = slipstream.generate(
        MODEL, IDS, max_new_tokens=28, eos_token_id=None, **drafting("self"), **schedule
    )
    assert slower.tolist() == given.sequences.tolist()


@pytest.mark.parametrize(
    ("name", "warps"),
    [
        ("ngram", {"temperature": 0.7, "top_k": 5}),
        ("self", {"temperature": 1.5, "top_k": 6, "top_p": 0.9, "min_p": 0.05}),
    ],
)
def test_sampling_has_the_law_of_transformers(name: str, warps: dict[str, Any]) -> None:
    """Pairs of first tokens, N = 1500, against HF's processors; Pearson's chi-square below mean + 4 sd."""
    model, twin = (
        tiny_model("llama", vocab_size=TINY_VOCAB, layers=1, initializer_range=0.2) for _ in range(2)
    )
    how = {"assistant_model": twin} if name == "self" else {"drafter": "ngram:min_n=1"}
    prompt, copies, calls = IDS[:, :6], 250, 6
    processors = LogitsProcessorList()
    kinds = {"temperature": Temperature, "top_k": TopK, "top_p": TopP, "min_p": MinP}
    processors.extend(kinds[k](v) for k, v in warps.items() if v)

    def law(ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return processors(ids, model(ids).logits[:, -1].float()).softmax(-1)[0].double()

    first = law(prompt)
    expected = {
        (a, b): float(first[a] * second[b])
        for a in range(TINY_VOCAB)
        for second in [law(torch.cat((prompt, torch.tensor([[a]])), 1))]
        for b in range(TINY_VOCAB)
    }
    seen: dict[tuple[int, int], int] = dict.fromkeys(product(range(TINY_VOCAB), repeat=2), 0)
    options = {"do_sample": True, "max_new_tokens": 3, "num_return_sequences": copies, "eos_token_id": None}
    for call in range(calls):
        rows = slipstream.generate(model, prompt, seed=1000 * call, check=False, **how, **options, **warps)
        for a, b in rows[:, 6:8].tolist():
            seen[a, b] += 1
    total = copies * calls
    assert all(expected[pair] > 0 for pair, count in seen.items() if count)
    usual = [pair for pair, p in expected.items() if p * total >= 5]
    cells = [(seen[pair], expected[pair] * total) for pair in usual]
    rest = total - sum(e for _, e in cells)
    if rest > 5:
        cells.append((total - sum(o for o, _ in cells), rest))
    statistic = sum((o - e) ** 2 / e for o, e in cells)
    freedom = len(cells) - 1
    assert freedom >= 8
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5
    distance = sum(abs(seen[p] / total - expected[p]) for p in seen) / 2
    assert distance < 0.15


def test_a_seed_repeats_and_rows_differ() -> None:
    options: dict[str, Any] = {"do_sample": True, "max_new_tokens": 12, "top_k": 0, "eos_token_id": None}
    two = torch.cat((IDS, IDS))
    first = slipstream.generate(MODEL, two, seed=1, num_return_sequences=3, **options).tolist()
    assert first == slipstream.generate(MODEL, two, seed=1, num_return_sequences=3, **options).tolist()
    assert len({tuple(row) for row in first}) == 6
    alone = slipstream.generate(MODEL, IDS, seed=1 + 4, **options).tolist()
    assert alone[0] == first[4]  # row i has seed + i, whatever is in the batch
    fresh = {tuple(slipstream.generate(MODEL, IDS, **options)[0].tolist()) for _ in range(3)}
    assert len(fresh) == 3


def test_the_global_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    slipstream.generate(MODEL, IDS, do_sample=True, max_new_tokens=5)
    assert torch.equal(before, torch.get_rng_state())


class Recorder:
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.calls.append((tuple(value.shape), value.dtype, value.device.type, value.tolist()))

    def end(self) -> None:
        self.calls.append("end")


@pytest.mark.parametrize("name", ["ngram", "self"])
def test_a_streamer_gets_the_calls_that_transformers_makes(name: str) -> None:
    theirs, ours = Recorder(), Recorder()
    options = {"max_new_tokens": 25, "eos_token_id": 257}
    MODEL.generate(IDS, do_sample=False, streamer=theirs, **options)
    slipstream.generate(MODEL, IDS, streamer=ours, **drafting(name), **options)
    assert ours.calls == theirs.calls


def test_a_streamer_is_not_given_what_lies_behind_a_stop_string() -> None:
    said = MODEL.generate(IDS, do_sample=False, max_new_tokens=12)[0, 8:].tolist()
    word = TOKENIZER.decode([said[3]])
    theirs, ours = Recorder(), Recorder()
    options = {"max_new_tokens": 25, "stop_strings": word, "tokenizer": TOKENIZER}
    MODEL.generate(IDS, do_sample=False, streamer=theirs, **options)
    slipstream.generate(MODEL, IDS, streamer=ours, **drafting("self"), **options)
    assert ours.calls == theirs.calls


def test_the_streamers_of_transformers_work(capsys: pytest.CaptureFixture[str]) -> None:
    slipstream.generate(MODEL, IDS, streamer=TextStreamer(TOKENIZER), max_new_tokens=10)
    ours = capsys.readouterr().out
    MODEL.generate(IDS, do_sample=False, streamer=TextStreamer(TOKENIZER), max_new_tokens=10)
    assert ours == capsys.readouterr().out != ""
    pieces = TextIteratorStreamer(TOKENIZER, skip_prompt=True)
    given = slipstream.generate(MODEL, IDS, streamer=pieces, max_new_tokens=10)
    assert "".join(pieces) == TOKENIZER.decode(given[0, 8:])


def test_a_streamer_takes_one_row() -> None:
    with pytest.raises(ParameterError, match="one row, not 2"):
        slipstream.generate(MODEL, torch.cat((IDS, IDS)), streamer=Recorder(), max_new_tokens=3)


def test_generate_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    slipstream.generate(MODEL, IDS, max_new_tokens=5, assistant_model=HELPER)
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""
