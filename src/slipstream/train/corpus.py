"""Text and code that every Python installation has: functions and documentation of its standard library."""

from __future__ import annotations

import ast
import importlib.util
import random
import re
import sysconfig
import textwrap
from functools import lru_cache
from pathlib import Path

MODULES = (
    "abc argparse ast base64 bdb bisect calendar cmd code codeop collections/__init__ colorsys compileall"
    " concurrent/futures/_base configparser contextlib copy csv dataclasses difflib dis doctest email/header"
    " email/message email/utils enum filecmp fileinput fnmatch fractions ftplib functools genericpath getopt"
    " gettext glob graphlib hashlib heapq hmac html/__init__ html/parser http/cookiejar http/cookies imaplib"
    " inspect ipaddress json/decoder json/encoder keyword linecache locale logging/__init__ logging/handlers"
    " mailbox mimetypes modulefinder netrc ntpath numbers operator optparse pathlib pdb pickletools pkgutil"
    " platform plistlib poplib posixpath pprint profile pstats pyclbr queue quopri random reprlib rlcompleter"
    " sched secrets selectors shelve shlex shutil smtplib socketserver stat statistics string subprocess symtable"
    " tabnanny tarfile tempfile textwrap threading timeit token tokenize trace traceback turtle types typing"
    " unittest/case unittest/mock urllib/parse urllib/request uuid wave weakref webbrowser wsgiref/headers"
    " xml/dom/minidom xml/etree/ElementTree xmlrpc/client zipapp zipfile zipfile/__init__"
).split()
_LINES = (5, 40)
_MOST_CHARACTERS = 1600
_PASSAGE = (300, 1500)


def _sources() -> list[str]:
    folder = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for name in MODULES:
        path = folder / f"{name}.py"
        if path.is_file():  # modules come and go between versions
            found.append(path.read_text(encoding="utf-8", errors="replace"))
    return found


@lru_cache
def functions() -> tuple[str, ...]:
    """Source of short functions and methods, without indentation, in the order of the modules."""
    kept: dict[str, None] = {}
    for source in _sources():
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
    texts = [ast.get_docstring(ast.parse(source)) or "" for source in _sources()]
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
