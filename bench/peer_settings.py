"""Which engines with which settings `peers.py` measures, and where the settings come from."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from typing import Any

from foundation import HF_ASSISTED, HF_PLAIN
from slipstream.errors import ParameterError

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
