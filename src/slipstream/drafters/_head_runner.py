"""`HeadRunner`: an EAGLE head over slots of its own, as `Runner` is a model over slots."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slipstream.drafters._growth import Level, likeliest
from slipstream.heads.eagle import DraftAttention, EagleHead
from slipstream.model.attention import AttentionStep, slot_attention
from slipstream.model.cache import SlotCache
from slipstream.model.pack import PackRow, build_pack, pad_rows
from slipstream.model.packed import weight_bytes


class HeadRunner:
    """Computes packed rows of a head. It leaves the cache's lengths alone: the caller commits."""

    def __init__(self, head: EagleHead, device: torch.device) -> None:
        self.head = head
        self.cache = SlotCache()
        self._device = device

    @property
    def memory_bytes(self) -> int:
        return weight_bytes(self.head) + self.cache.memory_bytes

    @torch.inference_mode()
    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """The target's features [n, F] as hidden states [n, H]."""
        return self.head.fuse(pad_rows(features))[: len(features)]

    @torch.inference_mode()
    def forward(self, rows: Sequence[PackRow], hidden: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Rows of next tokens, each with its hidden states [n, H]; gives each row's outputs [n, H]."""
        prepared = [(r, self.cache.length(r.slot), self.cache.reserve(r.slot, len(r.tokens))) for r in rows]
        pack = build_pack(prepared, self._device)
        line = pad_rows(torch.cat(list(hidden)))[None]  # [1, T, H]
        step = AttentionStep(pack, self.cache)

        def attend(
            module: DraftAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
        ) -> torch.Tensor:
            return slot_attention(module, query, key, value, None, module.scaling, slipstream=step)[0]

        out = self.head(pack.input_ids, line, pack.position_ids, attend)[0]  # [T, H]
        return [out[span.start : span.end] for span in pack.spans]

    @torch.inference_mode()
    def best(self, hidden: torch.Tensor, vocab_size: int, width: int, scored: bool) -> Level:
        """The `width` likeliest target ids after each of the outputs [n, H]."""
        logits = self.head.logits(pad_rows(hidden))[: len(hidden)]  # [n, draft V]
        if not self.head.vocab.reduced:
            logits = logits[:, :vocab_size]  # a head may be padded beyond the tokens there are
        ids, logprobs = likeliest(logits, width, scored)  # [n, width]
        tokens = self.head.vocab.to_target(ids).tolist()
        return Level(tokens, None if logprobs is None else logprobs.tolist())
