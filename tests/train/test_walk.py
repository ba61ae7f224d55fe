"""The whole way as a person types it: data, capture, train, load, generate; the tokens of plain decoding."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

import slipstream
from slipstream.cli.main import build_app
from slipstream.core.params import SamplingParams
from slipstream.testing.tiny import save_tiny

PROMPTS = [
    "add two numbers",
    "sort a list",
    "read a file",
    "what is a stack",
    "reverse a string",
    "count words",
]
FAST = ["--steps", "6", "--batch-size", "4", "--measure-every", "0", "--lr", "0.01"]

Call = Callable[..., Result]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a draft, answers of the target, and its states for every method."""
    root = tmp_path_factory.mktemp("walk")
    save_tiny(root / "target", layers=3, dtype=torch.bfloat16)
    save_tiny(root / "draft", seed=1, layers=2)
    save_tiny(root / "other", seed=2, layers=3)
    (root / "prompts.txt").write_text("\n".join(PROMPTS))
    target = str(root / "target")
    run(
        "data", target, "--prompts", str(root / "prompts.txt"), "-o", str(root / "data"),
        "--max-tokens", "16", "--held-out", "0.3", "--temperature", "0",
    )  # fmt: skip
    run(
        "capture", target, "--data", str(root / "data"), "-o", str(root / "states"),
        "--last", "--layers", "1,2,3", "--top-k", "8",
    )  # fmt: skip
    return root


def call(*arguments: str) -> Result:
    return CliRunner().invoke(build_app(), ["train", *arguments])


def run(*arguments: str) -> Result:
    found = call(*arguments)
    assert found.exit_code == 0, found.output
    return found


def refused(*arguments: str) -> str:
    """The one line of an error."""
    found = call(*arguments)
    assert found.exit_code == 2, found.output
    lines = [line for line in found.stderr.splitlines() if line.startswith("slipstream: error:")]
    assert len(lines) == 1 and "Traceback" not in found.output
    return lines[0]


def same_tokens(root: Path, drafter: str, model: str = "target") -> None:
    with slipstream.load(str(root / model)) as session:
        params = SamplingParams(max_tokens=16, temperature=0.8, seed=3, ignore_eos=True)
        plain = session.generate("sort a list", params)
        session.use(drafter)
        drafted = session.generate("sort a list", params)
        assert drafted.tokens == plain.tokens and drafted.counts.draft_tokens > 0


METHODS: dict[str, tuple[list[str], str]] = {
    "medusa": (["--heads", "2", "--share-output", "--draft-vocab", "40"], "medusa:heads={},topk=1x1"),
    "eagle": (["--draft-vocab", "40", "--taps", "1,2,3"], "eagle:heads={},top_k=1"),
    "draft": (["--from", "{}/draft", "--keep-every", "2"], "draft_model:model={}"),
}


@pytest.mark.parametrize(
    ("method", "source"),
    [("medusa", "states"), ("eagle", "states"), ("draft", "states"), ("medusa", "online")],
)
def test_a_trained_drafter_drafts_and_changes_nothing(
    root: Path, tmp_path: Path, method: str, source: str
) -> None:
    options, use = METHODS[method]
    fed = (
        ["--data", str(root / "states")] if source == "states" else ["--data", str(root / "data"), "--online"]
    )
    options = [o.format(root) for o in options]
    found = run(method, str(root / "target"), *fed, "-o", str(tmp_path), *options, *FAST, "--json")
    told = json.loads(found.stdout)
    assert told["steps"] == 6 and told["expected"]["tau"] >= 1.0
    assert "expected tau" in found.stderr and str(tmp_path) in told["drafter"]
    same_tokens(root, use.format(tmp_path))


def test_the_same_command_again_has_nothing_to_do(root: Path, tmp_path: Path) -> None:
    command = [
        "eagle",
        str(root / "target"),
        "--data",
        str(root / "states"),
        "-o",
        str(tmp_path),
        *FAST,
        "--json",
    ]
    first, again = (json.loads(run(*command).stdout) for _ in range(2))
    assert first["loss"] == again["loss"] and first["tokens"] == again["tokens"]


def test_stored_and_online_states_train_the_same(root: Path, tmp_path: Path) -> None:
    losses = []
    for name, fed in (("a", ["states"]), ("b", ["data", "--online"])):
        found = run(
            "eagle", str(root / "target"), "--data", str(root / fed[0]), *fed[1:], "-o", str(tmp_path / name),
            "--version", "1", *FAST, "--json",
        )  # fmt: skip
        losses.append(json.loads(found.stdout)["loss"])
    assert losses[0] == losses[1]


def test_sft_needs_no_states(root: Path, tmp_path: Path) -> None:
    run(
        "draft", str(root / "target"), "--data", str(root / "data"), "-o", str(tmp_path),
        "--from", str(root / "draft"), "--loss", "sft", *FAST,
    )  # fmt: skip
    same_tokens(root, f"draft_model:model={tmp_path}")


def test_medusa_2_writes_a_target_of_its_own(root: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    data = ["--data", str(root / "states")]
    run("medusa", str(root / "target"), *data, "-o", str(tmp_path / "one"), "--heads", "2", *FAST)
    found = run(
        "medusa",
        str(root / "target"),
        *data,
        "-o",
        str(tmp_path / "two"),
        "--joint",
        str(tmp_path / "one"),
        *FAST,
    )
    assert "changes the model" in found.stderr
    note: dict[str, Any] = json.loads((tmp_path / "two" / "slipstream.json").read_text())
    assert note["changes_target"] and note["changed_target"] == "target"
    with slipstream.load(str(root / "target")) as old, slipstream.load(str(tmp_path / "two/target")) as new:
        weights = [s.engine.runner.model.get_input_embeddings().weight for s in (old, new)]
        assert torch.equal(*weights)
    same_tokens(tmp_path, f"medusa:heads={tmp_path}/two,topk=1x1", "two/target")


def test_options_that_would_be_ignored_are_refused(root: Path, tmp_path: Path) -> None:
    target, out = str(root / "target"), ["-o", str(tmp_path / "out")]
    states = ["--data", str(root / "states")]
    joint = ["medusa", target, *states, *out, "--joint", str(root)]
    for ignored in (["--heads", "3"], ["--layers", "2"], ["--share-output"], ["--draft-vocab", "9"]):
        assert "leave out --heads" in refused(*joint, *ignored)
    assert "needs --joint" in refused("medusa", target, *states, *out, "--lora", "4")
    sft = ["draft", target, *states, *out, "--from", target, "--loss", "sft"]
    assert "leave --temperature out" in refused(*sft, "--temperature", "0.7")
    prompts = ["data", target, "--prompts", str(root / "prompts.txt"), *out]
    kept = [*prompts, "--keep-answers"]
    for name, value in (
        ("--temperature", "0"),
        ("--batch", "2"),
        ("--drafter", "ngram"),
        ("--weights", "int8"),
    ):
        assert f"leave out {name}" in refused(*kept, name, value)
    for name, value in (("--split", "test"), ("--config", "x")):
        assert "--split and --config" in refused(*prompts, name, value)
    assert not (tmp_path / "out").exists()


def test_what_a_training_reads_is_not_written_over(root: Path, tmp_path: Path) -> None:
    copied = tmp_path / "draft"
    shutil.copytree(root / "draft", copied)
    before = {p.name: p.read_bytes() for p in copied.iterdir()}
    data = ["--data", str(root / "states")]
    draft = ["draft", str(root / "target"), *data, "--from", str(copied)]
    assert "what the training reads" in refused(*draft, "-o", f"{copied}/../draft", *FAST)
    assert "what the training reads" in refused(*draft, "-o", str(root / "states"), *FAST)
    assert "what the training reads" in refused(*draft, "-o", str(root / "target"), *FAST)
    assert {p.name: p.read_bytes() for p in copied.iterdir()} == before
    assert "not empty and holds no training" in refused(
        "medusa", str(root / "target"), *data, "-o", str(copied)
    )


def test_adapters_of_another_start_are_not_gone_on_with(root: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    start = tmp_path / "start"
    shutil.copytree(root / "draft", start)
    command = [
        "draft", str(root / "target"), "--data", str(root / "data"), "-o", str(tmp_path / "out"),
        "--from", str(start), "--loss", "sft", "--lora", "2", *FAST,
    ]  # fmt: skip
    run(*command)
    shutil.rmtree(start)
    save_tiny(start, seed=5, layers=2)
    assert "trained with from_weights" in refused(*command)


def test_mistakes_are_told_in_one_line(root: Path, tmp_path: Path) -> None:
    target, other = str(root / "target"), str(root / "other")
    out = ["-o", str(tmp_path / "out")]
    states, data = ["--data", str(root / "states")], ["--data", str(root / "data")]
    assert "another target" in refused("medusa", other, *states, *out)
    assert "another target" in refused("medusa", other, *data, "--online", *out)
    assert "--online" in refused("eagle", target, *data, *out)
    assert "leave --online out" in refused("eagle", target, *states, "--online", *out)
    assert "no training data" in refused("medusa", target, "--data", str(tmp_path), *out)
    assert "--version" in refused("eagle", target, *states, *out, "--version", "2")
    assert "no --draft-vocab" in refused(
        "eagle", target, *states, *out, "--version", "1", "--draft-vocab", "9"
    )
    assert "--draft-vocab must be" in refused("medusa", target, *states, *out, "--draft-vocab", "9999")
    assert "--precision" in refused("medusa", target, *states, *out, "--precision", "fp8")
    assert "batch_size" in refused("medusa", target, *states, *out, "--batch-size", "0")
    assert "--loss" in refused("draft", target, *states, *out, "--from", target, "--loss", "mse")
    assert "tapped at" in refused("eagle", target, *states, *out, "--taps", "1,2,7")
    assert "tapped at" in refused("eagle", target, *states, *out, "--taps=-1,1,2")
    for method, option in (
        ("medusa", "--heads"),
        ("medusa", "--layers"),
        ("eagle", "--layers"),
        ("eagle", "--mlp"),
    ):
        assert "parameters needs" in refused(method, target, *states, *out, option, str(10**12))
    for taps in ("2,1,3", "1,1,2"):
        assert "must ascend" in refused("eagle", target, *states, *out, "--taps", taps)
    for temperature in ("0", "-1", "nan", "1e30"):
        assert "--temperature" in refused("eagle", target, *states, *out, "--temperature", temperature)
        assert "--temperature" in refused(
            "draft", target, *states, *out, "--from", target, "--temperature", temperature
        )
    for option, value in (("--noise", "nan"), ("--noise", "-1"), ("--mlp", "-5"), ("--layers", "0")):
        assert option in refused("eagle", target, *states, *out, option, value)
    assert "--keep-every" in refused("draft", target, *states, *out, "--from", target, "--keep-every", "0")
    assert not (tmp_path / "out").exists()
    run("medusa", target, *states, *out, *FAST)
    assert "trained with heads" in refused("medusa", target, *states, *out, *FAST, "--heads", "3")
    run("medusa", target, *states, *out, *FAST, "--heads", "3", "--restart")
