"""llama.cpp's parameters from a configuration, for the peer and for the server."""

from __future__ import annotations

from typing import Any

import xllamacpp

KINDS = {
    "draft": "COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE",
    "ngram_mod": "COMMON_SPECULATIVE_TYPE_NGRAM_MOD",
    "ngram_simple": "COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE",
}


def parameters(config: dict[str, Any]) -> xllamacpp.CommonParams:
    """model: a GGUF file. threads, context (tokens, of all rows together), rows. speculative: {kind: {field:
    value}}, where the kind `draft` also takes `model`. The rest is llama.cpp's own default."""
    params = xllamacpp.CommonParams()
    params.model.path = config["model"]
    params.n_ctx = config["context"]
    params.n_parallel = config.get("rows", 1)
    if not config.get("prefix_cache"):
        params.cache_prompt = False
        params.cache_ram_mib = 0
    params.port = config.get("port", 0)
    params.endpoint_metrics = config.get("metrics", False)
    threads = [params.cpuparams, params.cpuparams_batch]
    speculative = params.speculative
    threads += [speculative.draft.cpuparams, speculative.draft.cpuparams_batch]
    for one in threads:
        one.n_threads = config["threads"]
    wanted = config.get("speculative") or {}
    if wanted:
        speculative.types = [getattr(xllamacpp.common_speculative_type, KINDS[kind]) for kind in wanted]
    for kind, fields in wanted.items():
        for field, value in fields.items():
            if field == "model":
                speculative.draft.mparams.path = value
            else:
                setattr(getattr(speculative, kind), field, value)
    return params


def about() -> dict[str, Any]:
    """Which build it is, and the instructions that it was compiled for."""
    return {"build": xllamacpp.BUILD_INFO, "system": xllamacpp.get_system_info()}
