"""Which engines with which settings `peers.py` measures, where the settings come from, and the processes that
run them."""

from __future__ import annotations

import fnmatch
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import slipstream
from drafters import specs
from environments import prepare
from foundation import HF_ASSISTED, HF_PLAIN
from gguf_models import gguf_file
from slipstream.errors import ParameterError
from slipstream.model.cache import round_up
from slipstream.model.progress import Progress

GB = 1_000_000_000
SLIPSTREAM, HF, LLAMACPP, VLLM, OPENVINO = "slipstream", "transformers", "llama.cpp", "vllm", "openvino"
DRAFT = "{draft}"  # stands for the draft model's file or folder

OURS = "bench/drafters.py"
HF_DOCS = "transformers, generation strategies"
HF_DEFAULT = "the defaults of transformers' GenerationConfig: 20 assistant tokens, confidence 0.4"
LLAMA_DEFAULT = "common_params_speculative_draft of llama.cpp: 3 tokens"
LLAMA_OLD = "docs/speculative.md of llama.cpp: 16 tokens, long the default"
LLAMA_NGRAM = "docs/speculative.md of llama.cpp, ngram-mod: n 24, drafts of 48 to 64 (also the defaults)"
LLAMA_DENSE = "docs/speculative.md of llama.cpp, ngram-mod: dense models can have shorter drafts"
LLAMA_SIMPLE = "docs/speculative.md of llama.cpp, ngram-simple: n 12, m 48 (the defaults)"
VLLM_CPU = "vLLM's CPU page: bfloat16, torch.compile, Intel's OpenMP and tcmalloc preloaded, a thread a core"
VLLM_DRAFT = f"{VLLM_CPU}; its page on draft models: 5 tokens"
VLLM_NGRAM = f"{VLLM_CPU}; its page on n-grams: 5 tokens, prompt_lookup_max 4"
VLLM_ZEN = "vLLM's CPU page, AMD Zen: zentorch installed"
OPENVINO_GGUF = "OpenVINO GenAI's page on GGUF files"
OPENVINO_DRAFT = "speculative_decoding_lm.py of OpenVINO GenAI's samples: 4 tokens"
OPENVINO_LOOKUP = "prompt_lookup_decoding_lm.py of OpenVINO GenAI's samples: 5 tokens, n-grams to 3"


@dataclass(frozen=True)
class Setting:
    """A line of the table.

    weights: how the target's are stored. value: what the engine's process makes of it. source: who
    recommends it, or how it was chosen. learns: it remembers other answers, and each round begins without.
    usual: measured unless settings are named.
    """

    engine: str
    weights: str
    method: str
    value: Any
    source: str
    learns: bool = False
    usual: bool = True

    @property
    def name(self) -> str:
        return f"{self.weights} {self.method}"

    @property
    def full(self) -> str:
        return f"{self.engine} {self.name}"


def _ours(weights: str) -> list[Setting]:
    learning = {"suffix", "cascade"}
    methods = ("none", "draft", "draft-int8", "suffix", "cascade")
    return [Setting(SLIPSTREAM, weights, m, m, OURS, learns=m in learning) for m in methods]


def _llamacpp(engine: str, weights: str, usual: bool) -> list[Setting]:
    """usual: whether drafting is measured unasked; plain decoding always is."""

    def draft(length: int) -> dict[str, Any]:
        return {"draft": {"model": DRAFT, "n_max": length}}

    short = {"ngram_mod": {"n_match": 16, "n_min": 4, "n_max": 16}}
    return [
        Setting(engine, weights, "plain", {}, "llama.cpp's defaults"),
        Setting(engine, weights, "draft 3", draft(3), LLAMA_DEFAULT, usual=usual),
        Setting(engine, weights, "draft 16", draft(16), LLAMA_OLD, usual=usual),
        Setting(engine, weights, "ngram_mod", {"ngram_mod": {}}, LLAMA_NGRAM, learns=True, usual=usual),
        Setting(engine, weights, "ngram_mod short", short, LLAMA_DENSE, learns=True, usual=False),
        Setting(engine, weights, "ngram_simple", {"ngram_simple": {}}, LLAMA_SIMPLE, usual=False),
    ]


def _vllm(engine: str, plain: str, usual: bool) -> list[Setting]:
    draft = {"method": "draft_model", "model": DRAFT, "num_speculative_tokens": 5}
    ngram = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}
    return [
        Setting(engine, "bf16", "plain", None, plain, usual=usual),
        Setting(engine, "bf16", "draft 5", draft, VLLM_DRAFT, usual=usual),
        Setting(engine, "bf16", "ngram", ngram, VLLM_NGRAM, usual=usual),
    ]


def _openvino() -> list[Setting]:
    draft = {"draft": DRAFT, "generation": {"num_assistant_tokens": 4}}
    lookup = {"lookup": True, "generation": {"num_assistant_tokens": 5, "max_ngram_size": 3}}
    return [
        Setting(OPENVINO, "q4_k_m", "plain", {}, OPENVINO_GGUF),
        Setting(OPENVINO, "q4_k_m", "draft 4", draft, OPENVINO_DRAFT),
        Setting(OPENVINO, "q4_k_m", "prompt lookup", lookup, OPENVINO_LOOKUP),
        Setting(OPENVINO, "q8_0", "plain", {}, OPENVINO_GGUF, usual=False),
    ]


SETTINGS: tuple[Setting, ...] = (
    *_ours("bf16"),
    *_ours("int8"),
    Setting(HF, "bf16", "plain", HF_PLAIN, "transformers' defaults"),
    Setting(HF, "bf16", "assisted 5", HF_ASSISTED[0], HF_DOCS),
    Setting(HF, "bf16", "assisted 20, threshold", HF_ASSISTED[1], HF_DEFAULT),
    Setting(HF, "bf16", "prompt lookup 10", HF_ASSISTED[2], HF_DOCS),
    *_llamacpp(LLAMACPP, "q4_k_m", usual=True),
    *_llamacpp(LLAMACPP, "q8_0", usual=False),
    *_llamacpp(f"{LLAMACPP}-native", "q4_k_m", usual=True),
    *_llamacpp(f"{LLAMACPP}-native", "q8_0", usual=False),
    *_vllm(VLLM, VLLM_CPU, usual=True),
    *_vllm(f"{VLLM}-zen", VLLM_ZEN, usual=False),
    *_openvino(),
)


def chosen(patterns: str) -> list[Setting]:
    """Those whose full names match one of the patterns of a list with commas (`llama.cpp*`); the usual ones
    if it is empty. ParameterError for a pattern that matches nothing."""
    asked = [pattern.strip() for pattern in patterns.split(",") if pattern.strip()]
    for pattern in asked:
        if not any(fnmatch.fnmatchcase(s.full, pattern) for s in SETTINGS):
            raise ParameterError(
                f"no setting is called {pattern!r}; there are {', '.join(s.full for s in SETTINGS)}"
            )
    if not asked:
        return [s for s in SETTINGS if s.usual]
    return [s for s in SETTINGS if any(fnmatch.fnmatchcase(s.full, pattern) for pattern in asked)]


@dataclass(frozen=True)
class Process:
    """What runs settings of one engine that can share memory. needs: bytes it may take, at most, by estimate.
    prepare: makes what it runs on, when its turn comes, and gives the interpreter, the configuration and more
    environment variables."""

    name: str
    script: str
    settings: tuple[Setting, ...]
    needs: int
    prepare: Callable[[], tuple[Path, dict[str, Any], Mapping[str, str]]]

    @property
    def learns(self) -> bool:
        return any(s.learns for s in self.settings)

    @property
    def own(self) -> bool:
        """Whether it runs on this project's code."""
        return self.settings[0].engine in (SLIPSTREAM, HF)


@dataclass(frozen=True)
class Models:
    """The pair that everybody runs. target and draft: as `slipstream.load` takes them; folders: where they
    are. gguf: files given by hand, else the catalogue's."""

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
        """which: "target" or "draft"."""
        if self.gguf.get(which):
            return self.gguf[which]
        return str(gguf_file(getattr(self, which), weights, self.progress))


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
        ours = specs(models.draft)
        config = {
            **_pair(models),
            "weights": first.weights,
            "settings": {s.name: ours[s.value] for s in settings},
        }
        needs = int(1.6 * target + 2 * draft) + GB
        return Process(name, "run_slipstream.py", settings, needs, lambda: (prepare("project"), config, {}))
    if first.engine == HF:
        config = {**_pair(models), "settings": {s.name: s.value for s in settings}}
        needs = target + draft + 2 * GB
        return Process(name, "run_hf.py", settings, needs, lambda: (prepare("project"), config, {}))
    if first.engine == LLAMACPP:
        return Process(
            name, "run_llamacpp.py", settings, target + 2 * GB, lambda: _llamacpp_of(first, models)
        )
    if first.engine == OPENVINO:
        needs = 2 * target + 2 * GB
        return Process(name, "run_openvino.py", settings, needs, lambda: _openvino_of(first, models))
    needs = int(1.3 * (target + draft)) + 3 * GB
    return Process(name, "run_vllm.py", settings, needs, lambda: _vllm_of(first, models))


def _pair(models: Models) -> dict[str, Any]:
    return {"target": models.target, "draft": models.draft, "threads": models.threads}


def _filled(value: Any, draft: Callable[[], str]) -> Any:
    """The value with the draft model's place in it; it is only fetched if it is needed."""
    if isinstance(value, dict):
        return {key: _filled(inner, draft) for key, inner in value.items()}
    return draft() if value == DRAFT else value


def _llamacpp_of(setting: Setting, models: Models) -> tuple[Path, dict[str, Any], Mapping[str, str]]:
    return prepare("llamacpp"), _gguf_config(setting, models), {}


def _native_of(setting: Setting, models: Models) -> tuple[Path, dict[str, Any], Mapping[str, str]]:
    python = prepare("llamacpp-native")
    return python, {**_gguf_config(setting, models), "program": str(python.parent / "llama-server")}, {}


def _gguf_config(setting: Setting, models: Models) -> dict[str, Any]:
    return {
        "model": models.gguf_of("target", setting.weights),
        "speculative": _filled(setting.value, lambda: models.gguf_of("draft", "q4_k_m")),
        "threads": models.threads,
        "context": models.context,
        "eos_ids": models.eos_ids,
    }


def _openvino_of(setting: Setting, models: Models) -> tuple[Path, dict[str, Any], Mapping[str, str]]:
    config = {
        "model": models.gguf_of("target", setting.weights),
        **_filled(setting.value, lambda: models.gguf_of("draft", "q4_k_m")),
        "threads": models.threads,
        "eos_ids": models.eos_ids,
    }
    return prepare("openvino"), config, {}


def _vllm_of(setting: Setting, models: Models) -> tuple[Path, dict[str, Any], Mapping[str, str]]:
    config = {
        "model": str(models.folders[0]),
        "speculative": _filled(setting.value, lambda: str(models.folders[1])),
        "context": models.context,
        "eos_ids": models.eos_ids,
    }
    return prepare(setting.engine), config, {**vllm_variables(models.threads), **_bound(models.threads)}


def vllm_variables(threads: int) -> dict[str, str]:
    """vLLM's CPU page: Intel's OpenMP and tcmalloc preloaded, one thread a core, bound to it. Without the
    bound vLLM leaves a core to its other processes, which of two cores is one too many."""
    home = prepare("vllm").parents[1]
    found = [*Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4"), *home.glob("lib/libiomp5.so")]
    return {
        "LD_PRELOAD": ":".join(map(str, found)),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, _cores(threads))),
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }


def _bound(threads: int) -> dict[str, str]:
    """What vLLM sets for its worker processes, for one that is its own worker."""
    cores = ",".join(map(str, _cores(threads)))
    return {
        "OMP_NUM_THREADS": str(threads),
        "KMP_AFFINITY": f"granularity=fine,explicit,proclist=[{cores}]",
        "KMP_BLOCKTIME": "5",
        "KMP_TPAUSE": "0",
    }


def _cores(threads: int) -> list[int]:
    return sorted(os.sched_getaffinity(0))[:threads]
