"""`slipstream plan` as a person types it."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from slipstream.cli import main
from slipstream.cli.plan import check_outputs
from slipstream.errors import ParameterError
from slipstream.plan.page import per_second, usd
from slipstream.testing.measured import fake_bundle

CONFIG = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
}  # fmt: skip
SMALL = {
    **CONFIG,
    "hidden_size": 1024,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "big.json").write_text(json.dumps(CONFIG))
    (tmp_path / "small.json").write_text(json.dumps(SMALL))
    (tmp_path / "m.json").write_text(fake_bundle().model_dump_json())
    return tmp_path


def run(*arguments: str):  # type: ignore[no-untyped-def]
    return CliRunner().invoke(main.build_app(), ["plan", *arguments], prog_name="slipstream")


ESTIMATE = (
    "--gpu",
    "h100",
    "--model-config",
    "big.json",
    "--draft-config",
    "small.json",
    "--acceptance",
    "0.8",
)


def test_an_estimate_needs_no_model(here: Path) -> None:
    got = run(*ESTIMATE, "--batch", "1,8,64", "--price", "3")
    assert got.exit_code == 0 and got.stderr == ""
    for words in (
        "estimate, nothing was measured",
        "Speculation pays",
        "memory-bound",
        "draft_model:model=small",
    ):
        assert words in got.stdout
    plan = json.loads(run(*ESTIMATE, "--batch", "1,8,64", "--price", "3", "--json").stdout)
    for scenario in plan["scenarios"]:
        assert f"\n  {scenario['flags']}\n" in got.stdout  # whole, so that it can be copied
    assert [b["batch"] for b in plan["batches"]] == [1, 8, 64] and plan["estimate"]
    first = plan["batches"][0]
    assert first["cost_per_million_before"] > first["cost_per_million_after"] > 0


def test_the_worked_example_of_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    section = text.split("### Worked example")[1].split("\n## ")[0]
    told = None
    for line in section.split("```sh\n")[1].split("```")[0].splitlines():
        words = shlex.split(line)
        if words[0] == "echo":
            Path(words[3]).write_text(words[1])
        else:
            assert words[:2] == ["slipstream", "plan"]
            told = json.loads(run(*words[2:], "--json").stdout)
    assert told is not None and f"*{told['verdict']}*" in section
    for b in told["batches"]:
        o = b["best"] or b["options"][0]
        plain = b["plain"]["tokens_per_second"]
        after = o["tokens_per_second"] if b["best"] else plain
        cells = (
            str(b["batch"]),
            b["regime"],
            str(o["num_speculative_tokens"]) if b["best"] else "none",
            f"{o['speedup']:.2f} ({o['speedup_low']:.2f}–{o['speedup_high']:.2f})",
            f"{per_second(plain)} → {per_second(after)}",
            f"{usd(b['cost_per_million_before'])} → {usd(b['cost_per_million_after'])}",
        )
        assert f"| {' | '.join(cells)} |" in section
    extra = told["batches"][2]["extra_verify_cost"]
    assert extra["4"] == pytest.approx(0.25, abs=0.01) and told["batches"][1]["extra_verify_cost"]["8"] < 0.01


def test_an_estimate_imports_no_torch(here: Path) -> None:
    code = (
        "import sys; from slipstream.cli.main import main\n"
        f"try: main(['plan', *{ESTIMATE!r}, '--json'])\n"
        "except SystemExit: pass\n"
        "sys.stderr.write(' '.join(sorted({'torch', 'transformers', 'matplotlib'} & set(sys.modules))))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=here, capture_output=True, text=True)
    assert done.returncode == 0 and json.loads(done.stdout)["estimate"]
    assert done.stderr == ""


def test_a_measured_plan_with_a_report(here: Path) -> None:
    got = run("--measured", "m.json", "--batch", "1,8", "--html", "report.html")
    assert got.exit_code == 0 and "report: report.html" in got.stderr
    assert "[measured]" in got.stdout and "tokens; from batch" in got.stdout
    assert (here / "report.html").read_text().startswith("<!doctype html>")
    assert {p.name for p in here.iterdir()} == {"big.json", "small.json", "m.json", "report.html"}


def test_what_if_on_a_measured_machine(here: Path) -> None:
    got = run("--measured", "m.json", "--batch", "1,8", "--acceptance", "0.6")
    assert got.exit_code == 0 and "[measured; what if: acceptance as given]" in got.stdout
    assert "assumed: acceptance is as given" in got.stdout


def test_the_machines_are_listed() -> None:
    assert "h100-sxm" in run("--gpus").stdout and "3350 GB/s" in run("--gpus").stdout
    assert {m["name"] for m in json.loads(run("--gpus", "--json").stdout)} >= {
        "a100-80gb",
        "rtx-4090",
        "epyc-9654",
    }


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--gpu", "h10"], "unknown GPU 'h10': did you mean h100"),
        (["--price", "-1"], "the price must be a positive number of USD an hour, not -1"),
        (["--acceptance", "1.2"], "1 drafts need one --acceptance"),
        (["--batch", ""], "there is no batch size: give --batch 1,8,64"),
        (["--batch", "0"], "a batch size must be at least 1, not 0"),
        (["--batch", "1,x"], "--batch must be whole numbers such as 1,8,64, not '1,x'"),
        (["--model-config", "none.json"], "none.json cannot be read (No such file or directory)"),
        (["--html", "no/where/r.html"], "the folder of no/where/r.html does not exist"),
        (["--dtype", "int3"], "unknown dtype 'int3'"),
        (["--gpu-count", "0"], "the number of GPUs must be at least 1"),
        (["--context", "0"], "context must be at least 1"),
    ],
)
def test_mistakes_are_one_line_and_exit_status_two(here: Path, arguments: list[str], words: str) -> None:
    given = {a: b for a, b in zip(ESTIMATE[::2], ESTIMATE[1::2], strict=True)}
    if arguments[0] == "--acceptance":
        given.pop("--draft-config")
        arguments = [*arguments, "--acceptance", "0.5"]
        words = "--acceptance must be a fraction from 0 to 1, not '1.2'"
        given.pop("--acceptance")
    given.pop(arguments[0], None)
    got = run(*(part for pair in given.items() for part in pair), *arguments)
    assert got.exit_code == 2 and got.stdout == ""
    assert words in got.stderr and got.stderr.count("\n") == 1
    assert not (here / "no").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--gpu and --model-config and --acceptance missing"),
        (["--gpu", "h100"], "--model-config and --acceptance missing"),
        (["--measured", "m.json", "--gpu", "h100"], "--gpu is for an estimate"),
        (["--measured", "m.json", "--gpu-count", "2"], "--gpu-count is for an estimate"),
        (["--measured", "m.json", "--draft-dtype", "int8"], "--draft-dtype is for an estimate"),
        (["--measured", "m.json", "--prompt-tokens", "0"], "prompt tokens must be at least 1, not 0"),
        (["--measured", "m.json", "--measured", "./m.json"], "m.json is given twice"),
        (["--measured", "."], ". cannot be read (Is a directory)"),
        (["--measured", "m.json", "--batch", "32"], "batch 32 was not measured, the most is 8 rows"),
        (["--measured", "none.json"], "none.json cannot be read"),
        (["--measured", "big.json"], "big.json is not a measurement of version 1: kind: Field required"),
        (["--acceptance", "80", "--gpu", "h100", "--model-config", "big.json"], "not '80' (0.8?)"),
    ],
)
def test_what_is_missing_is_named(here: Path, arguments: list[str], words: str) -> None:
    got = run(*arguments)
    assert got.exit_code == 2 and got.stdout == "" and got.stderr.count("\n") == 1
    assert words in got.stderr


def test_a_report_that_cannot_be_written_leaves_nothing(here: Path) -> None:
    (here / "taken").mkdir()
    os.mkfifo(here / "pipe")
    for place, words in (
        ("taken", "taken cannot be written (it is a folder)"),
        ("pipe", "pipe cannot be written (it is no ordinary file)"),
        ("x" * 300, "cannot be written (File name too long)"),
        ("m.json/r.html", "the folder of m.json/r.html does not exist"),
    ):
        got = run("--measured", "m.json", "--html", place)
        assert got.exit_code == 2 and got.stdout == "" and words in got.stderr
    with pytest.raises(ParameterError, match="a.json cannot be two files"):
        check_outputs(Path("a.json"), None, Path("./a.json"))
    assert {p.name for p in here.iterdir()} == {"big.json", "small.json", "m.json", "taken", "pipe"}


def test_names_are_shown_as_they_are(here: Path) -> None:
    bundle = fake_bundle(
        prices={"draft_model:model=a[b]": 0.015}, rates={"draft_model:model=a[b]": {"[/x] $a$": (0.8,)}}
    )
    (here / "odd.json").write_text(bundle.model_dump_json())
    got = run("--measured", "odd.json", "--html", "odd.html")
    assert got.exit_code == 0 and "--drafter draft_model:model=a[b] " in got.stdout
    assert "[/x] $a$" in (here / "odd.html").read_text()
