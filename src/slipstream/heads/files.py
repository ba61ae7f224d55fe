"""A heads folder: config, tensors, provenance. Whatever does not fit is refused by name."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from slipstream.errors import DrafterError, SlipstreamError
from slipstream.model.parts import ModelParts
from slipstream.model.quiet import first_line
from slipstream.model.store import read_json, write_atomic

PROVENANCE = "slipstream.json"
_SHOWN = 6


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a heads folder."""
    if not folder.is_dir():
        raise DrafterError(f"there is no folder {folder}: give the folder that holds the heads' config.json")
    if not (folder / "config.json").is_file():
        raise DrafterError(f"{folder} has no config.json, so it holds no draft heads")
    return read_json(folder / "config.json")


@contextmanager
def understanding(folder: Path) -> Iterator[None]:
    """Turns what values of the wrong kind in config.json lead to into one error that names the file."""
    try:
        yield
    except SlipstreamError:
        raise
    except Exception as error:  # whatever a stranger's numbers lead to
        raise DrafterError(
            f"{folder / 'config.json'} does not describe draft heads ({type(error).__name__}:"
            f" {first_line(error)}): fetch it again"
        ) from error


def read_tensors(folder: Path, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """The tensors of the first of these files that is there, or of all files that an index names.

    Pickles (.pt, .bin) are read with `weights_only`, which runs no code.
    """
    for name in names:
        index = folder / f"{name}.index.json"
        if index.is_file():
            named = read_json(index).get("weight_map")
            if not isinstance(named, dict) or not named:
                raise DrafterError(f"{index} names no files of tensors: fetch it again")
            parts = {Path(str(part)).name for part in named.values()}
            return {k: v for part in sorted(parts) for k, v in _read_file(folder / part).items()}
        if (folder / name).is_file():
            return _read_file(folder / name)
    raise DrafterError(f"{folder} has no weights; looked for {', '.join(names)}")


def _read_file(file: Path) -> dict[str, torch.Tensor]:
    try:
        if file.suffix == ".safetensors":
            return dict(load_file(file))
        found = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, SafetensorError) as error:
        raise DrafterError(f"{file} cannot be read ({error}): fetch it again") from error
    except Exception as error:  # whatever the unpickler meets in a stranger's file
        raise DrafterError(
            f"{file} holds more than tensors or is damaged ({type(error).__name__}):"
            " convert it to safetensors"
        ) from error
    if not isinstance(found, dict) or not all(isinstance(v, torch.Tensor) for v in found.values()):
        raise DrafterError(f"{file} is not a dict of tensors: convert it to safetensors")
    return found


def fill(state: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Copy `found` into `state`, which must have the same names and shapes, and no NaN afterwards."""
    problems = []
    for name in sorted(state.keys() - found.keys()):
        problems.append(f"{name} {list(state[name].shape)} is missing")
    for name in sorted(found.keys() - state.keys()):
        close = difflib.get_close_matches(name, state.keys() - found.keys(), 1)
        problems.append(f"{name} has no place in them" + (f" (is it {close[0]}?)" if close else ""))
    for name in sorted(state.keys() & found.keys()):
        if state[name].shape != found[name].shape:
            problems.append(
                f"{name} has the shape {list(found[name].shape)} and must have {list(state[name].shape)}"
            )
    if problems:
        raise DrafterError(f"the heads in {folder} do not fit: {listed(problems)}")
    with torch.no_grad():
        for name, tensor in state.items():
            tensor.copy_(found[name])
    holes = [name for name, tensor in sorted(state.items()) if bool(tensor.isnan().any())]
    if holes:
        raise DrafterError(f"the heads in {folder} hold NaN in {listed(holes)}: train or fetch them again")
    large = [name for name, tensor in sorted(state.items()) if bool(tensor.isinf().any())]
    if large:
        raise DrafterError(
            f"the heads in {folder} hold numbers too large for {state[large[0]].dtype} in {listed(large)}:"
            " use another dtype, or train or fetch them again"
        )


def listed(items: Sequence[str]) -> str:
    more = f"; and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return "; ".join(items[:_SHOWN]) + more


def require(value: int, wanted: int | None, what: str, folder: Path) -> None:
    """Refuse heads that were made for a target of another size."""
    if wanted is not None and value != wanted:
        raise DrafterError(
            f"the heads in {folder} are for a target with {what} {value}, this target has {wanted}: use"
            " heads trained for this target"
        )


def check_provenance(folder: Path, target: ModelParts | None) -> dict[str, Any]:
    """Our own note beside the heads, {} if there is none; it may name the target they were trained on."""
    if not (folder / PROVENANCE).is_file():
        return {}
    note = read_json(folder / PROVENANCE)
    trained_on = note.get("target_fingerprint")
    if target is not None and trained_on not in (None, target.fingerprint):
        raise DrafterError(
            f"the heads in {folder} were trained on another target (fingerprint {trained_on}, this target"
            f" has {target.fingerprint}): use heads trained for this target"
        )
    return note


def write(
    folder: Path,
    file: str,
    tensors: Mapping[str, torch.Tensor],
    config: Mapping[str, Any],
    provenance: Mapping[str, Any] | None,
    dtype: torch.dtype | None = None,
) -> None:
    """Write a heads folder; tensors keep their bits, or where `dtype` is given floating ones become that."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = {
        name: tensor.detach().to("cpu", dtype if tensor.is_floating_point() else None).contiguous()
        for name, tensor in tensors.items()
    }
    save_file(stored, folder / file, {"format": "pt"})
    write_atomic(folder / "config.json", json.dumps(config, indent=2) + "\n")
    if provenance is not None:
        write_atomic(folder / PROVENANCE, json.dumps(provenance, indent=2) + "\n")
