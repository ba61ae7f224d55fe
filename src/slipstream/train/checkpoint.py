"""Checkpoints that are whole or absent: a folder is written under another name, flushed, then renamed.

step-000120/weights.safetensors     what is trained, in full precision
step-000120/optimizer.safetensors   AdamW's moments, by parameter name
step-000120/progress.json           where the run was, what it had seen, its settings and its curve

There is no random state to keep: every draw of the loop is keyed by the seed and the step.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from slipstream.errors import CapacityError, ModelError, ParameterError
from slipstream.model import disk
from slipstream.model.progress import size
from slipstream.model.store import read_json
from slipstream.train.method import Method

KEPT = 2  # the last good checkpoint, and the one before it
_NAME = re.compile(r"step-(\d+)")
_PROGRESS = ("step", "tokens", "seconds", "curve", "identity")


class Checkpoints:
    """The checkpoints below one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def found(self) -> list[Path]:
        """Whole checkpoints, oldest first."""
        if not self.folder.is_dir():
            return []
        named = [(m, p) for p in self.folder.iterdir() if (m := _NAME.fullmatch(p.name))]
        return [p for m, p in sorted(named, key=lambda pair: int(pair[0].group(1)))]

    def last(self) -> Path | None:
        found = self.found()
        return found[-1] if found else None

    def save(
        self, step: int, method: Method, optimizer: torch.optim.Optimizer, progress: Mapping[str, Any]
    ) -> Path:
        """Write one, whole or not at all; all but the last `KEPT` go. CapacityError: the disk is full."""
        weights = {name: p.detach() for name, p in method.trained().items()}
        moments = _moments(method, optimizer)
        needed = sum(t.nbytes for t in (*weights.values(), *moments.values()))
        folder = self.folder / f"step-{step:06d}"
        partial = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            free = disk.free_bytes(self.folder)
            if needed > free:
                raise CapacityError(
                    f"a checkpoint needs {size(needed)} of disk at {self.folder} and {size(free)} are free:"
                    " free some room, then run the same command again (it resumes)"
                )
            self._clear()
            partial.mkdir()
            try:
                save_file(_whole(weights), partial / "weights.safetensors")
                save_file(_whole(moments), partial / "optimizer.safetensors")
                (partial / "progress.json").write_text(json.dumps(progress), encoding="utf-8")
                for file in partial.iterdir():
                    with file.open("rb") as opened:
                        os.fsync(opened.fileno())
                _remove(folder)
                os.replace(partial, folder)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
            for old in self.found()[:-KEPT]:
                _remove(old)
        return folder

    def _clear(self) -> None:
        """Remove what a killed process left half-written."""
        for leftover in self.folder.glob("*.partial"):
            shutil.rmtree(leftover, ignore_errors=True)

    def remove(self) -> None:
        _remove(self.folder)


def _remove(folder: Path) -> None:
    """Under another name first: one that is half gone must not be taken for a whole one."""
    if folder.exists():
        going = folder.with_name(f"{folder.name}.{os.getpid()}.old.partial")
        os.replace(folder, going)
        shutil.rmtree(going, ignore_errors=True)


def read_progress(folder: Path) -> dict[str, Any]:
    """Where a run was. ModelError if that cannot be read."""
    try:
        progress = read_json(folder / "progress.json")
    except ModelError as error:
        raise ModelError(f"the checkpoint {folder} is damaged ({error}): delete it and run again") from None
    if missing := [name for name in _PROGRESS if name not in progress]:
        raise ModelError(f"the checkpoint {folder} is damaged (no {missing[0]}): delete it and run again")
    return progress


@torch.no_grad()
def restore(folder: Path, method: Method, optimizer: torch.optim.Optimizer) -> None:
    """Put weights and moments back. ModelError if they are not those of this method."""
    parameters = method.trained()
    try:
        weights = load_file(folder / "weights.safetensors")
        moments = load_file(folder / "optimizer.safetensors")
    except (OSError, SafetensorError) as error:
        raise ModelError(f"the checkpoint {folder} is damaged ({error}): delete it and run again") from None
    shapes = {name: p.shape for name, p in parameters.items()}
    if shapes != {name: w.shape for name, w in weights.items()}:
        raise ModelError(
            f"the checkpoint {folder} is of a drafter with other weights: give another --output, or --restart"
        )
    for name, parameter in parameters.items():
        parameter.copy_(weights[name])
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state.pop(parameter, None)
    for name, parameter in parameters.items():
        state = {
            k: moments[f"{k}.{name}"] for k in ("step", "exp_avg", "exp_avg_sq") if f"{k}.{name}" in moments
        }
        if state:
            optimizer.state[parameter] = {
                k: v if k == "step" else v.to(parameter.device) for k, v in state.items()
            }


def _moments(method: Method, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return {
        f"{key}.{name}": value
        for name, parameter in method.trained().items()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def _whole(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {k: v.detach().cpu().contiguous().clone() for k, v in tensors.items()}


@contextmanager
def writing(where: Path) -> Iterator[None]:
    """Turns a full disk, however a library puts it, into a CapacityError that says the run can go on, and
    whatever else cannot be written into a ParameterError."""
    try:
        with disk.writing(where):
            yield
    except SafetensorError as error:
        if not any(f"os error {number}" in str(error) for number in disk.FULL):
            raise ParameterError(
                f"{where} cannot be written ({error}): check the path and its permissions"
            ) from error
        raise CapacityError(
            f"the disk is full at {where} ({size(shutil.disk_usage(where).free)} free): free some room, then"
            " run the same command again (it resumes)"
        ) from error
