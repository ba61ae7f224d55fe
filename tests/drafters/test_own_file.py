"""A drafter in a file of one's own, written as people write files."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from slipstream.drafters import build_drafter, configure, predict_memory
from slipstream.drafters.base import TargetInfo
from slipstream.errors import DrafterError, ParameterError

FILE = """
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from slipstream.drafters.base import Drafter


@dataclass(frozen=True, slots=True)
class Config:
    mode: Literal[{modes}] = {modes}
    size: Literal[1, 2] = 1
    length: int | None = None
    free: Any = None

    def __post_init__(self):
        if self.free == "bad":
            raise ValueError("no such free")


class Mine(Drafter):
    name = "mine"
    Config = Config

    def __init__(self, config, target):
        self.room = config.length + target.context

    @classmethod
    def predict_memory(cls, config, target):
        return target.nonsense

    def propose(self, requests):
        return []
"""


def written(file: Path, mode: str) -> Path:
    file.parent.mkdir(exist_ok=True)
    file.write_text(FILE.format(modes=repr(mode)))
    return file


def test_annotations_may_be_text_and_files_may_have_the_same_name(tmp_path: Path) -> None:
    one, other = written(tmp_path / "a" / "mine.py", "x"), written(tmp_path / "b" / "mine.py", "y")
    first = configure(f"{one}:Mine")[0]
    assert configure(f"{other}:Mine:mode=y,length=3,free=text")[1].length == 3
    with pytest.raises(ParameterError, match="mode must be one of y, not 'x'"):
        configure(f"{other}:Mine:mode=x")
    kind, config = configure(f"{one}:Mine:mode=x,length=none,size=2")
    assert (config.mode, config.length, config.size, kind.name) == ("x", None, 2, first.name)


def test_a_file_that_breaks_leaves_no_module(tmp_path: Path) -> None:
    before = set(sys.modules)
    (tmp_path / "mine.py").write_text("import slipstream.drafters.base\n1 / 0\n")
    with pytest.raises(DrafterError, match="cannot be imported: ZeroDivisionError"):
        configure(f"{tmp_path / 'mine.py'}:Mine")
    assert not {m for m in set(sys.modules) - before if m.startswith("slipstream_drafter")}


def test_a_type_that_is_not_known_is_told(tmp_path: Path) -> None:
    file = written(tmp_path / "mine.py", "x")
    file.write_text(file.read_text().replace("Any, Literal", "Literal"))
    with pytest.raises(ParameterError, match="a type that is not known: name 'Any' is not defined"):
        configure(f"{file}:Mine:mode=x")


def test_whatever_it_raises_is_told_with_its_name_and_the_line(tmp_path: Path) -> None:
    file = written(tmp_path / "mine.py", "x")
    target = TargetInfo(24, 2048)
    with pytest.raises(
        DrafterError, match=r"mine.py:Mine' cannot be configured: ValueError: no such free \(mine.py"
    ):
        configure(f"{file}:Mine:free=bad")
    with pytest.raises(
        DrafterError, match=r"mine.py:Mine' cannot be built: TypeError: .* \(mine.py, line \d+\)"
    ):
        build_drafter(f"{file}:Mine", target)
    with pytest.raises(DrafterError, match="mine.py:Mine' cannot be asked for its memory: AttributeError"):
        predict_memory(f"{file}:Mine", target)  # type: ignore[arg-type]
    assert build_drafter(f"{file}:Mine:length=2", target).room == 2050  # type: ignore[attr-defined]
