"""`bench/drafters.py` and what the benches share, on tiny models: counting, resuming, tables."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from common import Log, rate, ratios, read_prompts, spread, turns
from drafters import main, specs
from drafters_report import Report, decoding
from slipstream.core.stats import DraftCounts
from slipstream.errors import ParameterError
from slipstream.testing.tiny import save_tiny

BENCH = Path(__file__).parents[2] / "bench"
SELECTED = BENCH / "prompts" / "drafters.jsonl"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    save_tiny(root / "target", layers=3)
    save_tiny(root / "draft", seed=1, layers=1)
    prompts = [
        ("edit/1", "edit", "abcabcab abcab"),
        ("qa/1", "qa", "one two one two"),
        ("qa/2", "qa", "aaab"),
    ]
    lines = [json.dumps({"id": i, "task": t, "prompt": p}) for i, t, p in prompts]
    (root / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    return root


def bench(models: Path, out: Path, *arguments: str) -> dict[str, Any]:
    """Run it; gives what it wrote."""
    main(
        ["--target", str(models / "target"), "--draft", str(models / "draft"), "--dtype", "float32"]
        + ["--prompts", str(models / "prompts.jsonl"), "--json", str(out), "--threads", "1"]
        + ["--max-tokens", "10", "--selfspec", "exit=1", *arguments]
    )
    return json.loads(out.read_text())  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def everything(models: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return bench(models, tmp_path_factory.mktemp("out") / "all.json")


def test_every_setting_answers_every_prompt_once_and_counts_its_ids(everything: dict[str, Any]) -> None:
    rows, missing = everything["rows"], everything["missing"]
    assert set(missing) == {name for name in specs("m") if name.startswith(("medusa", "eagle"))}
    assert all("heads=" in why for why in missing.values())  # none come with a model like this
    names = [name for name in specs("m") if name not in missing]
    counted = Counter((r["setting"], r["prompt"]) for r in rows)
    assert counted == Counter((n, p) for n in names for p in ("edit/1", "qa/1", "qa/2"))
    for row in rows:
        assert row["tokens"] == len(row["ids"]) == row["counts"]["emitted"] <= 10
        assert 0 < sum(row["parts"].values()) <= row["seconds"]
        assert (row["first_draft"] is None) == (row["counts"]["drafts"] == 0)
    assert {s["same_as_plain"] for s in everything["summaries"].values()} == {"3/3"}


def test_drafters_are_told_apart_by_what_they_draft_and_hold(everything: dict[str, Any]) -> None:
    of = everything["summaries"]
    assert of["none"]["counts"]["drafts"] == of["none"]["memory"] == 0
    assert of["draft-w3-n15"]["counts"]["draft_tokens"] > of["draft"]["counts"]["draft_tokens"] > 0
    assert of["draft"]["memory"] == of["draft-w2-n7"]["memory"] > 0  # the same model, counted for each
    assert of["cascade"]["memory"] > of["draft"]["memory"]
    assert of["selfspec"]["memory"] == 0
    (run,) = everything["runs"]
    assert run["specs"]["selfspec"].startswith("selfspec:skip=1-2,")  # what exit=1 means, in words that last


def test_a_run_that_was_killed_goes_on_where_it_was(models: Path, tmp_path: Path) -> None:
    only = ("--only", "suffix,recycle,cascade")
    whole = bench(models, tmp_path / "whole.json", *only)
    lines = (tmp_path / "whole.jsonl").read_text().splitlines()
    assert len(lines) == 1 + 4 * 3
    kept = lines[:9]  # two prompts, and half a line of the third
    killed = tmp_path / "killed.jsonl"
    killed.write_text("\n".join([*kept, lines[9][:40]]))
    resumed = bench(models, tmp_path / "killed.json", *only, "--resume")
    assert killed.read_text().splitlines()[:9] == kept
    assert len(resumed["runs"]) == 2

    def told(record: dict[str, Any]) -> dict[tuple[str, str], tuple[Any, Any]]:
        found = {(r["setting"], r["prompt"]): (r["ids"], r["counts"]) for r in record["rows"]}
        assert len(found) == len(record["rows"]) == 12
        return found

    before, after = told(whole), told(resumed)
    for setting, prompt in before:
        if setting != "recycle":  # what it learned from logits is gone
            assert after[setting, prompt] == before[setting, prompt], (setting, prompt)
    forgot = {(r["setting"], r["prompt"]) for r in resumed["rows"] if r["forgot"]}
    assert forgot == {("recycle", "qa/2")}
    again = bench(models, tmp_path / "killed.json", *only, "--table")
    assert again["rows"] == resumed["rows"]


def test_a_round_does_not_know_the_answers_of_the_round_before(models: Path, tmp_path: Path) -> None:
    alone = bench(models, tmp_path / "alone.json", "--only", "suffix", "--tasks", "edit")
    rows = [r for r in alone["rows"] if r["setting"] == "suffix"]
    assert [r["prompt"] for r in rows] == ["edit/1"]
    twice = bench(
        models, tmp_path / "alone.json", "--only", "suffix", "--tasks", "edit", "--rounds", "2", "--resume"
    )
    first, second = [r for r in twice["rows"] if r["setting"] == "suffix"]
    assert first == rows[0]
    assert second["counts"] == first["counts"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--only", "sufix"), "unknown setting 'sufix'; there are none, ngram"),
        (("--tasks", "poetry"), "unknown task 'poetry'; there are edit, qa"),
        (("--rounds", "0"), "--rounds must be at least 1"),
        (("--prompts", "nowhere.jsonl"), "cannot be read"),
        (("--table",), "holds no answers of plain decoding"),
    ],
)
def test_mistakes_are_told_in_one_line(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        bench(models, tmp_path / "out.json", *arguments)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_results_measured_in_another_way_are_not_mixed(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench(models, tmp_path / "out.json", "--only", "selfspec", "--tasks", "edit")
    before = (tmp_path / "out.jsonl").read_bytes()
    for changed, told in (
        (("--max-tokens", "9"), "max_tokens 10, now it is 9"),
        (("--selfspec", "exit=2"), "--drafter of selfspec selfspec:skip=1-2"),
    ):
        with pytest.raises(SystemExit) as ended:
            bench(
                models, tmp_path / "out.json", "--only", "selfspec", "--tasks", "edit", "--resume", *changed
            )
        assert ended.value.code == 2
        assert told in capsys.readouterr().err
    assert (tmp_path / "out.jsonl").read_bytes() == before


def test_starting_anew_keeps_the_earlier_results_aside(tmp_path: Path) -> None:
    path = tmp_path / "out" / "log.jsonl"
    log = Log(path, resume=False)
    log.start({"a": 1})
    log.add({"b": 2})
    again = Log(path, resume=True)
    assert (again.runs, again.rows) == ([{"a": 1}], [{"b": 2}])
    path.write_text('{"run": {}}\n{"nonsense": 1}\n')
    with pytest.raises(ParameterError, match="line 2 is damaged"):
        Log(path, resume=True)
    fresh = Log(path, resume=False)
    assert fresh.rows == [] and not path.exists()
    assert "nonsense" in path.with_name("log.jsonl.bak").read_text()


def test_every_setting_goes_first_equally_often() -> None:
    order = list(turns("abcd", prompts=8, rounds=2))
    assert Counter(order) == Counter((r, p, n) for r in range(2) for p in range(8) for n in "abcd")
    assert [(r, p) for r, p, _ in order] == sorted((r, p) for r, p, _ in order)
    assert Counter(name for _, _, name in order[::4]) == dict.fromkeys("abcd", 4)


# -- the report, on figures that can be worked out by hand -------------------------------------------


def row(setting: str, prompt: str, seconds: float, ids: str = "0123456789", **more: Any) -> dict[str, Any]:
    """An answer of ten tokens, two seconds of which went into the prompt. steps: (depth, nodes, accepted)."""
    counts = DraftCounts()
    for depth, nodes, accepted in more.pop("steps", [(0, 0, 0)] * 10):
        counts.record(depth, nodes, accepted, accepted + 1)
    drafter = more.pop("drafter", 1.0 if counts.drafts else 0.0)
    first = (
        {"seconds": drafter / 2, "tokens": counts.draft_tokens // counts.drafts} if counts.drafts else None
    )
    spent = {"target": seconds - 2 - drafter, "prefill": 2.0, "drafter": drafter, "other": 0.0}
    known = {"tokens": 10, "ids": list(ids), "seconds": seconds, "parts": spent, "counts": vars(counts)}
    fixed = {"setting": setting, "task": prompt.split("/")[0], "prompt": prompt, "round": 0, "run": 1}
    return {**fixed, **known, "first_draft": first, "memory": 0, "forgot": False, **more}


def report(tmp_path: Path, *rows: dict[str, Any]) -> Report:
    log = Log(tmp_path / "log.jsonl", resume=False)
    run = {
        "target": "T",
        "draft": "D",
        "dtype": "bfloat16",
        "max_tokens": 10,
        "machine": "M",
        "versions": "V",
    }
    log.start({**run, "specs": specs("D"), "missing": {"medusa": "no heads here", "eagle": "x" * 50}})
    for one in rows:
        log.add(json.loads(json.dumps(one)))
    return Report(log, list(specs("D")), {"suffix": "a note"})


def test_ratios_are_told_with_and_without_prompt_reading(tmp_path: Path) -> None:
    told = report(
        tmp_path,
        *(row("none", p, 12.0) for p in ("edit/1", "summarization/1", "qa/1", "qa/2")),
        row("suffix", "edit/1", 6.0),
        row("suffix", "summarization/1", 7.0),
        row("suffix", "qa/1", 12.0),
    )
    assert told.ratio("suffix", "edit") == pytest.approx(2.0)
    assert told.ratio("suffix", "edit", clock=decoding) == pytest.approx(2.5)
    assert told.ratio("suffix") == pytest.approx(
        36 / 25
    )  # qa/2, which only plain has answered, does not count
    assert told.ratio("draft") is None
    found = {t.aim: t for t in told.targets()}
    everywhere, copying = (
        found[f"suffix at least {x}"]
        for x in ("1.0 times plain on every task", "1.8 times plain on summarisation and code editing")
    )
    assert everywhere.met is True and "lowest qa 1.00x" in everywhere.found
    assert copying.met is False
    assert (
        copying.found
        == "whole requests: below summarization 1.71x; decoding only: lowest summarization 2.00x"
    )
    assert rate(told.rows("suffix")) == pytest.approx(30 / 25)
    assert spread(ratios(told.rows("suffix"), told.rows("none"))) == "1.71 (1.00-2.00)"


def test_drafting_is_told_without_the_reading_of_the_prompt(tmp_path: Path) -> None:
    chain, tree = [(4, 4, 1)] * 5, [(4, 7, 4)] * 2
    first = {"seconds": 2.0, "tokens": 4}
    told = report(
        tmp_path,
        row("none", "qa/1", 12.0),
        row("draft", "qa/1", 10.0, steps=chain, drafter=4.0, first_draft=first, memory=1_260_000_000),
        row("draft-int8", "qa/1", 8.0, steps=chain, drafter=3.0, first_draft=first),
        row("draft-w2-n7", "qa/1", 9.0, "0123456xyz", steps=tree, drafter=4.0, first_draft=first),
    )
    summary = told.summaries["draft"]
    assert summary.counts.tau == 2.0
    assert summary.counts.conditional_acceptance == [1.0, 0.0, 0.0, 0.0]
    assert summary.ms_a_draft == pytest.approx(500.0)  # four drafts in the two seconds after the first one
    assert summary.drafted_a_second == pytest.approx(8.0)
    assert summary.drafter_share == pytest.approx(0.4)
    found = {t.aim: t for t in told.targets()}
    int8 = found["int8 draft at least 1.3 times the bf16 draft's tokens/s"]
    assert int8.met is True
    assert int8.found == (
        "drafting 16.00 against 8.00 tokens/s, 2.00x; decoding with it, whole requests, 1.25x"
    )
    assert found["draft-w2-n7 has a higher tau than the chain of equal depth"].met is True
    assert found["draft-w3-n7 has a higher tau than the chain of equal depth"].met is None
    same = found["every chain gives plain decoding's tokens"]
    assert same.met is True and same.found == "trees part: draft-w2-n7 on qa/1 from token 7"
    assert found["suffix at least 1.0 times plain on every task"].met is None


def test_a_chain_that_changes_the_output_is_a_miss(tmp_path: Path) -> None:
    told = report(
        tmp_path, row("none", "qa/1", 12.0), row("ngram", "qa/1", 12.0, "01x3456789", steps=[(4, 4, 4)] * 2)
    )
    (same,) = (t for t in told.targets() if t.aim.startswith("every chain"))
    assert same.met is False and "ngram on qa/1 from token 2" in str(same) and "NOT MET" in str(same)


@pytest.mark.parametrize("markdown", [False, True])
def test_the_tables_hold_what_was_measured_and_say_what_was_not(tmp_path: Path, markdown: bool) -> None:
    told = report(tmp_path, row("none", "edit/1", 12.0), row("suffix", "edit/1", 6.0))
    out = io.StringIO()
    told.show(Console(file=out, width=160), markdown)
    text = out.getvalue()
    for expected in ("T bfloat16, draft D, greedy, 10 tokens", "M; V", "no heads here", "see below"):
        assert expected in text
    assert f"eagle is not measured: {'x' * 50}" in text
    assert "suffix: suffix (a note)" in text
    assert "2.00x" in text and "2.50x" in text
    if markdown:
        assert "| suffix | 2.00x | 2.00x | 2.00 (2.00-2.00) |" in text
        heads = [line.count("|") for line in text.split("\n") if line.startswith("|")]
        assert len(heads) == 4 * 4 + 2  # head, rule and two settings, four times; two that were not measured


# -- the prompts -------------------------------------------------------------------------------------


def test_the_prompts_are_three_of_each_task_from_the_development_half() -> None:
    prompts = read_prompts(SELECTED)
    assert len({p["id"] for p in prompts}) == len(prompts) == 24
    assert set(Counter(p["task"] for p in prompts).values()) == {3}
    assert len({p["task"] for p in prompts[:8]}) == 8
    kept = json.loads((SELECTED.parent / "development.json").read_text())
    for p in prompts:
        number = int(p["id"].rpartition("/")[2])
        assert number in kept["humaneval" if "HumanEval" in p["id"] else "spec_bench"]


def test_the_selection_can_be_made_again_from_the_whole_public_files(tmp_path: Path) -> None:
    kept = json.loads((SELECTED.parent / "development.json").read_text())
    categories = ["writing", "translation", "summarization", "qa", "math_reasoning", "rag"]
    questions = [
        {"question_id": i, "category": categories[(i - 81) // 80], "turns": [f"question {i}", "second"]}
        for i in range(81, 561)
    ]
    problems = [
        {
            "task_id": f"HumanEval/{i}",
            "prompt": f"def f{i}():\n",
            "canonical_solution": "    pass\n",
            "entry_point": f"f{i}",
        }
        for i in range(164)
    ]

    def select(name: str, half: bool) -> list[dict[str, Any]]:
        folder = tmp_path / name
        folder.mkdir()
        mine = [q for q in questions if not half or q["question_id"] in kept["spec_bench"]]
        ours = [p for p in problems if not half or int(p["task_id"][10:]) in kept["humaneval"]]
        (folder / "question.jsonl").write_text("".join(json.dumps(q) + "\n" for q in mine))
        (folder / "HumanEval.jsonl").write_text("".join(json.dumps(p) + "\n" for p in ours))
        out = tmp_path / f"{name}.jsonl"
        script = [sys.executable, str(BENCH / "prompts" / "make_drafters.py"), str(folder), "--out", str(out)]
        subprocess.run(script, check=True)
        return read_prompts(out)

    whole = select("whole", half=False)
    assert whole == select("half", half=True)
    assert Counter(p["task"] for p in whole) == Counter(p["task"] for p in read_prompts(SELECTED))
    assert len({p["id"].removeprefix("edit/") for p in whole}) == 24  # none is both completed and edited
