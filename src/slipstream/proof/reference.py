"""The target once more, with a cache of its own: nothing of a draft ever comes near it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slipstream.engine.engine import Engine
from slipstream.model.pack import PackRow
from slipstream.model.runner import Runner

_TOGETHER = 16  # rows a forward
_PROMPT = 0  # the slot of what all rows begin with


class Reference:
    """The engine's model, computed plainly: whole prefixes, or one token a step, never a tree."""

    def __init__(self, engine: Engine) -> None:
        self._runner = Runner(
            engine.runner.model, pack=False, check=False
        )  # it is checked and packed already
        self.vocab_size = engine.vocab_size
        self.dtype = next(engine.runner.model.parameters()).dtype

    def behind(self, prompt: Sequence[int], outputs: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """The logit row [width] of the token behind the prompt and each of these outputs."""
        cache, rows = self._runner.cache, list[torch.Tensor]()
        cache.open(_PROMPT)
        try:
            self._runner.extend(_PROMPT, prompt[:-1])
            for start in range(0, len(outputs), _TOGETHER):
                part = outputs[start : start + _TOGETHER]
                packs = [PackRow(slot, (prompt[-1], *out)) for slot, out in enumerate(part, start=1)]
                for pack in packs:
                    cache.open(pack.slot)
                    cache.copy_prefix(_PROMPT, pack.slot, len(prompt) - 1)
                rows += self._forward(packs, "last").unbind()
                for pack in packs:
                    cache.close(pack.slot)
        finally:
            for slot in range(_TOGETHER + 1):
                cache.close(slot)
        return rows

    def along(self, prompt: Sequence[int], output: Sequence[int]) -> torch.Tensor:
        """Logit rows [n + 1, width]: behind the prompt, and behind each of the output's n tokens."""
        self._runner.cache.open(_PROMPT)
        try:
            self._runner.extend(_PROMPT, prompt[:-1])
            return self._forward([PackRow(_PROMPT, (prompt[-1], *output))], "all")
        finally:
            self._runner.cache.close(_PROMPT)

    def stepwise(self, prompt: Sequence[int], output: Sequence[int]) -> torch.Tensor:
        """The logit row [width] behind the output, computed a token at a time as plain decoding does."""
        cache, tokens = self._runner.cache, (prompt[-1], *output)
        cache.open(_PROMPT)
        try:
            self._runner.extend(_PROMPT, prompt[:-1])
            for token in tokens[:-1]:
                self._runner.extend(_PROMPT, (token,))
            return self._forward([PackRow(_PROMPT, tokens[-1:])], "last")[0]
        finally:
            cache.close(_PROMPT)

    def _forward(self, packs: list[PackRow], logits: str) -> torch.Tensor:
        computed = self._runner.forward(packs, logits=logits).logits
        assert computed is not None
        return computed

    def close(self) -> None:
        self._runner.close()
