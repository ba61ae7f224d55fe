"""Prompts as transformers takes them: a padded tensor and a mask."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from slipstream.errors import ParameterError
from slipstream.integrations.options import Options


@dataclass(frozen=True)
class Prompts:
    """columns int64 [B, T] as given; rows are their real tokens, in order."""

    columns: torch.Tensor
    rows: tuple[tuple[int, ...], ...]

    @property
    def width(self) -> int:
        return int(self.columns.shape[1])

    @property
    def longest(self) -> int:
        return max(map(len, self.rows))


def split_inputs(inputs: Any, arguments: dict[str, Any]) -> tuple[Any, Any]:
    """(input_ids, attention_mask), wherever they are; what else a mapping holds joins `arguments`."""
    if isinstance(inputs, Mapping):
        for key, value in inputs.items():
            if arguments.get(key) is not None:
                raise ParameterError(f"{key} is given twice: in the inputs and by name")
            arguments[key] = value
        inputs = None
    ids, mask = arguments.pop("input_ids", None), arguments.pop("attention_mask", None)
    if ids is not None and inputs is not None:
        raise ParameterError("inputs and input_ids are the same; give one of them")
    return (inputs if ids is None else ids), mask


def read_prompts(ids: Any, mask: Any, options: Options, device: torch.device) -> Prompts:
    """Take padding off. ids [B, T]; None means one row with the beginning-of-sequence token.

    Without a mask, pad tokens are padding where transformers thinks so: if they are not end tokens.
    """
    if ids is None:
        if options.bos_id is None:
            raise ParameterError("there is no prompt and the model has no bos_token_id; give input_ids")
        ids = torch.tensor([[options.bos_id]], device=device)  # [1, 1]
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.dtype not in (torch.int64, torch.int32):
        raise ParameterError(
            "input_ids must be a tensor of token ids [batch, length]; use tokenizer(..., return_tensors='pt')"
        )
    if not ids.numel():
        raise ParameterError(f"the prompt is empty: input_ids has the shape {list(ids.shape)}")
    kept = _mask(ids, mask, options)  # [B, T]
    rows = []
    for number, (tokens, real) in enumerate(zip(ids.tolist(), kept.tolist(), strict=True)):
        if True not in real:
            raise ParameterError(f"row {number} of the batch is all padding; give it at least one token")
        start = real.index(True)
        end = start + sum(real)
        if not all(real[start:end]):
            if mask is None:
                raise ParameterError(
                    f"row {number} has the pad token {options.pad_id} inside its prompt; pass attention_mask"
                )
            raise ParameterError(
                f"the attention_mask of row {number} has a hole; padding belongs left or right of a prompt"
            )
        rows.append(tuple(tokens[start:end]))
    return Prompts(ids.long(), tuple(rows))


def _mask(ids: torch.Tensor, mask: Any, options: Options) -> torch.Tensor:
    if mask is None:
        pad = options.pad_id
        if pad is None or pad in options.eos_ids:
            return torch.ones_like(ids, dtype=torch.bool)
        return ids != pad
    if not isinstance(mask, torch.Tensor) or mask.shape != ids.shape:
        shape = list(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise ParameterError(
            f"attention_mask must be a tensor of the shape of input_ids, {list(ids.shape)}, not {shape}"
        )
    return mask != 0
