"""How the process leaves without output, or when Ctrl-C comes early: a line at most, never a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slipstream.testing.tiny import save_tiny

COMMAND = [sys.executable, "-m", "slipstream.cli.main"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("leaving") / "target")


def finish(*arguments: str, **streams: Any) -> tuple[int, str]:
    """Exit status and stderr."""
    done = subprocess.run(
        [*COMMAND, *arguments], **{"stderr": subprocess.PIPE, **streams}, text=True, check=False, timeout=120
    )
    return done.returncode, done.stderr or ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", [("drafters",), ("drafters", "--json"), ("--help",), ("--version",)])
def test_a_full_device_is_one_line_and_status_2(arguments: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        status, told = finish(*arguments, stdout=full)
    assert (status, told) == (
        2,
        "slipstream: error: the output cannot be written: No space left on device; make room, or send it"
        " elsewhere\n",
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("more", [(), ("--json",)])
def test_an_answer_onto_a_full_device_too(folder: Path, more: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        status, told = finish("run", "hi", "--model", str(folder), "--max-tokens", "3", *more, stdout=full)
    assert status == 2 and told.splitlines()[-1].startswith("slipstream: error: the output cannot be written")
    assert "Traceback" not in told and "Exception ignored" not in told


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", [("drafters", "--nonsense"), ("run", "hi", "--drafter", "nonsense")])
def test_where_nothing_can_be_said_the_status_still_is_2(arguments: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        assert finish(*arguments, stdout=full, stderr=full)[0] == 2


@pytest.mark.parametrize("arguments", [("drafters",), ("drafters", "--json"), ("--help",)])
def test_a_pipe_that_nobody_reads_ends_quietly(arguments: tuple[str, ...]) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        assert finish(*arguments, stdout=write) == (141, "")
    finally:
        os.close(write)


@pytest.mark.parametrize("module", ["typer", "rich", "torch"])
def test_ctrl_c_while_modules_are_imported_exits_130(module: str, folder: Path) -> None:
    """A signal comes as a function of the import system asks for the module.

    Python's own handler is set first: whoever starts the tests in the background may have them ignore it.
    """
    code = (
        "import signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "class Finder:\n"
        "    def find_spec(self, name, *_):\n"
        f"        if name == {module!r}: signal.raise_signal(signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "from slipstream.cli.main import main\n"
        "main(sys.argv[1:])"
    )
    arguments = ["run", "hi", "--model", str(folder), "--max-tokens", "2"]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 130 and done.stdout == ""
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
