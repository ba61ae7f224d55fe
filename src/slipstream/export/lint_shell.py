"""The words of a shell's text and where they stand, so that a word can be changed and all else left alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

_CONTROL = re.compile(r"&&|\|\||;;|[;|()\n]|&(?![>])")
_REDIRECTION = re.compile(r"(?:\d+|&)?(?:>>|>\||<<<|<<|<>|>|<)(?:&\d+|&-)?")
_GAP = re.compile(r"(?:[ \t]|\\\n)+")
_ENDS = " \t\n;|&<>()"
_CLOSED = {"(": ")", "{": "}"}


@dataclass(frozen=True, slots=True)
class Word:
    """value: without quotes; what a shell would put in for variables and commands stays as it is written.

    expands: there is such a thing in it. control: what ends a command.
    """

    value: str
    start: int
    end: int
    expands: bool = False
    control: bool = False


def words(text: str, start: int = 0) -> Iterator[Word]:
    """The words from `start` on, without comments, redirections and their files. ValueError for a quote that
    is never closed.
    """
    at, skipped = start, False
    while at < len(text):
        if gap := _GAP.match(text, at):
            at = gap.end()
        elif text[at] == "#":
            end = text.find("\n", at)
            at = len(text) if end < 0 else end
        elif found := _REDIRECTION.match(text, at):
            at, skipped = found.end(), "&" not in found[0][1:]  # a file follows, unless it is >&1
        elif found := _CONTROL.match(text, at):
            yield Word(found[0], at, found.end(), control=True)
            at, skipped = found.end(), False
        else:
            word = _word(text, at)
            at = word.end
            if not skipped:
                yield word
            skipped = False


def _word(text: str, start: int) -> Word:
    at, parts, expands = start, list[str](), False
    while at < len(text) and text[at] not in _ENDS:
        if text[at] == "'":
            end = text.find("'", at + 1)
            if end < 0:
                raise ValueError("No closing quotation")
            parts.append(text[at + 1 : end])
            at = end + 1
        elif text[at] == '"':
            at += 1
            while text[at : at + 1] != '"':
                if at >= len(text):
                    raise ValueError("No closing quotation")
                inner = _expansion(text, at)
                if inner > at:
                    parts.append(text[at:inner])
                    at, expands = inner, True
                elif text[at] == "\\" and text[at + 1 : at + 2] in ("$", "`", '"', "\\", "\n"):
                    parts.append(text[at + 1].replace("\n", ""))
                    at += 2
                else:
                    parts.append(text[at])
                    at += 1
            at += 1
        elif text[at] == "\\":
            parts.append(text[at + 1 : at + 2].replace("\n", ""))
            at += 2
        else:
            inner = _expansion(text, at)
            expands = expands or inner > at
            parts.append(text[at : max(inner, at + 1)])
            at = max(inner, at + 1)
    return Word("".join(parts), start, min(at, len(text)), expands)


def _expansion(text: str, at: int) -> int:
    """Where the variable or command that starts here ends; `at` if none does."""
    if text[at] == "`":
        end = text.find("`", at + 1)
        return at if end < 0 or "\n" in text[at:end] else end + 1  # a fence of Markdown is none
    if text[at] != "$":
        return at
    opened = text[at + 1 : at + 2]
    if opened not in _CLOSED:
        name = re.compile(r"\$(?:\w+|[@*#?$!-])").match(text, at)
        return at if name is None else name.end()
    depth = 0
    for i in range(at + 1, len(text)):
        depth += (text[i] == opened) - (text[i] == _CLOSED[opened])
        if depth == 0:
            return i + 1
    return at


def commands(found: Iterable[Word]) -> Iterator[list[Word]]:
    """The words, command by command."""
    command = list[Word]()
    for word in found:
        if not word.control:
            command.append(word)
        elif command:
            yield command
            command = []
    if command:
        yield command


def doubled(value: str) -> str:
    """A word in double quotes, in which variables and commands are still put in."""
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
