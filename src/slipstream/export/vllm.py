"""Drafters for vLLM: draft model, EAGLE-1, EAGLE-3 (published and speculators layout), Medusa."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any, Literal

from slipstream.errors import DrafterError
from slipstream.export.heads import (
    AUX_IDS,
    Package,
    eagle_package,
    kind_of,
    medusa_package,
    open_eagle,
    open_medusa,
    without_zero_bias,
    write,
)
from slipstream.export.hf import export_draft_model
from slipstream.export.report import ExportReport, takes_vllm
from slipstream.export.target import read_parts
from slipstream.heads import files
from slipstream.heads.eagle import EagleHead
from slipstream.heads.io import AuxConvention
from slipstream.version import __version__

Layout = Literal["published", "speculators"]
NO_BIAS = "and vLLM's EAGLE heads have none"


def export_vllm(
    drafter: Path,
    out: Path,
    target: Path,
    *,
    target_name: str | None = None,
    layout: Layout = "published",
    aux: AuxConvention = "auto",
    num_speculative_tokens: int = 3,
) -> ExportReport:
    """Write a drafter as vLLM loads it.

    drafter and target: folders. target_name: how the server is told the target, default its folder. layout:
    speculators' is for EAGLE-3 and is served by its own path alone. aux: see `heads.io.load_eagle`. Raises
    DrafterError, ModelError.
    """
    kind = kind_of(drafter)
    name = target_name or str(target)
    if layout == "speculators" and kind != "eagle3":
        raise DrafterError(
            f"speculators' layout is for EAGLE-3, and {drafter} holds {kind}: use the published layout"
        )
    if kind == "draft_model":
        return export_draft_model(
            drafter, out, target, engine="vllm", target_name=name, tokens=num_speculative_tokens
        )
    parts = read_parts(target)
    note = files.check_provenance(drafter, parts) or None
    if kind == "medusa":
        heads = open_medusa(drafter, parts)
        package = medusa_package(heads, parts)
        num_speculative_tokens = min(num_speculative_tokens, heads.config.num_heads)
    else:
        head = open_eagle(drafter, parts, aux)
        package = without_zero_bias(eagle_package(head), "fc.bias", NO_BIAS)
        if layout == "speculators":
            package = speculators_package(head, package, name, _architectures(target), num_speculative_tokens)
    write(out, kind, package, note)
    config = {"method": kind, "model": str(out), "num_speculative_tokens": num_speculative_tokens}
    command = ["vllm", "serve", name, "--speculative-config", json.dumps(config)]
    if layout == "speculators":
        command = ["vllm", "serve", str(out)]
    return ExportReport(
        "vllm", kind, layout, str(out), takes_vllm(kind), shlex.join(command), package.changes
    )


def _architectures(target: Path) -> list[str]:
    return [str(a) for a in files.read_config(target).get("architectures") or []]


_OF_THE_LAYER = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "hidden_act",
    "attention_bias",
    "mlp_bias",
    "rms_norm_eps",
    "max_position_embeddings",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "tie_word_embeddings",
)


def speculators_package(
    head: EagleHead, package: Package, target: str, architectures: list[str], tokens: int
) -> Package:
    """The config of vllm-project/speculators 0.9 around the same tensors."""
    raw = package.config
    layer = {k: raw[k] for k in _OF_THE_LAYER if k in raw}
    # vLLM copies this part, and takes three tapped layers where it is not told otherwise
    layer["num_aux_hidden_states"] = len(head.config.aux_layers)
    config: dict[str, Any] = {
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "architectures": ["Eagle3Speculator"],
        "transformer_layer_config": layer,
        "draft_vocab_size": head.vocab.size,
        "norm_before_residual": head.config.norm_before_residual,
        "target_hidden_size": head.config.target_hidden_size,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "embed_requires_grad": False,
        AUX_IDS: list(head.config.aux_layers),
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": tokens,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": target, "architectures": architectures},
        },
        "slipstream_aux_layers": list(head.config.aux_layers),
        "slipstream_version": __version__,
    }
    return Package(
        package.tensors, config, (*package.changes, "the config is nested as speculators writes it")
    )
