"""`Trainable`: a transformers causal LM whose weights change, whole or through adapters, and that can be
saved as a checkpoint of its own."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from slipstream.errors import ModelError, ParameterError
from slipstream.model.quiet import quiet
from slipstream.model.store import write_atomic
from slipstream.model.taps import decoder

NOTE = "slipstream.json"
_PROBE = 16


@dataclass(frozen=True, slots=True)
class Lora:
    """Low-rank adapters (arXiv 2106.09685) on every linear map of the layers: W + (alpha / rank) B A."""

    rank: int = 16
    alpha: int = 32

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ParameterError(f"the rank of LoRA adapters must be 1 or more, not {self.rank}")


class Trainable:
    """Owns `model`. With `lora` only the adapters are trained, else every parameter, in float32."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, lora: Lora | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self._dtype = next(model.parameters()).dtype
        self._base = model
        self._lora = lora is not None
        self.model: nn.Module = model
        model.eval().requires_grad_(False)
        self._require_plain_head(model)
        if lora is None:
            model.float().requires_grad_(True)
        else:
            self.model = _with_adapters(model, lora)

    @property
    def vocab_size(self) -> int:
        return int(self._base.config.get_text_config().vocab_size)

    def states(self, tokens: torch.Tensor) -> torch.Tensor:
        """What enters the LM head for texts [B, T] that are padded on the right, [B, T, H]."""
        hidden: torch.Tensor = decoder(self._base)(input_ids=tokens, use_cache=False).last_hidden_state
        return hidden

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """The model's logits for states [n, H], [n, V]."""
        head = self._base.get_output_embeddings()
        logits: torch.Tensor = head(states)  # type: ignore[misc]
        cap = getattr(self._base.config.get_text_config(), "final_logit_softcapping", None)
        return logits if cap is None else cap * torch.tanh(logits / cap)

    @torch.no_grad()
    def _require_plain_head(self, model: PreTrainedModel) -> None:
        """ModelError where `logits` is not what the model itself computes."""
        tokens = torch.arange(min(_PROBE, self.vocab_size), device=next(model.parameters()).device)[None]
        theirs = model(input_ids=tokens, use_cache=False).logits[0]
        ours = self.logits(self.states(tokens)[0])
        if not torch.allclose(theirs.float(), ours.float(), rtol=1e-2, atol=1e-2):
            raise ModelError(
                f"{type(model).__name__} does more to its logits than Slipstream knows, so it cannot be"
                " trained as a draft; choose another draft model"
            )

    @contextmanager
    def original(self) -> Iterator[None]:
        """The model as it was before training, inside the body (adapters off)."""
        if not self._lora:
            raise ParameterError("a model that is trained in full is not kept as it was; train with LoRA")
        with self.model.disable_adapter():  # type: ignore[operator]
            yield

    def save(self, folder: Path, provenance: Mapping[str, Any]) -> None:
        """A checkpoint folder in the dtype the model came in, adapters merged, tied weights stored once; the
        model stays as it is."""
        saved = self.model
        if self._lora:
            with quiet():
                saved = copy.deepcopy(self.model).merge_and_unload()  # type: ignore[operator]
        state = _cast(saved.state_dict(), self._dtype)
        with quiet():
            saved.save_pretrained(folder, state_dict=state, safe_serialization=True)  # type: ignore[operator]
            if self.tokenizer is not None:
                self.tokenizer.save_pretrained(folder)
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config["dtype"] = str(self._dtype).removeprefix("torch.")
        write_atomic(folder / "config.json", json.dumps(config, indent=2) + "\n")
        write_atomic(folder / NOTE, json.dumps(provenance, indent=2) + "\n")


def _cast(state: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The tensors on the CPU in `dtype`. What is one tensor under several names stays one: that is how
    save_pretrained knows tied weights."""
    made: dict[tuple[int, torch.Size, tuple[int, ...]], torch.Tensor] = {}
    cast = {}
    for name, tensor in state.items():
        key = (tensor.data_ptr(), tensor.shape, tensor.stride())
        if key not in made:
            made[key] = tensor.detach().to("cpu", dtype)
        cast[name] = made[key]
    return cast


def _with_adapters(model: PreTrainedModel, lora: Lora) -> nn.Module:
    try:
        with quiet():
            from peft import LoraConfig, TaskType, get_peft_model
    except ImportError:
        raise ModelError("LoRA needs the package peft: pip install 'slipstream-lm[train]'") from None
    config = LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=0.0,  # a run that is resumed must repeat itself
        target_modules="all-linear",  # the LM head is not among them
    )
    with quiet():
        adapted: nn.Module = get_peft_model(model, config)
    return adapted


def keep_layers(model: PreTrainedModel, every: int) -> PreTrainedModel:
    """The same model, in place, with layers 0, every, 2 every, … only."""
    if every < 1:
        raise ParameterError(f"keep every k-th layer with k of 1 or more, not {every}")
    body: Any = decoder(model)
    kept = list(range(0, len(body.layers), every))
    body.layers = nn.ModuleList(body.layers[i] for i in kept)
    for index, layer in enumerate(body.layers):
        for module in layer.modules():
            if isinstance(vars(module).get("layer_idx"), int):
                module.layer_idx = index  # type: ignore[assignment]
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    config.num_hidden_layers = len(kept)
    if kinds is not None:
        config.layer_types = [kinds[i] for i in kept]
    return model
