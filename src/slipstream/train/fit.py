"""The one loop that trains every drafter.

A step takes `accumulation` batches, divides their summed losses by their labels together, so splitting a
batch changes nothing but rounding, clips the gradients and lets AdamW move. All draws are keyed by
(seed, step, batch), all data by (seed, epoch): a run that was killed repeats itself from its last
checkpoint to the last bit.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch

from slipstream.errors import ParameterError, TrainingError
from slipstream.model import disk
from slipstream.train import checkpoint
from slipstream.train.acceptance import Acceptance, measure
from slipstream.train.checkpoint import Checkpoints, writing
from slipstream.train.curve import Curve, Scalars, Seen, Unwatched, Watch
from slipstream.train.device import accelerated, on_device, require_memory
from slipstream.train.method import Method, labels
from slipstream.train.provenance import TargetNote, provenance, seal
from slipstream.train.samples import Batch, Source
from slipstream.train.settings import FitSettings

SAVE_SECONDS = 600.0  # a checkpoint at least so often: where steps are slow, many would be lost
_HISTORY = ("runs", "last_run", "versions", "complete", "sources")  # of a data manifest: how it came to be
_OWN = re.compile(r"checkpoints|tensorboard|curve\.json|slipstream\.json")
Stopped = Literal["done", "tokens", "time", "interrupted"]


@dataclass(frozen=True)
class Fitted:
    """stopped: "done", the limit that ended it ("tokens", "time"), or "interrupted": then there is a
    checkpoint and no measurement. seconds and tokens over all calls."""

    folder: Path
    step: int
    total: int
    tokens: int
    seconds: float
    curve: Curve
    acceptance: Acceptance
    stopped: Stopped

    def to_json(self) -> dict[str, Any]:
        return {
            "stopped": self.stopped,
            "steps": self.step,
            "planned_steps": self.total,
            "tokens": self.tokens,
            "seconds": round(self.seconds, 1),
            "loss": self.curve.losses[-1] if self.curve.losses else None,
            "expected": {**self.acceptance.to_json(), "conditional": self.acceptance.conditional},
        }


def fit(
    method: Method,
    source: Source,
    out: Path,
    settings: FitSettings,
    target: TargetNote,
    *,
    arguments: Mapping[str, Any] | None = None,
    watch: Watch | None = None,
    restart: bool = False,
    draw: bool = True,
    interrupted: Callable[[], bool] = lambda: False,
) -> Fitted:
    """Train, resuming what lies in out/checkpoints, and write the drafter to `out`.

    arguments: what else decides the result (loss, sizes); kept, and compared on resuming. restart: throw
    earlier checkpoints away. draw: TensorBoard scalars and a picture of the curve, where their packages
    are installed. interrupted: asked before every step; True ends the call with a checkpoint. Raises
    TrainingError for no data, another run's checkpoint, or a loss that is no number; ParameterError for a
    folder with other things in it or that another process writes; CapacityError for memory or disk.
    Whatever happens, the last good checkpoint stays.
    """
    total = _total(source, settings)
    require_memory(method, settings)
    _require_own(out)
    identity: dict[str, Any] = {
        "kind": method.name,
        "target_fingerprint": target.fingerprint,
        "total": total,
        "settings": settings.decisive(),
        "arguments": dict(arguments or {}),
        "data": _digest(source.manifest),
    }
    with disk.alone(out), accelerated(settings) as accelerator:
        checkpoints = Checkpoints(out / "checkpoints")
        if restart:
            checkpoints.remove()
        _clear(out)
        run = _Run(
            method, source, out, settings, checkpoints, identity, watch or Unwatched(), accelerator, draw
        )
        stopped, acceptance = run.go(total, interrupted)
        fitted = Fitted(out, run.step, total, run.tokens, run.seconds, run.curve, acceptance, stopped)
        if stopped == "interrupted":
            return fitted
        note = provenance(
            method.name,
            target,
            arguments={**identity["arguments"], **settings.decisive()},
            data=source.manifest,
            run=fitted.to_json(),
            changes_target=method.changes_target,
        )
        _write(method, out, note)
    return fitted


class _Run:
    """A run in progress."""

    def __init__(
        self,
        method: Method,
        source: Source,
        out: Path,
        settings: FitSettings,
        checkpoints: Checkpoints,
        identity: Mapping[str, Any],
        watch: Watch,
        accelerator: Any,
        draw: bool,
    ) -> None:
        self._method, self._source, self._out, self._settings = method, source, out, settings
        self._checkpoints, self._identity, self._watch = checkpoints, identity, watch
        self._accelerator, self._draw = accelerator, draw
        self.step = self.tokens = 0
        self.seconds = 0.0
        self.curve = Curve()
        optimizer = torch.optim.AdamW(
            method.groups(settings.lr), betas=settings.betas, weight_decay=settings.weight_decay
        )
        self._bases = [group["lr"] for group in optimizer.param_groups]
        method.train()
        self._forward, self._optimizer = accelerator.prepare(method, optimizer)
        self._raw = optimizer
        self._resume()

    def _resume(self) -> None:
        last = self._checkpoints.last()
        if last is None:
            return
        progress = checkpoint.read_progress(last)
        _require_same(progress["identity"], self._identity, last)
        checkpoint.restore(last, self._method, self._raw)
        self.step, self.tokens = int(progress["step"]), int(progress["tokens"])
        self.seconds = float(progress["seconds"])
        self.curve = Curve.from_json(progress["curve"])
        self._watch.note(f"going on from step {self.step} ({last})")

    def go(self, total: int, interrupted: Callable[[], bool]) -> tuple[Stopped, Acceptance]:
        """All steps that are left, then the last checkpoint and measurement."""
        settings = self._settings
        batches = self._batches()
        scalars = Scalars(self._out / "tensorboard" if self._draw else None, self.step)
        begun, seconds, tokens, first = time.perf_counter(), self.seconds, self.tokens, self.step
        stopped: Stopped = "done"
        saved = 0.0
        self._watch.begin(self.step, total)
        try:
            while self.step < total:
                if interrupted():
                    self._save()
                    return "interrupted", Acceptance()
                if settings.max_tokens and self.tokens >= settings.max_tokens:
                    stopped = "tokens"
                    break
                if settings.minutes and time.perf_counter() - begun >= 60 * settings.minutes:
                    stopped = "time"
                    break
                rate = settings.rate(self.step, total)
                sums = self._train(list(islice(batches, settings.accumulation)), rate)
                spent = time.perf_counter() - begun
                self.seconds = seconds + spent
                seen = Seen(
                    step=self.step,
                    total=total,
                    loss=self.curve.losses[-1],
                    parts=sums,
                    rate=settings.lr * rate,
                    tokens=self.tokens,
                    speed=(self.tokens - tokens) / spent,
                    seconds_left=self._left(total, spent, self.step - first, self.tokens - tokens),
                    tau=self.curve.measured[-1]["tau"] if self.curve.measured else None,
                )
                scalars.step(seen)
                self._watch.step(seen)
                if self.step < total:
                    if settings.measure_every and self.step % settings.measure_every == 0:
                        self._measure(scalars)
                    if self.step % settings.checkpoint_every == 0 or spent >= saved + SAVE_SECONDS:
                        self._save()
                        saved = spent
            self._save()  # measuring takes a while, in which it may be killed
            acceptance = self._measure(scalars)
            self._draw_curve()
        finally:
            scalars.close()
        return stopped, acceptance

    def _train(self, pieces: list[Batch], rate: float) -> dict[str, float]:
        """One step; gives the parts of the loss a label. TrainingError if the loss is no number."""
        device = self._accelerator.device
        pieces = [on_device(piece, device) for piece in pieces]
        count = max(1, sum(labels(piece) for piece in pieces))
        sums: dict[str, torch.Tensor] = {}
        for number, piece in enumerate(pieces):
            if not labels(piece):
                continue
            found = self._forward(piece, self._generator(number))
            self._accelerator.backward(found["loss"] / count)
            for name, value in found.items():
                sums[name] = sums.get(name, 0.0) + value.detach()
        parts = {name: float(value) / count for name, value in sums.items()}
        loss = parts.pop("loss", 0.0)
        norm = float(self._accelerator.clip_grad_norm_(self._method.trained().values(), self._settings.clip))
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise self._not_a_number(loss)
        for group, base in zip(self._raw.param_groups, self._bases, strict=True):
            group["lr"] = base * rate
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.step += 1
        self.tokens += sum(int(piece.lengths.sum()) for piece in pieces)
        self.curve.losses.append(loss)
        return parts

    def _left(self, total: int, spent: float, steps: int, tokens: int) -> float:
        """Seconds until the last step or a limit; steps and tokens: what this call did in `spent` seconds."""
        left = spent / steps * (total - self.step)
        if self._settings.max_tokens:
            left = min(left, max(0, self._settings.max_tokens - self.tokens) * spent / max(1, tokens))
        if self._settings.minutes:
            left = min(left, max(0.0, 60 * self._settings.minutes - spent))
        return left

    def _measure(self, scalars: Scalars) -> Acceptance:
        settings = self._settings
        heldout = self._source.batches("heldout", epoch=0, batch_size=settings.batch_size, seed=settings.seed)
        limit = settings.heldout_batches or None
        found = measure(
            self._method, (on_device(b, self._accelerator.device) for b in islice(heldout, limit))
        )
        self.curve.measured = [m for m in self.curve.measured if m["step"] < self.step]
        self.curve.measured.append({"step": self.step, **found.to_json()})
        scalars.measured(self.step, found)
        self._watch.measured(self.step, found)
        return found

    def _save(self) -> None:
        if not all(bool(torch.isfinite(p).all()) for p in self._method.trained().values()):
            raise self._not_a_number(math.nan, "the weights")
        progress: dict[str, Any] = {"step": self.step, "tokens": self.tokens, "seconds": self.seconds}
        progress |= {"curve": self.curve.to_json(), "identity": self._identity}
        self._checkpoints.save(self.step, self._method, self._raw, progress)
        self._draw_curve()

    def _draw_curve(self) -> None:
        with writing(self._out):
            self.curve.write(self._out, self._draw)

    def _batches(self) -> Iterator[Batch]:
        """Training batches from where the run stands, epoch after epoch."""
        settings = self._settings
        done = self.step * settings.accumulation
        epoch, skip = divmod(done, _batches_an_epoch(self._source, settings))
        while True:
            yield from self._source.batches(
                "train", epoch=epoch, batch_size=settings.batch_size, seed=settings.seed, skip=skip
            )
            epoch, skip = epoch + 1, 0

    def _generator(self, number: int) -> torch.Generator:
        text = f"{self._settings.seed} {self.step} {number}".encode()
        key = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
        return torch.Generator(self._accelerator.device).manual_seed(key)

    def _not_a_number(self, loss: float, what: str = "the loss or its gradient") -> TrainingError:
        last = self._checkpoints.last()
        kept = f"the last good checkpoint is {last}" if last else "there was no checkpoint yet"
        return TrainingError(
            f"{what} became {loss if not math.isfinite(loss) else 'infinite'} in step"
            f" {self.step + 1}; {kept}. Train again with --restart and a lower --lr (it was"
            f" {self._settings.lr:g}), a longer --warmup, or --precision fp32"
        )


def _require_own(out: Path) -> None:
    """ParameterError for a folder with something else in it, which a drafter would be mixed into."""
    if not disk.is_empty(out) and not any(_OWN.fullmatch(p.name) for p in out.iterdir()):
        raise ParameterError(f"{out} is not empty and holds no training of ours: choose another --output")


def _clear(out: Path) -> None:
    """Remove what a killed run left half-written."""
    for leftover in (*out.glob("*.partial"), *out.glob("*.partial.png")):
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)


def _total(source: Source, settings: FitSettings) -> int:
    """Optimizer steps. TrainingError for an empty split."""
    for split in ("train", "heldout"):
        if source.size(split) < 1:  # type: ignore[arg-type]
            raise TrainingError(
                f"the {split} split of the data is empty: make data of at least two conversations, with"
                " --held-out above 0 (a folder keeps the share it was begun with)"
            )
    if settings.steps:
        return settings.steps
    batches = _batches_an_epoch(source, settings) * settings.epochs
    return max(1, math.ceil(batches / settings.accumulation))


def _batches_an_epoch(source: Source, settings: FitSettings) -> int:
    return math.ceil(source.size("train") / settings.batch_size)


def _require_same(before: Mapping[str, Any], now: Mapping[str, Any], folder: Path) -> None:
    """TrainingError, naming what differs, for the checkpoint of another run."""
    fix = "give another --output, or --restart to begin anew"
    if before["target_fingerprint"] != now["target_fingerprint"]:
        raise TrainingError(
            f"the checkpoint {folder} was trained on another target (fingerprint"
            f" {before['target_fingerprint']}, this one has {now['target_fingerprint']}): {fix}"
        )
    for part in ("settings", "arguments"):
        for key in before[part].keys() | now[part].keys():
            old, new = before[part].get(key), now[part].get(key)
            if old != new:
                raise TrainingError(f"the checkpoint {folder} was trained with {key} {old}, not {new}: {fix}")
    for key, what in (("kind", "method"), ("data", "data"), ("total", "number of steps")):
        if before[key] != now[key]:
            raise TrainingError(
                f"the checkpoint {folder} is of another {what} ({before[key]}, not {now[key]}): {fix}"
            )


def _digest(manifest: Mapping[str, Any]) -> str:
    """Of what the data are, not of the runs that made them."""

    def essence(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {k: essence(v) for k, v in value.items() if k not in _HISTORY}
        return value

    text = json.dumps(essence(manifest), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _write(method: Method, out: Path, note: Mapping[str, Any]) -> None:
    """The drafter's files in `out`, each whole or as it was; the config, without which it is none, last."""
    partial = out / f"drafter.{os.getpid()}.partial"
    with writing(out):
        try:
            method.save(partial, note)
            seal(partial)
            for file in sorted(partial.iterdir(), key=lambda p: p.name == "config.json"):
                if file.is_dir():
                    shutil.rmtree(out / file.name, ignore_errors=True)
                os.replace(file, out / file.name)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
