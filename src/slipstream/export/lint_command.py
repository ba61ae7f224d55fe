"""Command lines of serving engines: reading their options, and writing them back changed."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from slipstream.errors import ParameterError
from slipstream.export.lint_shell import Word, commands, doubled, words

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
# Options that take several values.
_MANY = frozenset(
    (
        *("served_model_name", "lora_modules", "api_key", "cudagraph_capture_sizes", "compile_sizes"),
        *("cuda_graph_sizes", "cuda_graph_bs", "lora_paths", "lora_target_modules", "logits_processors"),
    )
)
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


@dataclass(frozen=True, slots=True)
class Option:
    """flag: as written. value: None for a bare flag. joined: by =. more: further values. span, inside: where
    the whole and its first value stand in the text, if there is one.
    """

    flag: str
    value: str | None
    joined: bool
    more: tuple[str, ...] = ()
    span: tuple[int, int] = (0, 0)
    inside: tuple[int, int] = (0, 0)

    @property
    def whole(self) -> str:
        """Its name; that of the speculative config for a part of it."""
        name = canonical(self.flag)
        return SPECULATIVE if name.startswith(SPECULATIVE + ".") else name

    def words(self) -> list[str]:
        if self.value is None:
            return [self.flag]
        return [f"{self.flag}={self.value}"] if self.joined else [self.flag, self.value, *self.more]


@dataclass
class Command:
    """Tokens before the options, the positional model, the options in order, and the text they stand in.

    given: the speculative config as it was read; None if the text has to be written anew. end: of the last
    word.
    """

    prefix: list[str]
    target: str | None
    options: list[Option]
    engine: str | None
    text: str = ""
    end: int = 0
    expands: bool = False
    given: Mapping[str, Any] | None = None

    @classmethod
    def parse(cls, text: str, engine: str) -> Command:
        """The command in a text or script of one or more lines. Raises ParameterError."""
        try:
            words = _own_words(text)
        except ValueError as error:
            raise ParameterError(f"the command line cannot be split ({error}): check its quotes") from None
        return cls.of_words(words, engine, text=text)

    @classmethod
    def of_tokens(cls, tokens: Sequence[str], engine: str, image: str = "") -> Command:
        """From the words of a command; image is the container's that runs it."""
        return cls.of_words([Word(token, 0, 0) for token in tokens], engine, image)

    @classmethod
    def of_words(cls, words: Sequence[Word], engine: str, image: str = "", text: str = "") -> Command:
        tokens = [word.value for word in words]
        start, found = _options_start(tokens, image)
        if start is None:
            raise ParameterError(
                "no engine's command in it: give one with `vllm serve`, `python -m sglang.launch_server` or"
                " `llama-server`"
            )
        index, target, prefix = start, None, tokens[:start]
        options = list[Option]()
        while index < len(words):
            first = words[index]
            index += 1
            if not _is_flag(first.value):
                if target is None and not {"model", "model_path"} & {canonical(o.flag) for o in options}:
                    target = first.value
                    continue
                raise ParameterError(
                    f"{first.value!r} stands alone in the command line: which option is it for?"
                )
            flag, joined, value = first.value.partition("=")
            values = list[Word]()
            most = 0 if joined else None if canonical(flag) in _MANY else 1
            while (
                (most is None or len(values) < most)
                and index < len(words)
                and not _is_flag(words[index].value)
            ):
                values.append(words[index])
                index += 1
            last = (values or [first])[-1]
            inside = values[0] if values else first
            options.append(
                Option(
                    flag,
                    value if joined else values[0].value if values else None,
                    bool(joined),
                    tuple(word.value for word in values[1:]),
                    (first.start, last.end),
                    (inside.start, inside.end),
                )
            )
        end = words[-1].end if words else 0
        expands = any(word.expands for word in words)
        return cls(prefix, target, options, found or engine, text, end, expands)

    def args(self) -> dict[str, Any]:
        """The options by name, the last one where there are several; a bare flag is True, whole numbers are
        numbers.
        """
        return {canonical(o.flag): True if o.value is None else _typed(o.value) for o in self.options}

    def _changed(
        self, args: Mapping[str, Any], speculative: Mapping[str, Any] | None
    ) -> tuple[list[Option | None], list[Option]]:
        """Each option as it is to be, None for one that goes; and the new ones."""
        wanted, before = dict(args), self.args()
        if speculative is not None:
            wanted[SPECULATIVE] = json.dumps(speculative, ensure_ascii=False)
        last = {option.whole: i for i, option in enumerate(self.options)}
        kept = list[Option | None]()
        for i, option in enumerate(self.options):
            name = option.whole
            same = speculative == self.given if name == SPECULATIVE else wanted.get(name) == before[name]
            if name not in wanted or (not same and i != last[name]):  # the last one is the one that counts
                kept.append(None)
            elif same:
                kept.append(option)
            else:
                part = canonical(option.flag) != name
                flag = "--speculative-config" if part else option.flag
                value = None if wanted[name] is True else _word(wanted[name])
                kept.append(replace(option, flag=flag, value=value, joined=option.joined and not part))
        added = [
            Option("--" + name.replace("_", "-"), None if new is True else _word(new), False)
            for name, new in wanted.items()
            if name not in last
        ]
        return kept, added

    def tokens(self, args: Mapping[str, Any], speculative: Mapping[str, Any] | None) -> list[str]:
        """The words of the command with these options."""
        kept, added = self._changed(args, speculative)
        words = [*self.prefix, *([self.target] if self.target is not None else [])]
        return [*words, *(w for o in [*kept, *added] if o is not None for w in o.words())]

    def render(self, args: Mapping[str, Any], speculative: Mapping[str, Any] | None) -> str:
        """The text with these options; what is not changed stays as it was written."""
        kept, added = self._changed(args, speculative)
        gap = " \\\n  " if "\\\n" in self.text[: self.end] else " "
        edits = list[tuple[int, int, str]]()
        for old, new in zip(self.options, kept, strict=True):
            start, end = old.span
            if new is None:
                lead = re.search(r"(?:[ \t]|\\\n)*$", self.text[:start])
                edits.append((lead.start() if lead else start, end, ""))
            elif new is not old:
                if new.flag == old.flag and not new.joined and None not in (old.value, new.value):
                    start, end = old.inside[0], old.inside[1]
                    edits.append((start, end, self._quoted(str(new.value))))
                else:
                    edits.append((start, end, self._shown(new)))
        text, after = self.text[: self.end], self.text[self.end :]
        for start, end, shown in reversed(edits):
            text = text[:start] + shown + text[end:]
        return gap.join([text, *map(self._shown, added)]) + after

    def _shown(self, option: Option) -> str:
        if option.joined and option.value is not None:
            return f"{option.flag}={self._quoted(option.value)}"
        return " ".join([option.flag, *map(self._quoted, option.words()[1:])])

    def _quoted(self, value: str) -> str:
        """A word for the shell; where the command has variables in it, they are still put in."""
        return doubled(value) if self.expands and re.search(r"[$`]", value) else shlex.quote(value)


def _own_words(text: str) -> list[Word]:
    """The words of the engine's own command in a script. ValueError for an open quote in it."""
    try:
        found = _first_command(text, 0)
    except ValueError:  # perhaps an apostrophe in the text before it
        found = None
    if found is not None:
        return found
    lines = (m for m in re.finditer(r"[^\n]+", text) if not m[0].lstrip().startswith("#"))
    start = next((m.start() for m in lines if looks_like(m[0])), 0)
    return _first_command(text, start) or [*words(text, start)]


def _first_command(text: str, start: int) -> list[Word] | None:
    """Reads no further than to the end of the command."""
    return next(
        (c for c in commands(words(text, start)) if looks_like(" ".join(word.value for word in c))), None
    )


def canonical(flag: str) -> str:
    """--tensor-parallel-size and -tp -> tensor_parallel_size; parts behind a dot stay."""
    short, dot, part = flag.partition(".")
    if short in _SHORT:
        return _SHORT[short] + dot + part
    name = short.lstrip("-").replace("-", "_")
    return _ALIASES.get(name, name) + dot + part


def _is_flag(token: str) -> bool:
    return bool(re.match(r"--?[A-Za-z]", token))


def _typed(value: str) -> Any:
    return int(value) if re.fullmatch(r"-?\d+", value) else value


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


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
        after = found[0] + (tokens[found[0] : found[0] + 1] == ["serve"])
        return after, named or found[1]
    if tokens[:1] == ["serve"]:
        return 1, named
    if named is not None or (tokens and _is_flag(tokens[0])):
        return 0, named
    return None, None
