"""Drafters in the layouts their authors publish, and draft models as plain Hugging Face folders."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any, Literal

from slipstream.errors import DrafterError
from slipstream.export.heads import eagle_package, kind_of, open_eagle, open_medusa, write
from slipstream.export.report import (
    ExportReport,
    new_folder,
    takes_sglang,
    takes_vllm,
)
from slipstream.export.target import read_parts
from slipstream.heads import files
from slipstream.heads.io import MEDUSA_FILE, AuxConvention, save_medusa
from slipstream.model.checkpoint import inspect

_KEPT = (
    "*.json",
    "*.safetensors",
    "*.txt",
    "*.model",
    "*.jinja",
    "*.tiktoken",
    "LICENSE*",
    "NOTICE*",
    "README*",
)
_OURS = ("slipstream.json",)  # the manifest of our own store


def export_hf(drafter: Path, out: Path, target: Path | None, *, aux: AuxConvention = "auto") -> ExportReport:
    """Write a drafter as its authors publish it: EAGLE-3's layer is `midlayer`, Medusa's file has its own
    name.

    target: its folder; not needed for a draft model.
    """
    kind = kind_of(drafter)
    if kind == "draft_model":
        name = "TARGET" if target is None else str(target)
        return export_draft_model(drafter, out, target, engine="hf", target_name=name, tokens=3)
    if target is None:
        raise DrafterError(
            f"{drafter} holds {kind} heads: name their target with --target, to check that they fit"
        )
    parts = read_parts(target)
    note = files.check_provenance(drafter, parts) or None
    start = f"slipstream run --model {shlex.quote(str(target))} --drafter "
    if kind == "medusa":
        heads = open_medusa(drafter, parts)
        with new_folder(out, kind) as partial:
            save_medusa(heads, partial, provenance=note)
        return ExportReport(
            "hf",
            kind,
            f"FasterDecoding's {MEDUSA_FILE}",
            str(out),
            takes_vllm(kind),
            start + shlex.quote(f"medusa:heads={out}"),
            (),
        )
    package = eagle_package(open_eagle(drafter, parts, aux), midlayer=True)
    write(out, kind, package, note)
    return ExportReport(
        "hf",
        kind,
        "SafeAILab's EAGLE",
        str(out),
        takes_vllm(kind),
        start + shlex.quote(f"eagle:heads={out}"),
        package.changes,
    )


def export_draft_model(
    drafter: Path,
    out: Path,
    target: Path | None,
    *,
    engine: Literal["vllm", "sglang", "hf"],
    target_name: str,
    tokens: int,
) -> ExportReport:
    """Copy a causal language model into a new folder, after checking that it can draft for the target
    there.
    """
    config = inspect(drafter).config
    if target is not None:
        _require_vocabulary(config, files.read_config(target), drafter, target)
    with new_folder(out, "draft_model") as partial:
        names = {p.name for kind in _KEPT for p in drafter.glob(kind)} - {
            p.name for kind in _OURS for p in drafter.glob(kind)
        }
        for name in sorted(names):
            shutil.copyfile(drafter / name, partial / name)
    takes = {
        "vllm": takes_vllm("draft_model"),
        "sglang": takes_sglang(),
        "hf": "every engine that has the architecture",
    }
    speculative: dict[str, Any] = {
        "method": "draft_model",
        "model": str(out),
        "num_speculative_tokens": tokens,
    }
    start = {
        "vllm": ["vllm", "serve", target_name, "--speculative-config", json.dumps(speculative)],
        "sglang": [
            *("python", "-m", "sglang.launch_server", "--model-path", target_name),
            *("--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", str(out)),
            *("--speculative-num-steps", str(tokens), "--speculative-eagle-topk", "1"),
            *("--speculative-num-draft-tokens", str(tokens + 1)),
        ],
        "hf": ["slipstream", "run", "--model", target_name, "--drafter", f"draft_model:model={out}"],
    }
    return ExportReport(
        engine, "draft_model", "Hugging Face", str(out), takes[engine], shlex.join(start[engine]), ()
    )


def _require_vocabulary(draft: dict[str, Any], target: dict[str, Any], drafter: Path, folder: Path) -> None:
    def size(config: dict[str, Any]) -> Any:
        text = config.get("text_config")
        return (text if isinstance(text, dict) else config).get("vocab_size")

    if size(draft) != size(target):
        raise DrafterError(
            f"{drafter} has a vocabulary of {size(draft)} tokens and {folder} of {size(target)}: vLLM and"
            " SGLang draft"
            " with the same number only (vLLM 0.25 and newer also with use_heterogeneous_vocab); choose"
            " another draft"
        )
