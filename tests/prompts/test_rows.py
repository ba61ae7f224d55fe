"""Prompts are read from every common layout; a row that cannot be used is refused where it stands."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from slipstream.errors import ParameterError
from slipstream.prompts.rows import parse_row, read_prompts, read_rows


def write(path: Path, *lines: object) -> str:
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text(text + "\n", encoding="utf-8")
    return str(path)


def said(row) -> list[tuple[str, str]]:
    return [(m["role"], m["content"]) for m in row.messages]


def test_every_layout_gives_the_same_conversation(tmp_path):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    sharegpt = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]
    file = write(tmp_path / "a.jsonl", {"messages": messages}, "", {"conversations": sharegpt, "id": 4})
    first, second = read_rows([file])
    assert said(first) == said(second) == [("user", "hi"), ("assistant", "ho")]
    assert first.where.endswith("a.jsonl, line 1") and second.where.endswith("a.jsonl, line 3")
    assert first.key == second.key


def test_a_plain_prompt_and_its_system_message(tmp_path):
    file = write(tmp_path / "a.jsonl", {"prompt": "hi"}, {"prompt": "hi", "system": "be brief"})
    plain, led = read_rows([file])
    assert said(plain) == [("user", "hi")]
    assert said(led) == [("system", "be brief"), ("user", "hi")]
    assert said(plain.with_system("be kind"))[0] == ("system", "be kind")
    assert led.with_system("be kind") is led
    assert plain.key != led.key


def test_benchmarks_are_read_as_they_are_published(tmp_path):
    lines = [
        {"prompt": "a", "task_id": "HumanEval/0", "canonical_solution": "x"},
        {"turns": ["b", "c"], "category": "qa", "question_id": 7},
        {"question": "d", "answer": "e"},
        {
            "messages": [{"role": "user", "content": "f"}, {"role": "assistant", "content": "g"}],
            "task": "chat",
        },
    ]
    file = write(tmp_path / "p.jsonl", *lines)
    rows = read_prompts(file)
    assert [[m["content"] for m in row.asked] for row in rows] == [["a"], ["b"], ["d"], ["f"]]
    assert [row.task for row in rows] == ["all", "qa", "all", "chat"]
    assert [row.name for row in rows] == ["p.jsonl:HumanEval/0", "p.jsonl:7", "p.jsonl:3", "p.jsonl:4"]
    assert rows[3].with_system("be brief").task == "chat"
    text = read_prompts(write(tmp_path / "p.txt", "h"))
    assert (text[0].task, text[0].name) == ("all", "p.txt:1")


def test_a_small_set_of_our_own_comes_along():
    rows = read_prompts()
    assert {row.task for row in rows} == {"code", "prose", "edit"} and len({row.name for row in rows}) == 12
    assert read_prompts(limit=2) == rows[:2]


def test_files_of_text_arrays_and_folders(tmp_path):
    write(tmp_path / "b.txt", "first prompt", "", "  second prompt ")
    (tmp_path / "a.json").write_text(json.dumps([{"prompt": "third"}]), encoding="utf-8")
    (tmp_path / "ignored.bin").write_bytes(b"\xff")
    rows = read_rows([str(tmp_path)])
    assert [m[0][1] for m in map(said, rows)] == ["third", "first prompt", "second prompt"]
    assert rows[0].where.endswith("a.json, entry 1") and rows[2].where.endswith("b.txt, line 3")
    assert len(read_rows([str(tmp_path)], limit=2)) == 2


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"prompt": "x"', "not valid JSON"),
        ("[1, 2]", "must be a JSON object"),
        ({"text": "x"}, "needs messages, conversations, turns, prompt or question; it has text"),
        ({"prompt": "  "}, "the user's text is empty"),
        ({"prompt": 3}, "prompt must be a text or a list of turns, not 3"),
        ({"prompt": None, "x": 1}, "it has prompt (null), x"),
        ({"prompt": "x", "system": 5}, "the text must be a string, not 5"),
        pytest.param("[" * 100_000, "not valid JSON", id="deep"),
        (r'{"prompt": "half \ud83d"}', "half a character"),
        ({"conversations": [{"from": ["human"], "value": "x"}]}, 'unknown role ["human"]'),
        ({"turns": []}, "no user's turn"),
        ({"turns": "one"}, 'turns must be a list of turns, not "one"'),
        ({"turns": [{"role": "user", "content": "x"}]}, "the text must be a string"),
        ({"question": ""}, "the user's text is empty"),
        ({"messages": []}, "no user's turn"),
        ({"messages": ["hello"]}, 'turn 1: a turn must be an object, not "hello"'),
        ({"messages": [{"role": "tool", "content": "x"}]}, 'turn 1: unknown role "tool"'),
        ({"conversations": [{"from": "narrator", "value": "x"}]}, 'unknown role "narrator"'),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "must be a string"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "turn 1 is the assistant's"),
        ({"messages": [{"role": "user", "content": "x"}] * 2}, "turn 2 is the user's"),
        (
            {"messages": [{"role": "user", "content": "x"}, {"role": "system", "content": "y"}]},
            "a system message can only come first",
        ),
    ],
)
def test_a_malformed_row_is_refused_with_its_line(tmp_path, line, told):
    file = write(tmp_path / "a.jsonl", {"prompt": "fine"}, line)
    with pytest.raises(ParameterError, match="line 2") as error:
        read_rows([file])
    assert told in str(error.value)


def test_what_is_no_file_of_prompts_is_refused(tmp_path):
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "latin.txt").write_bytes("crème".encode("latin-1"))
    (tmp_path / "x.csv").write_text("a,b")
    (tmp_path / "late.jsonl").write_bytes(b'{"prompt": "a"}\n\n\xff\xfe\n')
    (tmp_path / "x.json").write_text("{}")
    for name, told in (
        ("empty.jsonl", "no prompts"),
        ("latin.txt", "not UTF-8"),
        ("x.csv", "neither .jsonl"),
        ("x.json", "JSON array"),
        ("nowhere", "there is no file"),
        ("late.jsonl", "late.jsonl, line 3: not UTF-8"),
    ):
        with pytest.raises(ParameterError, match=told):
            read_rows([str(tmp_path / name)])
    with pytest.raises(ParameterError, match="there are no prompts"):
        read_rows([])
    with pytest.raises(ParameterError, match="is empty"):
        read_rows([""])  # not the current folder with all below it
    with pytest.raises(ParameterError, match="leads nowhere"):
        read_rows(["~nobody-of-this-name/p.jsonl"])


def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path):
    mark = "\ufeff".encode()
    (tmp_path / "a.jsonl").write_bytes(mark + b'{"prompt": "one"}\n')
    (tmp_path / "b.txt").write_bytes(mark + b"two\r\nthree\r\n")
    (tmp_path / "c.json").write_bytes(mark + b'[{"prompt": "four"}]')
    rows = read_rows([str(tmp_path)])
    assert [r.messages[0]["content"] for r in rows] == ["one", "two", "three", "four"]


def test_the_same_question_has_the_same_key_whatever_was_answered():
    keys = {
        parse_row({"messages": [{"role": "user", "content": text}, *answer]}, "").key
        for text in ("one two", " one \n two")
        for answer in ([], [{"role": "assistant", "content": "yes"}])
    }
    assert len(keys) == 1
    assert parse_row({"prompt": "one three"}, "").key not in keys


@pytest.mark.filterwarnings("ignore")  # the library's own
def test_a_hugging_face_data_set_is_read_and_its_rows_are_named(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = tmp_path / "set"
    folder.mkdir()
    write(folder / "train.jsonl", {"prompt": "one"}, {"prompt": "two"}, {"prompt": ""})
    rows = read_rows([f"hf:{folder}"], limit=2)  # streamed: the third is not looked at
    assert [m[0][1] for m in map(said, rows)] == ["one", "two"]
    with pytest.raises(ParameterError, match=r"train row 3: the user's text is empty"):
        read_rows([f"hf:{folder}"])
    with pytest.raises(ParameterError, match="cannot be read"):
        read_rows([f"hf:{folder}"], split="nonsense")


def test_without_the_package_a_data_set_is_refused_with_the_fix(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ParameterError, match=r"pip install 'slipstream-lm\[train\]'"):
        read_rows(["hf:some/set"])
