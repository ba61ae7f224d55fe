"""What a checkpoint folder holds, read and checked before anything is loaded.

Format of a safetensors file: 8 bytes N (little endian), N bytes of JSON with dtype, shape and data_offsets
of each tensor, then the data. So a cut file is found from its first bytes and its length.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.core import jsontext
from slipstream.errors import ModelError
from slipstream.model.generation import GENERATION
from slipstream.model.store import read_json, reading_errors

_WIDTH = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
_FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "tekken.json")
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_HEADER_LIMIT = 100_000_000  # the format's own
_LAYER = re.compile(r"(.*?)\.(\d+)\.(.+)")  # layers.24.mlp.up_proj.weight
_AHEAD = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_layers", "mtp_num_hidden_layers")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checked folder. elements counts the numbers stored, by safetensors dtype ("BF16", …). files: those of
    the weights, by name."""

    path: Path
    config: dict[str, Any]
    generation: dict[str, Any]
    elements: dict[str, int]
    stored_bytes: int
    files: tuple[Path, ...]

    @property
    def dtype(self) -> str:
        """The dtype the checkpoint asks for: its config's, else the one most weights are stored in."""
        nested = self.config.get("text_config")
        for config in (self.config, nested if isinstance(nested, dict) else {}):
            named = config.get("dtype") or config.get("torch_dtype")
            if isinstance(named, str) and named.removeprefix("torch.") in _FLOATS.values():
                return named.removeprefix("torch.")
        return self.stored_dtype

    @property
    def stored_dtype(self) -> str:
        """The dtype most weights are stored in."""
        floats = {name: n for name, n in self.elements.items() if name in _FLOATS}
        return _FLOATS[max(floats, key=floats.__getitem__)] if floats else "float32"

    def bytes_as(self, width: int) -> int:
        """Bytes in memory with `width` bytes per floating-point number; other types keep theirs."""
        floats = sum(n for name, n in self.elements.items() if name in _FLOATS)
        other = self.stored_bytes - sum(
            n * _WIDTH[name] for name, n in self.elements.items() if name in _FLOATS
        )
        return floats * width + other


def inspect(folder: Path) -> Checkpoint:
    """Reads and checks a checkpoint folder; ModelError names the file that is missing or damaged."""
    with reading_errors(folder):
        names = {path.name for path in folder.iterdir()}
    if "config.json" not in names:
        gguf = sorted(name for name in names if name.endswith(".gguf"))
        hint = (
            f"pass the file itself: {folder / gguf[0]}"
            if gguf
            else "give the folder that save_pretrained wrote"
        )
        raise ModelError(f"{folder} has no config.json, so it is not a model folder: {hint}")
    config = read_json(folder / "config.json")
    generation = read_json(folder / GENERATION) if GENERATION in names else {}
    if not isinstance(config.get("model_type"), str):
        raise ModelError(
            f"{folder / 'config.json'} names no model_type: fetch the file again from where it came"
        )
    if not any(name in names for name in _TOKENIZERS) and not any(n.endswith(".tiktoken") for n in names):
        raise ModelError(
            f"{folder} has no tokenizer (no tokenizer.json): copy the tokenizer files of the model into "
            "it, e.g. "
            "with AutoTokenizer.from_pretrained(…).save_pretrained(folder)"
        )
    elements: dict[str, int] = {}
    stored = 0
    files = _weight_files(folder, names)
    for path, expected in files.items():
        header = read_header(path)
        absent = sorted(expected - header.keys())
        if absent:
            raise ModelError(
                f"{path} lacks the tensor {absent[0]} that {_INDEX} promises: fetch the file again"
            )
        for tensor in header.values():
            kind, (begin, end) = tensor["dtype"], tensor["data_offsets"]
            elements[kind] = elements.get(kind, 0) + math.prod(tensor["shape"])
            stored += end - begin
    return Checkpoint(folder, config, generation, elements, stored, tuple(sorted(files)))


def _weight_files(folder: Path, names: set[str]) -> dict[Path, set[str]]:
    """The safetensors files with the tensors each must hold (none known for a single file)."""
    if _INDEX in names:
        index = read_json(folder / _INDEX).get("weight_map")
        if not isinstance(index, dict) or not index:
            raise ModelError(f"{folder / _INDEX} has no weight_map: the file is damaged, fetch it again")
        files: dict[Path, set[str]] = {}
        for tensor, name in index.items():
            if not isinstance(name, str) or Path(name).name != name:
                raise ModelError(
                    f"{folder / _INDEX} points outside its folder: fetch the model from a source you trust"
                )
            files.setdefault(folder / name, set()).add(tensor)
        missing = sorted(path.name for path in files if path.name not in names)
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise ModelError(
                f"{folder} lacks {missing[0]}{more} of {len(files)} weight files: download the missing files"
            )
        return files
    if _SINGLE in names:
        return {folder / _SINGLE: set()}
    pickled = sorted(name for name in names if name.endswith((".bin", ".pt", ".pth")))
    if pickled:
        raise ModelError(
            f"{folder} has only pickled weights ({pickled[0]}), which can run code when loaded: convert "
            "them with "
            "model.save_pretrained(folder), which writes safetensors, or choose another source"
        )
    raise ModelError(f"{folder} has no weights (no {_SINGLE}): download the model again, completely")


def read_header(path: Path) -> dict[str, Any]:
    """The tensors of a safetensors file by name; ModelError when the file is cut or damaged."""
    damaged = f"{path} is damaged or was not downloaded completely"
    with reading_errors(path):
        length = path.stat().st_size
        with path.open("rb") as file:
            first = file.read(8)
            (size,) = struct.unpack("<Q", first) if len(first) == 8 else (0,)
            if not 2 <= size <= min(length - 8, _HEADER_LIMIT):
                raise ModelError(f"{damaged} (no header): delete it and fetch it again")
            raw = file.read(size)
    try:
        header = jsontext.parse(raw)
        header.pop("__metadata__", None)
        end = 0
        for tensor in header.values():
            begin, stop = tensor["data_offsets"]
            width = _WIDTH.get(tensor["dtype"])
            if width is not None and stop - begin != width * math.prod(tensor["shape"]):
                raise ValueError("a tensor's length is not that of its shape")
            end = max(end, stop)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{damaged} (header: {error}): delete it and fetch it again") from error
    if length != 8 + size + end:
        raise ModelError(
            f"{damaged} ({length} bytes, should be {8 + size + end}): delete it and fetch it again"
        )
    return dict(header)


def surplus_layers(
    unused: Iterable[str], own: Iterable[str], prefix: str, config: Mapping[str, Any]
) -> list[str]:
    """Tensors of layers like those that the model has, but beyond its last: the config counts too few.

    unused: tensors that are stored and not the model's; own: the model's; prefix: that of its base model,
    which a checkpoint may leave out. Layers that predict several tokens ahead lie behind the last one in some
    families, whose configs count them apart. Everything else that is unused is some other part's.
    """
    last: dict[tuple[str, str], int] = {}
    for place, number in filter(None, (_numbered(name, prefix) for name in own)):
        last[place] = max(number, last.get(place, -1))
    nested = config.get("text_config")
    counts = [values.get(name) for values in (config, nested or {}) for name in _AHEAD]
    ahead = max((n for n in counts if isinstance(n, int)), default=0)
    found = ((name, _numbered(name, prefix)) for name in unused)
    return sorted(n for n, at in found if at is not None and at[1] > last.get(at[0], at[1]) + ahead)


def _numbered(name: str, prefix: str) -> tuple[tuple[str, str], int] | None:
    """What stands before and behind the first number in a tensor's name, and the number."""
    match = _LAYER.fullmatch(name.removeprefix(f"{prefix}."))
    return None if match is None else ((match[1], match[3]), int(match[2]))
