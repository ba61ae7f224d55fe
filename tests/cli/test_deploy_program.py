"""How vLLM's server is started: by its program, or past the CPU build's broken one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from slipstream.deploy.program import Program, find_program


def script(folder: Path, body: str, first: str = f"#!{sys.executable}") -> str:
    file = folder / "vllm"
    file.write_text(f"{first}\nimport sys\n{body}\n")
    file.chmod(0o755)
    return str(file)


def test_a_program_is_asked_for_its_version(tmp_path: Path) -> None:
    named = script(tmp_path, "print('INFO starting 1.2.3.4', '\\n0.33.0')")
    assert find_program(named) == Program((named, "serve"), "0.33.0")


def test_a_program_that_is_not_there_is_named_as_it_was() -> None:
    assert find_program("/nowhere/vllm") == Program(("/nowhere/vllm", "serve"), None)


def test_the_cpu_build_that_does_not_find_its_own_name_starts_as_a_module(tmp_path: Path) -> None:
    found = find_program(
        script(tmp_path, "sys.exit('PackageNotFoundError: No package metadata was found for vllm')")
    )
    assert found.words == (sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model")


@pytest.mark.parametrize("first", ["#!/usr/bin/env -S python3", "#!/bin/sh"])
def test_a_program_without_a_python_of_its_own_is_started_itself(tmp_path: Path, first: str) -> None:
    body = "sys.exit('No package metadata was found for vllm')" if "env" in first else "exit 3"
    named = script(tmp_path, body, first)
    assert find_program(named) == Program((named, "serve"), None)
