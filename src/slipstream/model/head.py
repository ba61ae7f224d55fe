"""An LM head for some tokens only: a step reads no other rows of its weight (FR-Spec, arXiv 2502.14856)."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from slipstream.model.packed import release_pages
from slipstream.model.parts import ModelParts


def reduce_head(model: PreTrainedModel, ids: torch.Tensor) -> str:
    """Let a model give the logits [..., n] of these tokens [n] alone, in their order; gives the head's name.

    In place: the head becomes a plain linear layer of its own rows of the weight, to be packed or quantised
    as any other, and the whole weight is let go of where no embedding shares it. The model may be without
    data.
    """
    head = model.get_output_embeddings()
    small = ModelParts.of(model).lm_head_rows(ids)
    name: str = next(name for name, module in model.named_modules() if module is head)
    model.set_output_embeddings(small)
    if type(head) is nn.Linear and not any(p is head.weight for p in model.parameters()):
        release_pages(head.weight)
    return name
