"""Where a path that somebody typed leads."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from slipstream.errors import ParameterError


def expanded(path: str | PathLike[str]) -> Path:
    """The path with the home folders that `~` and `~name` stand for; ParameterError where there is none."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ParameterError(f"{path} leads nowhere ({error}): write the folder in full") from None
