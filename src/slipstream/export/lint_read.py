"""Reading a configuration in any form people paste it: command line, JSON, YAML, manifest, Python call.

All forms become one `Document`: the target, the engine's arguments and the speculative config as plain
values. Repairs change those; `render` writes them back in the form they came in, leaving the rest of the
text as it was.
"""

from __future__ import annotations

import ast
import copy
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from slipstream.core import jsontext
from slipstream.errors import ParameterError
from slipstream.export import lint_command, lint_python
from slipstream.export.from_plan import is_advice
from slipstream.export.lint_command import SPECULATIVE, Command

_QUOTES = str.maketrans({"“": '"', "”": '"', "„": '"', "‘": "'", "’": "'", "–": "--", "—": "--"})
# Comments, then `key:` or the start of a document.
_YAML_START = re.compile(r"(?:[ \t]*(?:#[^\n]*)?\n)*(?:---|[\w.-]+[ \t]*:(?:\s|$))")


@dataclass(frozen=True, slots=True)
class Damage:
    """Text that had to be mended before it could be read at all."""

    where: str
    message: str
    fix: str


@dataclass
class Document:
    """A configuration. args: by name with underscores; speculative: the speculative config, None if there
    is none.

    form: "engine" for a whole configuration, "speculative" for a speculative config alone. engine: what the
    text itself says, as `vllm` or `vllm==0.32.0`. An argument's value that is no literal is
    `lint_python.Source`.
    """

    kind: str
    form: str
    target: str | None
    args: dict[str, Any]
    speculative: dict[str, Any] | None
    _render: Callable[[Document], str]
    engine: str | None = None
    damage: list[Damage] = field(default_factory=list)

    def render(self) -> str:
        return self._render(self)

    @property
    def place(self) -> str:
        """Where the speculative config stands, for messages."""
        if self.form == "speculative":
            return self.kind
        return "--speculative-config" if self.kind in ("command", "manifest") else SPECULATIVE


def read(text: str, engine: str = "vllm") -> Document:
    """The configuration in `text`. Raises ParameterError for what cannot be read."""
    if not text.strip():
        raise ParameterError("the configuration is empty: give a command line, JSON, YAML or a Python call")
    try:
        return _read(text, engine)
    except ParameterError:
        straight = text.translate(_QUOTES)
        if straight == text:
            raise
    document = _read(straight, engine)
    document.damage.insert(
        0, Damage("the text", "typographic quotes, which no parser takes", "write \" and '")
    )
    return document


def _read(text: str, engine: str) -> Document:
    stripped = text.strip()
    if stripped.startswith("{"):
        return _mapping_document("json", *_json(stripped))
    if lint_python.looks_like(text):
        return _python_document(text)
    if not _YAML_START.match(text) and lint_command.looks_like(text):
        return command_document(Command.parse(text, engine))
    return _yaml(text, engine)


# -- command lines ----------------------------------------------------------------------------------


def command_document(command: Command, kind: str = "command") -> Document:
    args = command.args()
    speculative, damage = None, list[Damage]()
    raw = args.pop(SPECULATIVE, None)
    if raw is not None:
        speculative, repaired = parse_json(raw, "--speculative-config")
        if repaired:
            damage.append(repaired)
    for name in [n for n in args if n.startswith(SPECULATIVE + ".")]:
        speculative = {} if speculative is None else speculative
        speculative[name.removeprefix(SPECULATIVE + ".")] = _scalar(args.pop(name))
    command.given = None if damage else copy.deepcopy(speculative)
    target = command.target if command.target is not None else args.get("model", args.get("model_path"))

    def render(document: Document) -> str:
        return command.render(document.args, document.speculative)

    document = Document(kind, "engine", target, args, speculative, render, command.engine, damage)
    return document


def parse_json(value: Any, where: str) -> tuple[dict[str, Any], Damage | None]:
    """A speculative config given as text; Python spelling is mended. Raises ParameterError."""
    if isinstance(value, dict):
        return {str(k): v for k, v in value.items()}, None
    try:
        found, repaired = jsontext.parse(value), None
    except (ValueError, TypeError) as error:
        found = _loose(str(value).strip())
        if found is None:
            raise ParameterError(f"{where} is not JSON ({error}): {str(value)[:120]}") from None
        repaired = Damage(where, f"not JSON ({error})", "write strings in double quotes, true/false/null")
    if not isinstance(found, dict):
        raise ParameterError(f"{where} must be a JSON object, not {str(value)[:80]}")
    return {str(k): v for k, v in found.items()}, repaired


def _loose(text: str) -> Any:
    """A mapping in Python's spelling, or without quotes (which a shell takes away), as YAML reads it; else
    None.
    """
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        pass
    try:
        from ruamel.yaml import YAML
        from ruamel.yaml.error import YAMLError
    except ImportError:
        return None
    try:
        found = YAML(typ="safe", pure=True).load(text)
    except YAMLError:
        return None
    return found if isinstance(found, dict) and None not in found.values() else None


def _name(key: Any) -> str:
    return str(key).replace("-", "_")


def _scalar(text: Any) -> Any:
    try:
        return jsontext.parse(text)
    except (ValueError, TypeError):
        return text


# -- mappings ---------------------------------------------------------------------------------------


def _json(text: str) -> tuple[dict[str, Any], Callable[[Any], str], list[Damage]]:
    found, repaired = None, list[Damage]()
    try:
        found = jsontext.parse(text)
    except ValueError as error:
        try:
            found = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            raise ParameterError(f"this is not JSON ({error})") from None
        repaired.append(Damage("json", f"not JSON ({error})", "write strings in double quotes"))
    if not isinstance(found, dict):
        raise ParameterError("the JSON must be an object of settings")
    written = re.search(r"\n([ \t]+)\S", text)
    indent = written[1] if written else None
    return found, lambda value: json.dumps(value, indent=indent, ensure_ascii=False) + "\n", repaired


def _yaml(text: str, engine: str) -> Document:
    try:
        from ruamel.yaml import YAML
        from ruamel.yaml.error import YAMLError
    except ImportError:
        raise ParameterError("YAML needs ruamel.yaml: pip install 'slipstream-lm[scale]'") from None

    yaml = YAML()  # keeps comments and order
    yaml.preserve_quotes = True
    yaml.width = 4096
    yaml.explicit_start = text.startswith("---")
    if re.search(r"^( *)[^\s#-][^\n]*:[ \t]*(?:#[^\n]*)?\n\1 +- ", text, re.MULTILINE):
        yaml.indent(mapping=2, sequence=4, offset=2)
    try:
        parts = [part for part in yaml.load_all(text) if part is not None]
    except YAMLError as error:
        problem = " ".join(str(error).split())
        raise ParameterError(f"neither a command line, JSON, YAML nor a Python call ({problem})") from None

    def dump(value: Any) -> str:
        out = io.StringIO()
        yaml.dump_all(value, out) if isinstance(value, list) else yaml.dump(value, out)
        return out.getvalue()

    for part in parts:
        if isinstance(part, dict) and "kind" in part:
            for container in _containers(part):
                return _manifest(parts, container, dump, engine)
    if len(parts) != 1 or not isinstance(parts[0], dict):
        raise ParameterError("neither a command line, JSON, YAML with settings nor a Python call")
    return _mapping_document("yaml", parts[0], dump, [])


def _containers(value: Any) -> Iterator[dict[str, Any]]:
    """Containers of a manifest that start a serving engine."""
    if isinstance(value, dict):
        for container in _list(value.get("containers")):
            if not isinstance(container, dict):
                continue
            tokens = [str(t) for key in ("image", "command", "args") for t in _list(container.get(key))]
            if lint_command.looks_like(" ".join(tokens)):
                yield container
        for inner in value.values():
            yield from _containers(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _containers(inner)


def _list(value: Any) -> list[Any]:
    return [] if value is None else value if isinstance(value, list) else [value]


def _manifest(parts: list[Any], container: Any, dump: Callable[[Any], str], engine: str) -> Document:
    words = [str(t) for t in _list(container.get("command"))]
    arguments = [str(t) for t in _list(container.get("args"))]
    scripts = {"args": words[-1:] == ["-c"] and len(arguments) == 1}
    scripts["command"] = words[-2:-1] == ["-c"] and not arguments
    shell = next((key for key, there in scripts.items() if there), None)
    image = str(container.get("image", ""))
    if shell:
        command = Command.parse([*words, *arguments][-1], engine)
    else:
        command = Command.of_tokens([*words, *arguments], engine, image)
    document = command_document(command, "manifest")

    def render(changed: Document) -> str:
        if shell:
            text = command.render(changed.args, changed.speculative)
            *lead, written = _list(container[shell])
            _replace(container, shell, [*lead, type(written)(text)])  # keeps the style of a block
        else:
            tokens = command.tokens(changed.args, changed.speculative)
            # options may stand in the command itself
            inside = any(word.startswith("-") for word in words[len(command.prefix) :])
            _replace(container, "command", tokens if inside else words)
            _replace(container, "args", [] if inside else tokens[len(words) :])
        return dump(parts if len(parts) > 1 else parts[0])

    document._render = render
    return document


def _replace(container: Any, key: str, new: list[str]) -> None:
    """Changes a list of words where it differs, so that its style and comments stay."""
    old = container.get(key)
    if not new and not old:
        return
    if not isinstance(old, list) or len(old) != len(new):
        if isinstance(old, list):
            old[:] = new
        else:
            container[key] = new
        return
    for i, word in enumerate(new):
        if str(old[i]) != word:
            old[i] = word


def _mapping_document(
    kind: str, root: dict[str, Any], dump: Callable[[Any], str], damage: list[Damage]
) -> Document:
    names = {_name(k) for k in root}
    if is_advice(root) or names >= {"target", "drafter"}:
        raise ParameterError(
            "this is a plan of Slipstream's: `slipstream config vllm --plan FILE` makes and checks a"
            " configuration of it"
        )
    alone = SPECULATIVE not in names and (
        "method" in names or ("num_speculative_tokens" in names and "speculative_model" not in names)
    )
    if alone:

        def render_alone(document: Document) -> str:
            sync(root, document.speculative or {}, str)
            return dump(root)

        config = {str(k): v for k, v in root.items()}
        return Document(kind, "speculative", None, {}, config, render_alone, None, damage)
    args = {_name(k): v for k, v in root.items()}
    speculative = None
    raw = args.pop(SPECULATIVE, None)
    if raw is not None:
        speculative, repaired = parse_json(raw, SPECULATIVE)
        damage.extend([repaired] if repaired else [])

    def render(document: Document) -> str:
        wanted = dict(document.args)
        key = next((k for k in root if _name(k) == SPECULATIVE), SPECULATIVE)
        if document.speculative is not None:
            inner = root.get(key)
            if isinstance(inner, dict):
                sync(inner, document.speculative, str)
                wanted[SPECULATIVE] = inner
            else:
                wanted[SPECULATIVE] = (
                    json.dumps(document.speculative) if isinstance(inner, str) else document.speculative
                )
        sync(root, wanted)
        return dump(root)

    target = args.get("model", args.get("model_path"))
    engine = "sglang" if {"model_path", "speculative_algorithm"} & args.keys() else None
    return Document(kind, "engine", target, args, speculative, render, engine, damage)


def sync(container: Any, wanted: Mapping[str, Any], name_of: Callable[[Any], str] = _name) -> None:
    """Make the mapping hold exactly `wanted`, touching only what differs, so that comments and order stay."""
    for key in [k for k in container if name_of(k) not in wanted]:
        del container[key]
    spelled = {name_of(k): k for k in container}
    for name, value in wanted.items():
        key = spelled.get(name, name)
        if key not in container or container[key] != value:
            container[key] = value


# -- Python -----------------------------------------------------------------------------------------


def _python_document(text: str) -> Document:
    call = lint_python.find(text)
    args = dict(call.arguments)
    speculative = None
    raw = args.pop(SPECULATIVE, None)
    if isinstance(raw, dict):
        speculative = {str(k): v for k, v in raw.items()}
    elif raw is not None:
        raise ParameterError(
            f"{SPECULATIVE} of the call on line {call.line} is not written out, so it cannot be checked:"
            " give the dict itself"
        )
    target = args.get("model", args.get("model_path"))
    target = target if isinstance(target, str) else None

    def render(document: Document) -> str:
        wanted = dict(document.args)
        if document.speculative is not None:
            wanted[SPECULATIVE] = document.speculative
        return call.render(wanted)

    return Document("python", "engine", target, args, speculative, render, call.engine)
