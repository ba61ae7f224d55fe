"""Captured states on disk: safetensors shards of whole samples, each one whole or absent, and a manifest.

manifest.json               the target, the layers, dtype, shapes, shards
train-00000.safetensors     offsets [S + 1] and, of all its samples' tokens end to end: tokens [N] int32,
heldout-00000.safetensors   loss [N] bool, hidden.K and last [N, H], logit_values and logit_ids [N, k]
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from slipstream.errors import ParameterError
from slipstream.model import disk
from slipstream.model.identity import require_same, versions
from slipstream.model.store import read_json
from slipstream.train.capture import DTYPES, Captor, Captured, States
from slipstream.train.dataset import MANIFEST, DataSet
from slipstream.train.samples import Sample, Split

FORMAT = 1
SHARD_BYTES = 256_000_000
_FIELDS = ("target", "captured", "dtype", "shards")  # without which a manifest is none
SPLITS: tuple[Split, ...] = ("train", "heldout")


@dataclass(frozen=True)
class Shard:
    """Some samples of one split. identity: of the target, what is captured, and every token in it."""

    name: str
    split: Split
    samples: tuple[Sample, ...]
    identity: str

    @property
    def tokens(self) -> int:
        return sum(len(s.tokens) for s in self.samples)


@dataclass(frozen=True)
class Progress:
    """How far a capture is. done: computed; stored: in whole shards; tokens and seconds: of this run."""

    done_tokens: int
    stored_tokens: int
    total_tokens: int
    tokens: int
    seconds: float


@dataclass(frozen=True)
class Plan:
    """A capture before it runs: which shards there will be, which are there, what is still needed on disk."""

    folder: Path
    target: Mapping[str, Any]
    data: Mapping[str, Any]
    captured: Captured
    dtype: torch.dtype
    shards: tuple[Shard, ...]
    missing: tuple[Shard, ...]

    @property
    def bytes_per_token(self) -> int:
        return self.captured.bytes_per_token(int(self.target["hidden_size"]), self.dtype.itemsize)

    @property
    def total_bytes(self) -> int:
        return self.bytes_per_token * sum(s.tokens for s in self.shards)

    @property
    def needed_bytes(self) -> int:
        """What is still to be written."""
        return self.bytes_per_token * sum(s.tokens for s in self.missing)

    @property
    def manifest(self) -> dict[str, Any]:
        counts = {
            split: {
                "samples": sum(len(s.samples) for s in self.shards if s.split == split),
                "tokens": sum(s.tokens for s in self.shards if s.split == split),
                "loss_tokens": sum(sum(x.loss) for s in self.shards if s.split == split for x in s.samples),
            }
            for split in SPLITS
        }
        return {
            "kind": "states",
            "format": FORMAT,
            "target": dict(self.target),
            "captured": self.captured.to_json(),
            "dtype": str(self.dtype).removeprefix("torch."),
            "shapes": {
                "features": ["tokens", self.target["hidden_size"]],
                "logits": ["tokens", self.captured.top_k],
            },
            "counts": counts,
            "shards": [
                {"name": s.name, "split": s.split, "samples": len(s.samples), "identity": s.identity}
                for s in self.shards
            ],
            "data": dict(self.data),
            "versions": versions(),
        }


def plan_capture(
    folder: Path,
    target: Mapping[str, Any],
    data: DataSet,
    captured: Captured,
    *,
    dtype: str = "auto",
    shard_bytes: int = SHARD_BYTES,
) -> Plan:
    """What a capture into `folder` would write. dtype "auto" is the target's own, which keeps every bit.

    Raises ParameterError for a folder with states of another target, of other layers or of more tokens, and
    for data that another model answered.
    """
    name = str(target["dtype"]) if dtype == "auto" else dtype
    if name not in DTYPES:
        raise ParameterError(f"the stored dtype must be auto, {', '.join(DTYPES)}, not {name!r}")
    layers = int(target["num_layers"])
    if max(captured.hidden_layers, default=0) > layers:
        raise ParameterError(
            f"the target has {layers} layers: there is no stream after layer {max(captured.hidden_layers)}"
        )
    if not captured:
        raise ParameterError("nothing is to be captured: ask for layers, the last state, or logits")
    told = data.manifest.get("target", {})
    require_same(told, target, "answers", "the data folder", "tokenizer", "vocab_size")
    _check_folder(folder, target, captured, name)
    per_token = captured.bytes_per_token(int(target["hidden_size"]), DTYPES[name].itemsize)
    shards = []
    for split in SPLITS:
        for number, samples in enumerate(_groups(data.samples(split), max(1, shard_bytes // per_token))):
            seal = _identity(target, captured, name, samples)
            shards.append(Shard(f"{split}-{number:05}.safetensors", split, samples, seal))
    missing = tuple(s for s in shards if _seal_of(folder / s.name) != s.identity)
    planned, there = sum(s.tokens for s in shards), _stored_tokens(folder)
    if planned < there:
        raise ParameterError(
            f"{folder} holds the states of {there} tokens, more than the {planned} that are asked for now,"
            " and would lose them: ask for as many (--max-length, --limit-tokens), or choose another --output"
        )
    return Plan(folder, target, data.manifest, captured, DTYPES[name], tuple(shards), missing)


def _check_folder(folder: Path, target: Mapping[str, Any], captured: Captured, dtype: str) -> None:
    if disk.is_empty(folder):
        return
    if not (folder / MANIFEST).is_file():
        raise ParameterError(f"{folder} is not empty and holds no captured states: choose another --output")
    manifest = read_states_manifest(folder)
    require_same(manifest["target"], target, "states", folder)
    if manifest["captured"] != captured.to_json() or manifest["dtype"] != dtype:
        told = {**manifest["captured"], "dtype": manifest["dtype"]}
        raise ParameterError(
            f"{folder} holds other states (layers {told['hidden_layers']}, last {told['last_hidden']}, top_k"
            f" {told['top_k']}, {told['dtype']}): ask for the same, or choose another --output"
        )


def _stored_tokens(folder: Path) -> int:
    """Tokens in the whole shards of a folder of states."""
    total = 0
    for shard in read_states_manifest(folder)["shards"] if (folder / MANIFEST).is_file() else ():
        path = folder / shard["name"]
        if _seal_of(path) == shard["identity"]:
            file: Any = safe_open(path, framework="pt")
            total += int(file.get_tensor("offsets")[-1])
    return total


def _groups(samples: Sequence[Sample], most_tokens: int) -> Iterator[tuple[Sample, ...]]:
    group: list[Sample] = []
    count = 0
    for sample in samples:
        if group and count + len(sample.tokens) > most_tokens:
            yield tuple(group)
            group, count = [], 0
        group.append(sample)
        count += len(sample.tokens)
    if group:
        yield tuple(group)


def _identity(target: Mapping[str, Any], captured: Captured, dtype: str, samples: Sequence[Sample]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    named = {k: v for k, v in target.items() if k != "name"}
    digest.update(json.dumps([named, captured.to_json(), dtype], sort_keys=True).encode())
    for sample in samples:
        digest.update(torch.tensor([len(sample.tokens), *sample.tokens]).numpy().tobytes())
        digest.update(bytes(sample.loss))
    return digest.hexdigest()


def _seal_of(path: Path) -> str | None:
    """The identity a whole shard carries; None when it is absent or cut."""
    if not path.exists():
        return None
    try:
        file: Any = safe_open(path, framework="pt")  # checks header and length
        return dict(file.metadata() or {}).get("identity")
    except (OSError, SafetensorError):
        return None


def capture(
    plan: Plan,
    captor: Captor,
    *,
    report: Callable[[Progress], None] = lambda progress: None,
    stopped: Callable[[], bool] = lambda: False,
) -> bool:
    """Compute and write the missing shards; True when all are there, False when `stopped` said so.

    Disk room is checked first. A shard appears whole or not at all, so a run that is killed or meets a full
    disk loses at most one, and the same call goes on.
    """
    disk.require_room(plan.folder, plan.needed_bytes, "storing the states")
    with disk.alone(plan.folder):
        return _capture(plan, captor, report, stopped)


def _capture(
    plan: Plan, captor: Captor, report: Callable[[Progress], None], stopped: Callable[[], bool]
) -> bool:
    disk.write_whole(plan.folder / MANIFEST, (json.dumps(plan.manifest, indent=1) + "\n").encode())
    for leftover in plan.folder.glob("*.safetensors"):
        if leftover.name not in {s.name for s in plan.shards}:
            leftover.unlink()  # of a run that cut the data otherwise
    for leftover in plan.folder.glob(".*.safetensors.partial"):
        leftover.unlink()  # of a run that was killed while it wrote
    total = sum(s.tokens for s in plan.shards)
    before = stored = done = total - sum(s.tokens for s in plan.missing)
    began = time.perf_counter()
    for shard in plan.missing:
        states: list[States] = []
        for sample in shard.samples:
            if stopped():
                return False
            states.append(captor(sample))
            done += len(sample.tokens)
            if len(states) == len(shard.samples):
                disk.write_whole(plan.folder / shard.name, _packed(shard, states, plan))
                stored += shard.tokens
            report(Progress(done, stored, total, done - before, time.perf_counter() - began))
    return True


def _packed(shard: Shard, states: Sequence[States], plan: Plan) -> bytes:
    lengths = [0, *(len(s.tokens) for s in shard.samples)]
    tensors = {
        "offsets": torch.tensor(lengths).cumsum(0),
        "tokens": torch.tensor([t for s in shard.samples for t in s.tokens], dtype=torch.int32),
        "loss": torch.tensor([on for s in shard.samples for on in s.loss]),
    }
    for key in plan.captured.keys:
        tensors[tensor_name(key)] = torch.cat([s.features[key] for s in states]).to(plan.dtype)
    if plan.captured.top_k:
        pairs = [s.logits for s in states if s.logits is not None]
        tensors["logit_values"] = torch.cat([v for v, _ in pairs]).to(plan.dtype)
        tensors["logit_ids"] = torch.cat([i for _, i in pairs])
    note = {"identity": shard.identity, "weights": str(plan.target["weights"]), "split": shard.split}
    data: bytes = save(tensors, note)
    return data


def tensor_name(key: int | str) -> str:
    return f"hidden.{key}" if isinstance(key, int) else key


def read_states_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of captured states."""
    if not (folder / MANIFEST).is_file():
        raise ParameterError(
            f"{folder} has no {MANIFEST}: make it with slipstream train capture … -o {folder}"
        )
    manifest = read_json(folder / MANIFEST)
    if manifest.get("kind") != "states" or manifest.get("format") != FORMAT:
        raise ParameterError(
            f"{folder} holds no captured states of this version: make them with slipstream train capture"
        )
    if missing := [name for name in _FIELDS if name not in manifest]:
        raise ParameterError(f"{folder / MANIFEST} is damaged (no {missing[0]}): capture the states again")
    return manifest
