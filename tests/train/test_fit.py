"""The loop: resuming to the last bit, limits, splits of a batch, and what goes wrong."""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import math
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from slipstream.errors import CapacityError, ModelError, ParameterError, TrainingError
from slipstream.heads.io import load_medusa
from slipstream.model import disk
from slipstream.model.parts import ModelParts
from slipstream.testing.heads import random_eagle, random_medusa
from slipstream.testing.tiny import tiny_model
from slipstream.train import checkpoint
from slipstream.train.checkpoint import Checkpoints
from slipstream.train.curve import Seen, Unwatched
from slipstream.train.eagle import EagleMethod
from slipstream.train.fit import fit
from slipstream.train.medusa import MedusaMethod
from slipstream.train.method import Method
from slipstream.train.provenance import TargetNote
from slipstream.train.samples import Batch
from slipstream.train.settings import FitSettings

from .long_run import run
from .test_methods import samples
from .tiny_source import TinySource, quick_fit

V = 24
SETTINGS = FitSettings(lr=1e-2, steps=10, batch_size=2, checkpoint_every=3, measure_every=4)
LENGTHS = (9, 7, 12, 5, 8, 11, 6)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model(vocab_size=V)


@pytest.fixture
def source(model: PreTrainedModel) -> TinySource:
    return TinySource(model, samples(1, LENGTHS), samples(2, LENGTHS[:3]))


def medusa(model: PreTrainedModel) -> MedusaMethod:
    return MedusaMethod(random_medusa(model, 2), ModelParts.of(model))


def eagle(model: PreTrainedModel) -> EagleMethod:
    return EagleMethod(random_eagle(model, 1), ModelParts.of(model), steps=2, depth=2)


class Killed(Exception):
    pass


def dies_at(method: Method, step: int) -> Method:
    """The method, whose `step`-th forward of this call raises."""
    count = 0
    forward = method.forward

    def dying(batch: Batch, generator: torch.Generator) -> dict[str, torch.Tensor]:
        nonlocal count
        count += 1
        if count == step:
            raise Killed
        return forward(batch, generator)

    method.forward = dying  # type: ignore[method-assign]
    return method


@pytest.mark.parametrize("make", [medusa, eagle])
def test_a_killed_run_resumes_to_the_last_bit(
    model: PreTrainedModel, source: TinySource, tmp_path: Path, make: Any
) -> None:
    """EAGLE-1 draws noise, so this proves that draws are keyed as well."""
    whole = quick_fit(make(model), source, tmp_path / "whole", SETTINGS)
    for step in (2, 6):  # before the first checkpoint, and after the second one of what is left
        with pytest.raises(Killed):
            quick_fit(dies_at(make(model), step), source, tmp_path / "cut", SETTINGS)
    cut = quick_fit(make(model), source, tmp_path / "cut", SETTINGS)
    assert len(whole.curve.losses) == 10
    assert cut.curve.losses == whole.curve.losses
    assert cut.curve.measured == whole.curve.measured
    assert cut.tokens == whole.tokens and cut.acceptance == whole.acceptance
    weights = [tmp_path / name / "checkpoints/step-000010/weights.safetensors" for name in ("whole", "cut")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_resuming_skips_batches_without_computing_them(
    model: PreTrainedModel, source: TinySource, tmp_path: Path
) -> None:
    with pytest.raises(Killed):
        quick_fit(dies_at(medusa(model), 8), source, tmp_path, SETTINGS)
    again = TinySource(model, source.train, source.heldout)
    quick_fit(medusa(model), again, tmp_path, SETTINGS)
    trained = [chosen for split, chosen in again.made if split == "train"]
    assert len(trained) == 4  # steps 7 … 10


def test_a_process_killed_outright_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    """SIGKILL at any moment: the same command ends as if nothing had been."""
    script = Path(__file__).with_name("long_run.py")
    process = subprocess.Popen([sys.executable, str(script), str(tmp_path / "cut")])
    deadline = time.monotonic() + 120
    while not list((tmp_path / "cut").rglob("progress.json")) and time.monotonic() < deadline:
        assert process.poll() is None, "it ended before it could be killed"
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    for name in ("cut", "whole"):
        run(tmp_path / name)
    curves = [json.loads((tmp_path / name / "curve.json").read_text()) for name in ("cut", "whole")]
    assert curves[0] == curves[1]
    assert not list((tmp_path / "cut").rglob("*.partial"))


def test_splitting_a_batch_changes_nothing(
    model: PreTrainedModel, source: TinySource, tmp_path: Path
) -> None:
    """Four samples at once, or two and two: the loss is that of all their labels together."""
    train = source.train[:4]
    even = TinySource(model, train, source.heldout)
    at_once = replace(SETTINGS, batch_size=4)
    split = replace(SETTINGS, batch_size=2, accumulation=2)
    one = quick_fit(medusa(model), even, tmp_path / "one", at_once)
    two = quick_fit(medusa(model), even, tmp_path / "two", split)
    assert two.curve.losses == pytest.approx(one.curve.losses, rel=1e-5)


def test_a_loss_that_is_no_number_stops_and_keeps_the_last_checkpoint(
    model: PreTrainedModel, source: TinySource, tmp_path: Path
) -> None:
    method = medusa(model)
    forward, count = method.forward, 0

    def breaking(batch: Batch, generator: torch.Generator) -> dict[str, torch.Tensor]:
        nonlocal count
        count += 1
        found = forward(batch, generator)
        return {**found, "loss": found["loss"] * (float("nan") if count == 8 else 1.0)}

    method.forward = breaking  # type: ignore[method-assign]
    with pytest.raises(TrainingError, match="nan in step 8; the last good checkpoint is .*step-000006"):
        quick_fit(method, source, tmp_path, SETTINGS)
    assert all(p.isfinite().all() for p in method.parameters())
    assert not (tmp_path / "config.json").exists()
    resumed = quick_fit(medusa(model), source, tmp_path, SETTINGS)
    assert resumed.step == 10
    assert load_medusa(tmp_path, ModelParts.of(model)).config.num_heads == 2


def test_an_interrupted_run_keeps_what_it_has(
    model: PreTrainedModel, source: TinySource, tmp_path: Path
) -> None:
    asked: list[int] = []

    def interrupted() -> bool:
        asked.append(1)
        return len(asked) > 5

    whole = quick_fit(medusa(model), source, tmp_path / "whole", SETTINGS)
    cut = quick_fit(medusa(model), source, tmp_path / "cut", SETTINGS, interrupted=interrupted)
    assert cut.stopped == "interrupted" and cut.step == 5
    assert not (tmp_path / "cut/config.json").exists()
    rest = quick_fit(medusa(model), source, tmp_path / "cut", SETTINGS)
    assert rest.curve.losses == whole.curve.losses


def test_limits_stop_early_and_can_be_lifted(
    model: PreTrainedModel, source: TinySource, tmp_path: Path
) -> None:
    whole = quick_fit(medusa(model), source, tmp_path / "whole", SETTINGS)
    limited = replace(SETTINGS, max_tokens=whole.tokens // 2)
    first = quick_fit(medusa(model), source, tmp_path / "cut", limited)
    assert first.stopped == "tokens" and whole.tokens // 2 <= first.tokens < whole.tokens
    assert load_medusa(tmp_path / "cut", ModelParts.of(model)).config.num_heads == 2
    timed = quick_fit(medusa(model), source, tmp_path / "cut", replace(SETTINGS, minutes=1e-9))
    assert timed.stopped == "time" and timed.step == first.step
    rest = quick_fit(medusa(model), source, tmp_path / "cut", SETTINGS)
    assert rest.stopped == "done" and rest.curve.losses == whole.curve.losses


def test_a_run_that_is_done_is_not_trained_again(
    model: PreTrainedModel, source: TinySource, tmp_path: Path
) -> None:
    quick_fit(medusa(model), source, tmp_path, SETTINGS)
    again = quick_fit(dies_at(medusa(model), 1), source, tmp_path, SETTINGS)
    assert again.step == 10
    with pytest.raises(Killed):
        quick_fit(dies_at(medusa(model), 1), source, tmp_path, SETTINGS, restart=True)


def test_checkpoints_of_other_runs_are_refused(
    model: PreTrainedModel, source: TinySource, tmp_path: Path
) -> None:
    quick_fit(medusa(model), source, tmp_path, SETTINGS, arguments={"heads": 2})
    other = TargetNote("other", "0" * 32)
    with pytest.raises(TrainingError, match="another target.*--restart"):
        fit(medusa(model), source, tmp_path, SETTINGS, other, arguments={"heads": 2})
    with pytest.raises(TrainingError, match=r"trained with lr 0.01, not 0.1.*--out"):
        quick_fit(medusa(model), source, tmp_path, replace(SETTINGS, lr=0.1), arguments={"heads": 2})
    with pytest.raises(TrainingError, match="trained with heads 2, not 3"):
        quick_fit(medusa(model), source, tmp_path, SETTINGS, arguments={"heads": 3})
    with pytest.raises(TrainingError, match="another method"):
        quick_fit(eagle(model), source, tmp_path, SETTINGS, arguments={"heads": 2})
    fewer = TinySource(model, source.train[:3], source.heldout)
    with pytest.raises(TrainingError, match="another data"):
        quick_fit(medusa(model), fewer, tmp_path, SETTINGS, arguments={"heads": 2})
    larger = MedusaMethod(random_medusa(model, 3), ModelParts.of(model))
    with pytest.raises(ModelError, match="other weights"):
        quick_fit(larger, source, tmp_path, SETTINGS, arguments={"heads": 2})


def test_a_folder_with_other_things_in_it_is_refused(
    model: PreTrainedModel, source: TinySource, tmp_path: Path
) -> None:
    (tmp_path / "thesis.partial").mkdir()
    (tmp_path / "thesis.partial" / "chapter.txt").touch()
    with pytest.raises(ParameterError, match="not empty and holds no training"):
        quick_fit(medusa(model), source, tmp_path, SETTINGS)
    assert (tmp_path / "thesis.partial" / "chapter.txt").exists()
    (tmp_path / "file").touch()
    with pytest.raises(ParameterError, match="cannot be used"):
        quick_fit(medusa(model), source, tmp_path / "file", SETTINGS)


def test_two_runs_cannot_write_into_one_folder(
    model: PreTrainedModel, source: TinySource, tmp_path: Path
) -> None:
    busy = pytest.raises(ParameterError, match="another slipstream process")
    with disk.alone(tmp_path / "out"), busy:
        quick_fit(medusa(model), source, tmp_path / "out", SETTINGS, restart=True)


def test_a_checkpoint_that_is_half_deleted_is_none(
    model: PreTrainedModel, source: TinySource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed while old checkpoints go: what is being deleted has another name by then."""
    quick_fit(medusa(model), source, tmp_path, SETTINGS)
    checkpoints = Checkpoints(tmp_path / "checkpoints")

    def killed(folder: Path, **_: Any) -> None:
        (folder / "progress.json").unlink()
        raise Killed

    with monkeypatch.context() as dying:
        dying.setattr(checkpoint.shutil, "rmtree", killed)
        with pytest.raises(Killed):
            checkpoint._remove(checkpoints.found()[-1])
    assert [p.name for p in checkpoints.found()] == ["step-000009"]
    assert quick_fit(medusa(model), source, tmp_path, SETTINGS).step == 10


def test_weights_that_are_no_numbers_are_never_written(
    model: PreTrainedModel, source: TinySource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step can overflow them though its loss and gradients were fine."""

    def overflow(optimizer: torch.optim.Optimizer, closure: None = None) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.data.fill_(math.inf)

    monkeypatch.setattr(torch.optim.AdamW, "step", overflow)
    with pytest.raises(TrainingError, match="the weights became .*lower --lr"):
        quick_fit(medusa(model), source, tmp_path, replace(SETTINGS, steps=1))
    assert not Checkpoints(tmp_path / "checkpoints").found() and not (tmp_path / "config.json").exists()


def test_the_time_left_ends_at_the_first_limit(
    model: PreTrainedModel, source: TinySource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Seen] = []

    class Kept(Unwatched):
        def step(self, now: Seen) -> None:
            seen.append(now)

    clock = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))  # every look takes a second
    quick_fit(medusa(model), source, tmp_path / "steps", SETTINGS, watch=Kept())
    assert seen[-1].seconds_left == 0 < seen[-2].seconds_left < seen[0].seconds_left
    seen.clear()
    long = replace(SETTINGS, steps=100_000, measure_every=0)
    quick_fit(medusa(model), source, tmp_path / "tokens", replace(long, max_tokens=100), watch=Kept())
    assert len(seen) > 2
    for now in seen:
        assert now.seconds_left == pytest.approx(max(0, 100 - now.tokens) / now.speed)
    seen.clear()
    quick_fit(medusa(model), source, tmp_path / "time", replace(long, minutes=0.5), watch=Kept())
    assert len(seen) > 2
    for now in seen:
        assert now.seconds_left == pytest.approx(max(0.0, 30 - now.tokens / now.speed), abs=1e-6)


def test_a_run_that_is_killed_while_it_measures_has_all_its_steps(
    model: PreTrainedModel, source: TinySource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = replace(SETTINGS, measure_every=0, checkpoint_every=1000)

    def killed(*_: Any) -> None:
        raise Killed

    with monkeypatch.context() as dying:
        dying.setattr("slipstream.train.fit.measure", killed)
        with pytest.raises(Killed):
            quick_fit(medusa(model), source, tmp_path, settings)
    rest = quick_fit(dies_at(medusa(model), 1), source, tmp_path, settings)
    assert rest.step == 10 and len(rest.curve.measured) == 1


def test_slow_steps_are_kept_before_their_number_is_reached(
    model: PreTrainedModel, source: TinySource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count(step=400)
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))  # every look takes 400 seconds
    with pytest.raises(Killed):
        quick_fit(dies_at(medusa(model), 8), source, tmp_path, replace(SETTINGS, checkpoint_every=1000))
    assert [p.name for p in Checkpoints(tmp_path / "checkpoints").found()] == ["step-000004", "step-000006"]


def test_scalars_that_cannot_be_written_do_not_end_a_run(
    model: PreTrainedModel,
    source: TinySource,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.summary.writer.record_writer import RecordWriter

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    hook = threading.excepthook
    monkeypatch.setattr(RecordWriter, "write", full)
    assert quick_fit(medusa(model), source, tmp_path, SETTINGS, draw=True).step == 10
    assert "Traceback" not in capfd.readouterr().err and threading.excepthook is hook


def test_a_full_disk_leaves_what_was_there(
    model: PreTrainedModel, source: TinySource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = checkpoint.save_file, 0

    def full(*arguments: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > 3:
            raise checkpoint.SafetensorError("I/O error: No space left on device (os error 28)")
        real(*arguments)

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(CapacityError, match="disk is full.*resumes"):
        quick_fit(medusa(model), source, tmp_path, SETTINGS)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-000003"]
    monkeypatch.undo()

    def no_room(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint.os, "fsync", no_room)
    with pytest.raises(CapacityError, match="disk is full"):
        quick_fit(medusa(model), source, tmp_path, SETTINGS)
    monkeypatch.undo()
    assert quick_fit(medusa(model), source, tmp_path, SETTINGS).step == 10


def test_only_the_last_checkpoints_are_kept(
    model: PreTrainedModel, source: TinySource, tmp_path: Path
) -> None:
    (tmp_path / "checkpoints").mkdir(parents=True)
    (tmp_path / "checkpoints/step-000002.77.partial").mkdir()
    quick_fit(medusa(model), source, tmp_path, SETTINGS)
    assert [p.name for p in Checkpoints(tmp_path / "checkpoints").found()] == ["step-000009", "step-000010"]
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2


def test_damaged_checkpoints_are_named(model: PreTrainedModel, source: TinySource, tmp_path: Path) -> None:
    quick_fit(medusa(model), source, tmp_path, SETTINGS)
    file = tmp_path / "checkpoints/step-000010/weights.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ModelError, match="step-000010 is damaged"):
        quick_fit(medusa(model), source, tmp_path, SETTINGS)
    for text in ("", "{", "[]", '{"step": 3}', None):
        progress = tmp_path / "checkpoints/step-000010/progress.json"
        progress.unlink() if text is None else progress.write_text(text)
        with pytest.raises(ModelError, match="step-000010 is damaged .*: delete it and run again"):
            quick_fit(medusa(model), source, tmp_path, SETTINGS)
    shutil.rmtree(tmp_path / "checkpoints/step-000010")
    assert quick_fit(medusa(model), source, tmp_path, SETTINGS).step == 10


@pytest.mark.parametrize(
    ("number", "error"), [(27, CapacityError), (122, CapacityError), (30, ParameterError)]
)
def test_whatever_cannot_be_written_is_one_error_of_ours(tmp_path: Path, number: int, error: type) -> None:
    with pytest.raises(error), checkpoint.writing(tmp_path):
        raise checkpoint.SafetensorError(f"I/O error: cannot (os error {number})")


def test_what_cannot_be_trained_is_said_before_the_run(
    model: PreTrainedModel, source: TinySource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for split in ("train", "heldout"):
        with pytest.raises(TrainingError, match=f"the {split} split of the data is empty"):
            quick_fit(medusa(model), replace(source, **{split: []}), tmp_path)
    monkeypatch.setattr("slipstream.model.memory.available", lambda: 1000)
    with pytest.raises(CapacityError, match=r"training 5,\d+ parameters|training \d"):
        quick_fit(medusa(model), source, tmp_path, SETTINGS)
    rates = ("lr", "epochs", "weight_decay", "minutes", "warmup", "floor")
    for wrong in (
        *({"batch_size": 0}, {"lr": 0.0}, {"warmup": 1.0}, {"steps": -1}, {"epochs": 0.0}),
        *({"epochs": 1e308}, {"lr": 1e39}, {"weight_decay": 1e30}, {"seed": 1 << 63}, {"clip": math.nan}),
        *({name: value} for name in rates for value in (math.nan, math.inf)),
    ):
        with pytest.raises(ParameterError):
            FitSettings(**wrong)  # type: ignore[arg-type]


def test_mixed_precision_trains_float32_weights(
    model: PreTrainedModel, source: TinySource, tmp_path: Path
) -> None:
    for make in (medusa, eagle):
        full = quick_fit(make(model), source, tmp_path / make.__name__ / "fp32", SETTINGS)
        method = make(model)
        mixed = quick_fit(
            method, source, tmp_path / make.__name__ / "bf16", replace(SETTINGS, precision="bf16")
        )
        first, last = mixed.curve.losses[0], mixed.curve.losses[-1]
        assert first == pytest.approx(full.curve.losses[0], rel=0.02) and first != full.curve.losses[0]
        assert last < first
        assert all(p.dtype == torch.float32 for p in method.parameters())


def test_a_disk_without_room_is_said_before_writing(
    model: PreTrainedModel, source: TinySource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.model.disk.free_bytes", lambda folder: 1000)
    with pytest.raises(CapacityError, match=r"a checkpoint needs .* and 1\.00 kB are free.*resumes"):
        quick_fit(medusa(model), source, tmp_path, SETTINGS)
    assert not list((tmp_path / "checkpoints").iterdir())


def test_the_rate_rises_and_falls() -> None:
    settings = FitSettings(warmup=0.2, floor=0.1)
    rates = [settings.rate(step, 20) for step in range(20)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0] and rates[4] == 1.0
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[12] == pytest.approx(0.55) and rates[19] > 0.1


def test_the_note_beside_the_drafter_says_where_it_is_from(
    model: PreTrainedModel, source: TinySource, tmp_path: Path
) -> None:
    fitted = quick_fit(medusa(model), source, tmp_path, SETTINGS, arguments={"heads": 2})
    note = json.loads((tmp_path / "slipstream.json").read_text())
    assert note["target_fingerprint"] == ModelParts.of(model).fingerprint and note["kind"] == "medusa"
    assert note["data"] == dict(source.manifest) and not note["changes_target"]
    assert note["arguments"]["lr"] == 0.01 and note["arguments"]["heads"] == 2
    assert note["run"]["steps"] == 10 and note["run"]["expected"]["tau"] == fitted.acceptance.tau
    assert note["versions"]["torch"] == torch.__version__
    for name, digest in note["sha256"].items():
        assert hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() == digest
    assert "medusa_lm_head.safetensors" in note["sha256"]


def test_curves_are_drawn_where_the_packages_are(
    model: PreTrainedModel, source: TinySource, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    fitted = quick_fit(medusa(model), source, tmp_path, SETTINGS, draw=True)
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [e.step for e in events.Scalars("loss")] == list(range(1, 11))
    assert [e.value for e in events.Scalars("loss")] == pytest.approx(fitted.curve.losses)
    assert len(events.Scalars("heldout/tau")) == len(fitted.curve.measured) == 3
