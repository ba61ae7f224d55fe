"""Where a drafter comes from: `slipstream.json` beside it, with versions, arguments, target, data, hashes."""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slipstream.heads.files import PROVENANCE
from slipstream.model.identity import versions
from slipstream.model.progress import Silent
from slipstream.model.store import read_json, sha256_of, write_atomic

FORMAT = 1


@dataclass(frozen=True, slots=True)
class TargetNote:
    """Which target a drafter is for: as it was named, and `ModelParts.fingerprint`."""

    name: str
    fingerprint: str


def provenance(
    kind: str,
    target: TargetNote,
    *,
    arguments: Mapping[str, Any],
    data: Mapping[str, Any],
    run: Mapping[str, Any],
    changes_target: bool = False,
) -> dict[str, Any]:
    """JSON values. run: what came of it (steps, tokens, seconds, losses, held-out acceptance)."""
    return {
        "format": FORMAT,
        "kind": kind,
        "target": target.name,
        "target_fingerprint": target.fingerprint,
        "changes_target": changes_target,
        "arguments": dict(arguments),
        "data": dict(data),
        "data_sha256": hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest(),
        "run": dict(run),
        "versions": versions(),
        "machine": {
            "platform": f"{sys.platform} {platform.machine()}",
            "threads": torch.get_num_threads(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
    }


def seal(folder: Path) -> None:
    """Add the SHA-256 of every file beside it to a drafter's provenance."""
    note = read_json(folder / PROVENANCE)
    note["sha256"] = {
        p.relative_to(folder).as_posix(): sha256_of(p, Silent())
        for p in sorted(folder.rglob("*"))
        if p.is_file() and p.name != PROVENANCE
    }
    write_atomic(folder / PROVENANCE, json.dumps(note, indent=2, default=str) + "\n")
