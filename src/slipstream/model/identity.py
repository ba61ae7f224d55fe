"""Whose data this is: hashes of a target's weights, tokenizer and chat template; and what made it."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from slipstream.errors import ParameterError
from slipstream.model.embedding import Int8Embedding
from slipstream.model.int8 import Int8Linear
from slipstream.model.packed import PackedLinear
from slipstream.model.parts import ModelParts
from slipstream.version import __version__

_PACKAGES = ("torch", "transformers", "accelerate", "safetensors", "tokenizers", "peft", "numpy")
_SAMPLED = 256  # numbers of each tensor; all of them would take minutes to read
LAYERS = "k = the residual stream after k decoder layers, 0 = the embeddings, last = what enters the LM head"


def identity(model: Any, tokenizer: Any, name: str) -> dict[str, Any]:
    """A target as JSON values. fingerprint is `ModelParts`'s; weights tells fine-tuned models apart too."""
    parts = ModelParts.of(model)
    return {
        "name": name,
        "fingerprint": parts.fingerprint,
        "weights": weights_hash(model),
        "dtype": str(parts.embedding.dtype).removeprefix("torch."),
        "hidden_size": parts.hidden_size,
        "num_layers": parts.num_layers,
        "vocab_size": parts.vocab_size,
        "tokenizer": tokenizer_hash(tokenizer),
        "template": template_hash(tokenizer),
    }


def weights_hash(model: torch.nn.Module) -> str:
    """Over evenly spaced numbers of every weight, as bfloat16: the same whether the model is packed or
    not, and in any dtype that its bfloat16 checkpoint is loaded as. An int8 model is another one: its whole
    numbers and scales count."""
    found: dict[str, torch.Tensor] = {}
    for path, module in model.named_modules():
        for name, weight in module.named_parameters(recurse=False):
            found[f"{path}.{name}"] = _sample(weight.detach())
        if isinstance(module, PackedLinear):
            found[f"{path}.weight"] = _sample(module.dense())
        elif isinstance(module, (Int8Linear, Int8Embedding)):
            numbers = module.stored() if isinstance(module, Int8Linear) else module.table
            found[f"{path}.weight"] = _sample(numbers)
            found[f"{path}.scales"] = _sample(module.scales.view(torch.bfloat16))  # all bits of float32
    digest = hashlib.blake2b(digest_size=16)
    for name, sample in sorted(found.items()):
        digest.update(name.encode())
        digest.update(sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _sample(weight: torch.Tensor) -> torch.Tensor:
    count = min(_SAMPLED, weight.numel())
    # float64 holds every index of a tensor exactly; float32 would not
    at = torch.linspace(0, weight.numel() - 1, count, dtype=torch.float64).long()
    chosen = weight.flatten()[at.to(weight.device)].to("cpu", torch.bfloat16)
    size = torch.tensor([*weight.shape], dtype=torch.int64).view(torch.bfloat16)
    return torch.cat((size, chosen)).contiguous()


def tokenizer_hash(tokenizer: Any) -> str:
    """Over all that turns text into ids: vocabulary, merges, normalisers, added tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        told = {"vocab": tokenizer.get_vocab(), "added": tokenizer.get_added_vocab()}
    else:
        told = json.loads(backend.to_str())
        for state in ("truncation", "padding"):  # what the last call asked for, no property of the tokenizer
            told.pop(state, None)
    return _hash(told)


def template_hash(tokenizer: Any) -> str | None:
    template = tokenizer.chat_template
    return _hash(template) if template else None


def versions() -> dict[str, str]:
    """Of Slipstream, Python, and the packages that numbers depend on, as far as they are installed."""
    found = {"slipstream": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def require_same(
    known: Mapping[str, Any], now: Mapping[str, Any], what: str, where: object, *names: str
) -> None:
    """ParameterError unless the named values of two targets (all of them but the name) are equal."""
    for name in names or [n for n in now if n != "name"]:
        if known.get(name) != now.get(name):
            raise ParameterError(
                f"{where} holds {what} of another target ({name} was {known.get(name)!r}, is"
                f" {now.get(name)!r}): use the target they were made with, or another folder"
            )


def _hash(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
