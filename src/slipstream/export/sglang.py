"""Drafters for SGLang: draft model, EAGLE-1, EAGLE-3. Read against sglang 0.5.23 (models/llama_eagle*.py)."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import torch

from slipstream.errors import DrafterError
from slipstream.export.heads import (
    AUX_IDS,
    Package,
    eagle_package,
    edited,
    kind_of,
    open_eagle,
    without_zero_bias,
    write,
)
from slipstream.export.hf import export_draft_model
from slipstream.export.report import ExportReport, takes_sglang
from slipstream.export.target import read_parts
from slipstream.heads import files
from slipstream.heads.eagle import EagleHead
from slipstream.heads.io import AuxConvention


def export_sglang(
    drafter: Path,
    out: Path,
    target: Path,
    *,
    target_name: str | None = None,
    aux: AuxConvention = "auto",
    num_speculative_tokens: int = 3,
) -> ExportReport:
    """Write a drafter as SGLang loads it; see `export_vllm`."""
    kind = kind_of(drafter)
    name = target_name or str(target)
    if kind == "medusa":
        raise DrafterError("SGLang has no Medusa: vLLM up to 0.32.0 has, and an EAGLE head is served by both")
    if kind == "draft_model":
        return export_draft_model(
            drafter, out, target, engine="sglang", target_name=name, tokens=num_speculative_tokens
        )
    parts = read_parts(target)
    note = files.check_provenance(drafter, parts) or None
    head = open_eagle(drafter, parts, aux)
    package = _eagle1(head) if head.config.version == 1 else _eagle3(head, parts.num_layers)
    write(out, kind, package, note)
    command = [
        *("python", "-m", "sglang.launch_server", "--model-path", name),
        *("--speculative-algorithm", "EAGLE" if kind == "eagle" else "EAGLE3"),
        *("--speculative-draft-model-path", str(out)),
        *("--speculative-num-steps", str(num_speculative_tokens), "--speculative-eagle-topk", "1"),
        *("--speculative-num-draft-tokens", str(num_speculative_tokens + 1)),
    ]
    return ExportReport(
        "sglang", kind, "published", str(out), takes_sglang(), shlex.join(command), package.changes
    )


def _eagle1(head: EagleHead) -> Package:
    """`fc` has a bias there: a head without one gets zeros, which would otherwise be random."""
    package = eagle_package(head)
    if "fc.bias" not in package.tensors:
        weight = package.tensors["fc.weight"]
        zeros = torch.zeros(weight.shape[0], dtype=weight.dtype)
        package = Package(
            {**package.tensors, "fc.bias": zeros},
            package.config,
            ("fc.bias was added as zeros: SGLang's layer has one, and would leave it random",),
        )
    return edited(
        package,
        lambda config: config.update(architectures=["LlamaForCausalLMEagle"]),
        "the architecture is called LlamaForCausalLMEagle",
    )


def _eagle3(head: EagleHead, layers: int) -> Package:
    config = head.config
    if config.norm_before_residual:
        raise DrafterError(
            "SGLang's EAGLE-3 adds the state before its norm: a head with norm_before_residual is not it"
        )
    if config.attention_bias:
        raise DrafterError("SGLang's EAGLE-3 has no bias in its attention: train the head without one")
    if config.num_layers != 1:
        raise DrafterError(
            f"SGLang's EAGLE-3 layers behind the first have another norm: one layer, not {config.num_layers}"
        )
    beyond = [k for k in config.aux_layers if not 1 <= k < layers]
    if beyond:
        raise DrafterError(
            f"SGLang taps the outputs of the layers 0 to {layers - 2}; this head taps after {beyond[0]}"
            " layers:"
            " train it on layers in between"
        )
    package = eagle_package(head)
    if not config.fc_bias:
        package = without_zero_bias(package, "fc.bias", "which its config does not say")
    outputs = [k - 1 for k in config.aux_layers]

    def shift(raw: dict[str, Any]) -> None:
        raw[AUX_IDS] = outputs
        raw["eagle_config"][AUX_IDS] = outputs
        raw["architectures"] = ["LlamaForCausalLMEagle3"]

    return edited(
        package,
        shift,
        f"tapped layers are written as outputs of layers, {outputs}: after {list(config.aux_layers)}",
    )
