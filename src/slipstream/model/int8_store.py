"""Int8 weights of a checkpoint, kept on disk: made once, a layer at a time, and mapped when they are used.

int8/DIGEST-rR/part-00000.safetensors …   NAME.weight int8 [out, in] and NAME.scales float32 [out]

Every linear layer is kept, whatever its size, and the table of input embeddings, so that one copy serves
whatever is chosen when the model is loaded. The digest is that of the checkpoint's weight files; R is the
recipe's number (`RECIPE`).
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

from slipstream.errors import ModelError
from slipstream.model.checkpoint import Checkpoint
from slipstream.model.embedding import Int8Embedding
from slipstream.model.int8 import Int8Linear, int8_bytes, quantisable, quantise
from slipstream.model.packed import Groups, put, release_pages, units
from slipstream.model.progress import Progress
from slipstream.model.store import (
    Store,
    file_digest,
    manifest,
    reading_errors,
    require_room,
    whole_folder,
)
from slipstream.version import __version__

RECIPE = 1  # another number for other bits: symmetric, a scale an output channel, rounded half to even
_ALL: Mapping[str, torch.Tensor] = {}  # of every module all rows
PART_BYTES = 128 << 20  # so much is held before it is written; a larger weight is a part of its own


@dataclass(frozen=True)
class Int8Weights:
    """A complete folder. names: a module's name in the model -> file and name of its entry; modules that
    share a weight share the entry. kept: modules that have only these rows of it (`head.reduce_head`)."""

    folder: Path
    names: dict[str, tuple[str, str]]
    kept: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def open(
        cls, folder: Path, model: nn.Module, kept: Mapping[str, torch.Tensor] = _ALL
    ) -> Int8Weights | None:
        """None where the folder is missing, damaged, or not of this model's layers and sizes."""
        record = manifest(folder)
        try:
            names = {path: (file, name) for path, (file, name) in (record or {})["names"].items()}
            found = cls(folder, names, kept)
            fits = all(found._fits(path, weight) for path, weight in sources(model))
        except (KeyError, TypeError, ValueError, AttributeError, OSError, SafetensorError):
            return None
        return found if fits else None

    def _fits(self, path: str, weight: torch.Tensor) -> bool:
        file, name = self.names[path]
        with safe_open(self.folder / file, framework="pt") as stored:
            told = stored.get_slice(f"{name}.weight")
            scales = stored.get_slice(f"{name}.scales")
            found = [(t.get_dtype(), list(t.get_shape())) for t in (told, scales)]
            shape = [*weight.shape]
            if path in self.kept:  # of a longer one
                shape[0] = max(int(self.kept[path].amax()) + 1, told.get_shape()[0])
            return found == [("I8", shape), ("F32", shape[:1])]

    def get(self, path: str) -> tuple[torch.Tensor, torch.Tensor]:
        """A module's weight int8 [out, in], mapped where it has all rows, and its scales float32 [out]."""
        file, name = self.names[path]
        with safe_open(self.folder / file, framework="pt") as stored:
            weight, scales = stored.get_tensor(f"{name}.weight"), stored.get_tensor(f"{name}.scales").clone()
        if path not in self.kept:
            return weight, scales
        rows = weight[self.kept[path]], scales[self.kept[path]]
        release_pages(weight)
        return rows


def sources(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """What is kept of a model: the names of linear layers and of the input embedding, and their weights."""
    for found in quantisable(model, 0):
        yield found.path, found.linear.weight.detach()
    table = model.get_input_embeddings()  # type: ignore[operator]
    yield _name(model, table), table.weight.detach()


def int8_weights(
    checkpoint: Checkpoint,
    model: PreTrainedModel,
    load_stored: Callable[[], PreTrainedModel],
    progress: Progress,
    kept: Mapping[str, torch.Tensor] = _ALL,
) -> Int8Weights:
    """The int8 weights for a model that was loaded from this checkpoint; made now if need be.

    load_stored: loads it in the dtype it is stored in, so that weights are mapped and what is made does not
    depend on the dtype of `model`. kept: as of `Int8Weights`. Raises ModelError, CapacityError.
    """
    store = Store.default()
    folder = int8_folder(checkpoint, store, progress)
    found = Int8Weights.open(folder, model, kept)
    if found is not None:
        return found
    with store.lock(f"int8-{folder.name}", progress):
        found = Int8Weights.open(folder, model, kept)  # perhaps the process we waited for made it
        if found is None:
            _convert(load_stored(), folder, checkpoint.path.name, progress)
            found = Int8Weights.open(folder, model, kept)
    if found is None:
        raise ModelError(
            f"the int8 weights in {folder} are not those of {type(model).__name__}, although they were just"
            " made from it: load it without weights=int8"
        )
    return found


def int8_folder(checkpoint: Checkpoint, store: Store, progress: Progress) -> Path:
    """Where the int8 weights of a checkpoint belong. Reads its files through if they are not known yet."""
    with reading_errors(checkpoint.path):
        told = [f"{path.name} {file_digest(path, store, progress)}" for path in checkpoint.files]
    digest = hashlib.sha256("\n".join(told).encode()).hexdigest()
    return store.int8(f"{digest[:32]}-r{RECIPE}")


def _convert(model: PreTrainedModel, folder: Path, name: str, progress: Progress) -> None:
    unique = {weight.data_ptr(): weight for _, weight in sources(model)}
    total = sum(map(int8_bytes, unique.values()))
    names: dict[str, tuple[str, str]] = {}
    told: dict[str, Any] = {"source": name, "slipstream": __version__, "names": names}
    with whole_folder(folder, told) as partial:
        require_room(partial, total, f"the int8 copy of {name}")
        progress.stage(f"quantising {name} to int8", total)
        writer = _Writer(partial)
        done = 0
        known: dict[int, str] = {}
        for path, weight in sources(model):
            entry = known.setdefault(weight.data_ptr(), path)
            if entry == path:
                writer.add(path, *quantise(weight))
                release_pages(weight)
                done += int8_bytes(weight)
                progress.at(done)
            names[path] = (writer.file_of[entry], entry)
        writer.flush()


class _Writer:
    """Writes entries to part files. file_of: an entry's file, known as soon as it is added."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._waiting: dict[str, torch.Tensor] = {}
        self._parts = 0
        self.file_of: dict[str, str] = {}

    @property
    def _file(self) -> str:
        return f"part-{self._parts:05d}.safetensors"

    def add(self, name: str, weight: torch.Tensor, scales: torch.Tensor) -> None:
        self._waiting |= {f"{name}.weight": weight, f"{name}.scales": scales}
        self.file_of[name] = self._file
        if sum(t.nbytes for t in self._waiting.values()) >= PART_BYTES:
            self.flush()

    def flush(self) -> None:
        if self._waiting:
            save_file(self._waiting, self._folder / self._file)
            self._waiting = {}
            self._parts += 1


def use_int8(
    model: PreTrainedModel, weights: Int8Weights, *, embedding: bool = False, groups: Groups = ()
) -> None:
    """Replace the linear layers that gain, in place, and with `embedding` the table of input embeddings.

    Those of a group become one product. A layer or a group at a time: what a kernel has copied is let go of.
    Raises ModelError where the table cannot be replaced.
    """
    module = model.get_input_embeddings()
    table = module.weight
    found = {one.path: one for one in quantisable(model, embedding=embedding, groups=groups)}
    for names in units(found, groups):
        stored = [weights.get(path) for path in names]
        made = Int8Linear.together(stored, [found.pop(path).linear.bias for path in names])
        for path, layer, (quantised, _) in zip(names, made, stored, strict=True):
            put(model, path, layer)
            if path not in weights.kept:
                release_pages(quantised)
    if embedding:
        path = _name(model, module)
        others = [
            p for p, m in model.named_modules() if m is not module and table is m._parameters.get("weight")
        ]
        if others:
            raise ModelError(
                f"the embedding of {type(model).__name__} is also used by {others[0]}, so it cannot be int8:"
                " leave out embedding=int8"
            )
        put(model, path, Int8Embedding(*weights.get(path), module))
    gc.collect()


def _name(model: nn.Module, wanted: nn.Module) -> str:
    """A module's name from the model."""
    name: str = next(path for path, module in model.named_modules() if module is wanted)
    return name
