"""`Blueprint`: a model's modules without their data, to know what it will hold before it is loaded.

transformers builds a model on PyTorch's meta device from its config alone, in a fraction of a second. Its
parameters have shapes and dtypes, and a forward over it allocates the same slots of the same widths, so
what is asked here is computed by the very code that will allocate it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, __version__

from slipstream.core.precision import check_precision
from slipstream.errors import ModelError
from slipstream.model.cache import WIDTH, columns
from slipstream.model.catalogue import find
from slipstream.model.checkpoint import inspect
from slipstream.model.embedding import sampled_ids
from slipstream.model.generation import generation_defaults
from slipstream.model.int8 import quantised_bytes
from slipstream.model.load import choose_dtype, local_folder, require_known_code
from slipstream.model.pack import PackRow
from slipstream.model.packed import weight_bytes
from slipstream.model.parts import ModelParts
from slipstream.model.quiet import first_line, quiet
from slipstream.model.runner import Runner


@dataclass(frozen=True)
class Blueprint:
    """A causal language model that is not loaded. folder: None where only the catalogue knows it. weights,
    embedding: plain or int8, as `load` would be asked; `model` is the plain one."""

    name: str
    model: PreTrainedModel
    folder: Path | None
    weights: str = "plain"
    embedding: str = "plain"

    @classmethod
    def of(
        cls,
        spec: str,
        *,
        dtype: str = "auto",
        device: str | torch.device = "cpu",
        weights: str = "plain",
        embedding: str = "plain",
        trust_remote_code: bool = False,
    ) -> Blueprint:
        """As `load` would load it; nothing is downloaded. Raises ParameterError, ModelError."""
        check_precision(weights, embedding)
        folder, entry = local_folder(spec), find(spec)
        if folder is not None:
            checkpoint = inspect(folder)
            require_known_code(spec, checkpoint.config, trust_remote_code)
            chosen = choose_dtype(dtype, checkpoint.dtype, device, weights)
            model = _without_data(spec, folder, chosen, trust_remote_code)
        elif entry is not None:
            chosen = choose_dtype(dtype, entry.config["dtype"], device, weights)
            model = _without_data(spec, entry.config, chosen)
        else:
            raise ModelError(
                f"{spec} is not on this machine, so it is not known how large it is: slipstream pull {spec}"
            )
        return cls(spec, model, folder, weights, embedding)

    @cached_property
    def runner(self) -> Runner:
        """Computes nothing, but allocates as one with data would."""
        return Runner(self.model, pack=False, check=False)

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype  # type: ignore[no-any-return]

    @property
    def notes(self) -> tuple[str, ...]:
        """What a person should know about the numbers."""
        if self.folder is not None:
            return ()
        return (f"{self.name} is not on this machine (slipstream pull {self.name}): sizes of the catalogue",)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights, packed or not."""
        if self.weights == "int8":
            return quantised_bytes(self.model, self.embedding == "int8", self.runner.siblings())
        return weight_bytes(self.model)

    def cache_bytes(self, tokens: int, rows: int = 1) -> int:
        """Bytes of the slots of so many rows of so many tokens each."""
        return self._column_bytes * columns(tokens) * rows if tokens > 0 else 0

    @cached_property
    def _column_bytes(self) -> int:
        """Keys and values of one position, all layers together."""
        cache, slot = self.runner.cache, 0
        cache.open(slot)
        try:
            self.runner.forward([PackRow(slot, [0])], logits="none")
            return cache.memory_bytes // WIDTH
        except RuntimeError:  # positions that depend on data, which is not there (dynamic RoPE)
            config = self.runner.config
            heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
            size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
            return int(2 * config.num_hidden_layers * heads * size * self.dtype.itemsize)
        finally:
            cache.close(slot)

    def has_embedding(self, table: torch.Tensor) -> bool:
        """Whether this table [V, H] is the model's own of input embeddings, as far as some rows tell."""
        own = self.model.get_input_embeddings().weight
        stored = self._stored(own) if self.embedding == "plain" else None
        if stored is None or table.shape != own.shape:
            return False
        rows = sampled_ids(len(table))
        return torch.equal(stored[rows].to(self.dtype), table[rows].to(self.dtype))  # reads these rows

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end an answer, as far as the checkpoint's configs tell."""
        if self.folder is not None:
            checkpoint = inspect(self.folder)
            return generation_defaults(checkpoint.generation, checkpoint.config, None, self.folder).eos_ids
        entry = find(self.name)
        return frozenset(entry.eos_ids if entry is not None else ())

    @property
    def fingerprint(self) -> str:
        """What `ModelParts.fingerprint` will be, "" if the weights are not on this machine."""
        parts = ModelParts.of(self.model)
        own = self.model.get_input_embeddings().weight
        stored = [self._stored(t) if len(t) else t for t in (own, parts.norm)]
        if stored[0] is None or stored[1] is None:
            return ""
        return replace(parts, embedding=stored[0], norm=stored[1]).fingerprint

    def _stored(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The checkpoint's data of one of the model's tensors: mapped, so reading some rows reads no more."""
        name = next(name for name, own in self.model.named_parameters() if own is tensor)
        for path in sorted(self.folder.glob("*.safetensors")) if self.folder is not None else []:
            with safe_open(path, framework="pt") as file:
                if name in file.keys():  # noqa: SIM118  (not a dict)
                    return file.get_tensor(name)  # type: ignore[no-any-return]
        return None


def _without_data(
    spec: str, source: Path | dict[str, Any], dtype: torch.dtype, trust_remote_code: bool = False
) -> PreTrainedModel:
    """source: a checkpoint folder, or what its config.json would say."""
    try:
        with quiet(), torch.device("meta"):
            if isinstance(source, Path):
                config = AutoConfig.from_pretrained(
                    str(source), local_files_only=True, trust_remote_code=trust_remote_code
                )
            else:
                config = AutoConfig.for_model(**source)
            model: nn.Module = AutoModelForCausalLM.from_config(
                config, dtype=dtype, trust_remote_code=trust_remote_code
            )
    except Exception as error:  # whatever transformers or a checkpoint's own code trips over
        raise ModelError(
            f"{spec} cannot be built by transformers {__version__} ({first_line(error)}):"
            " check its config.json"
        ) from error
    return model.eval().requires_grad_(False)  # type: ignore[return-value]
