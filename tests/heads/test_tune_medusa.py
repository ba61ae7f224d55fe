"""`slipstream tune medusa`: the accuracies are those of a whole-text forward, and the drafter uses them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import slipstream
from slipstream.cli.main import build_app
from slipstream.core.choices import best_tree
from slipstream.core.params import SamplingParams
from slipstream.drafters import build_drafter
from slipstream.drafters._head_accuracy import HeadCounts, HeadProbe, save_accuracies
from slipstream.drafters.base import TargetInfo
from slipstream.drafters.medusa import ACCURACIES, MedusaDrafter, MedusaDrafterConfig
from slipstream.engine.engine import Engine
from slipstream.errors import DrafterError
from slipstream.heads.io import save_medusa
from slipstream.heads.medusa import MedusaHeads
from slipstream.model.runner import Runner
from slipstream.model.taps import decoder
from slipstream.testing.heads import greedy_next, memoryless_model, perfect_medusa, random_medusa
from slipstream.testing.tiny import save_tiny, tiny_model

PROMPTS = [[5, 17, 3, 9, 11, 2], [7], [4, 4], list(range(20))]
Info = Callable[[Any], TargetInfo]


def probe_of(model: Any, info: Info, heads: MedusaHeads, ranks: int = 4) -> HeadProbe:
    return HeadProbe(MedusaDrafter(MedusaDrafterConfig("", topk="1"), info(model), heads), ranks)


@torch.inference_mode()
def counted(model: Any, heads: MedusaHeads, texts: list[tuple[int, list[int]]], ranks: int) -> HeadCounts:
    """From one forward over each whole text, (prompt length, tokens), one guess at a time."""
    right = [[0] * ranks for _ in range(heads.config.num_heads)]
    guesses = [0] * heads.config.num_heads
    for prompt, tokens in texts:
        hidden = decoder(model)(input_ids=torch.tensor([tokens]), use_cache=False).last_hidden_state[0]
        logits = heads(hidden, model.get_output_embeddings())  # [K, T, V or draft V]
        inside = heads.vocab.target_ids()
        if heads.config.output == "target":
            logits = logits[..., inside]
        ids = inside[logits.topk(ranks).indices]  # [K, T, ranks]
        for root in range(max(prompt - 1, 1), len(tokens)):
            for head in range(len(guesses)):
                if root + 1 + head < len(tokens):
                    found = ids[head, root - 1].tolist()
                    guesses[head] += 1
                    if tokens[root + 1 + head] in found:
                        right[head][found.index(tokens[root + 1 + head])] += 1
    return HeadCounts(tuple(map(tuple, right)), tuple(guesses))


@pytest.mark.parametrize("chunk", [3, 512])
@pytest.mark.parametrize(("output", "reduced"), [("own", None), ("target", 11)])
def test_counts_are_those_of_whole_texts(
    chunk: int, output: str, reduced: int | None, run: Any, info: Info
) -> None:
    """Several rows, prompts in pieces, a row that is cancelled, and more states than are ranked at once."""
    model = tiny_model(vocab_size=24)
    heads = random_medusa(model, output=output, draft_vocab_size=reduced)
    probe = probe_of(model, info, heads)
    params = SamplingParams(max_tokens=50)
    ran = run(model, probe, PROMPTS, params, cancel={3: 30}, max_rows=3, chunk=chunk)
    texts = [(len(p), t) for p, t in zip(PROMPTS, ran.tokens, strict=True)]
    assert len(ran.tokens[0]) == 56 and len(ran.tokens[3]) < 70
    expected = counted(model, heads, texts, 4)
    assert probe.counts == expected and sum(map(sum, expected.right)) > 0
    assert not probe._rows


def test_perfect_heads_promise_what_they_then_keep(run: Any, info: Info) -> None:
    model = memoryless_model()
    heads = perfect_medusa(model)
    after = greedy_next(model).tolist()
    prompts = [[x, after[x], after[after[x]]] for x in (3, 8)]
    probe = probe_of(model, info, heads)
    run(model, probe, prompts, SamplingParams(max_tokens=16))
    table = probe.counts.accuracies
    assert [row[0] for row in table] == [1.0] * 3 and all(sum(row[1:]) == 0.0 for row in table)
    tree = best_tree(table, 63)
    assert tree.paths == ((0,), (0, 0), (0, 0, 0)) and tree.expected_tau(table) == 4.0
    config = MedusaDrafterConfig("", choices="0+0.0+0.0.0")
    ran = run(model, MedusaDrafter(config, info(model), heads), prompts, SamplingParams(max_tokens=16))
    assert ran.counts.tau == 4.0


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path, Path]:
    """Of a model and of heads, and a file of prompts."""
    model = tiny_model("qwen2", layers=1, seed=2)
    save_medusa(random_medusa(model), tmp_path / "heads")
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one\ntwo\nthree\n")
    return save_tiny(tmp_path / "model", model=model), tmp_path / "heads", prompts


def tune(model: Path, heads: Path, prompts: Path, *more: str) -> Any:
    options = ["--model", str(model), "--heads", str(heads), "--prompts", str(prompts)]
    return CliRunner().invoke(build_app(), ["tune", "medusa", *options, *more])


def test_the_command_writes_what_medusa_then_reads(folders: tuple[Path, Path, Path]) -> None:
    model, heads, prompts = folders
    (heads / ACCURACIES).write_text("damaged")  # is replaced, not read
    done = tune(*folders, "--tokens", "20", "--limit", "2", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    kept = json.loads((heads / ACCURACIES).read_text())
    assert found["path"] == str(heads / ACCURACIES) and kept["model"] == str(model)
    assert kept["right"] == found["right"] and kept["guesses"] == found["guesses"] == [20 * 2, 38, 36]
    table = found["accuracies"]
    assert table == [[r / n for r in row] for row, n in zip(kept["right"], kept["guesses"], strict=True)]
    assert [t["nodes"] for t in found["trees"]] == [len(best_tree(table, n)) for n in (7, 15, 31, 63)]
    assert found["trees"][0]["expected_tau"] == pytest.approx(
        best_tree(table, 7).expected_tau(table), abs=1e-4
    )
    with slipstream.load(str(model), drafter=f"medusa:heads={heads},nodes=7") as session:
        drafter = session.drafter
        assert isinstance(drafter, MedusaDrafter) and drafter.choices == best_tree(kept["accuracies"], 7)
        params = SamplingParams(max_tokens=12, temperature=0.8, seed=3)
        fast = session.generate("three", params)
        session.use("none")
        assert session.generate("three", params).tokens == fast.tokens
    again = tune(*folders, "--tokens", "20", "--limit", "2", "--out", str(heads / "other.json"))
    assert again.exit_code == 0, again.output
    assert json.loads((heads / "other.json").read_text()) == kept
    assert "EXPECTED TAU" in again.stdout and f"accuracies={heads / 'other.json'}" in again.stderr


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (["--heads", "/nowhere"], "there is no folder"),
        (["--prompts", "/nowhere"], "there is no file"),
        (["--limit", "0"], "--limit must be at least 1"),
        (["--tokens", "2"], "too short for 3 heads"),
        (["--out", "/proc/none/here.json"], "cannot be written"),
    ],
)
def test_mistakes_are_one_line_and_leave_the_old_file(
    more: list[str], reason: str, folders: tuple[Path, Path, Path]
) -> None:
    before = folders[1] / ACCURACIES
    before.write_text("old")
    done = tune(*folders, *(["--tokens", "8"] if "--tokens" not in more else []), *more)
    assert done.exit_code == 2
    errors = [line for line in done.stderr.splitlines() if "error:" in line]
    assert len(errors) == 1 and reason in errors[0] and "Traceback" not in done.stderr
    assert before.read_text() == "old" and sorted(p.name for p in folders[1].iterdir()) == sorted(
        ["accuracies.json", "config.json", "medusa_lm_head.safetensors"]
    )


def test_a_table_that_was_measured_is_the_one_that_is_read(tmp_path: Path, info: Info) -> None:
    counts = HeadCounts(((6, 2), (3, 3)), (10, 9))
    save_accuracies(tmp_path / "a.json", counts, "tiny")
    model = tiny_model(vocab_size=24)
    save_medusa(random_medusa(model), tmp_path / "heads")
    built = build_drafter(
        f"medusa:heads={tmp_path / 'heads'},nodes=3,accuracies={tmp_path / 'a.json'}", info(model)
    )
    assert isinstance(built, MedusaDrafter)
    assert built.choices == best_tree([[0.6, 0.2], [1 / 3, 1 / 3]], 3)
    (tmp_path / "folder").mkdir()
    with pytest.raises(DrafterError, match="cannot be written.*--out"):
        save_accuracies(tmp_path / "folder", counts, "tiny")


def test_the_engine_runs_on_plainly_while_heads_are_measured(info: Info) -> None:
    """The probe drafts nothing whatever the budget."""
    model = tiny_model(vocab_size=24)
    with Engine(Runner(model, pack=False), probe_of(model, info, random_medusa(model))) as engine:
        engine.set_drafter(engine.drafter, "fixed:num_speculative_tokens=4")
        engine.add([3, 4, 5], SamplingParams(max_tokens=8))
        list(engine.run())
        assert engine.counts.draft_tokens == 0 and engine.counts.passes == 8
