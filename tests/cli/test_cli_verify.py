"""`slipstream verify` as a person types it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from slipstream.cli import main
from slipstream.core.fault import ENVIRONMENT, FAULTS

QUICK = (
    "--model", "tiny", "--dtype", "float32", "--limit", "2", "--tokens", "12", "--samples", "100",
    "--minutes", "10",
)  # fmt: skip


def run(*arguments: str, **env: str | None) -> Any:
    return CliRunner().invoke(
        main.build_app(), [*arguments], prog_name="slipstream", env={ENVIRONMENT: None, **env}
    )


def test_a_correct_pair_is_verified_for_a_person() -> None:
    got = run("verify", *QUICK)
    assert got.exit_code == 0, got.output
    for words in (
        "tiny (float32) with ngram on",
        "SAME TOKENS",
        "greedy, penalties",
        "one by one",
        "SAME LAW",
        "drawn tree",
        "FINDS",
        "a false alarm in 10,000 runs",
        "VERIFIED in",
        "answers are the same tokens, and 8 laws are the target's",
    ):
        assert words in got.stdout, words
    assert "DIFFERENCE" not in got.stdout and "planted" not in got.stdout
    assert "comparing with plain decoding" in got.stderr and "WARNING" not in got.stderr


def test_a_fault_is_told_found_and_shown(tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_text("abcabcabcabc\nhello hello hello\n")
    options = ("--fail-fast", "--prompts", str(file))
    got = run("verify", *QUICK, *options, **{ENVIRONMENT: "bonus"})
    assert got.exit_code == 1
    assert f"slipstream: WARNING: {ENVIRONMENT}=bonus: the output is WRONG ON PURPOSE" in got.stderr
    for words in ("planted: bonus", "BROKEN in", "DIFFERENCE", "no tie", "mine.txt:", "are other tokens"):
        assert words in got.stdout, words
    got = run("verify", *QUICK, *options, "--json", **{ENVIRONMENT: "bonus"})
    told = json.loads(got.stdout)
    assert got.exit_code == 1 and told["verdict"] == "broken" and told["about"]["fault"] == "bonus"
    assert told["plan"]["fail_fast"] and told["plan"]["seed"] == 0 and told["about"]["model"] == "tiny"
    assert any(d["margin"] is not None for c in told["identity"] for d in c["differences"])


def test_the_faults_are_listed() -> None:
    got = run("verify", "--faults")
    assert got.exit_code == 0 and "attends to its elder siblings" in got.stdout
    assert json.loads(run("verify", "--faults", "--json").stdout) == FAULTS


def test_every_command_says_that_a_fault_is_planted() -> None:
    for command in (["version"], ["controllers"], ["models"]):
        got = run(*command, **{ENVIRONMENT: "sibling"})
        assert got.exit_code == 0 and "slipstream: WARNING: SLIPSTREAM_FAULT=sibling" in got.stderr
        got = run(*command, **{ENVIRONMENT: "nothing"})
        assert got.exit_code == 2 and "there are threshold, residual" in got.stderr
        assert "WARNING" not in run(*command).stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--drafter", "ngrm"], "did you mean 'ngram'"),
        (["--drafter", "ngram:max_n=0"], "1 <= min_n <= max_n"),
        (["--controller", "nothing"], "unknown controller 'nothing'"),
        (["--prompts", "nowhere.txt"], "there is no file nowhere.txt"),
        (["--samples", "5"], "samples must be at least 100, not 5"),
        (["--minutes", "0"], "minutes must be above 0, not 0"),
        (["--minutes", "1e308"], "minutes must be at most 525600"),
        (["--limit", "0"], "--limit must be at least 1, not 0"),
        (["--threads", "0"], "threads must be from 1"),
        (["--rule", "typicl"], "rule must be one of auto, rejection, block, typical"),
        (["--model", "./no/such/folder"], "no folder ./no/such/folder"),
        (["--dtype", "int3"], "dtype must be auto, bfloat16, float16 or float32"),
    ],
)
def test_mistakes_are_one_line_and_exit_status_two(arguments: list[str], words: str) -> None:
    got = run("verify", *QUICK, *arguments)
    assert got.exit_code == 2 and got.stdout == ""
    told = [line for line in got.stderr.splitlines() if line.startswith("slipstream: error:")]
    assert len(told) == 1 and words in told[0]
