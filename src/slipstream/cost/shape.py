"""A model's shape from its config.json: parameters, bytes, keys and values, operations. Nothing is loaded."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

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
    "active": ("num_experts_per_tok", "num_experts_per_token", "experts_per_token"),
    "positions": ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"),
}
_LARGEST = 10**9  # no size in a config.json comes near it
# Families whose feed-forward part is two matrices; all newer ones have three (a gate).
_TWO_MATRICES = frozenset(
    ("gpt2", "gpt_neo", "gpt_neox", "gptj", "opt", "bloom", "phi", "falcon", "codegen", "gpt_bigcode")
    + ("mpt", "starcoder2", "nemotron")
)
# Families whose head is the embedding unless they say otherwise.
_TIED = frozenset(
    ("gpt2", "gpt_neo", "gpt_bigcode", "opt", "bloom", "falcon", "mpt", "starcoder2", "cohere", "cohere2")
    + ("gemma", "gemma2", "gemma3", "gemma3_text")
)
_DTYPES = {"float": "float32", "half": "float16"}
# What checkpoints that are stored quantised say of it, as the dtype their weights are read in.
_QUANTISED = {"fp8": "float8", "fbgemm_fp8": "float8", "mxfp4": "int4", "awq": "int4", "gptq": "int4"}
_BITS = {4: "int4", 8: "int8", 16: "bfloat16"}


@dataclass(frozen=True)
class Latent:
    """Sizes of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434). width: of the cached vector.
    rotary: of the key that all heads share, cached beside it. nope, value: of a head's other part of the key,
    and of its value. query: of the vector that queries are made from, 0: from the hidden state."""

    width: int
    rotary: int
    nope: int
    value: int
    query: int = 0

    @property
    def cached(self) -> int:
        """Numbers of a token and layer."""
        return self.width + self.rotary

    def parameters(self, hidden: int, heads: int) -> int:
        """Of one layer."""
        asked = heads * (self.nope + self.rotary)
        queries = self.query * (hidden + asked) if self.query else hidden * asked
        made = hidden * self.cached + self.width * heads * (self.nope + self.value)
        return queries + made + heads * self.value * hidden


@dataclass(frozen=True)
class ModelShape:
    """experts: 0 for a dense model; else `intermediate` is one expert's width, `active` of them see a token,
    and `shared` units of width see every one; of the layers the first `dense` have no experts, but a width of
    `wide`. latent: of a model that caches no keys and values but one vector a layer from which it makes them
    (multi-head latent attention, DeepSeek-V2), else None. positions: longest context, 0 if not said."""

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
    dense: int = 0
    wide: int = 0
    latent: Latent | None = None
    positions: int = 0

    # -- parameters -----------------------------------------------------------------------------

    @property
    def attention_parameters(self) -> int:
        """Of one layer: queries, keys, values and the output projection."""
        if self.latent is not None:
            return self.latent.parameters(self.hidden, self.heads)
        return 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)

    @property
    def expert_parameters(self) -> int:
        """Of one layer's feed-forward part, or one expert of it."""
        return self.matrices * self.hidden * self.intermediate

    @property
    def parameters(self) -> int:
        """All of them, the embedding once more for a head of its own; norms are counted, biases not."""
        router = (self.layers - self.dense) * self.hidden * self.experts
        beside = self.layers * (self.attention_parameters + 2 * self.hidden) + self.hidden + router
        return round(self._mlp(self.experts)) + beside + self.vocab * self.hidden * (2 - self.tied)

    @property
    def active_parameters(self) -> int:
        """What one token is multiplied with: the head, attention, and the experts it is sent to."""
        attention = self.layers * self.attention_parameters
        return round(self._mlp(self.active)) + attention + self.vocab * self.hidden

    def _mlp(self, hit: float) -> float:
        """Parameters of the feed-forward parts of all layers, of so many experts in each."""
        if not self.experts:
            return self.layers * self.expert_parameters
        unit = self.matrices * self.hidden
        layer = hit * self.expert_parameters + unit * self.shared
        return (self.layers - self.dense) * layer + self.dense * unit * self.wide

    # -- bytes ----------------------------------------------------------------------------------

    @property
    def weight_bytes(self) -> float:
        return self.parameters * DTYPE_BYTES[self.dtype]

    def read_bytes(self, tokens: float) -> float:
        """Weights a step of so many tokens reads. Of E experts E(1 − (1 − k/E)^tokens) are hit on average, so
        verifying more tokens is not free in a mixture of experts."""
        hit = self.experts * (1 - (1 - self.active / self.experts) ** tokens) if self.experts else 0.0
        read = self._mlp(hit) + self.layers * self.attention_parameters + self.vocab * self.hidden
        return read * DTYPE_BYTES[self.dtype]

    @property
    def kv_bytes(self) -> float:
        """Keys and values of one token, at two bytes a number, or four where the model has four."""
        numbers = 2 * self.kv_heads * self.head_dim if self.latent is None else self.latent.cached
        return self.layers * numbers * max(DTYPE_BYTES[self.dtype], 2.0)

    # -- operations -----------------------------------------------------------------------------

    @property
    def mlp_flops(self) -> float:
        """A token's, in all layers."""
        return 2.0 * self._mlp(self.active)

    @property
    def projection_flops(self) -> float:
        """A token's attention projections and its head."""
        return 2.0 * (self.layers * self.attention_parameters + self.vocab * self.hidden)

    def attention_flops(self, context: float) -> float:
        """A token's scores and sums over `context` keys, in all layers."""
        width = 2.0 * self.head_dim if self.latent is None else self.latent.cached + self.latent.width
        return 2.0 * self.layers * self.heads * width * context

    def flops(self, context: float) -> float:
        """A token's, all together."""
        return self.mlp_flops + self.projection_flops + self.attention_flops(context)


def read_shape(path: Path, dtype: str | None = None) -> ModelShape:
    """From a config.json or the folder it is in. dtype: what the weights are kept in, if not as it says."""
    file = path / "config.json" if os.path.isdir(path) else path  # Path.is_dir raises for a long name
    config = read_json_object(file, "a model")
    name = file.parent.name if file.name == "config.json" else file.stem
    return shape_of(config, name or "model", dtype, str(file))


def shape_of(
    config: Mapping[str, Any], name: str, dtype: str | None = None, where: str = "config"
) -> ModelShape:
    """From the values of a config.json; those of a nested `text_config` count."""
    inner = config.get("text_config") or {}
    if not isinstance(inner, Mapping):
        raise ParameterError(f"{where}: text_config must be an object, not {inner!r}")
    config = {**config, **inner}

    def number(key: str, default: int | None = None) -> int:
        names = _NAMES.get(key, (key,))
        used = next((n for n in names if config.get(n) is not None), names[0])
        value = config.get(used)
        value = default if value is None else value
        if value is None:
            raise ParameterError(f"{where}: {names[0]} is missing, so the model's size is not known")
        if isinstance(value, list) and all(map(_is_whole, value)):  # a layer's; the mean keeps the sum
            value = round(sum(value) / len(value)) if value else 0
        if not _is_whole(value) or value < 0:
            raise ParameterError(f"{where}: {used} must be a whole number, not {value!r}")
        if value > _LARGEST:
            raise ParameterError(f"{where}: {used} is more than any model has: check it")
        return int(value)

    def positive(key: str, default: int | None = None) -> int:
        value = number(key, default)
        if value < 1:
            raise ParameterError(f"{where}: {_NAMES.get(key, (key,))[0]} must be at least 1, not {value}")
        return value

    hidden, heads, layers = positive("hidden"), positive("heads"), positive("layers")
    experts = number("experts", 0)
    wide = positive("intermediate", 4 * hidden)
    one = positive("moe_intermediate_size", wide) if experts else wide
    shared = number("n_shared_experts", 0) * one or number("shared_expert_intermediate_size", 0)
    family = str(config.get("model_type") or "")
    kept = _DTYPES.get(dtype, dtype) if dtype else _kept(config, where)
    if kept not in DTYPE_BYTES:
        place = "" if dtype else f"{where}: "
        raise ParameterError(f"{place}unknown dtype {kept!r}; there are {', '.join(DTYPE_BYTES)}")
    width = number("kv_lora_rank", 0)
    latent = None
    if width:
        latent = Latent(
            width,
            number("qk_rope_head_dim", 0),
            positive("qk_nope_head_dim"),
            positive("v_head_dim"),
            number("q_lora_rank", 0),
        )
    return ModelShape(
        name=name,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=positive("kv_heads", 1 if config.get("multi_query") is True else heads),
        head_dim=positive("head_dim", max(hidden // heads, 1)),
        intermediate=one,
        vocab=positive("vocab_size"),
        tied=bool(config.get("tie_word_embeddings", family in _TIED)),
        matrices=2 if family in _TWO_MATRICES else 3,
        experts=experts,
        active=min(positive("active", 2), experts) if experts else 0,
        shared=shared if experts else 0,
        dtype=kept,
        dense=min(number("first_k_dense_replace", 0), layers) if experts else 0,
        wide=wide if experts else 0,
        latent=latent,
        positions=_positions(config),
    )


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _positions(config: Mapping[str, Any]) -> int:
    """Some configs say a huge number where there is no limit."""
    told = (config.get(name) for name in _NAMES["positions"])
    return next((value for value in told if _is_whole(value) and 0 < value <= _LARGEST), 0)


def _kept(config: Mapping[str, Any], where: str) -> str:
    """The dtype that a checkpoint's weights are read in, as its config says."""
    quantised = config.get("quantization_config")
    if not quantised:
        kept = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
        return _DTYPES.get(kept, kept)
    told: Mapping[str, Any] = quantised if isinstance(quantised, Mapping) else {}
    method, bits = str(told.get("quant_method", "")), told.get("bits", told.get("w_bit"))
    if told.get("load_in_4bit") is True or told.get("load_in_8bit") is True:
        bits = 4 if told.get("load_in_4bit") is True else 8
    width = _BITS.get(bits) if _is_whole(bits) else _QUANTISED.get(method)
    if width is None:
        raise ParameterError(
            f"{where}: its weights are quantised ({method or 'it does not say how'}), in which width is not"
            " known: give --dtype (--draft-dtype for a draft) int4, int8 or float8"
        )
    return width
