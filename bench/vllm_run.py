"""One engine of vLLM on the prompts of a case, in vLLM's own environment.

    VLLM/bin/python bench/vllm_run.py CASE.json OUT.json

CASE.json: target, speculative (vLLM's own words; null: plain decoding), prompts (lists of token ids),
max_tokens, end_ids (none: nothing ends an answer), dtype, context, rows (answers that grow at once). OUT.json
gets tokens (of every answer), steps (of every answer: accepted drafted tokens of each verification), drafts
and accepted (by position; vLLM's own counters), seconds, version. A case that fails leaves no OUT.json.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

# in one process: on few cores vLLM's engine process beside the worker costs a core
os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")


def answer(case: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    llm = LLM(
        case["target"],
        speculative_config=case["speculative"],
        skip_tokenizer_init=True,
        dtype=case["dtype"],
        max_model_len=case["context"],
        max_num_seqs=case["rows"],
        enforce_eager=True,
        disable_log_stats=False,
        enable_prefix_caching=False,
        # refused where nothing is drafted
        per_request_spec_decode_metrics="detailed" if case["speculative"] else "none",
    )
    ends = case["end_ids"]
    params = SamplingParams(
        max_tokens=case["max_tokens"],
        temperature=0,
        ignore_eos=not ends,
        stop_token_ids=ends or None,
        detokenize=False,
    )
    began = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": p} for p in case["prompts"]], params, use_tqdm=False)
    found: dict[str, Any] = {
        "seconds": time.perf_counter() - began,
        "version": version(),
        "tokens": [list(o.outputs[0].token_ids) for o in outputs],
        "steps": [steps_of(o.outputs[0]) for o in outputs],
        "drafts": 0,
        "accepted": [],
    }
    for metric in llm.get_metrics():
        if metric.name == "vllm:spec_decode_num_drafts":
            found["drafts"] = int(metric.value)
        elif metric.name == "vllm:spec_decode_num_accepted_tokens_per_pos":
            found["accepted"] = list(metric.values)
    return found


def steps_of(output: Any) -> list[int]:
    """Accepted drafted tokens of each verification of one answer, in order."""
    told = output.spec_decode_metrics
    return [] if told is None else list(told.per_step_accepted)


def version() -> str:
    for name in ("vllm-cpu", "vllm"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise SystemExit("there is no vLLM in this environment: run this file with its Python")


if __name__ == "__main__":
    made = answer(json.loads(Path(sys.argv[1]).read_text()))
    out = Path(sys.argv[2])
    partial = out.with_name(out.name + ".partial")
    partial.write_text(json.dumps(made))
    partial.replace(out)
    sys.stdout.flush()
    os._exit(0)  # vLLM's threads would keep the process
