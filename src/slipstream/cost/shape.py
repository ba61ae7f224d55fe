"""A model's shape from its config.json: parameters, bytes, keys and values, operations. Nothing is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.cost.machines import DTYPE_BYTES, read_json_object
from slipstream.errors import ParameterError

# config.json has other names for the same things in older families.
_NAMES = {
    "hidden": ("hidden_size", "n_embd", "d_model", "dim"),
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv"),
    "intermediate": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
}
# Families whose feed-forward part is two matrices; all newer ones have three (a gate).
_TWO_MATRICES = frozenset(
    ("gpt2", "gpt_neo", "gpt_neox", "gptj", "opt", "bloom", "phi", "falcon", "codegen", "gpt_bigcode")
    + ("mpt", "starcoder2", "nemotron")
)
_DTYPES = {"float": "float32", "half": "float16"}


@dataclass(frozen=True)
class ModelShape:
    """experts: 0 for a dense model; else `intermediate` is one expert's width, `active` of them see a token,
    and `shared` units of width see every one."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool
    matrices: int = 3
    experts: int = 0
    active: int = 0
    shared: int = 0
    dtype: str = "bfloat16"

    # -- parameters -----------------------------------------------------------------------------

    @property
    def attention_parameters(self) -> int:
        """Of one layer: queries, keys, values and the output projection."""
        return 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)

    @property
    def expert_parameters(self) -> int:
        """Of one layer's feed-forward part, or one expert of it."""
        return self.matrices * self.hidden * self.intermediate

    @property
    def parameters(self) -> int:
        """All of them, the embedding once more for a head of its own; norms are counted, biases not."""
        beside = self.matrices * self.hidden * self.shared + self.hidden * self.experts
        layer = self.attention_parameters + self.expert_parameters * max(self.experts, 1) + beside
        return (
            self.layers * (layer + 2 * self.hidden) + self.hidden + self.vocab * self.hidden * (2 - self.tied)
        )

    @property
    def active_parameters(self) -> int:
        """What one token is multiplied with: the head, attention, and the experts it is sent to."""
        return self.layers * (self.attention_parameters + self._experts_of_a_token) + self.vocab * self.hidden

    @property
    def _experts_of_a_token(self) -> int:
        if not self.experts:
            return self.expert_parameters
        return self.active * self.expert_parameters + self.matrices * self.hidden * self.shared

    # -- bytes ----------------------------------------------------------------------------------

    @property
    def weight_bytes(self) -> float:
        return self.parameters * DTYPE_BYTES[self.dtype]

    def read_bytes(self, tokens: float) -> float:
        """Weights a step of so many tokens reads. Of E experts E(1 − (1 − k/E)^tokens) are hit on average, so
        verifying more tokens is not free in a mixture of experts."""
        read = float(self.attention_parameters)
        if self.experts:
            hit = self.experts * (1 - (1 - self.active / self.experts) ** tokens)
            read += hit * self.expert_parameters + self.matrices * self.hidden * self.shared
        else:
            read += self.expert_parameters
        return (self.layers * read + self.vocab * self.hidden) * DTYPE_BYTES[self.dtype]

    @property
    def kv_bytes(self) -> float:
        """Keys and values of one token, at two bytes a number, or four where the model has four."""
        return 2 * self.layers * self.kv_heads * self.head_dim * max(DTYPE_BYTES[self.dtype], 2.0)

    # -- operations -----------------------------------------------------------------------------

    @property
    def mlp_flops(self) -> float:
        """A token's, in all layers."""
        return 2.0 * self.layers * self._experts_of_a_token

    @property
    def projection_flops(self) -> float:
        """A token's attention projections and its head."""
        return 2.0 * (self.layers * self.attention_parameters + self.vocab * self.hidden)

    def attention_flops(self, context: float) -> float:
        """A token's scores and sums over `context` keys, in all layers."""
        return 4.0 * self.layers * self.heads * self.head_dim * context

    def flops(self, context: float) -> float:
        """A token's, all together."""
        return self.mlp_flops + self.projection_flops + self.attention_flops(context)


def read_shape(path: Path, dtype: str | None = None) -> ModelShape:
    """From a config.json or the folder it is in. dtype: what the weights are kept in, if not as it says."""
    file = path / "config.json" if path.is_dir() else path
    config = read_json_object(file, "a model")
    name = file.parent.name if file.name == "config.json" else file.stem
    return shape_of(config, name or "model", dtype, str(file))


def shape_of(
    config: Mapping[str, Any], name: str, dtype: str | None = None, where: str = "config"
) -> ModelShape:
    """From the values of a config.json; those of a nested `text_config` count."""
    outer, config = config, {**config, **(config.get("text_config") or {})}

    def number(key: str, default: int | None = None) -> int:
        names = _NAMES.get(key, (key,))
        value = next((config[n] for n in names if config.get(n) is not None), default)
        if value is None:
            raise ParameterError(f"{where}: {names[0]} is missing, so the model's size is not known")
        if isinstance(value, list):  # a width a layer: their mean keeps the sum
            value = round(sum(value) / len(value)) if value else 0
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ParameterError(f"{where}: {names[0]} must be a whole number, not {value!r}")
        return value

    def positive(key: str, default: int | None = None) -> int:
        value = number(key, default)
        if value < 1:
            raise ParameterError(f"{where}: {_NAMES.get(key, (key,))[0]} must be at least 1, not {value}")
        return value

    hidden, heads = positive("hidden"), positive("heads")
    experts = number("experts", 0)
    wide = positive("intermediate", 4 * hidden)
    one = number("moe_intermediate_size", wide) if experts else wide
    shared = number("n_shared_experts", 0) * one or number("shared_expert_intermediate_size", 0)
    kept = dtype or str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    kept = _DTYPES.get(kept, kept)
    if kept not in DTYPE_BYTES:
        raise ParameterError(f"unknown dtype {kept!r}; there are {', '.join(DTYPE_BYTES)}")
    family = str(config.get("model_type") or outer.get("model_type") or "")
    return ModelShape(
        name=name,
        hidden=hidden,
        layers=positive("layers"),
        heads=heads,
        kv_heads=positive("kv_heads", heads),
        head_dim=positive("head_dim", max(hidden // heads, 1)),
        intermediate=one,
        vocab=positive("vocab_size"),
        tied=bool(config.get("tie_word_embeddings", family in _TWO_MATRICES)),
        matrices=2 if family in _TWO_MATRICES else 3,
        experts=experts,
        active=min(number("num_experts_per_tok", 2), experts) if experts else 0,
        shared=shared if experts else 0,
        dtype=kept,
    )
