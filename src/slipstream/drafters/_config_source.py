"""The options of a drafter, read from its source: importing it may take seconds (torch, transformers)."""

from __future__ import annotations

import ast
from dataclasses import field, make_dataclass
from pathlib import Path
from typing import Any, Literal

_SIMPLE: dict[str, Any] = {"int": int, "float": float, "bool": bool, "str": str, "None": type(None)}


def config_without_import(path: Path) -> type[Any] | None:
    """A dataclass with the fields of the class that a drafter in this file names as its `Config`.

    Its checks are not there, nor are its defaults; types that are not written out take any text. None if
    there is no such class.
    """
    classes = {
        n.name: n for n in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(n, ast.ClassDef)
    }
    named = (config for kind in classes.values() if (config := _config_name(kind)) in classes)
    found = next(named, None)
    if found is None:
        return None
    fields = [
        (n.target.id, _type(n.annotation), *(() if n.value is None else (field(default=None),)))
        for n in classes[found].body
        if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
    ]
    return make_dataclass(found, fields, kw_only=True)  # type: ignore[arg-type]


def _config_name(kind: ast.ClassDef) -> str | None:
    """X of the line `Config = X`."""
    for node in kind.body:
        match node:
            case ast.Assign(targets=[ast.Name(id="Config")], value=ast.Name(id=name)):
                return name
    return None


def _type(node: ast.expr) -> Any:
    match node:
        case ast.Name(id=name) if name in _SIMPLE:
            return _SIMPLE[name]
        case ast.Constant(value=None):
            return type(None)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _type(left) | _type(right)
        case ast.Subscript(value=ast.Name(id="Literal"), slice=inner):
            return Literal[ast.literal_eval(inner)]  # a tuple is taken apart
        case _:
            return str
