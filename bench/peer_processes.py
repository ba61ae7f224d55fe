"""The processes that run the settings of `peer_settings.py`: who shares one, what it gets, what it needs."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import slipstream
from drafters import specs
from environments import prepare
from gguf_models import gguf_file
from peer_settings import DRAFT, HF, LLAMACPP, OPENVINO, SLIPSTREAM, Setting
from slipstream.model.cache import round_up
from slipstream.model.progress import Progress

GB = 1_000_000_000
Ready = tuple[Path, dict[str, Any], Mapping[str, str]]
"""The interpreter, the configuration and more environment variables."""


@dataclass(frozen=True)
class Process:
    """What runs settings of one engine that can share memory.

    script: in peer_workers. needs: bytes it may take, at most, by estimate. prepare: makes what it runs on,
    when its turn comes. own: it runs on this project's code.
    """

    name: str
    script: str
    settings: tuple[Setting, ...]
    needs: int
    prepare: Callable[[], Ready]
    own: bool = False

    @property
    def learns(self) -> bool:
        return any(s.learns for s in self.settings)


@dataclass(frozen=True)
class Models:
    """The pair that everybody runs. target and draft: as `slipstream.load` takes them; folders: where they
    are. context: tokens of the longest request, and room for drafts. gguf: files given by hand for "target"
    and "draft", else the catalogue's."""

    target: str
    draft: str
    folders: tuple[Path, Path]
    eos_ids: tuple[int, ...]
    threads: int
    context: int
    progress: Progress
    gguf: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def sizes(self) -> tuple[int, int]:
        """Bytes of the weights as they lie on disk, in bf16."""
        target, draft = (sum(f.stat().st_size for f in p.glob("*.safetensors")) for p in self.folders)
        return target, draft

    def gguf_of(self, which: str, weights: str) -> str:
        return self.gguf.get(which) or str(gguf_file(getattr(self, which), weights, self.progress))

    @property
    def own_words(self) -> dict[str, Any]:
        return {"target": self.target, "draft": self.draft, "threads": self.threads}


def context_for(prompts: Sequence[Sequence[int]], max_tokens: int) -> int:
    """Room for the longest request, and for drafts that reach beyond it."""
    return round_up(max(map(len, prompts)) + max_tokens + 128, 256)


def processes(wanted: Sequence[Setting], models: Models) -> tuple[list[Process], dict[str, str]]:
    """The processes that hold the settings, and why settings cannot be had (by full name)."""
    missing: dict[str, str] = {}
    if "weights" not in inspect.signature(slipstream.load).parameters:
        for setting in wanted:
            if setting.engine == SLIPSTREAM and setting.weights != "bf16":
                missing[setting.full] = "this Slipstream knows no other weights than bf16"
    groups: dict[str, list[Setting]] = {}
    for setting in wanted:
        if setting.full not in missing:
            shared = setting.engine in (SLIPSTREAM, HF)  # one process holds all of these
            key = f"{setting.engine} {setting.weights}" if shared else setting.full
            groups.setdefault(key, []).append(setting)
    return [_process(name, tuple(settings), models) for name, settings in groups.items()], missing


def _process(name: str, settings: tuple[Setting, ...], models: Models) -> Process:
    target, draft = models.sizes
    first = settings[0]
    if first.engine == SLIPSTREAM:
        needs = int(1.6 * target + 2 * draft) + GB
        return Process(name, "run_slipstream.py", settings, needs, partial(_ours, settings, models), own=True)
    if first.engine == HF:
        needs = target + draft + 2 * GB
        return Process(name, "run_hf.py", settings, needs, partial(_hf, settings, models), own=True)
    make: dict[str, tuple[str, int, Callable[[Setting, Models], Ready]]] = {
        LLAMACPP: ("run_llamacpp.py", target + 2 * GB, _llamacpp),
        f"{LLAMACPP}-native": ("run_llama_server.py", target + 2 * GB, _llamacpp_native),
        OPENVINO: ("run_openvino.py", 2 * target + 2 * GB, _openvino),
    }
    vllm = ("run_vllm.py", int(1.3 * (target + draft)) + 3 * GB, _vllm)
    script, needs, ready = make.get(first.engine, vllm)
    return Process(name, script, settings, needs, partial(ready, first, models))


def _ours(settings: Sequence[Setting], models: Models) -> Ready:
    ours = specs(models.draft)
    config = {"weights": settings[0].weights, "settings": {s.name: ours[s.value] for s in settings}}
    return prepare("project"), {**models.own_words, **config}, {}


def _hf(settings: Sequence[Setting], models: Models) -> Ready:
    return prepare("project"), {**models.own_words, "settings": {s.name: s.value for s in settings}}, {}


def _llamacpp(setting: Setting, models: Models) -> Ready:
    config = _gguf_words(setting, models)  # first, for it may not be had at all
    return prepare("llamacpp"), config, {}


def _llamacpp_native(setting: Setting, models: Models) -> Ready:
    config = _gguf_words(setting, models)
    python = prepare("llamacpp-native")
    return python, {**config, "program": str(python.parent / "llama-server")}, {}


def _gguf_words(setting: Setting, models: Models) -> dict[str, Any]:
    return {
        "model": models.gguf_of("target", setting.weights),
        "speculative": _filled(setting.value, lambda: models.gguf_of("draft", "q4_k_m")),
        "threads": models.threads,
        "context": models.context,
        "eos_ids": models.eos_ids,
    }


def _openvino(setting: Setting, models: Models) -> Ready:
    config = {
        "model": models.gguf_of("target", setting.weights),
        **_filled(setting.value, lambda: models.gguf_of("draft", "q4_k_m")),
        "threads": models.threads,
        "eos_ids": models.eos_ids,
    }
    return prepare("openvino"), config, {}


def _vllm(setting: Setting, models: Models) -> Ready:
    config = {
        "model": str(models.folders[0]),
        "speculative": _filled(setting.value, lambda: str(models.folders[1])),
        "context": models.context,
        "eos_ids": models.eos_ids,
    }
    return prepare(setting.engine), config, {**vllm_variables(models.threads), **bound(models.threads)}


def _filled(value: Any, draft: Callable[[], str]) -> Any:
    """The value with the draft model's place in it, which is only asked for if it is needed."""
    if isinstance(value, dict):
        return {key: _filled(inner, draft) for key, inner in value.items()}
    return draft() if value == DRAFT else value


def vllm_variables(threads: int) -> dict[str, str]:
    """vLLM's CPU page: Intel's OpenMP and tcmalloc preloaded, one thread a core, bound to it. Left alone it
    keeps a core for its other processes, which of two cores is one too many."""
    home = prepare("vllm").parents[1]
    found = [*Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4"), *home.glob("lib/libiomp5.so")]
    return {
        "LD_PRELOAD": ":".join(map(str, found)),
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GB
        "VLLM_CPU_OMP_THREADS_BIND": _cores(threads),
        "VLLM_NO_USAGE_STATS": "1",
    }


def bound(threads: int) -> dict[str, str]:
    """What vLLM sets for its worker processes, for one that is its own worker."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "KMP_AFFINITY": f"granularity=fine,explicit,proclist=[{_cores(threads)}]",
        "KMP_BLOCKTIME": "5",
        "KMP_TPAUSE": "0",
    }


def _cores(threads: int) -> str:
    return ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads]))
