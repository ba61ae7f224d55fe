"""Loading and saving trained heads in the layouts other projects publish and serve.

Medusa: FasterDecoding's `medusa_lm_head.safetensors`. EAGLE: the tensors vLLM and SGLang load. A layout
that is not understood completely is refused, never guessed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from slipstream.errors import DrafterError
from slipstream.heads import files
from slipstream.heads.base import DraftVocab
from slipstream.heads.medusa import MedusaConfig, MedusaHeads
from slipstream.model.parts import ModelParts

MEDUSA_FILE = "medusa_lm_head.safetensors"
_MEDUSA_FILES = (MEDUSA_FILE, "model.safetensors", "medusa_lm_head.pt")
_PREFIX = "medusa_heads."


def float_dtype(tensors: Mapping[str, torch.Tensor]) -> torch.dtype:
    """The widest floating dtype stored."""
    kinds = [t.dtype for t in tensors.values() if t.is_floating_point()]
    return max(kinds, key=lambda k: k.itemsize, default=torch.float32)


def take_vocab(tensors: dict[str, torch.Tensor], vocab: DraftVocab, folder: Path) -> None:
    """Move d2t and t2d out of `tensors` into the vocabulary, after checking them."""
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    if not vocab.reduced:
        if d2t is not None and bool(d2t.any()):
            raise DrafterError(
                f"the heads in {folder} have a d2t but a full draft vocabulary: check config.json"
            )
        return
    if d2t is None:
        raise DrafterError(
            f"the heads in {folder} do not fit: d2t [{vocab.size}] is missing, and they draft only"
            f" {vocab.size} of {vocab.vocab_size} tokens"
        )
    if d2t.shape != (vocab.size,) or d2t.is_floating_point():
        raise DrafterError(
            f"the heads in {folder} do not fit: d2t has the shape {list(d2t.shape)} and must hold"
            f" {vocab.size} whole numbers"
        )
    try:
        vocab.set_ids(d2t.to(torch.int64) + torch.arange(vocab.size))
    except DrafterError as error:
        raise DrafterError(f"the heads in {folder} do not fit: {error}") from None
    if t2d is not None and not torch.equal(t2d.bool(), vocab.t2d):  # type: ignore[arg-type]
        raise DrafterError(f"the heads in {folder} do not fit: t2d is not the set of tokens that d2t maps to")


def load_medusa(
    folder: Path, target: ModelParts | None = None, dtype: torch.dtype | None = None
) -> MedusaHeads:
    """Medusa heads from a folder, in `dtype` (None: as stored), for `target` if given.

    The published configs name a wrong number of heads, so heads are counted by their tensors; a
    config that promises more than there are is refused. Raises DrafterError.
    """
    raw = files.read_config(folder)
    files.check_provenance(folder, target)
    tensors = {k.removeprefix(_PREFIX): v for k, v in files.read_tensors(folder, _MEDUSA_FILES).items()}
    config = _medusa_config(raw, tensors, folder)
    if target is not None:
        files.require(config.hidden_size, target.hidden_size, "hidden size", folder)
        files.require(config.vocab_size, target.vocab_size, "vocabulary size", folder)
    heads = MedusaHeads(config, dtype or float_dtype(tensors))
    take_vocab(tensors, heads.vocab, folder)
    files.fill(heads.heads.state_dict(), tensors, folder)
    return heads.eval().requires_grad_(False)


def _medusa_config(raw: dict[str, Any], tensors: Mapping[str, torch.Tensor], folder: Path) -> MedusaConfig:
    blocks = [m for m in (re.fullmatch(r"(\d+)\.(\d+)\.linear\.weight", k) for k in tensors) if m]
    outputs = [m for m in (re.fullmatch(r"(\d+)\.(\d+)\.weight", k) for k in tensors) if m]
    if not blocks:
        raise DrafterError(
            f"the heads in {folder} do not fit: 0.0.linear.weight is missing; Medusa tensors are named"
            " HEAD.LAYER.linear.weight"
        )
    first = tensors[blocks[0].group(0)]
    promised = raw.get("medusa_num_heads", raw.get("num_heads", 0))
    heads = max(int(promised), *(int(m.group(1)) + 1 for m in (*blocks, *outputs)))
    layers = int(raw.get("medusa_num_layers", 1 + max(int(m.group(2)) for m in blocks)))
    own = raw.get("medusa_output", "own") == "own"
    draft_size = raw.get("draft_vocab_size")
    vocab_size = raw.get("vocab_size")
    if vocab_size is None:
        if not own or not outputs:
            raise DrafterError(f"{folder / 'config.json'} must give vocab_size")
        vocab_size = tensors[outputs[0].group(0)].shape[0]
    return MedusaConfig(
        hidden_size=int(raw.get("hidden_size", first.shape[-1])),
        vocab_size=int(vocab_size),
        num_heads=heads,
        num_layers=layers,
        output="own" if own else "target",
        draft_vocab_size=None if draft_size is None else int(draft_size),
    )


def save_medusa(
    heads: MedusaHeads,
    folder: Path,
    *,
    base_model: str = "",
    prefix: bool = False,
    provenance: Mapping[str, Any] | None = None,
) -> None:
    """Write FasterDecoding's layout; what it has no name for (shared output, draft vocabulary) is added."""
    config = heads.config
    raw: dict[str, Any] = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "base_model_name_or_path": base_model,
        "medusa_num_heads": config.num_heads,
        "medusa_num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "medusa_output": config.output,
    }
    if heads.vocab.reduced:
        raw["draft_vocab_size"] = heads.vocab.size
    named = {(_PREFIX if prefix else "") + k: v for k, v in heads.heads.state_dict().items()}
    files.write(folder, MEDUSA_FILE, {**named, **heads.vocab.state_dict()}, raw, provenance)
