"""Text that is always there: our word lists, and sources and documentation of Python's standard library."""

from __future__ import annotations

import ast
import importlib.util
import random
import re
import sysconfig
import textwrap
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

WORDS = Path(__file__).with_name("words.txt")
_LINES = (5, 40)
_MOST_CHARACTERS = 1600
_PASSAGE = (300, 1500)
_SLOT = re.compile(r"\{[^{}\n]*\}|##")


@lru_cache
def words() -> Mapping[str, tuple[str, ...]]:
    """The lists of words.txt by name."""
    lists: dict[str, list[str]] = {}
    entries: list[str] = []
    for line in WORDS.read_text(encoding="utf-8").splitlines():
        if line.startswith("[") and line.endswith("]"):
            entries = lists.setdefault(line[1:-1], [])
        elif line and not line.startswith("#"):
            entries.append(line.replace("\\n", "\n"))
    return {name: tuple(found) for name, found in lists.items()}


@lru_cache
def sources() -> tuple[str, ...]:
    """The modules of the list `module`, those that this Python has."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for name in words()["module"]:
        path = folder / f"{name}.py"
        if path.is_file():  # modules come and go between versions
            found.append(path.read_text(encoding="utf-8", errors="replace"))
    return tuple(found)


@lru_cache
def functions() -> tuple[str, ...]:
    """Source of short functions and methods, without indentation, in the order of the modules."""
    kept: dict[str, None] = {}
    for source in sources():
        lines = source.splitlines()
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, ast.FunctionDef) or node.end_lineno is None:
                continue
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            text = textwrap.dedent("\n".join(lines[first - 1 : node.end_lineno]))
            if _LINES[0] <= text.count("\n") + 1 <= _LINES[1] and len(text) <= _MOST_CHARACTERS:
                kept[text] = None
    return tuple(kept)


@lru_cache
def passages() -> tuple[str, ...]:
    """Paragraphs of prose: Python's language reference as `help()` has it, and modules' docstrings."""
    texts = [ast.get_docstring(ast.parse(source)) or "" for source in sources()]
    topics = importlib.util.find_spec("pydoc_data")
    if topics is not None and topics.submodule_search_locations:  # some distributions leave it out
        for node in ast.walk(_topics(Path(topics.submodule_search_locations[0]) / "topics.py")):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    kept: dict[str, None] = {}
    for text in texts:
        paragraphs = [p.strip() for p in re.split(r"\n\s*\n", text)]
        prose = [" ".join(p.split()) for p in paragraphs if _is_prose(p)]
        for start in range(0, len(prose), 3):
            passage = "\n\n".join(prose[start : start + 3])
            if _PASSAGE[0] <= len(passage) <= _PASSAGE[1]:
                kept[passage] = None
    return tuple(kept)


def corpus() -> Mapping[str, tuple[str, ...]]:
    """All of it by kind: `code`, the modules' whole sources; `prose`, the passages and our own sentences, in
    English and some other languages, without what stands for a word."""
    lists = (found for name, found in words().items() if name != "module")
    sentences = (" ".join(_SLOT.sub(" ", entry).split()) for found in lists for entry in found)
    return {"code": sources(), "prose": (*passages(), *sentences)}


def _topics(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8") if path.is_file() else "")


def _is_prose(paragraph: str) -> bool:
    """Whole sentences, not grammar, examples, headings or lists."""
    letters = sum(c.isalpha() or c.isspace() for c in paragraph)
    return (
        len(paragraph.split()) >= 12
        and letters > 0.86 * len(paragraph)
        and paragraph[0].isalpha()
        and paragraph.rstrip().endswith(".")
        and ">>>" not in paragraph
        and "::=" not in paragraph
    )


def misspelt(text: str, rng: random.Random, share: float = 0.12) -> str:
    """The text with typing mistakes in some of its longer words: letters swapped, doubled, left out."""

    def spoil(match: re.Match[str]) -> str:
        word = match[0]
        if rng.random() >= share:
            return word
        at = rng.randrange(1, len(word) - 2)
        swapped = word[:at] + word[at + 1] + word[at] + word[at + 2 :]
        return rng.choice((swapped, word[:at] + word[at] + word[at:], word[:at] + word[at + 1 :]))

    return re.sub(r"[a-z]{5,}", spoil, text)
