"""OpenVINO GenAI, fed with a GGUF file, which it turns into a graph of its own."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai
from protocol import serve


class OpenVINO:
    def __init__(self, config: dict[str, Any]) -> None:
        """model: a GGUF file. draft: another, or None. lookup: with prompt lookup. generation: fields of the
        generation config. threads, eos_ids."""
        properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": config["threads"]}
        if config.get("draft"):
            properties["draft_model"] = genai.draft_model(config["draft"], "CPU")
        if config.get("lookup"):
            properties["prompt_lookup"] = True
        scheduler = genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False
        scheduler.cache_size = 1  # GB
        self._pipe = genai.LLMPipeline(config["model"], "CPU", scheduler_config=scheduler, **properties)
        self._fields = config.get("generation") or {}
        self._eos_ids = config["eos_ids"]
        self.about = {"versions": f"openvino-genai {importlib.metadata.version('openvino-genai')}"}

    def answer(self, setting: str, ids: list[int], max_tokens: int) -> list[int]:
        config = genai.GenerationConfig(max_new_tokens=max_tokens, do_sample=False)
        config.eos_token_id = self._eos_ids[0]
        config.stop_token_ids = set(self._eos_ids)
        config.apply_chat_template = False
        for field, value in self._fields.items():
            setattr(config, field, value)
        line = np.array([ids], dtype=np.int64)
        prompt = genai.TokenizedInputs(ov.Tensor(line), ov.Tensor(np.ones_like(line)))
        done = self._pipe.generate(prompt, config)
        return [int(token) for token in done.tokens[0]]

    def told(self) -> dict[str, Any]:
        return {}

    def forget(self) -> None:
        pass


serve(OpenVINO)
