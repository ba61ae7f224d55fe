"""`slipstream serve`: mistakes are told at once, and a real process starts, answers and ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from slipstream.cli.main import main
from slipstream.cli.serve import drafter_specs
from slipstream.errors import ParameterError
from slipstream.serve.binding import claim, listen

COMMAND = [sys.executable, "-m", "slipstream.cli.main", "serve"]


def test_drafters_have_labels_and_plain_decoding_is_always_there() -> None:
    also = ["fast=ngram:max_n=2", "draft_model:model=x=y", "none"]
    assert drafter_specs("ngram", also) == {
        "ngram": "ngram",
        "fast": "ngram:max_n=2",
        "draft_model": "draft_model:model=x=y",
        "none": "none",
    }
    assert list(drafter_specs("none", ["suffix"])) == ["none", "suffix"]
    with pytest.raises(ParameterError, match="LABEL=ngram:max_n=3"):
        drafter_specs("ngram", ["ngram:max_n=3"])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["tiny", "--drafter", "ngramm"], "did you mean 'ngram'"),
        (["tiny", "--controller", "nothing"], "unknown controller"),
        (["tiny", "--controller", "goodput:curve=no.json"], "no.json cannot be read"),
        (["tiny", "--controller", "goodput:max_dept=3"], "did you mean 'max_depth'"),
        (["tiny", "--max-seconds", "0"], "limit seconds must be above 0"),
        (["tiny", "--grace", "inf"], "--grace"),
        (["tiny", "--cache-memory", "inf"], "--cache-memory"),
        (["tiny", "--served-model-name", ""], "--served-model-name"),
        (["tiny", "--metrics-prefix", "a b"], "prefix"),
        (["tiny", "--tool-form", "odd"], "unknown tool call form"),
        (["tiny", "--host", "203.0.113.1"], "cannot listen on 203.0.113.1:8000"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(
    options: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(["serve", *options])
    told = capsys.readouterr()
    assert left.value.code == 2 and says in told.err and told.out == ""
    assert len(told.err.strip().splitlines()) == 1


def test_of_two_servers_started_together_the_slower_is_told() -> None:
    with listen("127.0.0.1", 0) as first, listen("127.0.0.1", first.getsockname()[1]) as second:
        claim(first)
        with pytest.raises(ParameterError, match=r"cannot listen on 127\.0\.0\.1:\d+"):
            claim(second)


def test_it_starts_answers_and_ends_within_its_grace(tmp_path: Path) -> None:
    log = tmp_path / "log"
    options = ["tiny", "--port", "0", "--also", "suffix", "--grace", "0.2", "--cache-memory", "0.1"]
    options += ["--max-rows", "2", "--threads", "1"]
    cache = {**os.environ, "SLIPSTREAM_CACHE": str(tmp_path / "cache")}
    with log.open("w") as out:
        child = subprocess.Popen([*COMMAND, *options], stdout=out, stderr=out, env=cache)
    try:
        deadline = time.monotonic() + 120
        while not (found := re.search(r"at (http://\S+)", log.read_text())):
            assert child.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        with httpx.Client(base_url=found[1], transport=httpx.HTTPTransport(retries=20)) as http:
            assert set(http.get("/v1/models").json()["data"][0]["speculative"]["drafters"]) == {
                "ngram", "suffix", "none"
            }  # fmt: skip
            long = "a prompt that is longer than a chunk " * 60
            asked = {"prompt": long, "max_tokens": 2, "temperature": 0}
            told = [http.post("/v1/completions", json=asked).json() for _ in range(2)]
            cached = [t["usage"]["prompt_tokens_details"]["cached_tokens"] for t in told]
            assert cached[0] == 0 < cached[1] < told[1]["usage"]["prompt_tokens"]
            assert told[0]["choices"] == told[1]["choices"]
            body = {"prompt": "abc", "max_tokens": 1500, "ignore_eos": True, "stream": True}
            with http.stream("POST", "/v1/completions", json=body) as response:
                lines = response.iter_lines()
                next(lines)
                child.send_signal(signal.SIGTERM)
                told = [line for line in lines if line]
            assert "shutting down" in told[-1]
        child.wait(30)
    finally:
        child.kill()
        child.wait()
    assert re.search(
        r"slipstream: goodput: steps measured in .*; ngram pays .*; suffix pays ", log.read_text()
    )
    records = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    *_, again, request = [r for r in records if r.get("event") == "request"]
    assert again["cached_tokens"] == cached[1]
    assert request["status"] == 503 and request["stream"] and request["level"] == "info"
