"""`slipstream train prompts|data|capture` as a person types them."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from typer.testing import CliRunner

import slipstream
from slipstream.cli import main
from slipstream.cli.train_capture import needed
from slipstream.cli.train_shared import parse_layers, parse_time, span
from slipstream.errors import ParameterError
from slipstream.testing.quantised import lacks_int8
from slipstream.testing.tiny import EOS_ID
from slipstream.train.dataset import load_data
from slipstream.train.sources import StoredSource


def run(*arguments):
    return CliRunner().invoke(main.build_app(), ["train", *map(str, arguments)], prog_name="slipstream")


def test_from_prompts_to_stored_states(target_folder, tmp_path):
    made = run("prompts", "-n", 40, "-o", tmp_path / "p.jsonl", "--json")
    assert made.exit_code == 0, made.output
    assert json.loads(made.stdout)["prompts"] == 40
    answered = ["data", target_folder, "--prompts", tmp_path / "p.jsonl", "-o", tmp_path / "d"]
    answered += ["--max-tokens", 8, "--max-length", 400, "--limit-prompts", 12, "--temperature", 0]
    answered += ["--held-out", 0.2, "--drafter", "ngram", "--json"]
    first = run(*answered)
    assert first.exit_code == 0, first.output
    manifest = json.loads(first.stdout)
    assert manifest["complete"] and manifest["ended"] == "done" and manifest["runs"][0]["drafter"] == "ngram"
    assert "tokens/s" in first.stderr and "Traceback" not in first.stderr
    again = run(*answered)
    assert json.loads(again.stdout)["runs"] == manifest["runs"]
    data = load_data(tmp_path / "d")
    assert data.train and data.heldout
    listed = run("vocab", tmp_path / "d", "-o", tmp_path / "v.json", "-n", 5, "--json")
    assert listed.exit_code == 0, listed.output
    told = json.loads(listed.stdout)
    said = Counter(t for s in data.train for t, on in zip(s.tokens, s.loss, strict=True) if on)
    assert told == json.loads((tmp_path / "v.json").read_text()) and len(told["ids"]) == min(5, len(said))
    assert [said[i] for i in told["ids"]] == told["counts"] == sorted(said.values(), reverse=True)[:5]
    assert "of the held-out answers" in listed.stderr.replace("\n", " ")
    spec = f"draft_model:model={target_folder},draft_vocab={tmp_path / 'v.json'}"
    with slipstream.load(str(target_folder), spec) as session:
        assert {*told["ids"], EOS_ID} == set(session.drafter._names.tolist())
    stored = ["capture", target_folder, "--data", tmp_path / "d", "-o", tmp_path / "s", "--layers", "0,2"]
    stored += ["--last", "--top-k", 4]
    told = run(*stored, "--dry-run", "--json")
    assert told.exit_code == 0 and not (tmp_path / "s").exists()
    assert json.loads(told.stdout)["needed_bytes"] > 0 and "are still to be written" in told.stderr
    done = run(*stored)
    assert done.exit_code == 0, done.output
    source = StoredSource(tmp_path / "s")
    (batch,) = source.batches("heldout", epoch=0, batch_size=99, seed=0)
    assert set(batch.features) == {0, 2, "last"} and batch.logits[0].shape[-1] == 4
    assert source.size("train") == len(data.train)


@pytest.mark.skipif(lacks_int8(), reason="this CPU has no int8 products")
def test_the_int8_model_may_answer_for_the_plain_one(target_folder, tmp_path):
    (tmp_path / "p.txt").write_text("hello\ngood morning\n")
    begin = ["data", target_folder, "--prompts", tmp_path / "p.txt", "--max-tokens", 4, "--json"]
    plain = json.loads(run(*begin, "-o", tmp_path / "plain").stdout)
    int8 = json.loads(run(*begin, "-o", tmp_path / "int8", "--weights", "int8").stdout)
    assert int8["target"] == plain["target"]
    assert int8["arguments"].pop("weights") == "int8" and int8["arguments"] == plain["arguments"]
    other = run(*begin, "-o", tmp_path / "int8")
    assert other.exit_code == 2 and "weights" in other.stderr.splitlines()[-1]


def test_other_sampling_in_the_same_folder_is_one_line(target_folder, tmp_path):
    (tmp_path / "p.txt").write_text("hello\n")
    begin = ["data", target_folder, "--prompts", tmp_path / "p.txt", "-o", tmp_path / "d", "--max-tokens", 4]
    assert run(*begin).exit_code == 0
    got = run(*begin, "--seed", 3)
    assert got.exit_code == 2 and got.stdout == ""
    assert got.stderr.splitlines()[-1].startswith("slipstream: error: ") and "seed 0, not 3" in got.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["data", "nowhere", "--prompts", "no.jsonl", "-o", "x"], "there is no file no.jsonl"),
        (["data", "nowhere", "--prompts", "p.txt", "-o", "x", "--held-out", "1"], "--held-out"),
        (["data", "nowhere", "--prompts", "p.txt", "-o", "x", "--limit-time", "soon"], "--limit-time"),
        (["data", "nowhere", "--prompts", "p.txt", "-o", "x", "--batch", "0"], "--batch"),
        (["data", "nowhere", "--prompts", "p.txt", "-o", "x", "--drafter", "nonsense"], "nonsense"),
        (["data", "nowhere", "--prompts", "p.txt", "-o", "x", "--temperature", "-1"], "temperature"),
        (["capture", "nowhere", "--data", "d", "-o", "x"], "say what to store"),
        (["capture", "nowhere", "--data", "d", "-o", "x", "--for", "magic"], "--for must be"),
        (["capture", "nowhere", "--data", "d", "-o", "x", "--layers", "a,b"], "--layers must be numbers"),
        (["capture", "nowhere", "--data", "d", "-o", "x", "--last"], "train data"),
        (["prompts", "-n", "0", "-o", "x"], "at least 1"),
        (["prompts", "-n", "1", "-o", "."], "is a folder"),
        (["vocab", "d", "-o", "."], "is a folder"),
        (["vocab", "d", "-o", "x"], "train data"),
        (["vocab", "d", "-o", "x", "-n", "-1"], "--count must be"),
        (["eagle", "nowhere", "--data", "d", "-o", "x", "--taps", "a,b"], "--taps must be numbers"),
        (["data", "nowhere", "--prompts", "p.txt", "-o", "x", "--limit-tokens", "0"], "limit of tokens"),
        (["data", "nowhere", "--prompts", "p.txt", "-o", "x", "--max-length", "3"], "no room for a question"),
        (
            ["data", "nowhere", "--prompts", "p.txt", "-o", "x", "--limit-time", "9" * 400 + "h"],
            "--limit-time",
        ),
        (["data", "nowhere", "--prompts", "", "-o", "x"], "is empty"),
        (["data", "nowhere", "--prompts", "p.txt", "-o", "x", "--threads", "100000"], "--threads must be"),
    ],
)
def test_a_mistake_is_one_line_and_exit_2(tmp_path, monkeypatch, arguments, told):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.txt").write_text("hello\n")
    got = run(*arguments)
    assert got.exit_code == 2 and got.stdout == ""
    assert told in got.stderr.splitlines()[-1] and "Traceback" not in got.stderr
    assert not (tmp_path / "x").exists()


def test_a_target_without_a_template_is_refused_with_the_way_out(tmp_path):
    from slipstream.testing.tiny import save_tiny, tiny_tokenizer

    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    folder = save_tiny(tmp_path / "t", tokenizer=tokenizer)
    (tmp_path / "p.txt").write_text("hello\n")
    begin = ["data", folder, "--prompts", tmp_path / "p.txt", "-o", tmp_path / "d", "--max-tokens", 4]
    got = run(*begin)
    assert got.exit_code == 2 and "--no-chat-template" in got.stderr
    assert not (tmp_path / "d").exists()
    assert run(*begin, "--no-chat-template").exit_code == 0


def test_what_methods_learn_from():
    assert needed("eagle3", 28, None, False, None).hidden_layers == (2, 14, 25)
    assert needed("medusa", 28, None, False, None).last_hidden
    assert needed("medusa", 28, None, False, 7).top_k == 7
    assert needed("eagle3", 28, (1, 3), False, 0).keys == (1, 3)


def test_times_and_layers():
    assert [parse_time(t) for t in ("90", "90s", "1.5m", "2h")] == [90, 90, 90, 7200]
    assert parse_layers("2,14,25") == (2, 14, 25)
    assert [span(s) for s in (5, 200, 7500)] == ["5 s", "3 min 20 s", "2 h 5 min"]
    for bad in ("", "0", "-3s", "1d"):
        with pytest.raises(ParameterError):
            parse_time(bad)
