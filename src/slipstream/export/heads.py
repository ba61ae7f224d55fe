"""Trained heads in the layouts of engines, tensor for tensor. What an engine would compute otherwise is
refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from slipstream.errors import DrafterError
from slipstream.export.report import new_folder
from slipstream.heads import files
from slipstream.heads.eagle import EagleHead
from slipstream.heads.io import AuxConvention, eagle_layout, load_eagle, load_medusa
from slipstream.heads.medusa import MedusaHeads
from slipstream.model.checkpoint import read_header
from slipstream.model.parts import ModelParts

Kind = Literal["draft_model", "eagle", "eagle3", "medusa"]
AUX_IDS = "eagle_aux_hidden_state_layer_ids"
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Package:
    """What is to be written: tensors, config, and what was changed on the way."""

    tensors: Tensors
    config: dict[str, Any]
    changes: tuple[str, ...] = ()


def kind_of(folder: Path) -> Kind:
    """What a drafter's folder holds, told from its config and tensor names."""
    raw = files.read_config(folder)
    with files.understanding(folder):
        return _kind(folder, raw)


def _kind(folder: Path, raw: Mapping[str, Any]) -> Kind:
    named = " ".join(map(str, raw.get("architectures") or [])).lower()
    if raw.get("model_type") == "medusa" or "medusa_num_heads" in raw or "medusa" in named:
        return "medusa"
    if raw.get("speculators_model_type") == "eagle3" or "eagle3" in named or "draft_vocab_size" in raw:
        return "eagle3"
    if raw.get("model_type") == "eagle" or "eagle" in named or _has_fc(folder):
        return "eagle"
    return "draft_model"


def _has_fc(folder: Path) -> bool:
    """EAGLE-1's config is a plain Llama's; its tensors are not."""
    stored = sorted(folder.glob("*.safetensors"))
    if stored:
        return any("fc.weight" in read_header(path) for path in stored)
    pickled = folder / "pytorch_model.bin"
    return pickled.is_file() and "fc.weight" in files.read_tensors(folder, (pickled.name,))


def open_eagle(folder: Path, target: ModelParts, aux: AuxConvention) -> EagleHead:
    head = load_eagle(folder, target, aux=aux)
    layers = head.config.aux_layers
    if list(layers) != sorted(set(layers)):
        raise DrafterError(
            f"the head in {folder} joins the layers {list(layers)} in this order, and engines join them in"
            " the order"
            " of the model: train it with its layers ascending"
        )
    return head


def open_medusa(folder: Path, target: ModelParts) -> MedusaHeads:
    return load_medusa(folder, target)


def write(
    folder: Path,
    kind: Kind,
    package: Package,
    provenance: Mapping[str, Any] | None,
    file: str = "model.safetensors",
) -> None:
    """Write a package into a new folder."""
    with new_folder(folder, kind) as partial:
        files.write(partial, file, package.tensors, package.config, provenance)


def eagle_package(head: EagleHead, *, midlayer: bool = False) -> Package:
    """vLLM's layout (and the one EAGLE's authors publish), with everything written out."""
    tensors, config = eagle_layout(head, midlayer=midlayer)
    if head.config.version == 3:
        config |= {"fc_norm": False, "norm_output": False}
        if not head.config.own_lm_head:
            config["draft_vocab_size"] = None  # an engine then shares the target's, instead of a random one
    return Package(tensors, config)


def without_zero_bias(package: Package, name: str, reason: str) -> Package:
    """Drop a bias that is all zero; refuse one that is not."""
    bias = package.tensors.get(name)
    if bias is None:
        return package
    if bool(bias.any()):
        raise DrafterError(f"the head has a {name}, {reason}: train it without one")
    rest = {k: v for k, v in package.tensors.items() if k != name}
    config = {k: v for k, v in package.config.items() if k != "bias"}
    return Package(rest, config, (*package.changes, f"{name} is all zero and was left out"))


def edited(package: Package, edit: Callable[[dict[str, Any]], None], *changes: str) -> Package:
    """The package with its config changed."""
    config: dict[str, Any] = json.loads(json.dumps(package.config))
    edit(config)
    return Package(package.tensors, config, (*package.changes, *changes))


def medusa_package(heads: MedusaHeads, target: ModelParts) -> Package:
    """vLLM's names (vllm/model_executor/models/medusa.py up to 0.32.0): blocks, lm_heads or one lm_head."""
    config = heads.config
    tensors: Tensors = {}
    for h, head in enumerate(heads.heads):
        for name, tensor in head.state_dict().items():
            layer, _, rest = name.partition(".")
            if rest.startswith("linear."):
                tensors[f"blocks.{h}.layers.{layer}.{rest.removeprefix('linear.')}"] = tensor
            else:
                tensors[f"lm_heads.{h}.{rest}"] = tensor
    shared = config.output == "target"
    changes = ["tensors are called as vLLM calls them"]
    if shared:
        every = torch.arange(config.vocab_size)
        weight: torch.Tensor = target.lm_head_rows(every).weight.detach()
        weight = weight.to(next(iter(tensors.values())).dtype)
        changes.append("the target's LM head is shipped with them: vLLM does not share it")
        if heads.vocab.reduced:
            kept = torch.zeros(config.vocab_size, 1, dtype=weight.dtype)
            kept[heads.vocab.target_ids()] = 1
            weight = weight * kept  # a logit of zero is drafted only where all others are negative
            changes.append(
                f"its rows of tokens that these heads do not draft ({config.vocab_size - heads.vocab.size} of"
                f" {config.vocab_size}) are zero: vLLM 0.32.0 reads a token_map and then refuses to start"
                " for want of it"
            )
        tensors["lm_head.weight"] = weight
    elif heads.vocab.reduced:
        raise DrafterError(
            "vLLM builds Medusa's own output heads over the whole vocabulary, and these draft"
            f" {heads.vocab.size} of {config.vocab_size} tokens: train them with output=target, or over all"
        )
    raw: dict[str, Any] = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "truncated_vocab_size": config.vocab_size,
        "num_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "original_lm_head": shared,
        "medusa_fc_bias": True,
        "logit_scale": 1.0,
    }
    return Package(tensors, raw, tuple(changes))
