"""The parts of a target that its heads are checked against, read without loading the model."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn

from slipstream.errors import ModelError
from slipstream.model.checkpoint import inspect, read_header
from slipstream.model.parts import ModelParts


def read_parts(folder: Path) -> ModelParts:
    """Embedding, final norm and LM head of a checkpoint folder. ModelError if they are not where they
    usually are.
    """
    config = inspect(folder).config
    text = config.get("text_config")
    config = {**config, **text} if isinstance(text, dict) else config
    homes = {name: path for path in sorted(folder.glob("*.safetensors")) for name in read_header(path)}

    def find(*endings: str) -> torch.Tensor | None:
        for ending in endings:
            fitting = sorted((n for n in homes if n == ending or n.endswith("." + ending)), key=len)
            if fitting:
                with safe_open(homes[fitting[0]], framework="pt") as file:
                    tensor: torch.Tensor = file.get_tensor(fitting[0])
                    return tensor
        return None

    embedding = find("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")
    sizes = ("hidden_size", "vocab_size", "num_hidden_layers")
    missing = [k for k in sizes if not isinstance(config.get(k), int)]
    if embedding is None or missing:
        raise ModelError(
            f"{folder} is not laid out like a causal language model"
            f" ({', '.join(missing) or 'no embedding found'}):"
            " give the target's own folder"
        )
    head = nn.Linear(embedding.shape[1], embedding.shape[0], bias=False, device="meta")
    weight = None if config.get("tie_word_embeddings") else find("lm_head.weight", "embed_out.weight")
    head.weight = nn.Parameter(embedding if weight is None else weight, requires_grad=False)
    norm = find("model.norm.weight", "language_model.norm.weight")
    return ModelParts(
        int(config["hidden_size"]),
        int(config["vocab_size"]),
        int(config["num_hidden_layers"]),
        embedding,
        head,
        torch.zeros(0) if norm is None else norm,
    )
