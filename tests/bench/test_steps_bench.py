"""`bench/steps.py` on tiny models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import steps
from slipstream.model.load import load
from slipstream.model.runner import Runner
from slipstream.testing.tiny import save_tiny


@pytest.mark.parametrize("tied", [True, False])
def test_a_table_of_embeddings_is_read_only_as_a_head(tied: bool, tmp_path: Path) -> None:
    save_tiny(tmp_path, kind="qwen2", vocab_size=260, tie=tied)
    runner = Runner(load(str(tmp_path), dtype="float32").model, pack=False)
    total = sum(p.nbytes for p in runner.model.parameters())
    table = runner.model.get_input_embeddings().weight.nbytes
    constants = sum(b.nbytes for b in runner.model.buffers())
    assert steps.read_bytes(runner) == total + constants - (0 if tied else table)
    runner.close()


def test_the_table_has_every_shape_and_its_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_tiny(tmp_path / "model", kind="qwen2", vocab_size=260)
    out = tmp_path / "steps.json"
    steps.main(
        ["--models", str(tmp_path / "model"), "--weights", "plain", "--rows", "1,8", "--context", "8"]
        + ["--json", str(out), "--threads", "1"]
    )
    found = json.loads(out.read_text())["steps"]
    assert [one["shape"] for one in found] == ["1 of one", "8 of one", "8 sequences"]
    assert [one["rows"] for one in found] == [1, 8, 8]
    for one in found:
        assert one["limit"] == pytest.approx(one["read_bytes"] / one["bandwidth"])
        assert sum(one["shares"].values()) == pytest.approx(1, abs=0.05)
        assert one["shares"]["linear layers"] > 0 and one["shares"]["attention"] > 0
    told = capsys.readouterr().out
    assert told == out.with_suffix(".md").read_text() and "aim 1.25" in told
