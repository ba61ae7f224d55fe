"""What an export wrote, which engine versions take it, and how they are started."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from slipstream.errors import DrafterError
from slipstream.export.engines import NAME_PARTS, NEWEST, vllm
from slipstream.model.quiet import first_line


@dataclass(frozen=True)
class ExportReport:
    """engine: vllm, sglang or hf. kind: draft_model, eagle, eagle3 or medusa. takes: versions in words.
    layout: how the tensors are named. changes: what differs from the head's own folder, and why it is the
    same head.
    """

    engine: str
    kind: str
    layout: str
    folder: str
    takes: str
    start: str
    changes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def require_neutral(folder: Path, kind: str) -> None:
    """Refuse a path that makes vLLM take the draft for another kind than it is (config/speculative.py)."""
    if kind in ("eagle", "eagle3"):
        return
    for part, means in NAME_PARTS:
        if part in str(folder).lower():
            raise DrafterError(
                f"the path {folder} contains {part!r}, and vLLM takes every draft in such a path for"
                f" {means!r}:"
                " write to another folder"
            )


def require_room(folder: Path) -> None:
    """Refuse to write over something."""
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise DrafterError(f"{folder} is not empty: give a new folder with -o")


@contextmanager
def new_folder(out: Path, kind: str) -> Iterator[Path]:
    """A folder to write into, which becomes `out` at the end, or is gone. Raises DrafterError."""
    if out.name in ("", ".."):
        raise DrafterError(f"{out} is no new folder: name one with -o")
    require_neutral(out, kind)
    real = out.resolve()
    partial = real.with_name(real.name + ".partial")
    try:
        require_room(real)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        if real.is_dir():
            real.rmdir()  # empty, as was checked
        partial.rename(real)
    except (OSError, SafetensorError) as error:
        raise DrafterError(
            f"{out} cannot be written ({first_line(error)}): make room, or name another folder"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def takes_vllm(kind: str) -> str:
    """Which versions of vLLM have the method."""
    facts = vllm()
    return f"vllm {facts.when(facts.methods, kind)} (its sources were read up to {facts.read[-1]})"


def takes_sglang() -> str:
    return f"sglang {NEWEST['sglang']} (the version that was read)"
