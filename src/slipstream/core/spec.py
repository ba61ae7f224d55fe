"""`name:key=value,…`: how drafters and controllers are named and configured, everywhere.

The fields of a config dataclass are the options; their types say how a value is read. Where a value names
others with options of their own, these stand in parentheses: `cascade:drafters=suffix+ngram(max_n=3)`.
"""

from __future__ import annotations

import difflib
import types
import typing
from dataclasses import MISSING, fields
from typing import Any, TypeVar

from slipstream.errors import ParameterError

C = TypeVar("C")


def parse_spec(spec: str) -> tuple[str, dict[str, str]]:
    """Split into the name and its options. Values may hold '=' and ':', and commas within parentheses.

    A path to a file (`./mine.py:Mine:key=value`) keeps its first colon.
    """
    name, options = spec.strip(), ""
    parts = name.split(":")
    for i, part in enumerate(parts[1:], start=1):
        if "=" in part.split(",")[0]:
            name, options = ":".join(parts[:i]), ":".join(parts[i:])
            break
    if not name:
        raise ParameterError(f"{spec!r} names nothing; write NAME or NAME:key=value,key=value")
    values: dict[str, str] = {}
    for item in filter(None, (o.strip() for o in _split(options, ","))):
        key, equals, value = item.partition("=")
        key = key.strip().replace("-", "_")
        if not equals or not key:
            raise ParameterError(f"option {item!r} of {name!r} must be written key=value")
        if key in values:
            raise ParameterError(f"option {key!r} of {name!r} is given twice")
        values[key] = value.strip()
    return name, values


def parse_specs(text: str) -> list[str]:
    """The specs in `one+two(key=value,…)`, each written `two:key=value,…` as `parse_spec` reads it."""
    specs = []
    for item in (part.strip() for part in _split(text, "+")):
        name, opened, options = item.partition("(")
        if opened and not options.endswith(")"):
            raise ParameterError(f"{item!r} must be written NAME or NAME(key=value,key=value)")
        if not name:
            raise ParameterError(f"{text!r} has an empty part; write ONE+TWO(key=value)")
        specs.append(f"{name}:{options[:-1]}" if options[:-1] else name)
    return specs


def _split(text: str, separator: str) -> list[str]:
    """Parts between separators that are in no parentheses."""
    parts, depth, begin = [], 0, 0
    for i, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth < 0:
            break
        if character == separator and not depth:
            parts.append(text[begin:i])
            begin = i + 1
    if depth:
        raise ParameterError(f"the parentheses of {text!r} do not match")
    return [*parts, text[begin:]]


def make_config(config: type[C], owner: str, values: dict[str, Any]) -> C:
    """An instance of the config dataclass; strings are read by the field's type, other values kept."""
    try:
        hints = typing.get_type_hints(config)
    except NameError as error:  # a type that is imported for the type checker only, or is mistyped
        raise ParameterError(f"the options of {owner!r} have a type that is not known: {error}") from None
    known = {f.name: f for f in fields(config) if f.init}  # type: ignore[arg-type]
    for key in values:
        if key not in known:
            close = difflib.get_close_matches(key, known, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"its options are {', '.join(known) or 'none'}"
            raise ParameterError(f"{owner!r} has no option {key!r}; {hint}")
    read = {k: _read(v, hints[k], f"{owner}:{k}") if isinstance(v, str) else v for k, v in values.items()}
    for name, f in known.items():
        if name not in read and f.default is MISSING and f.default_factory is MISSING:
            raise ParameterError(f"{owner!r} needs the option {name!r}: write {owner}:{name}=…")
    return config(**read)


def refuse_given(config: Any, why: str, *names: str) -> None:
    """ParameterError, with the reason, if one of these options is not at its default: it would be ignored."""
    defaults = {f.name: f.default for f in fields(config)}
    given = [name for name in names if getattr(config, name) != defaults[name]]
    if given:
        raise ParameterError(f"{why}: leave out {' and '.join(given)}")


def _read(text: str, kind: Any, where: str) -> Any:
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        members = typing.get_args(kind)
        if type(None) in members and text.lower() == "none":
            return None
        kind = next(m for m in members if m is not type(None))
    if typing.get_origin(kind) is typing.Literal:
        choices = {str(choice): choice for choice in typing.get_args(kind)}
        if text in choices:
            return choices[text]
        raise ParameterError(f"{where} must be one of {', '.join(choices)}, not {text!r}")
    if kind is Any:
        return text
    if kind is bool:
        if text.lower() in ("true", "yes", "on", "1"):
            return True
        if text.lower() in ("false", "no", "off", "0"):
            return False
        raise ParameterError(f"{where} must be true or false, not {text!r}")
    try:
        return kind(text)
    except (ValueError, TypeError):
        what = {int: "a whole number", float: "a number"}.get(kind, getattr(kind, "__name__", str(kind)))
        raise ParameterError(f"{where} must be {what}, not {text!r}") from None
