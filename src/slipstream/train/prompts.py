"""Prompts to train on, put together from our own word lists and Python's standard library.

No benchmark's text is used, so what is measured on a benchmark was not seen in training. The same count,
seed and Python version give the same prompts.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.errors import ParameterError
from slipstream.prompts.corpus import functions, misspelt, passages, words

_SLOT = re.compile(r"\{([a-z]+)(\d*)(?::(\d+)-(\d+))?\}")
_TRIES = 50


@dataclass(frozen=True)
class Prompt:
    """A question for the target, and what kind it is."""

    category: str
    text: str

    def to_json(self) -> dict[str, str]:
        return {"category": self.category, "prompt": self.text}


class Filler:
    """Fills the slots of templates. What a name stands for is kept, so texts filled by one filler agree.

    given: what some names stand for from the start.
    """

    def __init__(self, rng: random.Random, **given: str) -> None:
        self.rng = rng
        self._drawn = given

    def __call__(self, text: str) -> str:
        """The text with its slots filled, those of the entries drawn as well."""
        return _SLOT.sub(self._slot, text)

    def draw(self, name: str) -> str:
        """An entry of a list, filled."""
        return self(self.rng.choice(words()[name]))

    def _slot(self, match: re.Match[str]) -> str:
        name, number, low, high = match.groups()
        key = name + number
        if key not in self._drawn:
            if low is not None:
                self._drawn[key] = str(self.rng.randint(int(low), int(high)))
            else:
                taken = {v for k, v in self._drawn.items() if k.rstrip("0123456789") == name}
                free = [w for w in words()[name] if w not in taken]
                self._drawn[key] = self(self.rng.choice(free))
        return self._drawn[key]


def _passage(fill: Filler) -> tuple[str, list[str]]:
    """A filled passage and the questions it answers."""
    text, *questions = _parts(fill.draw("passage"))
    return text, questions


def _parts(entry: str) -> list[str]:
    return [part.strip() for part in entry.split("##")]


def _prose(fill: Filler) -> str:
    if fill.rng.random() < 0.35:
        return fill.rng.choice(passages())
    return _passage(fill)[0]


def _sentences(text: str, rng: random.Random, most: int) -> str:
    found = re.split(r"(?<=[.!?]) (?=[A-ZÄÖÜ])", text)
    count = rng.randint(1, min(most, len(found)))
    start = rng.randint(0, len(found) - count)
    return " ".join(found[start : start + count])


def _code(fill: Filler) -> str:
    kind = fill.rng.random()
    if kind < 0.55:
        return fill.draw("codeask")
    if kind < 0.80:
        signature, doc, example = _parts(fill.draw("signature"))
        body = f'{signature}\n    """{doc}\n\n' + "\n".join(f"    {line}" for line in example.split("\n"))
        return f'{fill.draw("complete")}\n\n```python\n{body}\n    """\n```'
    return fill.draw("sqlask" if kind < 0.88 else "bug")


def _edit(fill: Filler) -> str:
    if fill.rng.random() < 0.65:
        return f"{fill.draw('editcode')}\n\n```python\n{fill.rng.choice(functions())}\n```"
    ask, text = fill.draw("editprose"), _prose(fill)
    if "spelling" in ask:
        text = misspelt(text, fill.rng)
    return f"{ask}\n\n{text}"


def _explain(fill: Filler) -> str:
    if fill.rng.random() < 0.65:
        return fill.draw("explainask")
    return f"{fill.draw('explaincode')}\n\n```python\n{fill.rng.choice(functions())}\n```"


def _question(fill: Filler) -> str:
    return fill.draw("question")


def _write(fill: Filler) -> str:
    return fill.draw("writeask")


def _translate(fill: Filler) -> str:
    rng = fill.rng
    if rng.random() < 0.45:
        text = _sentences(_prose(fill), rng, 3)
        return Filler(rng, text=text).draw("translate")
    source = rng.choices(("german", "french", "spanish"), (6, 2, 2))[0]
    lines = rng.sample(words()[source], rng.choice((1, 1, 2, 3)))
    text = " ".join(fill(line) for line in lines)
    return Filler(rng, text=text, source=source.capitalize()).draw("backtranslate")


def _summarise(fill: Filler) -> str:
    if fill.rng.random() < 0.25:
        return f"{fill.draw('extract')}\n\n{_prose(fill)}"
    several = [_passage(Filler(fill.rng))[0] for _ in range(fill.rng.choice((0, 0, 1)))]
    ask, texts = fill.draw("summarise"), "\n\n".join([_prose(fill), *several])
    return f"{texts}\n\n{ask}" if fill.rng.random() < 0.3 else f"{ask}\n\n{texts}"


def _maths(fill: Filler) -> str:
    return fill.draw("maths" if fill.rng.random() < 0.85 else "reason")


def _retrieve(fill: Filler) -> str:
    rng = fill.rng
    found = [_passage(Filler(rng)) for _ in range(rng.randint(2, 4))]
    question = rng.choice(rng.choice(found)[1])
    texts = "\n".join(f"[{i}] {text}" for i, (text, _) in enumerate(found, start=1))
    return f"{fill.draw('retrieve')}\n\n{texts}\n\nQuestion: {question}"


CATEGORIES: Mapping[str, tuple[Callable[[Filler], str], float]] = {
    "code": (_code, 0.24),
    "edit": (_edit, 0.12),
    "explain": (_explain, 0.11),
    "question": (_question, 0.11),
    "write": (_write, 0.10),
    "translate": (_translate, 0.08),
    "summarise": (_summarise, 0.08),
    "maths": (_maths, 0.09),
    "retrieve": (_retrieve, 0.07),
}


def make_prompts(count: int, seed: int = 0) -> list[Prompt]:
    """`count` different prompts in mixed order, by the shares of `CATEGORIES`.

    The first ones of a longer list are those of a shorter one. ParameterError when a category has no more
    new prompts to give.
    """
    if count < 1:
        raise ParameterError(f"the number of prompts must be at least 1, not {count}")
    rng = random.Random(f"prompts {seed}")
    names, shares = list(CATEGORIES), [share for _, share in CATEGORIES.values()]
    seen: set[str] = set()
    made = []
    for _ in range(count):
        (name,) = rng.choices(names, shares)
        made.append(Prompt(name, _fresh(name, rng, seen)))
    return made


def _fresh(name: str, rng: random.Random, seen: set[str]) -> str:
    for _ in range(_TRIES):
        text = CATEGORIES[name][0](Filler(rng))
        if text not in seen:
            seen.add(text)
            return text
    raise ParameterError(f"no more different {name} prompts after {len(seen)} in all: ask for fewer")


def variety(prompts: Sequence[Prompt]) -> dict[str, Any]:
    """What is in them: per category the number, the distinct first words, the tenth, middle and ninetieth
    percentile of the length in words; and the distinct word triples per triple in all (1: none repeats)."""
    told: dict[str, Any] = {"prompts": len(prompts), "categories": {}}
    for name in CATEGORIES:
        texts = [p.text.split() for p in prompts if p.category == name]
        lengths = sorted(len(t) for t in texts)
        told["categories"][name] = {
            "prompts": len(texts),
            "first_words": len({t[0] for t in texts}),
            "words": [lengths[int(q * (len(lengths) - 1))] for q in (0.1, 0.5, 0.9)] if lengths else [],
        }
    first = Counter(p.text.split()[0] for p in prompts)
    triples = [t for p in prompts for t in ngrams(p.text, 3)]
    told["first_words"] = len(first)
    told["most_common_first_word"] = max(first.values()) / len(prompts)
    told["distinct_triples"] = len(set(triples)) / max(1, len(triples))
    return told


def ngrams(text: str, n: int) -> list[tuple[str, ...]]:
    """Runs of n words, in lower case, without punctuation."""
    found = re.findall(r"\w+", text.lower())
    return [tuple(found[i : i + n]) for i in range(len(found) - n + 1)]
