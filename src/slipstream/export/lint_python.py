"""Python calls that start an engine: `LLM(…)`, `EngineArgs(…)`, `AsyncEngineArgs(…)`, `sglang.Engine(…)`."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.errors import ParameterError

_NAMES = ("LLM", "EngineArgs", "AsyncEngineArgs", "Engine")


@dataclass(frozen=True, slots=True)
class Source:
    """A value that is no literal, as it stands in the source."""

    text: str


@dataclass
class Call:
    """One call in a source: its argument values by name, and where it stands."""

    source: str
    node: ast.Call
    arguments: dict[str, Any]
    positional: int

    @property
    def line(self) -> int:
        return self.node.lineno

    @property
    def engine(self) -> str:
        """Whose call it is."""
        return "sglang" if _called(self.node.func) == "Engine" else "vllm"

    def render(self, wanted: Mapping[str, Any]) -> str:
        """The source with this call's arguments changed; what is not changed stays as it was written."""
        written = {k.arg: k for k in self.node.keywords if k.arg is not None}
        parts = [_segment(self.source, a) for a in self.node.args[self.positional :]]
        if self.positional and "model" in wanted:
            same = wanted["model"] == self.arguments.get("model")
            parts.insert(0, _segment(self.source, self.node.args[0]) if same else _code(wanted["model"]))
        for name, value in wanted.items():
            if name == "model" and self.positional:
                continue
            keyword = written.get(name)
            unchanged = keyword is not None and self.arguments.get(name) == value
            text = _segment(self.source, keyword.value) if unchanged and keyword else _code(value)
            parts.append(f"{name}={text}")
        parts.extend(f"**{_segment(self.source, k.value)}" for k in self.node.keywords if k.arg is None)
        start = _offset(self.source, self.node.lineno, self.node.col_offset)
        end = _offset(self.source, self.node.end_lineno or 0, self.node.end_col_offset or 0)
        head = _segment(self.source, self.node.func)
        if "\n" in self.source[start:end]:
            indent = re.match(r"[ \t]*", self.source.splitlines()[self.node.lineno - 1])
            lead = indent[0] if indent else ""
            inside = "".join(f"{lead}    {part},\n" for part in parts)
            body = f"{head}(\n{inside}{lead})"
        else:
            body = f"{head}({', '.join(parts)})"
        return self.source[:start] + body + self.source[end:]


def looks_like(text: str) -> bool:
    """Whether this is Python with a call that starts an engine."""
    return bool(re.search(rf"\b(?:{'|'.join(_NAMES)})\s*\(", text))


def find(text: str) -> Call:
    """The first such call. Raises ParameterError if the text is no Python."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise ParameterError(f"line {error.lineno} is not Python ({error.msg})") from None
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _called(node.func) in _NAMES:
            arguments = {k.arg: _value(text, k.value) for k in node.keywords if k.arg is not None}
            positional = 0
            if node.args and not isinstance(node.args[0], ast.Starred) and "model" not in arguments:
                arguments = {"model": _value(text, node.args[0]), **arguments}
                positional = 1
            return Call(text, node, arguments, positional)
    raise ParameterError(f"no call of {', '.join(_NAMES)} in it")


def _called(func: ast.expr) -> str:
    return func.attr if isinstance(func, ast.Attribute) else func.id if isinstance(func, ast.Name) else ""


def _value(text: str, node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        pass
    if isinstance(node, ast.Dict) and all(isinstance(k, ast.Constant) for k in node.keys):
        pairs = zip(node.keys, node.values, strict=True)
        return {k.value: _value(text, v) for k, v in pairs if isinstance(k, ast.Constant)}
    if isinstance(node, ast.Call) and _called(node.func) == "dict" and not node.args:
        return {k.arg: _value(text, k.value) for k in node.keywords if k.arg is not None}
    return Source(_segment(text, node))


def _segment(text: str, node: ast.AST) -> str:
    return ast.get_source_segment(text, node) or ast.unparse(node)


def _code(value: Any) -> str:
    """A value as Python source; names in it stay names."""
    if isinstance(value, Source):
        return value.text
    if isinstance(value, dict):
        return "{" + ", ".join(f'"{k}": {_code(v)}' for k, v in value.items()) + "}"
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return repr(value)


def _offset(text: str, line: int, column: int) -> int:
    """Index into the text of a line (from 1) and a column in UTF-8 bytes."""
    lines = text.splitlines(keepends=True)
    head = lines[line - 1].encode()[:column].decode() if line <= len(lines) else ""
    return sum(len(part) for part in lines[: line - 1]) + len(head)
