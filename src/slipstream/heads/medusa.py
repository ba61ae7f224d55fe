"""Medusa: K small heads on the target's last hidden state, each guessing one token further ahead.

Cai et al., arXiv 2401.10774. With the state h_t of position t the target's own LM head predicts
token t+1; head k (from 0) predicts token t+2+k.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from slipstream.errors import DrafterError
from slipstream.heads.base import DraftVocab, build_with_nan

LMHead = Callable[[torch.Tensor], torch.Tensor]  # [..., H] -> [..., V]


@dataclass(frozen=True, slots=True)
class MedusaConfig:
    """output: "own" linear heads, or the "target"'s frozen LM head. vocab_size is the target's.

    draft_vocab_size: how many of its tokens can be drafted; None means all.
    """

    hidden_size: int
    vocab_size: int
    num_heads: int = 4
    num_layers: int = 1
    output: Literal["own", "target"] = "own"
    draft_vocab_size: int | None = None


class ResBlock(nn.Module):
    """x + SiLU(Wx + b); x [..., H]."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.silu(self.linear(x))


class MedusaHeads(nn.Module):
    """K heads of `num_layers` residual blocks; no two share a block. Weights are NaN until set."""

    def __init__(self, config: MedusaConfig, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config = config
        self.vocab = DraftVocab(config.vocab_size, config.draft_vocab_size)
        size = self.vocab.size

        def head() -> nn.Sequential:
            blocks: list[nn.Module] = [ResBlock(config.hidden_size) for _ in range(config.num_layers)]
            if config.output == "own":
                blocks.append(nn.Linear(config.hidden_size, size, bias=False))
            return nn.Sequential(*blocks)

        self.heads: nn.ModuleList = build_with_nan(
            lambda: nn.ModuleList(head() for _ in range(config.num_heads)), dtype
        )

    def start(self, lm_head: torch.Tensor | None = None) -> MedusaHeads:
        """The state training begins with: every block the identity, every own head the LM head.

        lm_head [V, H] is the target's weight, of which the draft vocabulary's rows are taken.
        """
        for head in self.heads:
            for block in head:  # type: ignore[attr-defined]
                if isinstance(block, ResBlock):
                    nn.init.zeros_(block.linear.weight)
                    nn.init.zeros_(block.linear.bias)
                else:
                    if lm_head is None:
                        raise DrafterError("Medusa heads with own outputs start from the target's LM head")
                    block.weight.data.copy_(lm_head.detach()[self.vocab.target_ids()])
        return self

    def forward(
        self, hidden: torch.Tensor, lm_head: LMHead | None = None, count: int | None = None
    ) -> torch.Tensor:
        """Logits [K, ..., draft V] for last hidden states [..., H], of the first `count` heads.

        lm_head: the target's (its rows of the draft vocabulary), where the heads have none.
        """
        outputs = torch.stack([head(hidden) for head in self.heads[:count]])
        if self.config.output == "own":
            return outputs
        if lm_head is None:
            raise DrafterError("these Medusa heads use the target's LM head; pass it")
        return lm_head(outputs)
