"""The two sources of training batches: states read from shards, or computed by the target when asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from slipstream.errors import ParameterError
from slipstream.model.identity import versions
from slipstream.train.capture import Captor, Captured, States, collate
from slipstream.train.dataset import DataSet
from slipstream.train.samples import Batch, Sample, Split
from slipstream.train.shards import SPLITS, read_states_manifest, tensor_name

Read = Callable[[int], tuple[Sample, States]]


def order(split: Split, count: int, *, epoch: int, seed: int) -> list[int]:
    """Which sample comes when: a shuffle by (seed, epoch) of "train", "heldout" as it is stored."""
    if split == "heldout":
        return list(range(count))
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % (1 << 63))
    return torch.randperm(count, generator=generator).tolist()


def _batches(
    chosen: Sequence[int], read: Read, captured: Captured, batch_size: int, skip: int
) -> Iterator[Batch]:
    if batch_size < 1 or skip < 0:
        raise ParameterError(f"a batch has at least 1 sample and 0 can be skipped, not {batch_size}, {skip}")
    for at in range(skip * batch_size, len(chosen), batch_size):
        pairs = [read(i) for i in chosen[at : at + batch_size]]
        yield collate([sample for sample, _ in pairs], [states for _, states in pairs], captured)


class StoredSource:
    """Batches from a folder of shards, memory-mapped: only the rows asked for are read.

    captured: what is needed of it, at most what is there (None: all that is there). target: the manifest's
    target must have these values. ParameterError names a shard that is missing, cut, or of another target.
    """

    def __init__(
        self, folder: Path, captured: Captured | None = None, target: Mapping[str, Any] | None = None
    ) -> None:
        self._folder = folder
        self._manifest = read_states_manifest(folder)
        there = Captured.from_json(self._manifest["captured"])
        self.captured = there if captured is None else captured
        absent = [k for k in self.captured.keys if k not in there.keys]
        if absent or self.captured.top_k > there.top_k:
            raise ParameterError(
                f"{folder} has the layers {list(there.keys)} and the {there.top_k} best logits; needed are"
                f" {list(self.captured.keys)} and {self.captured.top_k}: capture again with these"
            )
        if target is not None:
            self._check_target(target)
        self._files: dict[str, Any] = {}
        self._places: dict[Split, list[tuple[str, int, int]]] = {split: [] for split in SPLITS}
        for shard in self._manifest["shards"]:
            offsets = self._open(shard).get_tensor("offsets").tolist()
            spans = zip(offsets, offsets[1:], strict=False)
            self._places[shard["split"]] += [(shard["name"], start, end) for start, end in spans]

    def _check_target(self, target: Mapping[str, Any]) -> None:
        known = self._manifest["target"]
        for name in ("weights", "tokenizer", "dtype"):
            if name in target and known[name] != target[name]:
                raise ParameterError(
                    f"{self._folder} holds states of another target ({name} was {known[name]}, is"
                    f" {target[name]}): capture again with this target"
                )

    def _open(self, shard: Mapping[str, Any]) -> Any:
        path = self._folder / shard["name"]
        try:
            file: Any = safe_open(path, framework="pt")
        except (OSError, SafetensorError) as error:
            raise ParameterError(
                f"{path} is missing or cut ({error}): run slipstream train capture again, it resumes"
            ) from None
        if dict(file.metadata() or {}).get("identity") != shard["identity"]:
            raise ParameterError(
                f"{path} is of another target or of other data than {self._folder / 'manifest.json'} says:"
                " delete it and run slipstream train capture again"
            )
        self._files[shard["name"]] = file
        return file

    @property
    def manifest(self) -> Mapping[str, Any]:
        return self._manifest

    def size(self, split: Split) -> int:
        return len(self._places[split])

    def batches(
        self, split: Split, *, epoch: int, batch_size: int, seed: int, skip: int = 0
    ) -> Iterator[Batch]:
        places = self._places[split]
        chosen = order(split, len(places), epoch=epoch, seed=seed)
        return _batches(chosen, lambda i: self._read(*places[i]), self.captured, batch_size, skip)

    def _read(self, name: str, start: int, end: int) -> tuple[Sample, States]:
        file = self._files[name]

        def rows(tensor: str) -> torch.Tensor:
            return file.get_slice(tensor)[start:end]  # type: ignore[no-any-return]

        sample = Sample(tuple(rows("tokens").tolist()), tuple(rows("loss").tolist()))
        features = {key: rows(tensor_name(key)) for key in self.captured.keys}
        if not (k := self.captured.top_k):
            return sample, States(features)
        return sample, States(features, (rows("logit_values")[:, :k], rows("logit_ids")[:, :k]))


class OnlineSource:
    """Batches that the target computes as they are asked for: no disk, one target pass a sample and epoch.

    Without a captor the batches hold the text alone, which is all that a draft model needs to learn it.
    """

    def __init__(self, data: DataSet, captor: Captor | None, target: Mapping[str, Any]) -> None:
        self._data, self._captor = data, captor
        self._target = target

    @property
    def captured(self) -> Captured:
        return Captured() if self._captor is None else self._captor.captured

    @property
    def manifest(self) -> Mapping[str, Any]:
        counts = {s: {"samples": self.size(s), "tokens": self._tokens(s)} for s in SPLITS}
        return {
            "kind": "online",
            "target": dict(self._target),
            "captured": self.captured.to_json(),
            "dtype": self._target.get("dtype"),
            "counts": counts,
            "data": dict(self._data.manifest),
            "versions": versions(),
        }

    def _tokens(self, split: Split) -> int:
        return sum(len(s.tokens) for s in self._data.samples(split))

    def size(self, split: Split) -> int:
        return len(self._data.samples(split))

    def batches(
        self, split: Split, *, epoch: int, batch_size: int, seed: int, skip: int = 0
    ) -> Iterator[Batch]:
        samples = self._data.samples(split)
        chosen = order(split, len(samples), epoch=epoch, seed=seed)
        compute = self._captor or _nothing
        return _batches(chosen, lambda i: (samples[i], compute(samples[i])), self.captured, batch_size, skip)


def _nothing(sample: Sample) -> States:
    return States({})
