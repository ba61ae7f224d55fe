"""Running a bench on tiny models: what is written is what the engine did, it survives a kill, it is exact."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import slipstream
import sweep
from slipstream import SamplingParams
from slipstream.bench import run as module
from slipstream.bench.bundle import BenchBundle, Head, Plan, read_bench
from slipstream.bench.journal import Journal, journal_of, keep_bundle
from slipstream.bench.plan import make_units
from slipstream.bench.run import bench
from slipstream.bench.summary import Summary
from slipstream.cli import main
from slipstream.core.stats import DraftCounts
from slipstream.engine.session import Session
from slipstream.errors import DrafterError, ParameterError
from slipstream.model import disk
from slipstream.plan import measure as measuring
from slipstream.plan.rates import bandwidth, matrix_rate
from slipstream.prompts.rows import Row
from slipstream.testing.tiny import save_tiny

PROMPTS = [
    Row(({"role": "user", "content": text},), "", task, f"p:{i}")
    for i, (task, text) in enumerate([("edit", "abcabcabc"), ("edit", "one two one two"), ("qa", "aaab")])
]
PLAN = Plan(drafters=["ngram:min_n=1", "suffix"], lengths=[2, 3], batches=[1, 2], rounds=2, tokens=14)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny") / "target", layers=1)


@pytest.fixture(scope="module")
def session(folder: Path) -> Iterator[Session]:
    with slipstream.load(str(folder), max_rows=2) as found:
        yield found


@pytest.fixture(scope="module")
def bundle(session: Session) -> BenchBundle:
    return bench(session, "tiny", PLAN, PROMPTS, command=["me"])


def test_every_setting_answers_every_unit_every_round(bundle: BenchBundle) -> None:
    assert bundle.complete and len(bundle.settings) == 2 * (1 + 2 * 2)
    # two tasks at batch 1: three units; at batch 2: one unit each, of which qa repeats its one prompt
    assert Counter(u.batch for u in bundle.units) == {1: 3, 2: 2}
    assert [u.prompts for u in bundle.units if u.batch == 2] == [[0, 1], [2, 2]]
    seen = Counter((r.round, r.unit, r.setting) for r in bundle.runs)
    assert set(seen.values()) == {1} and len(seen) == 2 * 5 * (3 + 2)
    assert bundle.sessions[0].command == ["me"] and bundle.sessions[0].versions["torch"]
    assert bundle.target.name == "tiny" and len(bundle.target.weights) == 32


def test_answers_and_counts_are_those_of_the_engine(bundle: BenchBundle, session: Session) -> None:
    params = SamplingParams(max_tokens=14)
    for run in bundle.runs:
        setting = bundle.of(run)
        if setting.batch != 1 or run.round or setting.drafter == "suffix":
            continue
        spec = None if setting.plain else f"fixed:num_speculative_tokens={setting.depth}"
        session.use(setting.drafter, spec)
        (answer,) = run.answers
        real = session.generate([dict(m) for m in PROMPTS[answer.prompt].asked], params)
        assert tuple(answer.ids) == real.tokens
        told = answer.counts.counts
        assert (told.passes, told.tested_at, told.accepted_at) == (
            real.counts.passes,
            real.counts.tested_at,
            real.counts.accepted_at,
        )
    session.use("none")


def test_time_adds_up_and_steady_steps_are_a_part_of_it(bundle: BenchBundle) -> None:
    for run in bundle.runs:
        assert 0 < run.parts.total <= run.seconds * 1.001 and run.parts.prefill > 0
        assert run.steady.seconds.total <= run.parts.total and run.steady.seconds.prefill == 0
        assert run.steady.tokens == sum(a.steady.emitted for a in run.answers) < run.tokens
        for answer in run.answers:
            assert answer.steady.passes == run.steady.steps <= answer.counts.passes - 2
            assert len(answer.ids) == answer.counts.emitted
        uncut = bundle.of(run).depth  # in a steady step every draft may be as long as was asked
        if run.steady.steps:
            lengths = [len(bundle.prompts[a.prompt].ids) for a in run.answers]
            assert min(lengths) < run.steady.context < max(lengths) + 14 - uncut


def test_all_tokens_are_plain_decodings(bundle: BenchBundle) -> None:
    summary = Summary(bundle)
    assert not summary.differences
    assert all(c.same == c.answers for c in summary.cells)
    drafted = [c for c in summary.totals if not c.setting.plain]
    assert all(c.counts.draft_tokens for c in drafted)


def test_sampled_answers_keep_their_seeds(session: Session, bundle: BenchBundle, folder: Path) -> None:
    own = [f"draft_model:model={folder}"]  # the target as its own draft
    plan = Plan(drafters=own, lengths=[3], temperatures=[0, 0.9], rounds=2, tokens=14, seed=5)
    found = bench(session, "tiny", plan, PROMPTS)
    summary = Summary(found)
    assert not summary.differences and len(found.drafters[0].weights) == 32
    greedy, sampled = [c for c in summary.totals if not c.setting.plain]
    assert greedy.counts.accepted_at == greedy.counts.tested_at and greedy.counts.tau > 2
    assert sampled.counts.accepted_at != sampled.counts.tested_at
    said = {a.prompt: a.ids for r in bundle.runs for a in r.answers}
    for run in found.runs:
        warm = found.of(run).temperature > 0
        assert all((a.ids != said[a.prompt]) == warm for a in run.answers)


def test_a_drafter_that_learns_knows_nothing_of_other_units(session: Session) -> None:
    twice = [PROMPTS[0], Row(PROMPTS[0].messages, "", "edit", "again")]
    plan = Plan(drafters=["suffix"], lengths=[3], rounds=2, tokens=14)
    found = bench(session, "tiny", plan, twice)
    counts = {a.counts.model_dump_json() for r in found.runs if not found.of(r).plain for a in r.answers}
    assert len(counts) == 1


def test_the_order_rotates_and_units_take_turns() -> None:
    plan = Plan(drafters=["ngram"], batches=[1, 2])
    units = make_units(plan, ["a", "a", "a", "b"])
    assert [(u.batch, u.task, u.prompts) for u in units] == [
        (1, "a", [0]), (1, "b", [3]), (2, "a", [0, 1]), (2, "b", [3, 3]),
        (1, "a", [1]), (2, "a", [2, 0]),
        (1, "a", [2]),
    ]  # fmt: skip


class Killed(module.Silent):
    """Stops after so many runs, as a signal would."""

    def __init__(self, runs: int) -> None:
        self.left = runs

    def at(self, done: int) -> None:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt


def test_a_killed_bench_goes_on_where_it_was(session: Session, bundle: BenchBundle, tmp_path: Path) -> None:
    out = tmp_path / "b.json"
    keep = journal_of(out)
    with pytest.raises(KeyboardInterrupt):
        bench(session, "tiny", PLAN, PROMPTS, keep=keep, progress=Killed(12))
    with keep.open("a") as file:
        file.write('{"run": {"sett')  # torn
    counted = Killed(10**6)
    found = bench(session, "tiny", PLAN, PROMPTS, keep=keep, progress=counted)
    assert 10**6 - counted.left == 50 - 10  # two units of five settings were whole
    assert found.complete and len(found.sessions) == 2 and len(found.runs) == 50
    assert {r.session for r in found.runs} == {0, 1}

    def answers(b: BenchBundle) -> dict[Any, Any]:
        return {(r.round, r.unit, r.setting): [a.ids for a in r.answers] for r in b.runs}

    assert answers(found) == answers(bundle)
    keep_bundle(out, found)
    assert read_bench(out) == found and not keep.exists()
    assert not session.engine.has_work and session.generate([1, 2], SamplingParams(max_tokens=2)).tokens


def test_a_journal_of_another_bench_is_refused(session: Session, tmp_path: Path) -> None:
    keep = tmp_path / "x.partial"
    plan = Plan(drafters=["ngram:min_n=1"], lengths=[2], rounds=1, tokens=14)
    with pytest.raises(KeyboardInterrupt):
        bench(session, "tiny", plan, PROMPTS, keep=keep, progress=Killed(3))
    other = plan.model_copy(update={"tokens": 9})
    with pytest.raises(ParameterError, match="holds a bench that was begun with tokens 14, now it is 9"):
        bench(session, "tiny", other, PROMPTS, keep=keep)
    with pytest.raises(ParameterError, match="begun with other prompts"):
        bench(session, "tiny", plan, PROMPTS[:2], keep=keep)
    more = bench(session, "tiny", plan.model_copy(update={"rounds": 2}), PROMPTS, keep=keep)
    assert more.complete and {r.round for r in more.runs} == {0, 1} and len(more.runs) == 2 * 3 * 2
    keep.write_text("nonsense\n")
    with pytest.raises(ParameterError, match="damaged"):
        bench(session, "tiny", plan, PROMPTS, keep=keep)


def test_time_that_is_over(session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ParameterError, match="nothing was measured: the time was too short"):
        bench(session, "tiny", PLAN, PROMPTS, minutes=1e-9)
    clock = iter(range(0, 10**6, 30))  # every look at the clock is half a minute later
    monkeypatch.setattr(module.time, "monotonic", lambda: float(next(clock)))
    notes: list[str] = []
    silent = module.Silent()
    monkeypatch.setattr(silent, "note", notes.append, raising=False)
    keep = tmp_path / "b.partial"
    found = bench(session, "tiny", PLAN, PROMPTS, keep=keep, minutes=3, progress=silent)
    assert not found.complete and 0 < len(found.runs) < 50
    assert notes == ["the time is over: the same command goes on from here"]
    assert set(Counter((r.round, r.unit) for r in found.runs).values()) == {5}  # what was begun is whole


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"drafters": []}, "there is no drafter to measure"),
        ({"drafters": ["none"]}, "plain decoding is always measured: leave out --drafter none"),
        ({"drafters": ["ngram", "ngram"]}, "--drafter ngram is given twice"),
        ({"drafters": ["ngrm"]}, "unknown drafter 'ngrm'; did you mean 'ngram'"),
        ({"controllers": ["gooput"]}, "unknown controller 'gooput'"),
        ({"controllers": ["goodput:curve=nowhere.json"]}, "nowhere.json cannot be read"),
        ({"batches": [1, 8]}, "batch 8 needs a session of as many rows, this one has 2"),
    ],
)
def test_plans_that_cannot_be_measured_are_refused(
    session: Session, change: dict[str, Any], words: str
) -> None:
    with pytest.raises((ParameterError, DrafterError)) as error:
        bench(session, "tiny", PLAN.model_copy(update=change), PROMPTS)
    assert words in str(error.value)
    with pytest.raises(ParameterError, match="there are no prompts"):
        bench(session, "tiny", PLAN, [])


def test_a_drafter_that_says_its_length_has_that_one(session: Session) -> None:
    plan = Plan(drafters=["ngram:num_speculative_tokens=5", "ngram"], lengths=[2], rounds=1, tokens=4)
    found = bench(session, "tiny", plan, PROMPTS[:1])
    assert [(s.drafter, s.depth) for s in found.settings[1:]] == [
        ("ngram:num_speculative_tokens=5", 5),
        ("ngram", 2),
    ]
    own = Plan(drafters=["ngram"], rounds=1, tokens=4)
    assert bench(session, "tiny", own, PROMPTS[:1]).settings[1].depth == 7


def test_a_journal_without_a_file_keeps_nothing(bundle: BenchBundle) -> None:
    journal = Journal(None, bundle)
    assert not journal.complete and not journal.runs


# -- the command ------------------------------------------------------------------------------------


def run(*arguments: str) -> Any:
    return CliRunner().invoke(main.build_app(), ["bench", *arguments], prog_name="slipstream")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    lines = [{"task": p.task, "id": p.name, "prompt": p.asked[0]["content"]} for p in PROMPTS]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return tmp_path


OPTIONS = (
    *("--prompts", "p.jsonl", "--tokens", "10", "--rounds", "2", "--length", "2"),
    *("--drafter", "ngram:min_n=1"),
)


def test_bench_then_baseline_then_report(here: Path, folder: Path) -> None:
    got = run("--model", str(folder), *OPTIONS, "--out", "a.json", "--html", "a.html")
    assert got.exit_code == 0, got.stderr
    for words in (
        "BATCH 1",
        "TIMES AS FAST",
        "ngram:min_n=1",
        "EDIT",
        "QA",
        "6/6",
        "promised plain decoding's",
    ):
        assert words in got.stdout
    assert (here / "a.html").read_text().startswith("<!doctype html>")
    assert {p.name for p in here.iterdir()} == {"p.jsonl", "a.json", "a.html"}
    again = run(
        *["--model", str(folder), *OPTIONS, "--out", "b.json", "--baseline", "a.json", "--json"],
        *["--task", "edit"],
    )
    assert again.exit_code == 0, again.stderr
    told = json.loads(again.stdout)
    assert told["exact"] and {c["task"] for c in told["comparison"]["changes"]} == {"edit"}
    shown = run("--bundle", "b.json", "--baseline", "a.json")
    assert shown.exit_code == 0 and "Against the baseline:" in shown.stdout


def test_a_drafter_is_replayed_on_recorded_answers_and_counts_what_was_counted(
    here: Path, bundle: BenchBundle
) -> None:
    (here / "b.json").write_text(bundle.model_dump_json())
    made = next(s for s in bundle.settings if s.fixed and not s.temperature and s.drafter.startswith("ngram"))
    asked = ["--bundle", "b.json", "--replay", made.drafter, "--length", str(made.depth)]
    got = run(*asked, "--json")
    assert got.exit_code == 0, got.stderr
    (told,) = json.loads(got.stdout)["replayed"]
    assert (told["drafter"], told["depth"]) == (made.drafter, made.depth)
    assert set(told["tasks"]) == {"all", *bundle.tasks}
    once = DraftCounts()
    for place in range(len(bundle.prompts)):
        runs = (r for r in bundle.runs if bundle.of(r) == made)
        once.add(next(a.counts.counts for r in runs for a in r.answers if a.prompt == place))
    for name in ("passes", "drafted_at", "tested_at", "accepted_at"):
        assert told["tasks"]["all"][name] == getattr(once, name), name
    assert told["tasks"]["all"]["tau"] == pytest.approx(once.tau)
    shown = run(*asked, "--html", "r.html")
    assert "REPLAYED" in shown.stdout and "the target was not run" in shown.stdout
    assert "<h2>Replayed</h2>" in (here / "r.html").read_text()
    needs = run("--bundle", "b.json", "--replay", "recycle")
    assert needs.exit_code == 2 and "cannot be replayed" in needs.stderr


def test_other_tokens_than_plain_decodings_end_with_status_one(
    here: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = module._answer

    def planted(session: Session, setting: Any, *rest: Any) -> Any:
        found = real(session, setting, *rest)
        if setting.depth and len(found.rows[0].output) > 8:
            found.rows[0].tokens[-1] ^= 1
        return found

    monkeypatch.setattr(module, "_answer", planted)
    got = run("--model", str(folder), *OPTIONS, "--out", "a.json")
    assert got.exit_code == 1
    assert "DIFFERENT TOKENS: ngram:min_n=1 2 (batch 1) on p.jsonl:p:" in got.stderr
    assert "BROKEN" in got.stdout and "the same tokens were promised" in got.stdout
    assert read_bench(here / "a.json").complete
    assert run("--bundle", "a.json", "--json").exit_code == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--model is missing"),
        (["--model", "x"], "there is no drafter to measure"),
        (["--model", "x", "--drafter", "ngrm"], "unknown drafter 'ngrm'; did you mean 'ngram'"),
        (["--model", "x", "--drafter", "ngram", "--length", "2,x"], "--length must be whole numbers"),
        (["--model", "x", "--drafter", "ngram", "--batch", "0"], "--batch must be whole numbers from 1 on"),
        (["--model", "x", "--drafter", "ngram", "--temperature", "-1"], "--temperature must be numbers of 0"),
        (["--model", "x", "--drafter", "ngram", "--prompts", "none.txt"], "there is no file none.txt"),
        (["--model", "x", "--drafter", "ngram", "--prompts", "empty.txt"], "empty.txt holds no prompts"),
        (["--model", "x", "--drafter", "ngram", "--task", "law"], "there is no prompt of task 'law'; there"),
        (["--model", "x", "--drafter", "ngram", "--limit", "0"], "--limit must be at least 1"),
        (["--model", "x", "--drafter", "ngram", "--tokens", "0"], "--tokens must be at least 1"),
        (["--model", "x", "--drafter", "ngram", "--minutes", "0"], "--minutes must be above 0"),
        (["--model", "x", "--drafter", "ngram", "--out", "no/b.json"], "the folder of no/b.json does not"),
        (["--model", "x", "--drafter", "ngram", "--baseline", "p.jsonl"], "p.jsonl is not a bench bundle of"),
        (["--model", "x", "--drafter", "ngram", "--measurement", "p.jsonl"], "p.jsonl is not a measurement"),
        (["--model", "x", "--drafter", "ngram", "--out", "."], ". cannot be written (it is a folder)"),
        (["--model", "x", "--drafter", "ngram", "--html", "slipstream-bench.json"], "cannot be two files"),
        (["--bundle", "none.json"], "none.json cannot be read"),
        (["--bundle", "p.jsonl", "--model", "x"], "--bundle measures nothing"),
        (["--model", "x", "--replay", "ngram"], "--replay needs --bundle FILE"),
    ],
)
def test_mistakes_are_one_line_and_exit_status_two(here: Path, arguments: list[str], words: str) -> None:
    (here / "empty.txt").touch()
    got = run(*arguments)
    assert got.exit_code == 2 and got.stdout == "", got.stderr
    assert words in got.stderr and got.stderr.count("\n") == 1


def test_two_processes_do_not_write_one_bench(here: Path) -> None:
    with disk.held(journal_of(Path("a.json"))):
        got = run("--model", "x", "--drafter", "ngram", "--out", "a.json")
    assert got.exit_code == 2 and "another slipstream process is writing a.json.partial" in got.stderr
    (here / "a.json.partial").mkdir()
    with pytest.raises(ParameterError, match="a.json.partial cannot be read"):
        list(disk.read_lines(here / "a.json.partial"))


def test_a_bench_that_measured_nothing_stands_in_nobodys_way(bundle: BenchBundle, tmp_path: Path) -> None:
    head = Head.model_validate(bundle.model_dump(include=set(Head.model_fields)))
    Journal(tmp_path / "b.partial", head).start(bundle.sessions[0], [])
    other = head.model_copy(update={"plan": head.plan.model_copy(update={"tokens": 99})})
    assert Journal(tmp_path / "b.partial", other).sessions == []
    (line,) = disk.read_lines(tmp_path / "b.partial")
    assert line["head"]["plan"]["tokens"] == 99


def test_a_journal_that_names_what_there_is_not_is_damaged(bundle: BenchBundle, tmp_path: Path) -> None:
    head = Head.model_validate(bundle.model_dump(include=set(Head.model_fields)))
    session, run_ = bundle.sessions[0], bundle.runs[0]
    lines = [("head", head), ("session", session), ("run", run_)]
    for bad in (
        [*lines[:2], ("run", run_.model_copy(update={"unit": 99}))],
        [*lines[:2], ("run", run_.model_copy(update={"setting": 99}))],
        [lines[0], lines[2]],
        lines[1:],
        [lines[0], *lines],
    ):
        path = tmp_path / "b.partial"
        path.write_text("".join(json.dumps({k: v.model_dump(mode="json")}) + "\n" for k, v in bad))
        with pytest.raises(ParameterError, match="b.partial is damaged: delete it"):
            Journal(path, head)


def test_another_models_baseline_is_refused_before_anything_is_measured(
    here: Path, folder: Path, bundle: BenchBundle
) -> None:
    other = bundle.target.model_copy(update={"weights": "0" * 32})
    (here / "other.json").write_text(bundle.model_copy(update={"target": other}).model_dump_json())
    got = run("--model", str(folder), *OPTIONS, "--out", "a.json", "--baseline", "other.json")
    assert got.exit_code == 2 and "the baseline is of another model (tiny, weights 000" in got.stderr
    assert not (here / "a.json").exists() and not journal_of(here / "a.json").exists()


def test_the_sweep_measures_predicts_and_prints_its_figures(
    here: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measuring, "bandwidth", lambda device: bandwidth(device, 1 << 16))
    monkeypatch.setattr(measuring, "matrix_rate", lambda device, dtype: matrix_rate(device, dtype, 32))
    small = partial(sweep.Curves, rounds=3, nodes=(1, 2, 3, 5), contexts=(64,), prefill=(16,))
    monkeypatch.setattr(sweep, "Curves", small)
    options = {
        "--target": folder, "--drafter": "ngram:min_n=1", "--dtype": "float32", "--prompts": "p.jsonl",
        "--lengths": "1,2", "--batches": "1,2", "--rounds": 1, "--max-tokens": 16, "--limit": 1,
        "--threads": 1, "--measurement": "m.json", "--out": "s.json",
    }  # fmt: skip
    arguments = [str(part) for pair in options.items() for part in pair]
    sweep.main(arguments)
    told = capsys.readouterr().out
    for words in (
        "predicted within 10% of measured for 90% of at least 40 cells: not measured; ",
        " cells (",
        "the planned setting reaches 95% of the sweep's best at every batch size: ",
        "batch 2: planned ",
        "goodput reaches 97% of the best fixed length of each task: ",
        "goodput reaches 1.05 times the best single fixed length over all tasks: ",
        "with a useless drafter goodput costs at most 3% against plain decoding: ",
    ):
        assert words in told, told
    found = read_bench(here / "s.json")
    useless = [c for c in Summary(found).totals if "useless" in c.setting.drafter]
    assert useless and all(c.counts.acceptance_rate < 0.1 for c in useless)
    sweep.main([*arguments, "--report", "--json"])
    assert json.loads(capsys.readouterr().out)["exact"]
