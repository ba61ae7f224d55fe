"""EAGLE heads: one decoder layer that continues the target's features (arXiv 2401.15077, 2503.01840).

Position t of the head joins the embedding of token t+1 with the feature of token t, and its output stands
for the feature of token t+1, from which token t+2 is guessed: tokens are one ahead of features.
EAGLE-1 takes the state that enters the target's LM head, and guesses with that LM head. EAGLE-3 fuses
the residual stream at several depths and has a norm and an LM head of its own.

The same `EagleHead.forward` trains (a whole text, any mask), drafts (over slots) and is exported:
how keys and values meet is the caller's `Attend`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from slipstream.core.draft import Needs
from slipstream.errors import DrafterError
from slipstream.heads.base import DraftVocab, build_with_nan
from slipstream.model.parts import ModelParts
from slipstream.model.rope import rope_frequencies

# (module, query [B, heads, T, D], key and value [B, kv_heads, T, D]) -> [B, T, heads, D]
Attend = Callable[["DraftAttention", torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class EagleConfig:
    """A Llama-shaped head. vocab_size and target_hidden_size are the target's.

    aux_layers (EAGLE-3): the tapped residual streams, k = after k layers, 0 = the embeddings.
    own_embedding: the head ships an embedding; otherwise it reads the target's raw table. own_lm_head
    likewise (EAGLE-3). norm_before_residual: the first layer's residual is the normed hidden state.
    """

    version: Literal[1, 3]
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    target_hidden_size: int
    num_layers: int = 1
    draft_vocab_size: int | None = None
    aux_layers: tuple[int, ...] = ()
    norm_before_residual: bool = False
    own_embedding: bool = False
    own_lm_head: bool = True
    fc_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    rms_norm_eps: float = 1e-6
    context: int = 2048
    rope: Mapping[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 1e4})

    def __post_init__(self) -> None:
        if self.version == 1 and (self.aux_layers or self.draft_vocab_size not in (None, self.vocab_size)):
            raise DrafterError("EAGLE-1 heads have neither tapped layers nor a draft vocabulary of their own")
        if self.version == 1 and self.hidden_size != self.target_hidden_size:
            raise DrafterError("EAGLE-1 heads have the target's hidden size")
        if not self.own_lm_head and self.draft_vocab_size not in (None, self.vocab_size):
            raise DrafterError("a draft vocabulary of its own needs an LM head of its own")
        if self.version == 3 and not self.aux_layers:
            raise DrafterError("EAGLE-3 heads need the target layers they tap")


class DraftAttention(nn.Module):
    """Grouped-query attention with rotary positions; in [B, T, in_size], out [B, T, H]."""

    def __init__(self, config: EagleConfig, in_size: int, index: int) -> None:
        super().__init__()
        self.layer_idx = index
        self.head_dim = config.head_dim
        self.scaling = config.head_dim**-0.5
        q_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        bias = config.attention_bias
        self.q_proj = nn.Linear(in_size, q_size, bias=bias)
        self.k_proj = nn.Linear(in_size, kv_size, bias=bias)
        self.v_proj = nn.Linear(in_size, kv_size, bias=bias)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=bias)

    def forward(
        self, x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor], attend: Attend
    ) -> torch.Tensor:
        q, k, v = (
            linear(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # [B, heads, T, D]
            for linear in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = attend(self, _rotate(q, rotary), _rotate(k, rotary), v)  # [B, T, heads, D]
        out: torch.Tensor = self.o_proj(mixed.flatten(2))
        return out


def _rotate(x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """x [B, heads, T, D]; cos and sin [B, 1, T, D], each half repeated."""
    first, second = x.chunk(2, -1)
    return x * rotary[0] + torch.cat((-second, first), -1) * rotary[1]


class DraftMLP(nn.Module):
    """down(SiLU(gate x) * up x)."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        size, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(size, inner, bias=bias)
        self.up_proj = nn.Linear(size, inner, bias=bias)
        self.down_proj = nn.Linear(inner, size, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class DraftNorm(nn.RMSNorm):
    """RMS norm in its weight's precision, whatever mixed precision hands it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.to(self.weight.dtype))


class DraftLayer(nn.Module):
    """A decoder layer. EAGLE-3's first one attends from cat(norm(embedding), norm(hidden)), 2H wide;
    EAGLE-1's first one has no norm in front of its attention."""

    def __init__(self, config: EagleConfig, index: int) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.wide = config.version == 3 and index == 0
        self.norm_before_residual = config.norm_before_residual
        bare = config.version == 1 and index == 0
        self.input_layernorm = nn.Identity() if bare else DraftNorm(size, eps)
        if self.wide:
            self.hidden_norm = DraftNorm(size, eps)
        self.self_attn = DraftAttention(config, 2 * size if self.wide else size, index)
        self.post_attention_layernorm = DraftNorm(size, eps)
        self.mlp = DraftMLP(config)

    def forward(
        self,
        hidden: torch.Tensor,
        embedded: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        attend: Attend,
    ) -> torch.Tensor:
        """hidden [B, T, H] (and embedded [B, T, H], read by a wide layer) -> [B, T, H]."""
        if self.wide:
            normed = self.hidden_norm(hidden)
            entering = torch.cat((self.input_layernorm(embedded), normed), -1)  # [B, T, 2H]
            residual = normed if self.norm_before_residual else hidden
        else:
            entering, residual = self.input_layernorm(hidden), hidden
        hidden = residual + self.self_attn(entering, rotary, attend)
        out: torch.Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class EagleHead(nn.Module):
    """The head of either version. Its state dict has the published names; weights are NaN until set.

    `target` must be bound before use where the head shares the target's embedding or LM head; what is
    shared is not part of the state.
    """

    def __init__(self, config: EagleConfig, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config = config
        self.target: ModelParts | None = None
        self.vocab = DraftVocab(config.vocab_size, config.draft_vocab_size)
        size = config.hidden_size
        joined = 2 * size if config.version == 1 else len(config.aux_layers) * config.target_hidden_size

        def parts() -> nn.ModuleDict:
            built: dict[str, nn.Module] = {
                "fc": nn.Linear(joined, size, bias=config.fc_bias),
                "layers": nn.ModuleList(DraftLayer(config, i) for i in range(config.num_layers)),
            }
            if config.own_embedding:
                built["embed_tokens"] = nn.Embedding(config.vocab_size, size)
            if config.version == 3:
                built["norm"] = DraftNorm(size, config.rms_norm_eps)
                if config.own_lm_head:
                    built["lm_head"] = nn.Linear(size, self.vocab.size, bias=False)
            return nn.ModuleDict(built)

        self.body: nn.ModuleDict = build_with_nan(parts, dtype)
        self._frequencies, self._rope_factor = rope_frequencies(config.rope, config.head_dim, config.context)

    @property
    def needs(self) -> Needs:
        """The target's states it reads."""
        if self.config.version == 1:
            return Needs(last_hidden=True)
        return Needs(hidden_layers=tuple(sorted(set(self.config.aux_layers))))

    def features(self, seen: Mapping[int | str, torch.Tensor]) -> torch.Tensor:
        """What `needs` asked for, joined: EAGLE-1 [..., H], EAGLE-3 [..., taps * target H]."""
        if self.config.version == 1:
            return seen["last"]
        return torch.cat([seen[k] for k in self.config.aux_layers], -1)

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """The target's features as hidden states [..., H]; outputs of `forward` are fed back without it."""
        return features if self.config.version == 1 else self.body["fc"](features)  # type: ignore[no-any-return]

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [..] -> [.., H]."""
        if "embed_tokens" in self.body:
            return self.body["embed_tokens"](ids)  # type: ignore[no-any-return]
        return self._bound.embed(ids)

    def forward(
        self, ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """One step: next tokens' ids [B, T], hidden states [B, T, H], positions [B, T] -> [B, T, H]."""
        embedded = self.embed(ids).to(hidden.dtype)  # [B, T, H]
        if self.config.version == 1:
            hidden = self.body["fc"](torch.cat((embedded, hidden), -1))
        angles = positions[..., None].float() * self._frequencies.to(positions.device)  # [B, T, D/2]
        angles = torch.cat((angles, angles), -1)[:, None]  # [B, 1, T, D]
        rotary = (
            (angles.cos() * self._rope_factor).to(hidden.dtype),
            (angles.sin() * self._rope_factor).to(hidden.dtype),
        )
        for layer in self.body["layers"]:  # type: ignore[attr-defined]
            hidden = layer(hidden, embedded, rotary, attend)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Outputs of `forward` [..., H] -> [..., draft V]."""
        if self.config.version == 3:
            hidden = self.body["norm"](hidden)
            if "lm_head" in self.body:
                return self.body["lm_head"](hidden)  # type: ignore[no-any-return]
        return self._bound.lm_head(hidden.to(self._bound.embedding.dtype))  # type: ignore[no-any-return]

    def share_embedding(self) -> None:
        """Drop an own embedding that is the target's, bit for bit in this dtype: checkpoints ship a copy."""
        if "embed_tokens" in self.body:
            own, theirs = self.body["embed_tokens"].weight, self._bound.embedding
            if not isinstance(theirs, torch.Tensor):
                return  # an int8 table: other numbers
            if own.shape == theirs.shape and torch.equal(own, theirs.to(own.dtype)):  # type: ignore[arg-type]
                del self.body["embed_tokens"]

    @property
    def _bound(self) -> ModelParts:
        if self.target is None:
            raise DrafterError("this EAGLE head shares weights with its target; set head.target first")
        return self.target

    def start(self, seed: int = 0) -> EagleHead:
        """The state training begins with: small noise, norms of 1, zero biases.

        An own LM head is noise too; copy the target's rows into it where there are any.
        """
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.body.named_parameters():
                if name.endswith("bias"):
                    parameter.zero_()
                elif parameter.dim() == 1:
                    parameter.fill_(1.0)
                else:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
        return self


def attend_masked(mask: torch.Tensor | None = None) -> Attend:
    """Attention over a whole text: causal, or with a mask [B or 1, 1, T, T] (bool or additive)."""

    def attend(
        module: DraftAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        mixed = nn.functional.scaled_dot_product_attention(
            query, key, value, mask, is_causal=mask is None, scale=module.scaling, enable_gqa=True
        )
        return mixed.transpose(1, 2)

    return attend
