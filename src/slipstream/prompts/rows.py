"""Prompts out of files and data sets: rows in the common layouts, checked where they stand.

A row is a JSON object with `messages` ([{"role", "content"}]), with ShareGPT's `conversations` ([{"from",
"value"}]), with `turns` (Spec-Bench, MT-Bench: texts, of which the first is asked), with a plain `prompt`
(HumanEval) or `question` (GSM8K); `system` may go with each, and what kind of text it asks for as `task` or
`category`. Text files hold one prompt a line.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from slipstream.core import jsontext
from slipstream.core.places import expanded
from slipstream.errors import ParameterError

Message = Mapping[str, str]

HUB = "hf:"
BUILT_IN = "small.jsonl"  # the set that comes with Slipstream
ANY_TASK = "all"
ROLES = ("system", "user", "assistant")
_SHAREGPT = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "system": "system",
}
_LAYOUTS = ("messages", "conversations", "turns", "prompt", "question")
_IDS = ("id", "question_id", "task_id")
_TEXT = (".txt", ".text", ".md")
_SHOWN = 40


@dataclass(frozen=True)
class Row:
    """One conversation: an optional system message, then user and assistant turns, the user first.

    It may end with a user's turn or with an assistant's. where: file and line, for messages to people. task:
    what kind of text is asked for, "all" where it is not said. name: its file and its id there, or its line.
    """

    messages: tuple[Message, ...]
    where: str
    task: str = ANY_TASK
    name: str = ""

    @property
    def questions(self) -> tuple[Message, ...]:
        """What is asked: everything but the assistant's turns."""
        return tuple(m for m in self.messages if m["role"] != "assistant")

    @property
    def asked(self) -> tuple[Message, ...]:
        """What is to be answered: everything up to the last user's turn."""
        return self.messages if self.messages[-1]["role"] == "user" else self.messages[:-1]

    @property
    def key(self) -> str:
        """Tells conversations apart by what is asked; the space between words does not count."""
        asked = [(m["role"], " ".join(m["content"].split())) for m in self.questions]
        return hashlib.blake2b(json.dumps(asked).encode(), digest_size=16).hexdigest()

    def with_system(self, system: str | None) -> Row:
        """The same with this system message in front, unless it has one."""
        if system is None or self.messages[0]["role"] == "system":
            return self
        return replace(self, messages=({"role": "system", "content": system}, *self.messages))


def read_prompts(source: str | Path | None = None, limit: int | None = None) -> list[Row]:
    """The rows of one source, see `read_rows`; None: the small set that comes with Slipstream."""
    if source is not None:
        return read_rows([str(source)], limit=limit)
    text = resources.files("slipstream.prompts").joinpath(BUILT_IN).read_text(encoding="utf-8")
    return list(_from_lines(text.splitlines(), BUILT_IN, BUILT_IN, json_lines=True))[:limit]


def read_rows(
    sources: Sequence[str], *, split: str = "train", config: str | None = None, limit: int | None = None
) -> list[Row]:
    """The rows of all sources, in order, at most `limit`.

    A source is a .jsonl or .json file, a text file, a folder of such files, or `hf:NAME`: a Hugging Face
    data set (its `split`, its `config`), which is streamed. ParameterError names the first bad row's place.
    """
    if not sources:
        raise ParameterError("there are no prompts: name a file, a folder, or hf:NAME of a data set")
    rows: list[Row] = []
    for source in sources:
        before = len(rows)
        for row in _rows_of(source, split, config):
            rows.append(row)
            if limit is not None and len(rows) >= limit:
                return rows
        if len(rows) == before:
            raise ParameterError(f"{source} holds no prompts: give a file with at least one")
    return rows


def _rows_of(source: str, split: str, config: str | None) -> Iterator[Row]:
    if source.startswith(HUB):
        yield from _from_hub(source.removeprefix(HUB), split, config)
        return
    if not source.strip():  # a path of nothing is the current folder
        raise ParameterError("a source of prompts is empty: name a file, a folder, or hf:NAME of a data set")
    path = expanded(source)
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.is_file() and p.suffix in (".jsonl", ".json", *_TEXT))
        for file in files:
            yield from _from_file(file)
    elif path.is_file():
        yield from _from_file(path)
    else:
        raise ParameterError(f"there is no file {path}: check the path (a data set of the hub is {HUB}NAME)")


def _from_file(path: Path) -> Iterator[Row]:
    if path.suffix == ".json":
        yield from _from_array(path)
        return
    if path.suffix not in (".jsonl", *_TEXT):
        raise ParameterError(
            f"{path} is neither .jsonl, .json nor text ({', '.join(_TEXT)}): rename or convert"
        )
    try:
        with path.open("rb") as file:
            lines = _decoded(file, str(path))
            yield from _from_lines(lines, str(path), path.name, json_lines=path.suffix == ".jsonl")
    except OSError as error:
        raise ParameterError(f"{path} cannot be read ({error.strerror}): check its permissions") from None


def _decoded(lines: Iterable[bytes], place: str) -> Iterator[str]:
    """Lines of UTF-8, with or without a byte order mark in front."""
    for number, line in enumerate(lines, start=1):
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise ParameterError(
                f"{place}, line {number}: not UTF-8 text ({error.reason}): convert the file first"
            ) from None


def _from_lines(lines: Iterable[str], place: str, file: str, *, json_lines: bool) -> Iterator[Row]:
    for number, line in enumerate(lines, start=1):
        where = f"{place}, line {number}"
        if not line.strip():
            continue
        if json_lines:
            yield parse_row(_json(line, where), where, file, number)
        else:
            yield Row(({"role": "user", "content": line.strip()},), where, name=f"{file}:{number}")


def _from_array(path: Path) -> Iterator[Row]:
    try:
        entries = _json(path.read_text(encoding="utf-8-sig"), str(path))
    except (UnicodeDecodeError, OSError) as error:
        raise ParameterError(f"{path} cannot be read ({error}): it must be UTF-8 JSON") from None
    if not isinstance(entries, list):
        raise ParameterError(f"{path} must hold a JSON array of rows: one object a line is .jsonl")
    for number, entry in enumerate(entries, start=1):
        yield parse_row(entry, f"{path}, entry {number}", path.name, number)


def _from_hub(name: str, split: str, config: str | None) -> Iterator[Row]:
    try:
        import datasets  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError:
        raise ParameterError(
            f"{HUB}{name} needs the package datasets: pip install 'slipstream-lm[train]', or give"
            " a .jsonl file"
        ) from None
    try:
        rows: Iterable[Any] = datasets.load_dataset(name, config, split=split, streaming=True)
        for number, entry in enumerate(rows, start=1):
            yield parse_row(entry, f"{HUB}{name}, {split} row {number}", name, number)
    except ParameterError:
        raise
    except Exception as error:  # the library raises whatever the network, the hub or a data file does
        reason = " ".join(str(error).split())
        raise ParameterError(
            f"the data set {name} ({split}) cannot be read ({reason[:200]}): check its name, split and config"
        ) from error


def _json(text: str, where: str) -> Any:
    try:
        return jsontext.parse(text)
    except ValueError as error:
        raise ParameterError(f"{where}: not valid JSON ({error}): mend or delete it") from None


def parse_row(entry: Any, where: str, file: str = "", number: int = 0) -> Row:
    """One object as a row; ParameterError says at `where` what is wrong with it. file, number: its name."""
    if not isinstance(entry, Mapping):
        raise ParameterError(f"{where}: a row must be a JSON object, not {_short(entry)}")
    found = [name for name in _LAYOUTS if entry.get(name) is not None]
    if not found:
        have = ", ".join(f"{k} (null)" if v is None else str(k) for k, v in entry.items()) or "nothing"
        wanted = f"{', '.join(_LAYOUTS[:-1])} or {_LAYOUTS[-1]}"
        raise ParameterError(f"{where}: a row needs {wanted}; it has {have}")
    layout, value = found[0], entry[found[0]]
    if layout == "question" or (layout == "prompt" and isinstance(value, str)):
        messages = [_message("user", value, where)]
    elif not isinstance(value, Sequence) or isinstance(value, str):
        wanted = "a text or a list of turns" if layout == "prompt" else "a list of turns"
        raise ParameterError(f"{where}: {layout} must be {wanted}, not {_short(value)}")
    elif layout == "turns":
        messages = [_message("user", text, where) for text in value[:1]]
    else:
        messages = [_turn(turn, where, i) for i, turn in enumerate(value, start=1)]
    system = entry.get("system")
    if system and (not messages or messages[0]["role"] != "system"):
        messages.insert(0, _message("system", system, where))
    task = str(entry.get("task") or entry.get("category") or ANY_TASK)
    known = next((entry[key] for key in _IDS if entry.get(key) is not None), number)
    return Row(_in_turn(messages, where), where, task, f"{file}:{known}")


def _turn(turn: Any, where: str, number: int) -> Message:
    here = f"{where}, turn {number}"
    if not isinstance(turn, Mapping):
        raise ParameterError(f"{here}: a turn must be an object, not {_short(turn)}")
    if "role" in turn:
        role, content = turn["role"], turn.get("content")
        known = role in ROLES
    else:
        role, content = turn.get("from"), turn.get("value")
        known = isinstance(role, str) and role in _SHAREGPT
    if not known:
        raise ParameterError(
            f"{here}: unknown role {_short(role)}; only {', '.join(ROLES)} can be trained on"
        )
    return _message(_SHAREGPT.get(str(role), str(role)), content, here)


def _message(role: str, content: Any, where: str) -> Message:
    if not isinstance(content, str):
        raise ParameterError(f"{where}: the text must be a string, not {_short(content)}")
    if not content.strip():
        raise ParameterError(f"{where}: the {role}'s text is empty: mend or delete the row")
    try:
        content.encode()
    except UnicodeEncodeError as error:  # JSON can say what no text holds: half of a surrogate pair
        raise ParameterError(
            f"{where}: the text holds half a character ({content[error.start]!r}): mend or delete the row"
        ) from None
    return {"role": role, "content": content}


def _in_turn(messages: Sequence[Message], where: str) -> tuple[Message, ...]:
    """Messages whose turns alternate, the user first."""
    turns = [m["role"] for m in messages if m["role"] != "system"]
    if any(m["role"] == "system" for m in messages[1:]):
        raise ParameterError(f"{where}: a system message can only come first")
    if not turns:
        raise ParameterError(f"{where}: there is no user's turn: mend or delete the row")
    for number, role in enumerate(turns):
        if role != ("user", "assistant")[number % 2]:
            raise ParameterError(
                f"{where}: turns must alternate, the user first; turn {number + 1} is the {role}'s"
            )
    return tuple(messages)


def _short(value: Any) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"
