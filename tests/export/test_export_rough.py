"""An export is whole or absent, and goes nowhere but where it was told."""

from __future__ import annotations

import errno
import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError

from slipstream.errors import SlipstreamError
from slipstream.export.hf import export_hf
from slipstream.export.sglang import export_sglang
from slipstream.export.vllm import export_vllm
from slipstream.heads import files

KINDS = ["draft", "raw1", "raw3", "rawm"]


def drafter(kind: str, checkpoints: dict[str, str]) -> Path:
    """A draft model, and heads as they are trained."""
    return Path(checkpoints["target"]).parent / kind


def folders(root: Path) -> list[str]:
    return sorted(str(p.relative_to(root)) for p in root.rglob("*"))


@pytest.mark.parametrize("kind", KINDS)
def test_half_an_export_is_none(
    kind: str, checkpoints: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk, an error of the writing library, Ctrl-C: nothing is left, the next try goes through."""
    real_write, real_copy = files.write_atomic, shutil.copyfile
    arguments: Any = (drafter(kind, checkpoints), tmp_path / "out", Path(checkpoints["target"]))
    full = OSError(errno.ENOSPC, "No space left on device")
    for error, expected in (
        (full, SlipstreamError),
        (SafetensorError("I/O error"), SlipstreamError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ):

        def fails(*_: object, error: BaseException = error) -> None:
            raise error

        monkeypatch.setattr(files, "write_atomic", fails)
        monkeypatch.setattr(shutil, "copyfile", fails)
        for export in (export_vllm, export_hf):
            with pytest.raises(expected):
                export(*arguments)
            assert folders(tmp_path) == []
    monkeypatch.setattr(files, "write_atomic", real_write)
    monkeypatch.setattr(shutil, "copyfile", real_copy)
    export_vllm(*arguments)
    assert "out/config.json" in folders(tmp_path) and not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("export", [export_vllm, export_hf, export_sglang])
def test_where_it_may_not_be_written(
    kind: str, export: Callable[..., Any], checkpoints: dict[str, str], tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    for out in (file, file / "x", Path("."), tmp_path / "..", drafter(kind, checkpoints)):
        before = folders(drafter(kind, checkpoints))
        with pytest.raises(SlipstreamError):
            export(drafter(kind, checkpoints), out, Path(checkpoints["target"]))
        assert folders(drafter(kind, checkpoints)) == before
    assert folders(tmp_path) == ["file"] and file.read_text() == "mine"


def test_a_link_to_an_empty_folder_is_filled(checkpoints: dict[str, str], tmp_path: Path) -> None:
    real, link = tmp_path / "disk", tmp_path / "link"
    real.mkdir()
    link.symlink_to(real)
    export_vllm(Path(checkpoints["draft"]), link, Path(checkpoints["target"]))
    assert link.is_symlink() and (real / "config.json").is_file()


@pytest.mark.parametrize("kind", KINDS)
def test_what_it_says_to_start_is_quoted(kind: str, checkpoints: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "a b'$(c)"
    start = export_hf(drafter(kind, checkpoints), out, Path(checkpoints["target"])).start
    assert str(out) in shlex.split(start)[-1] and shlex.split(start)[:2] == ["slipstream", "run"]


@pytest.mark.parametrize(
    "change",
    [
        {"architectures": 5},
        {"architectures": None},
        {"vocab_size": None},
        {"hidden_size": "wide"},
        {"num_hidden_layers": [1]},
    ],
)
@pytest.mark.parametrize("which", ["eagle3", "target"])
def test_configs_of_the_wrong_kind(
    which: str, change: dict[str, Any], checkpoints: dict[str, str], tmp_path: Path
) -> None:
    copies = {name: tmp_path / name for name in ("eagle3", "target")}
    for name, copy in copies.items():
        shutil.copytree(checkpoints[name], copy)
    config = json.loads((copies[which] / "config.json").read_text())
    (copies[which] / "config.json").write_text(json.dumps({**config, **change}))
    try:
        export_vllm(copies["eagle3"], tmp_path / "out", copies["target"])
    except SlipstreamError:
        assert not (tmp_path / "out").exists()
    else:
        assert next(iter(change)) in ("architectures", "num_hidden_layers", "hidden_size", "vocab_size")
