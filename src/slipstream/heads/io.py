"""Loading and saving trained heads in the layouts other projects publish and serve.

Medusa: FasterDecoding's `medusa_lm_head.safetensors`. EAGLE: the tensors vLLM and SGLang load. A layout
that is not understood completely is refused, never guessed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from slipstream.errors import DrafterError
from slipstream.heads import files
from slipstream.heads.base import DraftVocab
from slipstream.heads.eagle import EagleConfig, EagleHead
from slipstream.heads.medusa import MedusaConfig, MedusaHeads
from slipstream.model.int8 import Quantise, gains, int8_bytes
from slipstream.model.parts import ModelParts
from slipstream.model.rope import rope_parameters

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
    files.check_provenance(folder, target)
    config, tensors = open_medusa(folder, target)
    with files.understanding(folder):
        heads = MedusaHeads(config, dtype or float_dtype(tensors))
    take_vocab(tensors, heads.vocab, folder)
    files.fill(heads.heads.state_dict(), tensors, folder)
    return heads.eval().requires_grad_(False)


def open_medusa(
    folder: Path, target: ModelParts | None = None
) -> tuple[MedusaConfig, dict[str, torch.Tensor]]:
    """The config and the tensors as they are stored; safetensors are mapped, not read."""
    raw = files.read_config(folder)
    tensors = {k.removeprefix(_PREFIX): v for k, v in files.read_tensors(folder, _MEDUSA_FILES).items()}
    with files.understanding(folder):
        config = _medusa_config(raw, tensors, folder)
    if target is not None:
        files.require(config.hidden_size, target.hidden_size, "hidden size", folder)
        files.require(config.vocab_size, target.vocab_size, "vocabulary size", folder)
    return config, tensors


def loaded_bytes(
    tensors: Mapping[str, torch.Tensor], vocab: DraftVocab, dtype: torch.dtype, quantise: Quantise = "none"
) -> int:
    """What heads take that are loaded in `dtype`: every tensor of theirs, and the draft vocabulary."""
    weights = sum(
        int8_bytes(t)
        if quantise == "int8" and name != "embed_tokens.weight" and t.dim() == 2 and gains(t)
        else t.numel() * dtype.itemsize
        for name, t in tensors.items()
        if name not in ("d2t", "t2d")
    )
    return weights + sum(b.nbytes for b in vocab.buffers())


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
    # One that is missing is enough to be refused: a damaged file must not have us build millions.
    heads = min(heads, 1 + len({m.group(1) for m in (*blocks, *outputs)}))
    layers = min(layers, 1 + len({m.group(2) for m in blocks}))
    output = raw.get("medusa_output", "own")
    if output not in ("own", "target"):
        raise DrafterError(f"{folder / 'config.json'} has medusa_output {output!r}; it is own or target")
    own = output == "own"
    draft_size = raw.get("draft_vocab_size")
    vocab_size = raw.get("vocab_size")
    if vocab_size is None:
        if not own or not outputs:
            raise DrafterError(f"{folder / 'config.json'} must give vocab_size")
        vocab_size = tensors[outputs[0].group(0)].shape[0]
    config = MedusaConfig(
        hidden_size=int(raw.get("hidden_size", first.shape[-1])),
        vocab_size=int(vocab_size),
        num_heads=heads,
        num_layers=layers,
        output="own" if own else "target",
        draft_vocab_size=None if draft_size is None else int(draft_size),
    )
    _require_sizes(config, ("hidden_size", "vocab_size", "num_layers", "draft_vocab_size"), folder)
    return config


def _require_sizes(config: MedusaConfig | EagleConfig, names: Sequence[str], folder: Path) -> None:
    for name in names:
        size = getattr(config, name)
        if size is not None and size < 1:
            raise DrafterError(f"{folder / 'config.json'} has {name} {size}: it must be at least 1")


def save_medusa(
    heads: MedusaHeads,
    folder: Path,
    *,
    base_model: str = "",
    prefix: bool = False,
    provenance: Mapping[str, Any] | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Write FasterDecoding's layout; what it has no name for (shared output, draft vocabulary) is added.

    dtype: of the floating tensors, None as they are.
    """
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
    files.write(folder, MEDUSA_FILE, {**named, **heads.vocab.state_dict()}, raw, provenance, dtype)


# -- EAGLE ------------------------------------------------------------------------------------------

AuxConvention = Literal["auto", "after", "output"]
_EAGLE_FILES = ("model.safetensors", "pytorch_model.bin")
_AUX_IDS = "eagle_aux_hidden_state_layer_ids"
_AUX_NOTE = "slipstream_aux_layers"
_SIZES = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("vocab_size", "target_hidden_size", "num_layers", "draft_vocab_size", "context"),
)
_NOT_COMPUTED = ("norm_before_fc", "fc_norm", "norm_output", "parallel_drafting")


def load_eagle(
    folder: Path,
    target: ModelParts,
    dtype: torch.dtype | None = None,
    *,
    aux: AuxConvention = "auto",
) -> EagleHead:
    """An EAGLE-1 or EAGLE-3 head from a folder, in `dtype` (None: as stored), bound to its target.

    aux: how a list of tapped layers counts: "after" k layers (ours, vLLM, speculators) or the "output"
    of 0-based layer k (SGLang, SpecForge, ModelOpt). Auto trusts our own note, takes the common
    default where there is no list, reads a list as vLLM does, and refuses the list that is the
    default of the other convention. Raises DrafterError.
    """
    files.check_provenance(folder, target)
    config, tensors = open_eagle(folder, target, aux=aux)
    with files.understanding(folder):
        head = EagleHead(config, dtype or float_dtype(tensors))
    take_vocab(tensors, head.vocab, folder)
    files.fill(head.body.state_dict(), tensors, folder)
    head.target = target
    return head.eval().requires_grad_(False)


def open_eagle(
    folder: Path, target: ModelParts, *, aux: AuxConvention = "auto"
) -> tuple[EagleConfig, dict[str, torch.Tensor]]:
    """The config and the tensors as they are stored, by our names; safetensors are mapped, not read."""
    found = files.read_config(folder)
    with files.understanding(folder):
        raw = _flat(found, folder)
    tensors = {
        re.sub(r"^midlayer\.", "layers.0.", name): tensor
        for name, tensor in files.read_tensors(folder, _EAGLE_FILES).items()
        if not name.endswith("rotary_emb.inv_freq")
    }
    with files.understanding(folder):
        config = _eagle_config(raw, tensors, target, aux, folder)
    files.require(config.target_hidden_size, target.hidden_size, "hidden size", folder)
    files.require(config.vocab_size, target.vocab_size, "vocabulary size", folder)
    return config, tensors


def _flat(raw: dict[str, Any], folder: Path) -> dict[str, Any]:
    """One level of config: EAGLE's old `model` and speculators' `transformer_layer_config` moved up."""
    if "speculators_model_type" in raw:
        if raw["speculators_model_type"] != "eagle3":
            raise DrafterError(f"{folder} holds a {raw['speculators_model_type']!r} speculator, not EAGLE")
        if "norm_before_residual" not in raw:
            raise DrafterError(
                f"{folder / 'config.json'} does not say norm_before_residual, and readers of this format"
                " assume different values: add what it was trained with"
            )
        return {**raw["transformer_layer_config"], **raw, "version": 3}
    return {**raw["model"], **raw} if isinstance(raw.get("model"), dict) else raw


def _eagle_config(
    raw: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    target: ModelParts,
    aux: AuxConvention,
    folder: Path,
) -> EagleConfig:
    file = folder / "config.json"
    nested = raw.get("eagle_config") or {}
    for name in _NOT_COMPUTED:
        if raw.get(name) or nested.get(name):
            raise DrafterError(f"{file} sets {name}, which Slipstream's EAGLE head does not compute")
    if nested.get("use_aux_hidden_state") is False:
        raise DrafterError(f"{file} sets use_aux_hidden_state to false, which Slipstream does not compute")
    if raw.get("hidden_act", "silu") != "silu":
        raise DrafterError(f"{file} has hidden_act {raw['hidden_act']!r}; EAGLE heads use silu")
    missing = [
        k for k in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size") if k not in raw
    ]
    if missing:
        raise DrafterError(f"{file} must give {', '.join(missing)}")
    named = " ".join(raw.get("architectures") or []).lower()
    third = raw.get("version") == 3 or "eagle3" in named or "layers.0.hidden_norm.weight" in tensors
    hidden = int(raw["hidden_size"])
    draft_size = raw.get("draft_vocab_size")
    layers = {m.group(1) for name in tensors if (m := re.match(r"layers\.(\d+)\.", name))}
    config = EagleConfig(
        version=3 if third else 1,
        hidden_size=hidden,
        intermediate_size=int(raw["intermediate_size"]),
        num_attention_heads=int(raw["num_attention_heads"]),
        num_key_value_heads=int(raw.get("num_key_value_heads") or raw["num_attention_heads"]),
        head_dim=int(raw.get("head_dim") or hidden // int(raw["num_attention_heads"])),
        vocab_size=int(raw["vocab_size"]),
        target_hidden_size=int(raw.get("target_hidden_size") or hidden),
        num_layers=min(int(raw.get("num_hidden_layers", 1)), 1 + len(layers)),  # see `_medusa_config`
        draft_vocab_size=None if draft_size is None else int(draft_size),
        aux_layers=_aux_layers(raw, target.num_layers, aux, file) if third else (),
        norm_before_residual=bool(raw.get("norm_before_residual", False)),
        own_embedding="embed_tokens.weight" in tensors,
        own_lm_head="lm_head.weight" in tensors or (third and draft_size not in (None, raw["vocab_size"])),
        fc_bias="fc.bias" in tensors and (not third or bool(raw.get("bias"))),
        attention_bias=bool(raw.get("attention_bias", False)),
        mlp_bias=bool(raw.get("mlp_bias", False)),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        context=int(raw.get("max_position_embeddings", 2048)),
        rope=rope_parameters(raw),
    )
    _require_sizes(config, _SIZES, folder)
    if config.num_attention_heads % config.num_key_value_heads or config.head_dim % 2:
        raise DrafterError(
            f"{file} has {config.num_attention_heads} attention heads of size {config.head_dim} on"
            f" {config.num_key_value_heads} key-value heads, which no head computes: fetch it again"
        )
    if third and not config.own_embedding and hidden != target.hidden_size:
        raise DrafterError(
            f"the heads in {folder} do not fit: embed_tokens.weight {[config.vocab_size, hidden]} is missing"
        )
    return config


def _aux_layers(raw: Mapping[str, Any], layers: int, aux: AuxConvention, file: Path) -> tuple[int, ...]:
    """The tapped layers as we count them: k = after k layers."""
    note = raw.get(_AUX_NOTE)
    listed = raw.get(_AUX_IDS) or (raw.get("eagle_config") or {}).get(_AUX_IDS)
    if note is not None:
        found = tuple(int(k) for k in note)
    elif listed is None:
        found = (2, layers // 2, layers - 3)  # the same tensors in both conventions
    elif aux == "output":
        found = tuple(int(k) + 1 for k in listed)
    elif aux == "auto" and tuple(listed) == (1, layers // 2 - 1, layers - 4):
        raise DrafterError(
            f"{file} taps the layers {list(listed)}, the default of engines that count layer outputs from 0:"
            " say aux_layers=output if it is from SGLang, SpecForge or ModelOpt, else aux_layers=after"
        )
    else:
        found = tuple(int(k) for k in listed)
    if not found or min(found) < 0 or max(found) > layers:
        raise DrafterError(f"{file} taps the layers {list(found)} of a target that has {layers} layers")
    return found


def save_eagle(
    head: EagleHead,
    folder: Path,
    *,
    midlayer: bool = False,
    provenance: Mapping[str, Any] | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Write the layout vLLM loads; see `eagle_layout`. dtype: of the floating tensors, None as they are."""
    tensors, config = eagle_layout(head, midlayer=midlayer)
    files.write(folder, "model.safetensors", tensors, config, provenance, dtype)


def eagle_layout(
    head: EagleHead, *, midlayer: bool = False
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors and the config of the layout vLLM loads; midlayer names EAGLE-3's layer as its authors do.

    Tapped layers are written as vLLM counts them, and again under a name that leaves no doubt.
    """
    config = head.config
    rope = dict(config.rope)
    theta, kind = rope["rope_theta"], rope["rope_type"]
    raw: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3" if config.version == 3 else "LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "hidden_act": "silu",
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.context,
        "rope_theta": theta,
        "rope_scaling": None if kind == "default" else {k: v for k, v in rope.items() if k != "rope_theta"},
        "rope_parameters": rope,
        "tie_word_embeddings": False,
    }
    if config.version == 3:
        raw |= {
            "draft_vocab_size": head.vocab.size,
            "target_hidden_size": config.target_hidden_size,
            "num_aux_hidden_states": len(config.aux_layers),
            "norm_before_residual": config.norm_before_residual,
            "norm_before_fc": False,
            "bias": config.fc_bias,
            "eagle_config": {"use_aux_hidden_state": True, _AUX_IDS: list(config.aux_layers)},
            _AUX_IDS: list(config.aux_layers),
            _AUX_NOTE: list(config.aux_layers),
        }
    named = {**head.body.state_dict(), **head.vocab.state_dict()}
    if midlayer:
        named = {re.sub(r"^layers\.0\.", "midlayer.", k): v for k, v in named.items()}
    return named, raw
