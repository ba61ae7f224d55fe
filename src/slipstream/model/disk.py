"""Files that grow while a run may be killed: whole lines, whole files, a plain word when the disk is full."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slipstream.core import jsontext
from slipstream.errors import CapacityError, ParameterError
from slipstream.model.progress import size
from slipstream.model.store import free_bytes as free_bytes
from slipstream.model.store import write_through


@contextmanager
def writing(where: Path) -> Iterator[None]:
    """Turns the operating system's errors into ours."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise CapacityError(
                f"the disk is full at {where}: free some room, then run the same command again (it resumes)"
            ) from error
        raise ParameterError(
            f"{where} cannot be written ({error.strerror or error}): check the path and its permissions"
        ) from error


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


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The JSON lines of a file that may end in half a line, which is cut off: what wrote it was killed."""
    if not path.exists():
        return
    good = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                break
            try:
                value = jsontext.parse(line)
            except ValueError as error:
                raise ParameterError(
                    f"{path}, line {number}: damaged ({error}): delete that line and run again"
                ) from None
            good += len(line)
            yield value
    if path.stat().st_size > good:
        with writing(path):
            os.truncate(path, good)
