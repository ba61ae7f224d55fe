"""Files that grow while a run may be killed: whole lines, whole files, a plain word when the disk is full."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import filelock

from slipstream.core import jsontext
from slipstream.errors import CapacityError, ParameterError
from slipstream.model.progress import size
from slipstream.model.store import free_bytes as free_bytes
from slipstream.model.store import write_through

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_LOCK = ".lock"


@contextmanager
def writing(where: Path) -> Iterator[None]:
    """Turns the operating system's errors into ours."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise CapacityError(
                f"the disk is full at {where}: free some room, then run the same command again (it resumes)"
            ) from error
        raise ParameterError(
            f"{where} cannot be written ({error.strerror or error}): check the path and its permissions"
        ) from error


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Makes a folder and holds it while the body runs: two writers would undo each other's work.

    ParameterError when another process holds it, or it cannot be written.
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / _LOCK, folder, f"into {folder}", "--output"):
        yield


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Holds a file that grows while the body runs, likewise."""
    with _locked(path.with_name(f".{path.name}{_LOCK}"), path, str(path), "--out"):
        yield


@contextmanager
def _locked(beside: Path, what: Path, told: str, option: str) -> Iterator[None]:
    lock = filelock.FileLock(beside)
    with writing(what):
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            raise ParameterError(
                f"another slipstream process is writing {told}: wait for it, or choose another {option}"
            ) from None
    try:
        yield
    finally:
        with suppress(OSError):  # elsewhere an open file cannot be removed; it does no harm
            beside.unlink()
        lock.release()


def is_empty(folder: Path) -> bool:
    """Whether nothing is in a folder, or only what a killed run left: locks and half-written files, whose
    names begin with a dot. True for one that is not there; ParameterError for what is no folder."""
    try:
        return all(p.name.startswith(".") for p in folder.iterdir())
    except FileNotFoundError:
        return True
    except OSError as error:
        raise ParameterError(f"{folder} cannot be used ({error.strerror}): choose another --output") from None


def require_room(folder: Path, needed: int, what: str) -> None:
    """CapacityError unless the folder's disk has so many bytes free."""
    free = free_bytes(folder)
    if needed > free:
        raise CapacityError(
            f"{what} needs {size(needed)} of disk at {folder} and {size(free)} are free: free some room,"
            " choose another disk, store less (--max-length, --limit-tokens, --top-k), or train with --online"
        )


def write_whole(path: Path, data: bytes) -> None:
    """The file is whole and on the disk, or it is not there."""
    with writing(path.parent):
        write_through(path.with_name(f".{path.name}.partial"), path, data)


def append_line(path: Path, value: Mapping[str, Any]) -> None:
    """One more JSON line, on the disk when this returns."""
    line = json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n"
    with writing(path), path.open("ab") as file:
        file.write(line.encode())
        file.flush()
        os.fsync(file.fileno())


def read_lines(path: Path, *, mend: bool = False) -> Iterator[dict[str, Any]]:
    """The JSON objects of a file, one a line. It may end in half a line, which does not count: what wrote it
    was killed, or is still writing. mend: cut that off, so that lines can be added; only for its writer."""
    if not path.exists():
        return
    good = 0
    try:
        opened = path.open("rb")
    except OSError as error:
        raise ParameterError(f"{path} cannot be read ({error.strerror}): choose another") from None
    with opened as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                break
            try:
                value = jsontext.parse(line)
                if not isinstance(value, dict):
                    raise ValueError("no JSON object")
            except ValueError as error:
                raise damaged(path, number, error) from None
            good += len(line)
            yield value
    if mend and path.stat().st_size > good:
        with writing(path):
            os.truncate(path, good)


def damaged(path: Path, number: int, error: Exception) -> ParameterError:
    """What is said of a line that is not as it was written."""
    return ParameterError(f"{path}, line {number}: damaged ({error}): delete that line and run again")
