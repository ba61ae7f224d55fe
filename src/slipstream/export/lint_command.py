"""Command lines of serving engines: reading their options, and writing them back changed."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slipstream.core import jsontext
from slipstream.errors import ParameterError

SPECULATIVE = "speculative_config"
_SHORT = {
    "-tp": "tensor_parallel_size",
    "-pp": "pipeline_parallel_size",
    "-dp": "data_parallel_size",
    "-sc": SPECULATIVE,
    "-q": "quantization",
    "-md": "model_draft",
    "-m": "model",
    "-c": "ctx_size",
}
_ALIASES = {
    "tp": "tensor_parallel_size",
    "tp_size": "tensor_parallel_size",
    "spec_draft_model": "model_draft",
}
# What stands right before an engine's own options.
_MARKERS = (
    (re.compile(r"^vllm\.entrypoints\.\S+$"), "vllm"),
    (re.compile(r"^sglang\.launch_server$"), "sglang"),
    (re.compile(r"^(?:\S*/)?llama-(?:server|cli)(?:\.exe)?$"), "llama.cpp"),
    (re.compile(r"^\S*vllm-openai(?:-cpu)?(?::v?(?P<version>\d[\w.]*)|:\S+)?$"), "vllm"),
    (re.compile(r"^lmsysorg/sglang(?::v?(?P<version>\d[\w.]*)|:\S+)?$"), "sglang"),
)
_OPTION = re.compile(r"(?:^|\s)--(?:speculative|spec)-[a-z]")


def looks_like(text: str) -> bool:
    """Whether this is a command line of an engine."""
    words = text.split()
    return (
        any(pattern.match(word) for word in words for pattern, _ in _MARKERS)
        or bool(re.search(r"(?:^|[\s/])(?:vllm|sglang)\s+serve\b", text))
        or bool(_OPTION.search(text))
    )


@dataclass
class Command:
    """Tokens before the options, the positional model, the options in order, and the text around the command.

    options: (flag as written, value or None for a bare flag, whether joined by =).
    """

    prefix: list[str]
    target: str | None
    options: list[tuple[str, str | None, bool]]
    engine: str | None
    rest: list[str] = field(default_factory=list)
    before: str = ""
    after: str = ""
    continued: bool = False

    @classmethod
    def parse(cls, text: str, engine: str) -> Command:
        """The command in a text or script of one or more lines. Raises ParameterError."""
        start, end = _extent(text)
        body = text[start:end]
        try:
            tokens = shlex.split(body.replace("\\\n", " "), comments=True)
        except ValueError as error:
            raise ParameterError(f"the command line cannot be split ({error}): check its quotes") from None
        command = cls.of_tokens(tokens, engine)
        command.before, command.after, command.continued = text[:start], text[end:], "\\\n" in body
        return command

    @classmethod
    def of_tokens(cls, tokens: list[str], engine: str, image: str = "") -> Command:
        """From the words of a command; image is the container's that runs it."""
        start, found = _options_start(tokens, image)
        if start is None:
            raise ParameterError(
                "no engine's command in it: give one with `vllm serve`, `python -m sglang.launch_server` or"
                " `llama-server`"
            )
        name = found or engine
        rest, index, target = list[str](), start, None
        options = list[tuple[str, str | None, bool]]()
        while index < len(tokens):
            token = tokens[index]
            index += 1
            if token in ("&", ";", "&&", "|", ">", ">>", "2>&1"):
                rest = tokens[index - 1 :]
                break
            if not _is_flag(token):
                if target is None and not options:
                    target = token
                else:
                    raise ParameterError(
                        f"{token!r} stands alone in the command line: which option is it for?"
                    )
                continue
            flag, joined, value = token.partition("=")
            if joined:
                options.append((flag, value, True))
            elif (
                index < len(tokens) and not _is_flag(tokens[index]) and tokens[index] not in ("&", ";", "&&")
            ):
                options.append((flag, tokens[index], False))
                index += 1
            else:
                options.append((flag, None, False))
        return cls(tokens[:start], target, options, name, rest)

    def args(self) -> dict[str, Any]:
        """The options by name; a bare flag is True, whole numbers are numbers."""
        return {canonical(flag): True if value is None else _typed(value) for flag, value, _ in self.options}

    def tokens(self, args: Mapping[str, Any], speculative: Mapping[str, Any] | None) -> list[str]:
        """The words of the command with these options."""
        return [t for group in self._groups(args, speculative) for t in group]

    def _groups(self, args: Mapping[str, Any], speculative: Mapping[str, Any] | None) -> list[list[str]]:
        wanted = {name: value for name, value in args.items()}
        if speculative is not None:
            wanted[SPECULATIVE] = json.dumps(speculative)
        before = self.args()
        groups = [[*self.prefix, *([self.target] if self.target is not None else [])]]
        done = set[str]()
        for flag, value, joined in self.options:
            name = canonical(flag)
            whole = SPECULATIVE if name.startswith(SPECULATIVE + ".") else name
            if whole not in wanted or whole in done:
                continue
            done.add(whole)
            if whole != name:
                flag, joined = "--speculative-config", False
            elif wanted[name] != before[name] or name == SPECULATIVE:
                same = name == SPECULATIVE and value is not None and _same_json(value, speculative)
                value = value if same else _word(wanted[name])
            if whole != name:
                value = _word(wanted[whole])
            if value is None:
                groups.append([flag])
            else:
                groups.append([f"{flag}={value}"] if joined else [flag, value])
        for name, new in wanted.items():
            if name not in done:
                flag = "--" + name.replace("_", "-")
                groups.append([flag] if new is True else [flag, _word(new)])
        if self.rest:
            groups.append(self.rest)
        return groups

    def render(self, args: Mapping[str, Any], speculative: Mapping[str, Any] | None) -> str:
        """The text with the command changed; one option a line where it was written so."""
        groups = self._groups(args, speculative)
        words = [" ".join(_quoted(t) for t in group) for group in groups if group]
        return self.before + (" \\\n  " if self.continued else " ").join(words) + self.after


def canonical(flag: str) -> str:
    """--tensor-parallel-size and -tp -> tensor_parallel_size; parts behind a dot stay."""
    if flag in _SHORT:
        return _SHORT[flag]
    name = flag.lstrip("-").replace("-", "_")
    return _ALIASES.get(name, name)


def _is_flag(token: str) -> bool:
    return bool(re.match(r"--?[A-Za-z]", token))


def _typed(value: str) -> Any:
    return int(value) if re.fullmatch(r"-?\d+", value) else value


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _same_json(text: str, value: Any) -> bool:
    try:
        found = jsontext.parse(text)
    except ValueError:
        return False
    return isinstance(found, dict) and {k.replace("-", "_"): v for k, v in found.items()} == value


def _quoted(token: str) -> str:
    """Quoted for a shell where it must be; an assignment or operator stays as it is."""
    if re.fullmatch(r"[A-Za-z_]\w*=[\w./:-]*", token) or token in ("&", ";", "&&", "|", ">", ">>", "2>&1"):
        return token
    if token.startswith(("$", "~")):
        return token
    return shlex.quote(token)


def _options_start(tokens: list[str], image: str) -> tuple[int | None, str | None]:
    """Where the engine's own words begin, and which engine it is (with the version its image names)."""
    named = None
    for pattern, engine in _MARKERS:
        match = pattern.match(image)
        if match:
            version = match.groupdict().get("version")
            named = f"{engine}=={version}" if version else engine
    found: tuple[int, str] | None = None
    for index, token in enumerate(tokens):
        bare = token.rsplit("/", 1)[-1]
        if bare in ("vllm", "sglang") and tokens[index + 1 : index + 2] == ["serve"]:
            found = (index + 2, bare)
            break
        for pattern, engine in _MARKERS:
            match = pattern.match(token)
            if match:
                version = match.groupdict().get("version")
                found = (index + 1, f"{engine}=={version}" if version else engine)
        if found is not None and found[0] == index + 1:
            break
    if found is not None:
        return found[0], named or found[1]
    if tokens[:1] == ["serve"]:
        return 1, named
    if named is not None or (tokens and _is_flag(tokens[0])):
        return 0, named
    return None, None


def _extent(text: str) -> tuple[int, int]:
    """Start and end of the command (with its continued lines, and quotes that span lines) in a script."""
    for match in re.finditer(r"(?:[^\n\\'\"]|\\.|\\\n|'[^']*'|\"(?:[^\"\\]|\\.|\\\n)*\")+", text):
        piece = match[0]
        if piece.strip() and not piece.lstrip().startswith("#") and looks_like(piece):
            lead = len(piece) - len(piece.lstrip())
            if text[match.end() : match.end() + 1] in ("'", '"'):  # a quote that is never closed
                return match.start() + lead, len(text)
            return match.start() + lead, match.start() + len(piece.rstrip())
    return 0, len(text.rstrip())
