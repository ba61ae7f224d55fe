"""The commands about models as a person types them: what is printed where, and the exit status."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from slipstream.cli import app, main
from slipstream.model import load, memory
from slipstream.model.hub import HubMiss
from slipstream.testing.quantised import every_size, lacks_int8
from slipstream.testing.tiny import save_tiny, save_tiny_gguf, tiny_model
from slipstream.version import __version__


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(load, "fetch_from_hub", lambda *_, **__: HubMiss("the hub is away"))
    monkeypatch.setattr(load, "cached_snapshot", lambda *_: None)
    return tmp_path / "cache"


def run(*arguments: str):
    return CliRunner().invoke(main.build_app(), list(arguments), prog_name="slipstream")


def test_pull_prints_the_folder_on_stdout_and_all_else_on_stderr(tmp_path, cache):
    path = save_tiny_gguf(tmp_path / "mine.gguf", tiny_model("qwen2", vocab_size=260))
    got = run("pull", str(path))
    assert got.exit_code == 0
    folder = Path(got.stdout.strip())
    assert folder.parent == cache / "models" and (folder / "model.safetensors").exists()
    assert "converting mine.gguf to bfloat16" in got.stderr and "is ready" in got.stderr


def test_pull_takes_several_and_keeps_what_came_before_one_that_fails(tmp_path, cache):
    one, two = save_tiny(tmp_path / "one"), save_tiny(tmp_path / "two")
    got = run("pull", str(one), str(two))
    assert got.exit_code == 0 and got.stdout.split() == [str(one), str(two)]
    broken = run("pull", str(one), str(tmp_path / "nowhere"), str(two))
    assert broken.exit_code == 2 and broken.stdout.split() == [str(one)]


def test_models_lists_the_catalogue_and_the_cache(tmp_path):
    run("pull", str(save_tiny_gguf(tmp_path / "mine.gguf", tiny_model("qwen2", vocab_size=260))))
    got = run("models")
    assert got.exit_code == 0 and got.stderr == ""
    assert "qwen2.5-coder-0.5b" in got.stdout and "slipstream pull qwen2.5-coder-1.5b" in got.stdout
    assert "mine-" in got.stdout
    listed = json.loads(run("models", "--json").stdout)
    assert [m["name"] for m in listed["catalogue"]] == ["qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b"]
    assert listed["catalogue"][0]["path"] is None
    assert listed["cached"][0]["source"] == "mine.gguf" and listed["cached"][0]["bytes"] > 0


@pytest.mark.skipif(lacks_int8(), reason="this CPU has no int8 products")
def test_models_lists_int8_copies(tmp_path):
    folder = save_tiny(tmp_path / "mine")
    load.load(str(folder), weights="int8")
    (copy,) = json.loads(run("models", "--json").stdout)["int8"]
    assert copy["of"] == "mine" and copy["bytes"] > 30_000
    table = run("models").stdout
    assert "INT8 WEIGHTS OF" in table and "mine" in table


def test_doctor_reports_the_machine():
    got = run("doctor")
    assert got.exit_code == 0 and got.stderr == ""
    for word in ("torch", "processor", "available of", "advised dtype", "qwen2.5-coder-1.5b"):
        assert word in got.stdout
    report = json.loads(run("doctor", "--json").stdout)
    assert report["versions"]["slipstream"] == __version__
    assert report["memory"]["total_bytes"] >= report["memory"]["available_bytes"] > 0
    assert report["advised_dtype"] in ("bfloat16", "float16", "float32")


def test_doctor_says_what_would_be_refused_and_why(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "available", lambda: 2_000_000_000)
    big, small = json.loads(run("doctor", "--json").stdout)["models"]
    assert "needs" in big["refused"] and "2.00 GB are available" in big["refused"]
    assert small["path"] is None


def test_doctor_checks_a_model(tmp_path):
    folder = save_tiny(tmp_path / "tiny")
    got = run("doctor", str(folder), "--json")
    assert got.exit_code == 0
    assert json.loads(run("doctor", "--model", str(folder), "--json").stdout)["models"][-1]["path"] == str(
        folder
    )
    assert json.loads(got.stdout)["models"][-1]["path"] == str(folder)
    os.truncate(folder / "model.safetensors", 100)
    got = run("doctor", str(folder))
    assert got.exit_code == 1 and "refused" in got.stdout and "fetch it again" in got.stdout


def test_doctor_predicts_the_memory_of_a_model_and_a_drafter(tmp_path):
    target, draft = save_tiny(tmp_path / "target"), save_tiny(tmp_path / "draft", layers=1)
    spec = f"draft_model:model={draft}"
    got = run("doctor", str(target), "--drafter", spec, "--context", "600", "--batch", "2", "--json")
    assert got.exit_code == 0 and got.stderr == ""
    plan = json.loads(got.stdout)["memory_plan"]
    assert (plan["drafter"], plan["context"], plan["batch"], plan["dtype"]) == (spec, 600, 2, "float32")
    cache = 2 * 2 * 8 * 4 * 1024 * 2  # k and v, heads, head_dim, fp32, columns, rows: of one layer
    assert plan["target"]["cache_bytes"] == 2 * cache and plan["drafter_memory"]["cache_bytes"] == cache
    assert plan["target"]["weight_bytes"] > plan["drafter_memory"]["weight_bytes"] > 80_000
    assert plan["fits"] is True and plan["needed_bytes"] < plan["available_bytes"]
    half = run("doctor", str(target), "--drafter", spec, "--dtype", "bfloat16", "--json")
    halved = json.loads(half.stdout)["memory_plan"]["target"]["weight_bytes"]
    assert halved == pytest.approx(plan["target"]["weight_bytes"] / 2, abs=100)
    table = run("doctor", str(target), "--drafter", spec).stdout
    assert "KEYS, VALUES" in table and "float32, 1 sequence of 2048 tokens" in table and ": fits" in table


@pytest.mark.skipif(lacks_int8(), reason="this CPU has no int8 products")
def test_doctor_knows_int8_weights(tmp_path, monkeypatch):
    with every_size():
        target = save_tiny(tmp_path / "target", tie=True)
        plans = []
        for options in ([], ["--weights", "int8"], ["--weights", "int8", "--embedding", "int8"]):
            report = json.loads(run("doctor", str(target), *options, "--json").stdout)
            plans.append(report["memory_plan"])
        assert [(p["weights"], p["embedding"]) for p in plans] == [
            ("plain", "plain"), ("int8", "plain"), ("int8", "int8"),
        ]  # fmt: skip
        sizes = [p["target"]["weight_bytes"] for p in plans]
        assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == 3
        room = plans[2]["needed_bytes"] + 1000
        monkeypatch.setattr(memory, "available", lambda: room)
        got = run("doctor", str(target))
        assert got.exit_code == 1 and "--weights int8" in got.stdout
        got = run("doctor", str(target), "--weights", "int8", "--embedding", "int8")
        assert got.exit_code == 0 and "int8 and float32, embedding int8, 1 sequence" in got.stdout


def test_doctor_refuses_what_does_not_fit_and_says_what_to_do(tmp_path, monkeypatch):
    target = str(save_tiny(tmp_path / "target"))
    monkeypatch.setattr(memory, "available", lambda: 2_000_000)
    fits = run("doctor", target, "--context", "512")
    assert fits.exit_code == 0 and "512 tokens" in fits.stdout and ": fits" in fits.stdout
    got = run("doctor", target, "--batch", "9")
    assert got.exit_code == 1
    assert "refused. Close other programs, or try --context 512, a smaller --batch" in got.stdout
    assert json.loads(run("doctor", target, "--batch", "9", "--json").stdout)["memory_plan"]["fits"] is False


def test_doctor_knows_from_the_catalogue_what_is_not_here():
    got = run("doctor", "--drafter", "draft_model:model=qwen2.5-coder-0.5b", "--dtype", "bfloat16", "--json")
    plan = json.loads(got.stdout)["memory_plan"]
    assert plan["model"] == "qwen2.5-coder-1.5b"
    assert [note.split(" is not on this machine")[0] for note in plan["notes"]] == [
        "qwen2.5-coder-1.5b",
        "qwen2.5-coder-0.5b",
    ]
    assert plan["drafter_memory"]["weight_bytes"] == pytest.approx(2 * 630_167_424, rel=1e-5)


def test_doctor_says_what_it_does_not_know(tmp_path):
    target = str(save_tiny(tmp_path / "target"))
    (tmp_path / "mine.py").write_text(
        "from slipstream.core.draft import Drafter\n"
        "from slipstream.drafters.none import NoConfig\n"
        "class Mine(Drafter):\n    name, Config = 'mine', NoConfig\n    def propose(self, asked): return []\n"
    )
    got = run("doctor", target, "--drafter", f"{tmp_path / 'mine.py'}:Mine")
    assert got.exit_code == 0
    assert "unknown: the drafter 'mine' does not tell" in got.stdout and "fits but for what is" in got.stdout


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--drafter", "ngrm"], "did you mean 'ngram'?"),
        (["--drafter", "ngram:max_m=2"], "did you mean 'max_n'?"),
        (["--drafter", "ngram:max_n=0"], "1 <= min_n <= max_n"),
        (["--drafter", "draft_model:model=some/where"], "some/where is not on this machine"),
        (["--drafter", "draft_model:model=./nowhere"], "there is no folder ./nowhere"),
        (["--drafter", "medusa:heads=./nowhere"], "there is no folder"),
        (["some/where", "--drafter", "ngram"], "some/where is not on this machine"),
        (["--drafter", "ngram", "--dtype", "int3"], "dtype must be"),
        (["--weights", "int3"], "weights must be plain or int8"),
        (["one", "--model", "other"], "two models were named, one and other"),
        (["--batch", "0"], "batch must be at least 1"),
        (["--context", "1"], "context must be at least 2"),
    ],
)
def test_a_mistake_to_doctor_is_one_line_and_exit_2(arguments, told):
    got = run("doctor", *arguments)
    assert got.exit_code == 2 and got.stdout == ""
    (line,) = got.stderr.splitlines()
    assert line.startswith("slipstream: error: ") and told in line


def test_a_model_of_which_nothing_is_known_is_no_failure():
    got = run("doctor", "some/where", "--json")
    assert got.exit_code == 0
    report = json.loads(got.stdout)
    assert report["memory_plan"] is None and "slipstream pull some/where" in report["models"][-1]["note"]


def test_help_and_version():
    assert run("--version").stdout == run("version").stdout == f"slipstream {__version__}\n"
    for arguments in ([], ["--help"], ["pull", "-h"], ["models", "--help"], ["doctor", "--help"]):
        got = run(*arguments)
        assert "Usage: slipstream" in got.output and got.exit_code == (0 if arguments else 2)


@pytest.mark.parametrize(
    "arguments",
    [["pull"], ["nonsense"], ["pull", "x", "--nonsense"], ["models", "extra"], ["doctor", "--drafter"]],
)
def test_wrong_usage_exits_2(arguments):
    got = run(*arguments)
    assert got.exit_code == 2 and got.stdout == ""
    assert "Error: " in got.stderr and "Traceback" not in got.stderr


@pytest.mark.parametrize("spec", ["qwen2.5-coder-0.6b", "./nowhere", "two\nlines", ""])
def test_a_mistake_is_one_line_and_exit_2(spec):
    got = run("pull", spec)
    assert got.exit_code == 2 and got.stdout == ""
    assert got.stderr.splitlines()[-1].startswith("slipstream: error: ")
    assert sum(line.startswith("slipstream: error: ") for line in got.stderr.splitlines()) == 1


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "file"))
    got = run("pull", "qwen2.5-coder-0.5b")
    assert got.exit_code == 2 and "SLIPSTREAM_CACHE" in got.stderr.splitlines()[-1]
    for command in ("models", "doctor"):
        assert run(command).exit_code == 0


def interrupted() -> None:
    """Stops as Ctrl-C would."""
    raise KeyboardInterrupt


def test_an_interrupt_exits_130(monkeypatch):
    commands: dict[str, Callable[..., None]] = {"stop": interrupted, "pull": app.COMMANDS["pull"]}
    monkeypatch.setattr(app, "COMMANDS", commands)
    got = run("stop")
    assert got.exit_code == 130 and got.stderr == "slipstream: interrupted\n"


def test_the_real_process_prints_no_traceback(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "slipstream.cli.main", "pull", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.splitlines()[-1].startswith(f"slipstream: error: {tmp_path} has no config.json")
    assert "Traceback" not in done.stderr
