"""Python calls that start an engine: `LLM(…)`, `EngineArgs(…)`, `AsyncEngineArgs(…)`, `sglang.Engine(…)`."""

from __future__ import annotations

import ast
import json
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
        edits = list[tuple[int, int, str]]()
        written = {k.arg: k for k in self.node.keywords if k.arg is not None}
        if self.positional and "model" in wanted and wanted["model"] != self.arguments.get("model"):
            edits.append((*self._span(self.node.args[0]), _code(wanted["model"])))
        new = [
            f"{name}={_code(value)}"
            for name, value in wanted.items()
            if name not in written and not (self.positional and name == "model")
        ]
        gone = list[list[tuple[int, int]]]()  # runs of neighbours
        beside = False  # the one before goes as well
        for keyword in self.node.keywords:
            name, (start, end) = keyword.arg, self._span(keyword)
            if name is None or name in wanted:
                if name is not None and wanted[name] != self.arguments[name]:
                    edits.append((*self._span(keyword.value), _code(wanted[name])))
                beside = False
            elif new:  # the first that goes makes room for them
                edits.append((start, end, f",{self._gap(start)}".join(new)))
                new = []
            else:
                gone = [*gone[:-1], [*gone[-1], (start, end)]] if beside else [*gone, [(start, end)]]
                beside = True
        edits += [(*self._with_commas(run), "") for run in gone]
        if new:
            spans = [*map(self._span, self.node.args), *map(self._span, self.node.keywords)]
            start, end = max(spans, default=(0, self._span(self.node.func)[1] + 1))
            lead = f",{self._gap(start)}" if spans else ""
            edits.append((end, end, lead + f",{self._gap(start)}".join(new)))
        text = self.source
        for start, end, shown in sorted(edits, reverse=True):
            text = text[:start] + shown + text[end:]
        return text

    def _span(self, node: ast.expr | ast.keyword) -> tuple[int, int]:
        start = _offset(self.source, node.lineno, node.col_offset)
        return start, _offset(self.source, node.end_lineno or 0, node.end_col_offset or 0)

    def _gap(self, start: int) -> str:
        """What separates an argument from the next: a new line where each has its own."""
        lead = self.source[self.source.rfind("\n", 0, start) + 1 : start]
        return " " if lead.strip() else "\n" + lead

    def _with_commas(self, run: list[tuple[int, int]]) -> tuple[int, int]:
        """Neighbouring arguments with their commas; with their lines and the comments on them, if these hold
        nothing else."""
        text, (start, _), (_, end) = self.source, run[0], run[-1]
        first = text.rfind("\n", 0, start) + 1
        rest = re.compile(r"[ \t]*,?[ \t]*(?:#[^\n]*)?\n").match(text, end)
        if rest and not text[first:start].strip():
            return first, rest.end()
        before = re.search(r",\s*$", text[:start])
        if before:
            return before.start(), end
        comma = re.compile(r"[ \t]*,[ \t]*").match(text, end)
        return start, comma.end() if comma else end


def looks_like(text: str) -> bool:
    """Whether this is Python with a call that starts an engine."""
    return bool(re.search(rf"\b(?:{'|'.join(_NAMES)})\s*\(", text))


def find(text: str) -> Call:
    """The first such call with speculation in it, else the first. Raises ParameterError if the text is no
    Python.
    """
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise ParameterError(f"line {error.lineno} is not Python ({error.msg})") from None
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and _called(n.func) in _NAMES]
    for node in sorted(calls, key=lambda call: not any("spec" in (k.arg or "") for k in call.keywords))[:1]:
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
        return json.dumps(value, ensure_ascii=False)
    return repr(value)


def _offset(text: str, line: int, column: int) -> int:
    """Index into the text of a line (from 1) and a column in UTF-8 bytes. A form feed ends no line."""
    lines = text.split("\n")
    head = lines[line - 1].encode()[:column].decode() if line <= len(lines) else ""
    return sum(len(part) + 1 for part in lines[: line - 1]) + len(head)
