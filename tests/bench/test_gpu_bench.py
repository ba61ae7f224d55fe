"""`bench/gpu.py`, on the CPU: there are no graphs, all else is the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import gpu
from slipstream.core.draft import Budget, DraftRequest
from slipstream.core.params import SamplingParams

TINY = ["--shape", "tiny", "--check-shape", "tiny", "--dtype", "float32", "--device", "cpu"]
SMALL = ["--check-prompts", "3", "--check-tokens", "8", "--tokens", "6", "--context", "8"]


def test_the_tables_have_every_batch_and_width(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "gpu.json"
    assert gpu.main([*TINY, *SMALL, "--batches", "1,3", "--widths", "1,5", "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    exact = found["exact"]
    assert [one["drafts"] for one in exact] == ["plain decoding", "chains", "trees"]
    assert all(one["same"] == one["answers"] == 3 and not one["margins"] for one in exact)
    assert 0 <= exact[-1]["logits_error"] < 1e-5
    assert [(one["batch"], one["width"]) for one in found["steps"]] == [(1, 1), (1, 5), (3, 1), (3, 5)]
    each = 2 * 2 * 2 * 16 * 4  # layers, keys and values, heads, head_dim, bytes of float32
    first, last = found["steps"][0], found["steps"][-1]
    assert last["bytes"] - first["bytes"] == (3 * (8 + 5) - (8 + 1)) * each
    for one in found["steps"]:
        assert one["limit"] == pytest.approx(one["bytes"] / one["bandwidth"])
        assert one["median"]["plain"] > 0 and len(one["seconds"]["plain"]) == gpu.STEPS
    assert [one["batch"] for one in found["answers"]] == [1, 3]
    assert all(one["same"] == one["batch"] and one["tau"] > 1 for one in found["answers"])
    told = capsys.readouterr().out
    assert told == out.with_suffix(".md").read_text() and told.count("| plain |") == 5


def test_without_a_gpu_it_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main(["--json", str(tmp_path / "gpu.json")]) == 2
    assert capsys.readouterr().err.strip() == gpu.NO_GPU
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("rate", [0.0, 0.7, 1.0])
def test_drafts_are_right_as_often_as_they_are_told_to_be(rate: float) -> None:
    known = {3: [t % 40 for t in range(900)]}
    draft, right, drafted = gpu.right_at(rate, known, 50), 0, 0
    for done in range(400):
        tokens = [1, 2, *known[3][:done]]
        made = draft(DraftRequest(0, tokens, 2, Budget.chain(4), SamplingParams(), 3)).tree.tokens[1:]
        wanted = known[3][done : done + 4]
        right += sum(a == b for a, b in zip(made, wanted, strict=True))
        drafted += 4
    assert right / drafted == pytest.approx(rate, abs=0.05 if 0 < rate < 1 else 0)
