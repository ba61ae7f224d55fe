"""The generated prompts: the same for a seed, varied, and free of any benchmark's text."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from slipstream.errors import ParameterError
from slipstream.prompts.corpus import words
from slipstream.train.prompts import CATEGORIES, make_prompts, ngrams, variety

BENCH = Path(__file__).parents[2] / "bench" / "prompts"


@pytest.fixture(scope="module")
def prompts():
    return make_prompts(2400, seed=0)


def test_a_seed_gives_the_same_prompts_and_another_one_others(prompts):
    assert make_prompts(300, seed=0) == prompts[:300]
    others = {p.text for p in make_prompts(300, seed=1)}
    assert len(others & {p.text for p in prompts}) < 45


def test_no_prompt_comes_twice_and_every_category_has_its_share(prompts):
    assert len({p.text for p in prompts}) == len(prompts) == 2400
    for name, (_, share) in CATEGORIES.items():
        count = sum(p.category == name for p in prompts)
        assert abs(count / len(prompts) - share) < 0.03, name
    assert abs(sum(share for _, share in CATEGORIES.values()) - 1) < 1e-9


def test_they_are_varied(prompts):
    told = variety(prompts)
    assert told["first_words"] > 120 and told["most_common_first_word"] < 0.2
    assert told["distinct_triples"] > 0.3
    for name, facts in told["categories"].items():
        assert facts["first_words"] >= 5, name
    middle = {name: facts["words"][1] for name, facts in told["categories"].items()}
    assert min(middle.values()) < 20 and max(middle.values()) > 150
    assert max(len(p.text) for p in prompts) < 6000
    same = variety([prompts[0]] * 50)
    assert same["distinct_triples"] < 0.05 and same["most_common_first_word"] == 1


def test_every_slot_is_filled(prompts):
    for prompt in prompts:
        prose = re.sub(r"```.*?```", "", prompt.text, flags=re.DOTALL)
        assert not re.search(r"\{[a-z]+\d*(:\d+-\d+)?\}|##", prose), prompt.text


def test_every_word_list_is_used():
    source = (Path(__file__).parents[2] / "src/slipstream/train/prompts.py").read_text()
    source += (Path(__file__).parents[2] / "src/slipstream/prompts/corpus.py").read_text()
    entries = "\n".join(entry for found in words().values() for entry in found)
    for name, found in words().items():
        assert re.search(rf"""["']{name}["']""", source) or re.search(rf"\{{{name}\d*\}}", entries), name
        assert found, name


def test_no_thirteen_words_of_a_benchmark_prompt_are_in_them(prompts):
    files = sorted(BENCH.glob("*.jsonl"))
    assert any(f.name == "foundation.jsonl" for f in files)
    benchmark = {
        gram
        for file in files
        for line in file.read_text(encoding="utf-8").splitlines()
        for text in _texts(json.loads(line))
        for gram in ngrams(text, 13)
    }
    assert len(benchmark) > 100
    shared = {" ".join(g) for p in prompts for g in ngrams(p.text, 13) if g in benchmark}
    assert not shared


def _texts(value: object) -> list[str]:
    if isinstance(value, str):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for part in inner for text in _texts(part)]


def test_too_many_are_refused(monkeypatch):
    monkeypatch.setattr("slipstream.train.prompts.CATEGORIES", {"one": (lambda fill: "always this", 1.0)})
    with pytest.raises(ParameterError, match="no more different one prompts"):
        make_prompts(2)
    with pytest.raises(ParameterError, match="at least 1"):
        make_prompts(0)
