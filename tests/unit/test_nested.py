"""JSON that is nested more deeply than Python can follow is one clear error that names the file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from slipstream.cli import main
from slipstream.core.choices import read_accuracies
from slipstream.core.jsontext import parse
from slipstream.cost.bundle import read_bundle
from slipstream.cost.machines import read_json_object
from slipstream.drafters._draft_vocab import read_ids
from slipstream.drafters._suffix_store import MAGIC, SuffixStore
from slipstream.errors import SlipstreamError
from slipstream.export.deploy_plan import read_plan
from slipstream.export.lint import lint
from slipstream.model.checkpoint import read_header
from slipstream.model.disk import read_lines
from slipstream.model.store import manifest, read_json
from slipstream.prompts.rows import read_rows
from slipstream.watch.history import read as read_history

DEEP = '{"prompt": ' + "[" * 100_000 + "]" * 100_000 + "}"

READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "prompts": (".jsonl", lambda path: read_rows([str(path)])),
    "prompts in an array": (".json", lambda path: read_rows([str(path)])),
    "plan": (".json", read_plan),
    "measurement": (".json", read_bundle),
    "machine": (".json", lambda path: read_json_object(path, "a machine")),
    "config": (".json", read_json),
    "journal": (".jsonl", lambda path: list(read_lines(path))),
    "history": (".jsonl", read_history),
    "draft vocabulary": (".json", read_ids),
    "accuracies": (".json", read_accuracies),
    "suffix store": ("", lambda path: SuffixStore(24, path=path)),
    "weights": (".safetensors", read_header),
}


@pytest.mark.parametrize("what", READERS)
def test_a_file_that_is_nested_too_deeply_is_named(what: str, tmp_path: Path) -> None:
    ending, read = READERS[what]
    path = tmp_path / f"deep{ending}"
    raw = (DEEP + "\n").encode()
    if what == "suffix store":
        raw = MAGIC + raw
    if what == "weights":
        raw = len(raw).to_bytes(8, "little") + raw
    path.write_bytes(raw)
    with pytest.raises(SlipstreamError) as told:
        read(path)
    assert str(path) in str(told.value) and "\n" not in str(told.value)
    assert "nested too deeply" in str(told.value) or "recursion" in str(told.value)


def test_a_manifest_that_is_nested_too_deeply_is_none(tmp_path: Path) -> None:
    (tmp_path / "slipstream.json").write_text(DEEP)
    assert manifest(tmp_path) is None


def test_what_is_nested_too_deeply_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        parse(DEEP)
    assert parse("[[1]]") == [[1]]


@pytest.mark.parametrize(
    "text",
    [
        DEEP,
        "speculative_config: " + "[" * 5000 + "]" * 5000,
        "LLM(model=" + "[" * 5000 + "]" * 5000 + ")",
        "LLM(model=" + "-" * 50_000 + "1)",
        "vllm serve m --speculative-config '" + DEEP + "'",
    ],
    ids=["json", "yaml", "python", "python operators", "command"],
)
def test_a_configuration_that_is_nested_too_deeply_is_refused_by_name(text: str, tmp_path: Path) -> None:
    with pytest.raises(SlipstreamError) as told:
        lint(text)
    assert len(str(told.value)) < 500
    path = tmp_path / "deep.txt"
    path.write_text(text)
    done = CliRunner().invoke(main.build_app(), ["lint", str(path)], prog_name="slipstream")
    assert done.exit_code == 2 and done.stderr.startswith(f"slipstream: error: {path}: ")
    assert done.stderr.count("\n") == 1
