"""Calibrating the session that will serve: what is measured, what is kept, and what is done without."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import slipstream
from slipstream import SamplingParams
from slipstream.control import GoodputConfig
from slipstream.cost.bundle import Bundle, read_bundle
from slipstream.cost.roofline import Free
from slipstream.drafters import build_drafter
from slipstream.engine.session import Session
from slipstream.errors import ParameterError
from slipstream.model import pack
from slipstream.model.progress import Silent
from slipstream.plan import calibrate as module
from slipstream.plan.calibrate import Calibrated, Offer, calibrate, corners, goodput_for, kept_at
from slipstream.plan.timing import step_seconds
from slipstream.testing.tiny import save_tiny

ROWS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny") / "target", layers=1)


@pytest.fixture(scope="module")
def session(folder: Path) -> Iterator[Session]:
    with slipstream.load(str(folder), max_rows=ROWS) as found:
        yield found


@pytest.fixture(scope="module")
def offers(session: Session, folder: Path) -> dict[str, Offer]:
    specs = {
        "small": f"draft_model:model={folder},num_speculative_tokens=3",
        "ngram": "ngram",
        "none": "none",
    }
    return {name: Offer(build_drafter(spec, session.info), spec) for name, spec in specs.items()}


@pytest.fixture(scope="module")
def bundle(session: Session, offers: dict[str, Offer]) -> Bundle:
    return calibrate(session, offers, ROWS)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, on a machine whose repeats never differ."""
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path))
    monkeypatch.setattr(module, "spread", lambda seconds: 0.0)
    return tmp_path


@pytest.fixture
def made(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> list[Bundle]:
    """Calibrations that were asked for, which all are `bundle`."""
    asked: list[Bundle] = []

    def take(*args: Any, **options: Any) -> Bundle:
        asked.append(bundle)
        return bundle

    monkeypatch.setattr(module, "calibrate", take)
    return asked


def found(session: Session, offers: dict[str, Offer], rows: int = ROWS, **options: Any) -> Calibrated:
    config = GoodputConfig(options.pop("curve", ""))
    got = goodput_for(session, offers, config, rows, progress=Silent(), **options)
    assert got is not None
    return got


def test_the_corners_are_plain_steps_and_whole_blocks() -> None:
    assert corners(1) == [(1, 1), (1, 4), (1, 8), (1, 16)]
    assert corners(2)[-5:] == [(2, 1), (2, 2), (2, 4), (2, 8), (2, 16)]
    assert corners(8)[-5:] == [(8, 1), (8, 2), (8, 4), (8, 8), (8, 16)]
    assert {r for r, _ in corners(12)} == {1, 2, 4, 8, 12}
    assert all(n == 1 or r * n % pack.ROWS == 0 for r, n in corners(12))
    assert max(r * n for r, n in corners(16)) == 128


def test_steps_and_every_drafter_that_drafts_are_measured_on_the_session_itself(
    session: Session, offers: dict[str, Offer], bundle: Bundle
) -> None:
    assert [(s.rows, s.nodes) for s in bundle.steps] == sorted(corners(ROWS), key=lambda p: (p[0] * p[1], p))
    timed = {(d.drafter, d.rows, d.depth) for d in bundle.drafts}
    small, ngram = offers["small"].spec, offers["ngram"].spec
    assert timed == {(small, 1, 8), (small, 3, 4), (small, 1, 1), (small, 1, 4)} | {
        (ngram, 1, 8), (ngram, 3, 4), (ngram, 1, 1), (ngram, 1, 4)
    }  # fmt: skip
    assert bundle.block == pack.ROWS and bundle.overhead
    assert session.drafter.name == "none" and not session.engine.has_work
    assert len(session.engine.runner.cache) == 0
    assert session.generate([1, 2, 3], SamplingParams(max_tokens=4)).tokens


def test_what_there_is_no_time_for_is_left_out_the_smallest_step_never(session: Session) -> None:
    grid = [(1, n, 4) for n in (1, 4, 8, 16)]
    (only,) = step_seconds(session.engine.runner, grid, 3, limit=0.0)
    assert (only.rows, only.nodes) == (1, 1) and len(only.seconds) == 1
    assert all(len(s.seconds) == 3 for s in step_seconds(session.engine.runner, grid, 3, limit=60.0))


def test_drafters_beyond_the_time_are_taken_to_be_free(session: Session, offers: dict[str, Offer]) -> None:
    late = calibrate(session, offers, 1, limit=1e-6)
    assert not late.drafts and [(s.rows, s.nodes) for s in late.steps] == [(1, 1)]
    assert isinstance(module._curves(late, offers["small"], pack.ROWS).draft, Free)


def test_it_is_measured_once_and_kept_for_the_next_start(
    session: Session, offers: dict[str, Offer], cache: Path, made: list[Bundle]
) -> None:
    first = found(session, offers)
    assert len(made) == 1 and "measured in" in first.told and "kept in" in first.told
    (file,) = (cache / "calibration").iterdir()
    assert read_bundle(file) == made[0]
    again = found(session, offers)
    assert len(made) == 1 and f"({file})" in again.told
    assert "more tokens a row cost at most 10 % at 1 row; " in again.told
    assert "small pays" in again.told and "ngram pays" in again.told


def test_another_batch_or_other_drafters_are_another_calibration(
    session: Session, offers: dict[str, Offer], cache: Path, made: list[Bundle]
) -> None:
    fewer = {"small": offers["small"]}
    files = {kept_at(session, o, r) for o in (offers, fewer) for r in (1, ROWS)}
    assert len(files) == 4 and kept_at(session, dict(offers), ROWS) in files


@pytest.mark.parametrize("text", ["", "{", '{"kind": "slipstream-measure"}', "\udcff"])
def test_a_damaged_file_is_measured_anew(
    text: str, session: Session, offers: dict[str, Offer], cache: Path, made: list[Bundle]
) -> None:
    file = kept_at(session, {n: o for n, o in offers.items() if o.depth}, ROWS)
    file.parent.mkdir()
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    assert "measured in" in found(session, offers).told and len(made) == 1
    assert read_bundle(file) == made[0]


def test_a_busy_machine_or_a_folder_that_takes_nothing_keeps_nothing(
    session: Session,
    offers: dict[str, Offer],
    cache: Path,
    made: list[Bundle],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "spread", lambda seconds: 0.5)
    assert "the machine is busy" in found(session, offers).told
    assert not (cache / "calibration").exists()
    monkeypatch.setattr(module, "spread", lambda seconds: 0.0)
    (cache / "calibration").write_text("a file where the folder should be")
    assert "cannot be written" in found(session, offers).told and len(made) == 2


def test_without_measuring_it_learns_and_without_a_drafter_there_is_nothing_to_decide(
    session: Session, offers: dict[str, Offer], cache: Path, made: list[Bundle]
) -> None:
    got = found(session, offers, measure=False)
    assert "learned on the way" in got.told and not made
    assert got.controller.depth_at(1, "small") > 0
    none = {"none": offers["none"]}
    assert goodput_for(session, none, GoodputConfig(""), ROWS, progress=Silent()) is None


def test_a_file_is_taken_as_it_is_and_must_have_the_default_drafter(
    session: Session, offers: dict[str, Offer], bundle: Bundle, tmp_path: Path, made: list[Bundle]
) -> None:
    file = tmp_path / "m.json"
    file.write_text(bundle.model_dump_json())
    got = found(session, offers, curve=str(file))
    assert f"as measured in {file}" in got.told and not made
    other = {"other": Offer(offers["small"].drafter, "suffix"), "ngram": offers["ngram"]}
    with pytest.raises(ParameterError, match="name one with goodput:drafter=NAME"):
        found(session, other, curve=str(file))


def test_decoding_with_it_says_what_plain_decoding_says(
    session: Session, offers: dict[str, Offer], bundle: Bundle
) -> None:
    params = SamplingParams(max_tokens=40)
    plain = session.generate([1, 2, 1, 2], params).tokens
    offer = offers["small"]
    from slipstream.control import Goodput

    session.use(offer.drafter, Goodput(GoodputConfig(""), module._curves(bundle, offer, pack.ROWS)))
    assert session.generate([1, 2, 1, 2], params).tokens == plain
    session.use("none")
