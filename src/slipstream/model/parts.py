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
from slipstream.model.packed import PackedLinear
from slipstream.model.taps import decoder

_SAMPLED_ROWS = 64


@dataclass(frozen=True)
class ModelParts:
    """embedding [V, H] is the raw table: what a model multiplies it with (Gemma) is not in it, as in the
    engines that heads are exported to. lm_head maps [..., H] to [..., V] and may be packed."""

    hidden_size: int
    vocab_size: int
    num_layers: int
    embedding: torch.Tensor
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
            model.get_input_embeddings().weight,
            head,
            norm.weight if norm is not None else torch.zeros(0),
        )

    def lm_head_rows(self, ids: torch.Tensor) -> nn.Linear:
        """A frozen LM head for these tokens [n] only."""
        head: Any = self.lm_head
        weight = head.dense() if isinstance(head, PackedLinear) else head.weight.detach()  # [V, H]
        ids = ids.to(weight.device)
        rows, bias = weight[ids], head.bias  # [n, H]
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
        rows = torch.linspace(0, self.vocab_size - 1, _SAMPLED_ROWS).long()
        sampled = [self.embedding.detach()[rows.to(self.embedding.device)], self.norm.detach()]
        digest = hashlib.blake2b(
            f"{self.hidden_size} {self.vocab_size} {self.num_layers}".encode(), digest_size=16
        )
        for part in sampled:
            digest.update(part.to("cpu", torch.bfloat16).contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()
