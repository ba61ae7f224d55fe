"""The parts of a loaded model that trained heads share: its embedding and its LM head."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from slipstream.errors import DrafterError
from slipstream.model.embedding import Int8Embedding, input_table, original_rows, sampled_ids
from slipstream.model.packed import KernelLinear
from slipstream.model.taps import decoder


@dataclass(frozen=True)
class ModelParts:
    """embedding [V, H] is the raw table: what a model multiplies it with (Gemma) is not in it, as in the
    engines that heads are exported to. lm_head maps [..., H] to [..., V] and may be packed. Either may be
    int8."""

    hidden_size: int
    vocab_size: int
    num_layers: int
    embedding: torch.Tensor | Int8Embedding
    lm_head: nn.Module
    norm: torch.Tensor

    @classmethod
    def of(cls, model: PreTrainedModel) -> ModelParts:
        config = model.config.get_text_config()
        head = model.get_output_embeddings()
        if head is None:
            raise DrafterError(f"{type(model).__name__} has no LM head that trained heads could share")
        norm = getattr(decoder(model), "norm", None)
        return cls(
            int(config.hidden_size),
            int(config.vocab_size),
            int(config.num_hidden_layers),
            input_table(model),
            head,
            norm.weight if norm is not None else torch.zeros(0),
        )

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Raw rows of the table for ids of any shape, [..., H]."""
        if isinstance(self.embedding, Int8Embedding):
            return self.embedding.rows(ids)
        return nn.functional.embedding(ids, self.embedding)

    def lm_head_rows(self, ids: torch.Tensor) -> nn.Linear:
        """A frozen LM head for these tokens [n] only, in the model's dtype."""
        head: Any = self.lm_head
        ids = ids.to(self.embedding.device)
        rows = head.rows(ids) if isinstance(head, KernelLinear) else head.weight.detach()[ids]  # [n, H]
        rows, bias = rows.to(self.embedding.dtype), head.bias
        small = nn.Linear(rows.shape[1], rows.shape[0], bias is not None, device="meta")
        small.weight = nn.Parameter(rows, requires_grad=False)
        if bias is not None:
            small.bias = nn.Parameter(bias.detach()[ids], requires_grad=False)
        return small

    @cached_property
    def fingerprint(self) -> str:
        """Tells this target from others of the same shape, in any dtype that bfloat16 can be made from.

        Over sizes, evenly spaced embedding rows and the final norm: what fine-tuning with adapters
        leaves alone is not told apart.
        """
        sampled = [original_rows(self.embedding, sampled_ids(self.vocab_size)), self.norm.detach()]
        digest = hashlib.blake2b(
            f"{self.hidden_size} {self.vocab_size} {self.num_layers}".encode(), digest_size=16
        )
        for part in sampled:
            digest.update(part.to("cpu", torch.bfloat16).contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()
