"""Rotary frequencies from a checkpoint's config, for heads that are not transformers models.

The scaled kinds are transformers' own functions, so that a head rotates as the engines that serve it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from slipstream.errors import DrafterError

_STATIC = ("default", "linear", "llama3", "yarn")


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """{"rope_type", "rope_theta", …} from either spelling: `rope_parameters`, or theta and `rope_scaling`."""
    found = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind = found.pop("rope_type", None) or found.pop("type", None) or "default"
    found.pop("type", None)
    theta = found.pop("rope_theta", None) or config.get("rope_theta") or 10_000.0
    if kind not in _STATIC:
        raise DrafterError(f"draft heads cannot use rope type {kind!r}; there are {', '.join(_STATIC)}")
    return {"rope_type": kind, "rope_theta": float(theta), **found}


def rope_frequencies(
    parameters: Mapping[str, Any], head_dim: int, context: int
) -> tuple[torch.Tensor, float]:
    """Inverse frequencies float32 [head_dim / 2] and the factor on cosine and sine."""
    kind = parameters["rope_type"]
    if kind == "default":
        steps = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        return 1.0 / parameters["rope_theta"] ** steps, 1.0
    config = LlamaConfig(
        hidden_size=head_dim,
        num_attention_heads=1,
        head_dim=head_dim,
        max_position_embeddings=context,
        rope_parameters=dict(parameters),
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config)
    return frequencies.float(), float(factor)
