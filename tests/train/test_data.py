"""The target's answers: the same tokens however they were made, resumable, deduplicated, within limits."""

from __future__ import annotations

import errno
import json
import os

import pytest

from slipstream.core.params import SamplingParams
from slipstream.errors import CapacityError, ParameterError
from slipstream.model import disk
from slipstream.model.identity import identity, tokenizer_hash, weights_hash
from slipstream.prompts.rows import parse_row
from slipstream.train.data import (
    Answerer,
    AnswerSettings,
    Limits,
    Tally,
    keep_answers,
    row_seed,
    rows_that_fit,
)
from slipstream.train.dataset import ANSWERS, MANIFEST, Conversation, DataWriter, load_data
from slipstream.train.samples import Sample
from slipstream.train.template import question_tokens

PARAMS = SamplingParams(max_tokens=10, temperature=0.9, top_k=40)
SETTINGS = AnswerSettings(PARAMS, seed=5, max_length=200)
ROWS = [parse_row({"prompt": f"tell me of {thing}"}, f"row {i}") for i, thing in enumerate("abcdefgh")]


def answer(session, target, folder, rows=ROWS, *, settings=SETTINGS, limits=Limits(), **how):  # noqa: B008
    writer = DataWriter(folder, target, settings.to_json(), 0.25)
    tally = Answerer(session, settings, writer, limits).run(rows, batch=how.pop("batch", 3), **how)
    writer.save(complete=tally.ended == "done")
    return tally


def lines(folder):
    """The finished conversations by key."""
    found = [json.loads(line) for line in (folder / ANSWERS).read_text().splitlines()]
    assert len({f["key"] for f in found}) == len(found)
    return {f["key"]: f for f in found}


def test_an_answer_is_what_serving_gives_for_the_question(session, target, tmp_path):
    tally = answer(session, target, tmp_path / "d")
    assert (tally.answers, tally.ended) == (len(ROWS), "done")
    for row in ROWS:
        got = lines(tmp_path / "d")[row.key]
        served = session.generate(list(row.messages), PARAMS.with_(seed=row_seed(5, row.key, 0)))
        asked = question_tokens(session.tokenizer, row.messages)
        (sample,) = got["samples"]
        assert sample["tokens"] == [*asked, *served.tokens]
        assert sample["loss"] == [[len(asked), len(asked) + len(served.tokens)]]
        assert got["messages"][-1] == {"role": "assistant", "content": served.text}
        assert got["finish"] == [served.finish_reason]


def test_batch_order_and_drafter_do_not_change_an_answer(opened, target_folder, session, target, tmp_path):
    answer(session, target, tmp_path / "one", batch=1)
    drafting = opened(target_folder, "ngram:num_speculative_tokens=3,max_n=3,min_n=1")
    answer(drafting, target, tmp_path / "many", ROWS[::-1], batch=8)
    assert lines(tmp_path / "one") == lines(tmp_path / "many")


def test_a_killed_run_goes_on_where_it_was(session, target, tmp_path):
    answer(session, target, tmp_path / "whole")
    folder = tmp_path / "killed"
    first = answer(
        session,
        target,
        folder,
        stopped=lambda: len(lines(folder)) >= 2 if folder.joinpath(ANSWERS).exists() else False,
    )
    assert first.ended == "interrupted" and 2 <= first.answers < len(ROWS)
    assert not session.engine.has_work
    assert json.loads((folder / "manifest.json").read_text())["complete"] is False
    kept = (folder / ANSWERS).read_bytes()
    with (folder / ANSWERS).open("ab") as file:
        file.write(b'{"key": "half a li')
    second = answer(session, target, folder)
    assert (second.resumed, second.answers) == (first.answers, len(ROWS) - first.answers)
    assert (folder / ANSWERS).read_bytes().startswith(kept)
    assert lines(folder) == lines(tmp_path / "whole")
    third = answer(session, target, folder)
    assert (third.answers, third.ended) == (0, "done")


def test_a_full_disk_stops_cleanly_and_is_resumed(session, target, tmp_path, monkeypatch):
    answer(session, target, tmp_path / "whole")
    sync, calls = os.fsync, []

    def full(descriptor):
        calls.append(descriptor)
        if len(calls) == 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CapacityError, match="the disk is full .*it resumes"):
        answer(session, target, tmp_path / "d")
    assert not session.engine.has_work
    answer(session, target, tmp_path / "d")
    assert lines(tmp_path / "d") == lines(tmp_path / "whole")


def written(folder, keys, held_out=0.5):
    """A data folder with a sample of ten tokens for every key."""
    writer = DataWriter(folder, {}, {}, held_out)
    for number, key in enumerate(keys):
        writer.add(Conversation(key, (), (Sample((number,) * 10, (False,) * 5 + (True,) * 5),)))
    writer.save(complete=True)
    return folder


def test_a_reader_cuts_nothing_off_that_is_still_being_written(tmp_path):
    folder = written(tmp_path / "d", ("0" * 32, "f" * 32))
    with (folder / ANSWERS).open("ab") as file:
        file.write(b'{"key": "half a li')
    before = (folder / ANSWERS).read_bytes()
    data = load_data(folder)
    assert len(data.train) == len(data.heldout) == 1
    assert (folder / ANSWERS).read_bytes() == before
    DataWriter(folder, {}, {}, 0.5)  # who goes on with the folder does cut it off
    assert (folder / ANSWERS).read_bytes() == before[: before.rindex(b"{")]


def test_one_process_at_a_time_writes_into_a_folder(tmp_path):
    busy = pytest.raises(ParameterError, match="another slipstream process is writing into")
    with disk.alone(tmp_path / "d"):
        with busy, disk.alone(tmp_path / "d"):
            pass
        assert disk.is_empty(tmp_path / "d")
    with disk.alone(tmp_path / "d"):
        pass
    assert not list((tmp_path / "d").iterdir())
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ParameterError, match="cannot be"), disk.alone(place):
            pass
        with pytest.raises(ParameterError, match="cannot be used"):
            disk.is_empty(place)


def test_what_a_killed_run_left_is_no_reason_to_refuse_a_folder(tmp_path):
    (tmp_path / "d").mkdir()
    for name in (".manifest.json.partial", ".lock"):
        (tmp_path / "d" / name).write_text("{")
    assert load_data(written(tmp_path / "d", ("0" * 32, "f" * 32))).train


@pytest.mark.parametrize(
    "line", ["5", "[]", "{}", '{"key": 1}', pytest.param("[" * 100_000, id="deep"), "nonsense"]
)
def test_a_damaged_answer_is_named_by_its_line(tmp_path, line):
    folder = written(tmp_path / "d", ("0" * 32, "f" * 32))
    with (folder / ANSWERS).open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ParameterError, match="line 3: damaged"):
        load_data(folder)
    with pytest.raises(ParameterError, match="line 3: damaged"):
        DataWriter(folder, {}, {}, 0.5)
    (folder / MANIFEST).write_text('{"kind": "data", "format": 1, "target": {}}')
    with pytest.raises(ParameterError, match="damaged .no arguments"):
        load_data(folder)


def test_something_is_held_out_within_the_limits_too(tmp_path):
    folder = written(tmp_path / "d", ("f" * 32, "e" * 32, "d" * 32, "0" * 32))  # the last is held out
    few = load_data(folder, limit_tokens=30)
    assert len(few.train) == 2 and len(few.heldout) == 1


def test_the_facts_of_a_folder_stand_until_a_run_ends(tmp_path):
    folder = written(tmp_path / "d", ("0" * 32, "f" * 32))
    DataWriter(folder, {}, {}, 0.5).save(complete=True, ended="done", sources=["p.txt"])
    DataWriter(folder, {}, {}, 0.5)  # killed before its first answer
    manifest = json.loads((folder / MANIFEST).read_text())
    assert manifest["ended"] == "done" and manifest["sources"] == ["p.txt"]


def test_the_time_left_is_not_that_of_the_short_answers():
    """Of sixteen answers one ended early; the other fifteen, which go on, say how long answers are."""
    tally = Tally(total=1600, answers=1, tokens=10, running=15 * 90, seconds=13.6)  # 100 tokens a second
    assert tally.left(Limits(), 1, 10, 512) == pytest.approx((1599 * 512 - 1350) / 100)  # one ended: no more
    tally = Tally(total=1600, answers=16, tokens=16 * 100, running=0, seconds=16.0)
    assert tally.left(Limits(), 16, 1600, 512) == pytest.approx(1584)
    assert tally.left(Limits(tokens=1700), 16, 1600, 512) == pytest.approx(1)
    assert tally.left(Limits(tokens=10**6, seconds=20), 16, 1600, 512) == pytest.approx(4)
    assert Tally(total=5).left(Limits(), 0, 0, 512) is None
    resumed = Tally(total=200, resumed=100, running=100, seconds=1.0)  # what was there before counts as well
    assert resumed.left(Limits(), 100, 9900, 512) == pytest.approx((100 * 100 - 100) / 100)


def test_earlier_turns_of_unfinished_conversations_count(session, target, tmp_path):
    turns = [{"role": r, "content": t} for t in ("one", "two", "three") for r in ("user", "assistant")]
    seen = []
    answer(
        session,
        target,
        tmp_path / "d",
        [parse_row({"messages": turns}, "")],
        report=lambda tally: seen.append(tally.tokens + tally.running),
    )
    assert seen == sorted(seen) and len(set(seen)) > 10


def test_another_target_or_other_arguments_are_refused(opened, other_folder, session, target, tmp_path):
    answer(session, target, tmp_path / "d", limits=Limits(prompts=2))
    stranger = opened(other_folder)
    other = identity(stranger.info.model, stranger.tokenizer, "tiny")
    with pytest.raises(ParameterError, match="answers of another target"):
        answer(stranger, other, tmp_path / "d")
    with pytest.raises(ParameterError, match="begun with seed 5, not 6"):
        answer(session, target, tmp_path / "d", settings=AnswerSettings(PARAMS, seed=6, max_length=200))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    with pytest.raises(ParameterError, match="not empty and no data folder"):
        answer(session, target, tmp_path / "full")


def test_limits_of_prompts_tokens_and_time(session, target, tmp_path):
    assert answer(session, target, tmp_path / "p", limits=Limits(prompts=3)).answers == 3
    few = answer(session, target, tmp_path / "t", limits=Limits(tokens=15), batch=1)
    assert few.ended == "limit of tokens" and 15 <= few.tokens <= 15 + 10
    again = answer(session, target, tmp_path / "t", limits=Limits(tokens=15))
    assert (again.answers, again.ended) == (0, "limit of tokens")
    late = answer(session, target, tmp_path / "s", limits=Limits(seconds=1e-9))
    assert (late.answers, late.ended) == (0, "limit of time")
    with pytest.raises(ParameterError, match="above 0"):
        Limits(tokens=0)


def test_duplicates_and_questions_without_room_are_left_out(session, target, tmp_path):
    long = parse_row({"prompt": "x" * 200}, "row 9")
    tally = answer(session, target, tmp_path / "d", [ROWS[0], long, ROWS[1], ROWS[0]])
    assert (tally.answers, tally.duplicates, tally.too_long) == (2, 1, 1)
    assert set(lines(tmp_path / "d")) == {ROWS[0].key, ROWS[1].key}


def test_several_turns_are_answered_one_after_the_other(session, target, tmp_path):
    turns = ("one", "two", "three")
    row = parse_row(
        {"messages": [{"role": r, "content": t} for t in turns for r in ("user", "assistant")]}, ""
    )
    answer(session, target, tmp_path / "d", [row.with_system("be kind")])
    (got,) = lines(tmp_path / "d").values()
    assert [m["role"] for m in got["messages"]] == ["system", *("user", "assistant") * 3]
    assert [m["content"] for m in got["messages"][1::2]] == list(turns)
    learned = [s["tokens"][a:b] for s in got["samples"] for a, b in s["loss"]]
    assert len(learned) == 3
    for i, tokens in enumerate(learned):  # each is the answer to the conversation before it
        seed = row_seed(5, row.with_system("be kind").key, i)
        served = session.generate(got["messages"][: 2 + 2 * i], PARAMS.with_(seed=seed))
        assert tokens == list(served.tokens)


def test_the_split_is_the_same_for_the_same_conversation(session, target, tmp_path):
    answer(session, target, tmp_path / "some", limits=Limits(prompts=4))
    answer(session, target, tmp_path / "all", ROWS[::-1])
    some, every = load_data(tmp_path / "some"), load_data(tmp_path / "all")
    assert len(every.train) + len(every.heldout) == len(ROWS)
    assert every.heldout and every.train and not set(every.train) & set(every.heldout)
    assert set(some.train) <= set(every.train) and set(some.heldout) <= set(every.heldout)
    cut = load_data(tmp_path / "all", max_length=35, limit_tokens=200)
    assert max(len(s.tokens) for s in cut.train) <= 35
    assert sum(len(s.tokens) for s in (*cut.train, *cut.heldout)) <= 200


def test_answers_of_the_rows_can_be_kept(session, target, tmp_path):
    settings = AnswerSettings(PARAMS, max_length=60, keep_answers=True)
    writer = DataWriter(tmp_path / "d", target, settings.to_json(), 0)
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "yes"}]
    rows = [parse_row({"messages": messages}, "row 1"), parse_row({"prompt": "x" * 70}, "row 2")]
    with pytest.raises(ParameterError, match="row 2: there is no assistant's turn"):
        keep_answers(session.tokenizer, rows, frozenset({257}), settings, writer, Limits())
    writer.save(complete=True)
    (sample,) = load_data(tmp_path / "d").train
    assert (
        session.tokenizer.decode([t for t, on in zip(sample.tokens, sample.loss, strict=True) if on][:-1])
        == "yes"
    )


def test_plain_text_is_continued_without_a_template(session, target, tmp_path):
    settings = AnswerSettings(PARAMS, template=False)
    answer(session, target, tmp_path / "d", ROWS[:1], settings=settings)
    (got,) = lines(tmp_path / "d").values()
    assert bytes(got["samples"][0]["tokens"][: len("tell me of a")]) == b"tell me of a"
    with pytest.raises(ParameterError, match="row 1: without a chat template"):
        answer(session, target, tmp_path / "e", [ROWS[1].with_system("x")], settings=settings)


def test_what_cannot_be_asked_for_is_refused():
    for settings, told in (
        ({"params": SamplingParams()}, "max_tokens"),
        ({"params": PARAMS, "max_length": 10}, "no room for a question"),
        ({"params": PARAMS, "keep_answers": True, "template": False}, "chat template"),
    ):
        with pytest.raises(ParameterError, match=told):
            AnswerSettings(**settings)


def test_the_batch_is_chosen_by_memory(session, monkeypatch):
    from slipstream.model import memory

    model = session.info.model
    dtype, config = model.dtype, model.config
    per_row = (
        2 * 3 * 2 * 8 * 4 * 1024 + 8 * config.vocab_size * 4
    )  # K, V, layers, heads, width, bytes, tokens
    for room, fits in ((per_row * 2 * 5, 5), (per_row * 2000, 16)):
        monkeypatch.setattr(memory, "available", lambda room=room: room)
        assert rows_that_fit(config, dtype, model.device, 1000) == fits
    monkeypatch.setattr(memory, "available", lambda: per_row)
    with pytest.raises(CapacityError, match="lower --max-length"):
        rows_that_fit(config, dtype, model.device, 1000)
    monkeypatch.setattr(memory, "available", lambda: per_row * 40)
    assert rows_that_fit(config, dtype, model.device, 1000, 40) == 40
    with pytest.raises(CapacityError, match="41 answers of 1000 tokens at once .*: lower --batch"):
        rows_that_fit(config, dtype, model.device, 1000, 41)


def test_a_target_is_told_by_its_weights_packed_or_not(session, target_folder, other_folder):
    from slipstream.model.load import load

    loose = load(str(target_folder))
    assert weights_hash(loose.model) == weights_hash(session.info.model)
    assert weights_hash(load(str(other_folder)).model) != weights_hash(loose.model)
    before = tokenizer_hash(loose.tokenizer)
    loose.tokenizer("some text", truncation=True, max_length=2)
    assert tokenizer_hash(loose.tokenizer) == before
    loose.tokenizer.add_tokens(["more"])
    assert tokenizer_hash(loose.tokenizer) != before
