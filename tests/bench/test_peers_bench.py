"""`bench/peers.py` and its parts: processes, order, counting, tables; with engines made of a few lines."""

from __future__ import annotations

import io
import json
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import psutil
import pytest
from gguf.quants import dequantize, quantize
from rich.console import Console

import environments
import peer_driver
import peer_processes
from common import Log, as_prompt, read_prompts
from environments import ENVIRONMENTS, Built, Environment, prepare
from gguf_models import gguf_file, requantise
from peer_driver import Crew, PeerError, Watch, Worker
from peer_processes import GB, Models, Process, processes
from peer_report import PeerReport
from peer_settings import SETTINGS, Setting, chosen
from peers import answers, counted, few, main
from slipstream.errors import ModelError, ParameterError
from slipstream.model.progress import Silent
from slipstream.testing.tiny import save_tiny

ECHO = """
import os, sys, time
sys.path.insert(0, {workers!r})
from protocol import serve

class Echo:
    about = {{"versions": "echo 1"}}
    def __init__(self, config):
        print("noise on stdout")
        os.write(1, b"more noise\\n")
        if config.get("fails"):
            raise ValueError("no such weights")
        self.seen = 0
    def answer(self, setting, ids, max_tokens):
        self.seen += 1
        if setting == "dies":
            print("a last word", file=sys.stderr, flush=True)
            os._exit(3)
        until = time.process_time() + 0.1
        while time.process_time() < until:
            pass
        return [i + 1 for i in ids][:max_tokens]
    def told(self):
        return {{"seen": self.seen}}
    def forget(self):
        self.seen = 0

serve(Echo)
"""


@pytest.fixture
def echo(tmp_path: Path) -> Path:
    script = tmp_path / "echo.py"
    script.write_text(ECHO.format(workers=str(peer_driver.WORKERS)))
    return script


def process(echo: Path, name: str = "echo", needs: int = 0, **config: Any) -> Process:
    setting = Setting("echo", "bf16", name, None, "made here")
    made = Path(sys.executable), config, {"TOLD": "yes"}
    return Process(name, str(echo), (setting,), needs, lambda: made)


@pytest.fixture
def worker(echo: Path, tmp_path: Path) -> Iterator[Worker]:
    one = Worker(process(echo), tmp_path / "logs")
    yield one
    one.close()


# -- processes ---------------------------------------------------------------------------------------


def test_a_peer_answers_is_timed_and_forgets(worker: Worker, tmp_path: Path) -> None:
    assert worker.about == {"versions": "echo 1"}
    first, second = (worker.ask("any", [1, 2, 3], 2) for _ in range(2))
    assert first["ids"] == [2, 3] and (first["seen"], second["seen"]) == (1, 2)
    assert first["seconds"] >= 0.1  # it computes as long
    worker.forget()
    again = worker.ask("any", [5], 9)
    assert again["ids"] == [6] and again["seen"] == 1
    log = (tmp_path / "logs/echo.log").read_text()
    assert "noise on stdout" in log and "more noise" in log


def test_a_resting_peer_does_not_compute(worker: Worker) -> None:
    one = psutil.Process(worker._child.pid)
    worker.pause()
    deadline = time.monotonic() + 5
    while one.status() != psutil.STATUS_STOPPED and time.monotonic() < deadline:
        time.sleep(0.01)
    assert one.status() == psutil.STATUS_STOPPED
    worker.resume()
    assert worker.ask("any", [1], 1)["ids"] == [2]
    worker.pause()
    worker.close()
    assert not psutil.pid_exists(worker._child.pid)


def test_what_others_compute_is_told_from_what_the_peer_does(monkeypatch: pytest.MonkeyPatch) -> None:
    busy, own, clock = [100.0], [30.0], [1.0]
    times = SimpleNamespace(nice=1.0, system=2.0, irq=0.0, softirq=0.5, steal=0.5, iowait=9.0, idle=50.0)
    monkeypatch.setattr(peer_driver.psutil, "cpu_times", lambda: SimpleNamespace(user=busy[0], **vars(times)))
    monkeypatch.setattr(peer_driver.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(peer_driver.os, "cpu_count", lambda: 2)

    class One:
        @property
        def cpu_seconds(self) -> float:
            return own[0]

    watch = Watch(One())  # type: ignore[arg-type]
    busy[0], own[0], clock[0] = 119.0, 48.0, 11.0  # 19 s of 2 x 10, 18 of them the peer's
    assert watch.others() == pytest.approx(0.05)
    times.steal += 2.0  # what the host gave to somebody else is gone as well
    assert watch.others() == pytest.approx(0.15)


def test_a_peer_that_fails_or_dies_is_told_with_its_log(echo: Path, tmp_path: Path) -> None:
    with pytest.raises(PeerError, match=r"ValueError: no such weights; see .*broken\.log"):
        Worker(process(echo, "broken", fails=True), tmp_path)
    one = Worker(process(echo, "mortal"), tmp_path)
    with pytest.raises(PeerError, match=r"mortal ended \(a last word\)"):
        one.ask("dies", [1], 1)
    one.close()


def test_who_leaves_no_room_for_the_largest_other_is_closed(
    echo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = [10 * GB]
    monkeypatch.setattr(peer_driver, "available", lambda: free[0])
    small, large = process(echo, "small", GB), process(echo, "large", 6 * GB)
    crew = Crew([small, large], tmp_path)
    first = crew.take(small)
    crew.leave(first)  # 10 GB are free, 6 and the reserve are needed
    assert crew.take(small) is first
    crew.leave(first)
    free[0] = 7 * GB
    with pytest.raises(PeerError, match=r"large may need 6\.00 GB .* 7\.00 GB are free"):
        crew.take(large)
    assert not psutil.pid_exists(first._child.pid)  # it had to go, in vain
    again = crew.take(small)
    crew.leave(again)
    assert not psutil.pid_exists(again._child.pid)  # with it, large could never start
    crew.close()


# -- counting ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ids", [[1, 2, 3, 4], [1, 9], [9], [1, 2, 3, 9]])
def test_an_answer_is_as_long_as_the_limit_or_ends(ids: list[int]) -> None:
    assert counted({"ids": ids}, 4, (9, 8)) == ids


@pytest.mark.parametrize("ids", [[1, 2], [], [1, 2, 3, 4, 5], [9, 1], [1, 9, 2, 3]])
def test_an_answer_that_is_counted_otherwise_is_refused(ids: list[int]) -> None:
    with pytest.raises(PeerError, match="not be comparable"):
        counted({"ids": ids}, 4, (9, 8))


class Stub:
    """A worker that says what it is asked."""

    cpu_seconds = 0.0

    def __init__(self, *settings: Setting) -> None:
        self.process = Process("stub", "", settings, 0, lambda: (Path(), {}, {}))
        self.asked: list[Any] = []

    def ask(self, setting: str, ids: list[int], max_tokens: int) -> dict[str, Any]:
        self.asked.append((setting, ids, max_tokens))
        return {"ids": [1] * max_tokens, "seconds": 1.0}

    def forget(self) -> None:
        self.asked.append("forget")


def test_warm_ups_are_not_measured_and_teach_nothing() -> None:
    one = Setting("e", "bf16", "one", {"draft": {"n_max": 3}}, "")
    two = Setting("e", "bf16", "two", {}, "", learns=True)
    models: Any = SimpleNamespace(eos_ids=(9,))
    stub: Any = Stub(one, two)
    todo = [(i, s) for i in range(2) for s in (one, two)]
    told = list(answers(stub, todo, [[1, 2, 3], [4]], models, 32))
    assert [(i, s.method, r["tokens"]) for i, s, r in told] == [
        (0, "one", 32), (0, "two", 32), (1, "one", 32), (1, "two", 32)
    ]  # fmt: skip
    warm = [("bf16 one", [4], 16), ("bf16 two", [4], 16)]
    assert stub.asked[:3] == [*warm, "forget"] and len(stub.asked) == 7
    plain: Any = Stub(one)
    assert list(answers(plain, [], [[1]], models, 32)) == [] and not plain.asked


def test_prompts_are_read_as_they_are_published(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"question_id": 81, "category": "writing", "turns": ["Compose.", "Rewrite."]},
        {"question_id": 402, "task": "math_reasoning", "category": "math_reasoning", "turns": ["2+2?"]},
        {"task_id": "HumanEval/4", "prompt": "def f():\n", "entry_point": "f", "test": "…"},
        {"id": "own/1", "task": "own", "prompt": "Hello", "source": "me"},
    ]
    path = tmp_path / "mixed.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    read = read_prompts(path)
    assert [(p["id"], p["task"]) for p in read] == [
        ("mt_bench/81", "mt_bench"),
        ("math_reasoning/402", "math_reasoning"),
        ("HumanEval/4", "humaneval"),
        ("own/1", "own"),
    ]
    assert read[0]["prompt"] == "Compose." and read[2]["prompt"].endswith("\n\ndef f():")
    assert read[3] == rows[3]
    path.write_text('{"id": "x"}\n')
    with pytest.raises(ParameterError, match="question of Spec-Bench"):
        read_prompts(path)


def test_few_prompts_are_spread_over_each_task() -> None:
    prompts = [as_prompt({"id": f"{t}{i}", "task": t, "prompt": ""}) for i in range(6) for t in "ab"]
    assert [p["id"] for p in few(prompts, 2)] == ["a0", "b0", "a3", "b3"]
    assert few(prompts, 0) == prompts
    assert len(few(prompts, 99)) == 12


# -- settings and environments -----------------------------------------------------------------------


def test_every_setting_has_a_source_and_a_name_of_its_own() -> None:
    assert len({s.full for s in SETTINGS}) == len(SETTINGS)
    assert all(s.source for s in SETTINGS)
    assert chosen("") == [s for s in SETTINGS if s.usual]
    assert {s.full for s in chosen("llama.cpp q4_k_m draft*, vllm bf16 plain")} == {
        "llama.cpp q4_k_m draft 3",
        "llama.cpp q4_k_m draft 16",
        "vllm bf16 plain",
    }
    with pytest.raises(ParameterError, match="no setting is called 'lama\\*'; there are slipstream"):
        chosen("lama*")


def test_every_setting_is_run_by_its_engine_s_script_with_what_it_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = (tmp_path / "target", tmp_path / "draft")
    models = Models("t", "d", folders, (9,), 2, 512, Silent(), {"target": "t.gguf", "draft": "d.gguf"})
    monkeypatch.setattr(peer_processes, "prepare", lambda name: tmp_path / name / "bin/python")
    made, missing = processes([s for s in SETTINGS if s.weights != "int8"], models)
    assert not missing and sum(len(p.settings) for p in made) == len(
        [s for s in SETTINGS if s.weights != "int8"]
    )
    by_name = {p.name: (p, *p.prepare()) for p in made}
    ours, _, config, _ = by_name["slipstream bf16"]
    assert ours.own and ours.learns and len(ours.settings) == 5
    assert config["settings"]["bf16 draft-int8"].startswith("draft_model:model=d,")
    draft, python, config, _ = by_name["llama.cpp q4_k_m draft 16"]
    assert (draft.script, python.parts[-3]) == ("run_llamacpp.py", "llamacpp")
    assert config["speculative"] == {"draft": {"model": "d.gguf", "n_max": 16}} and config["eos_ids"] == (9,)
    native, _, config, _ = by_name["llama.cpp-native q4_k_m ngram_mod"]
    assert native.learns and native.script == "run_llama_server.py"
    assert config["program"].endswith("llamacpp-native/bin/llama-server")
    for name in ("vllm", "vllm-zen"):
        one, python, config, variables = by_name[f"{name} bf16 draft 5"]
        assert (one.script, python.parts[-3]) == ("run_vllm.py", name)
        assert config["speculative"]["model"] == str(folders[1])
        assert variables["OMP_NUM_THREADS"] == "2"
    assert by_name["openvino q4_k_m draft 4"][2]["draft"] == "d.gguf"


class Pip:
    """Makes what venv and pip would; fails at a command that holds `bad`."""

    def __init__(self, bad: str = "") -> None:
        self.bad = bad
        self.commands: list[list[str]] = []

    def __call__(self, command: Sequence[str], log: Path) -> int:
        self.commands.append(list(command))
        if "venv" in command:
            site = Path(command[-1]) / "lib/python3/site-packages"
            site.mkdir(parents=True)
            (Path(command[-1]) / "bin").mkdir()
        if self.bad and self.bad in command:
            log.write_text("Collecting\nERROR: No matching distribution found for it\nnoise\n")
            return 1
        return 0


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SLIPSTREAM_BENCH_ENVS", str(tmp_path / "envs"))
    one = Environment("one", (("a==1",), ("b==2",)), "import a", removed=("c",), room=1)
    more = Environment("two", (("--no-deps", "d==3"),), "import d", extends="one", room=1)
    monkeypatch.setattr(environments, "ENVIRONMENTS", {"one": one, "two": more})
    return tmp_path / "envs"


def test_an_environment_is_made_once_step_by_step(made: Path) -> None:
    pip, notes = Pip(), list[str]()
    python = prepare("one", notes.append, pip)
    assert python == made / "one/bin/python" and len(notes) == 1
    assert [c[-1] for c in pip.commands] == [str(made / "one"), "a==1", "b==2", "c", "import a"]
    assert "uninstall" in pip.commands[3]
    assert prepare("one", notes.append, pip) == python
    assert len(notes) == 1 and len(pip.commands) == 5
    prepare("two", notes.append, pip)
    (seen,) = (made / "two").glob("lib/*/site-packages/*.pth")
    assert seen.read_text().strip() == str(made / "one/lib/python3/site-packages")


def test_an_environment_that_was_not_finished_is_made_anew(made: Path) -> None:
    with pytest.raises(
        ModelError, match=r"pip install b==2 failed \(No matching distribution found for it\)"
    ):
        prepare("one", print, Pip(bad="b==2"))
    pip = Pip()
    prepare("one", print, pip)
    assert len(pip.commands) == 5


def test_a_program_is_compiled_from_its_source_package(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = Built("s==1", "third/party", "engine", ("-DFAST=ON",))
    monkeypatch.setitem(environments.ENVIRONMENTS, "built", Environment("built", (), "", built=built, room=1))
    pip = Pip()

    def run(command: Sequence[str], log: Path) -> int:
        if "download" in command:
            folder = Path(command[command.index("-d") + 1])
            (folder / "s-1/third/party").mkdir(parents=True)
            shutil.make_archive(str(folder / "s-1"), "gztar", folder, "s-1")
            shutil.rmtree(folder / "s-1")
        elif "-S" in command:
            assert Path(command[command.index("-S") + 1]).parts[-3:] == ("s-1", "third", "party")
        elif "--build" in command:
            program = Path(command[command.index("--build") + 1]) / "bin/engine"
            program.parent.mkdir(parents=True)
            program.write_text("#!/bin/sh")
            program.chmod(0o755)
        return pip(command, log)

    python = prepare("built", print, run)
    assert (python.parent / "engine").read_text() == "#!/bin/sh"
    assert [c for c in pip.commands if "-DFAST=ON" in c] and not list((made / "built").glob("tmp*"))


def test_an_environment_of_ones_own_is_taken_as_it_is(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip = Pip()
    monkeypatch.setenv("SLIPSTREAM_ENV_ONE", str(tmp_path / "mine"))
    with pytest.raises(ModelError, match="SLIPSTREAM_ENV_ONE names .*, which is no virtual environment"):
        prepare("one", print, pip)
    (tmp_path / "mine/bin").mkdir(parents=True)
    (tmp_path / "mine/bin/python").touch()
    assert prepare("one", print, pip) == tmp_path / "mine/bin/python" and not pip.commands
    with pytest.raises(ModelError, match="no environment 'three'; there are one, two"):
        prepare("three", print, pip)
    assert ENVIRONMENTS["vllm-zen"].variable == "SLIPSTREAM_ENV_VLLM_ZEN"


# -- files for engines that read no other --------------------------------------------------------------


def test_a_file_in_eight_bits_is_the_same_model(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "four.gguf", "llama")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
    writer.add_string("general.name", "tiny")
    writer.add_array("tokenizer.ggml.tokens", ["a", "bc", "ß"])
    writer.add_array("tokenizer.ggml.scores", [0.5, 1.5])
    generator = np.random.default_rng(0)
    four = gguf.GGMLQuantizationType.Q4_0
    matrix = generator.normal(size=(6, 64)).astype(np.float32)
    writer.add_tensor("w.weight", quantize(matrix, four), raw_dtype=four)
    writer.add_tensor("n.weight", np.arange(5, dtype=np.float32))
    writer.add_tensor("x.weight", generator.normal(size=(2, 32)).astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    requantise(tmp_path / "four.gguf", tmp_path / "eight.gguf")
    before, after = (gguf.GGUFReader(tmp_path / f"{name}.gguf") for name in ("four", "eight"))
    for name, field in before.fields.items():
        if not name.startswith("GGUF.") and name != "general.file_type":
            assert after.fields[name].contents() == field.contents(), name
    assert after.fields["general.file_type"].contents() == gguf.LlamaFileType.MOSTLY_Q8_0
    for old, new in zip(before.tensors, after.tensors, strict=True):
        assert old.name == new.name and list(old.shape) == list(new.shape)
        assert new.tensor_type.name == ("F32" if old.name == "n.weight" else "Q8_0")
        one, other = (dequantize(t.data, t.tensor_type) for t in (old, new))
        assert np.abs(one - other).max() <= np.abs(one).max() / 127


def test_only_the_catalogue_s_models_have_files(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no GGUF file of tiny .*: give one of qwen2.5-coder-1.5b"):
        gguf_file("tiny", out=tmp_path)
    assert not list(tmp_path.iterdir())


# -- tables ------------------------------------------------------------------------------------------


def rows_of(setting: str, seconds: dict[str, tuple[float, float]]) -> list[dict[str, Any]]:
    """Two rounds of ten tokens for every task."""
    engine, _, name = setting.partition(" ")
    return [
        {
            "engine": engine,
            "setting": name,
            "task": task,
            "prompt": f"{task}/1",
            "round": round_,
            "tokens": 10,
            "ids": [round_] * 10,
            "seconds": spent,
            "others": 0.5 if name == "bf16 plain" else 0.0,
            "forgot": False,
            "drafted": 8,
            "accepted": 4,
        }
        for task, both in seconds.items()
        for round_, spent in enumerate(both)
    ]


@pytest.fixture
def report(tmp_path: Path) -> PeerReport:
    log = Log(tmp_path / "peers.jsonl", resume=False)
    log.start(
        {
            "target": "t",
            "draft": "d",
            "max_tokens": 10,
            "machine": "m",
            "versions": "v",
            "missing": {"openvino q4_k_m plain": "it cannot be fed"},
        }
    )
    for row in (
        *rows_of("slipstream bf16 none", {"qa": (2.0, 4.0), "rag": (2.0, 4.0)}),
        *rows_of("slipstream bf16 suffix", {"qa": (1.0, 2.0), "rag": (1.0, 2.0)}),
        *rows_of("transformers bf16 plain", {"qa": (4.0, 8.0), "rag": (4.0, 8.0)}),
        *rows_of("llama.cpp q4_k_m plain", {"qa": (2.0, 4.0), "rag": (2.0, 4.0)}),
        *rows_of("llama.cpp q4_k_m draft 3", {"qa": (9.0, 9.0), "rag": (0.5, 1.0)}),
        *rows_of("vllm bf16 plain", {"qa": (1.5, 3.0), "rag": (1.5, 3.0)}),
    ):
        log.add(row)
    again = Log(log.path, resume=True)
    assert again.rows == log.rows and again.runs == log.runs
    return PeerReport(again, SETTINGS)


def test_rates_are_told_by_round_and_the_best_is_one_setting(report: PeerReport) -> None:
    named = {s.full: s for s in report.measured}
    assert report.rates(named["slipstream bf16 suffix"]) == [10.0, 5.0]
    assert report.median(named["slipstream bf16 suffix"]) == 7.5
    assert report.rates(named["llama.cpp q4_k_m draft 3"], "rag") == [20.0, 10.0]
    best = report.best("llama.cpp")
    assert best and best.full == "llama.cpp q4_k_m plain"  # draft 3 wins one task only


def test_aims_are_judged_over_all_prompts_and_task_by_task(report: PeerReport) -> None:
    total, every, vllm, hf, exact = report.targets()
    assert total.met and "slipstream bf16 suffix against llama.cpp q4_k_m plain: 2.00x" in total.found
    assert every.met and "qa 2.00x (2.00x), rag 2.00x (0.50x)" in every.found
    assert vllm.met is False and "1.50x" in vllm.found
    assert hf.met and "4.00x" in hf.found
    assert exact.met and exact.aim.startswith("Slipstream bf16: every drafter")


def test_the_record_has_one_row_a_setting_and_task(report: PeerReport) -> None:
    rows = report.record()["rows"]
    keys = [(r["engine"], r["setting"], r["task"]) for r in rows]
    assert len(set(keys)) == len(keys) == 12
    row = rows[keys.index(("llama.cpp", "q4_k_m draft 3", "qa"))]
    assert row == {
        "engine": "llama.cpp",
        "setting": "q4_k_m draft 3",
        "task": "qa",
        "tokens": 20,
        "seconds": 18.0,
        "tokens_per_second": pytest.approx(20 / 18),
        "by_round": [pytest.approx(10 / 9), pytest.approx(10 / 9)],
    }
    assert json.loads(json.dumps(report.record()))["missing"]


@pytest.mark.parametrize("markdown", [False, True])
def test_the_tables_tell_medians_ranges_and_who_disturbed(report: PeerReport, markdown: bool) -> None:
    out = io.StringIO()
    report.show(Console(file=out, width=220), markdown)
    text = out.getvalue()
    assert "7.50 (5.00-10.00)" in text and "5.00-10.00" in text
    assert "openvino q4_k_m plain is not measured: it cannot be fed" in text
    assert "vllm bf16 plain: others took more than 5 % of the machine during 4 of 4 answers" in text
    assert "50 %" in text and "4/4" in text


def test_the_chart_is_drawn(report: PeerReport, tmp_path: Path) -> None:
    report.chart(tmp_path / "peers.json")
    assert (tmp_path / "peers.png").read_bytes()[:4] == b"\x89PNG"
    svg = (tmp_path / "peers.svg").read_text()
    assert "llama.cpp q4_k_m draft 3" in svg and "task by task" in svg


# -- all of it ---------------------------------------------------------------------------------------


@pytest.fixture
def models(tmp_path: Path) -> Path:
    save_tiny(tmp_path / "target", layers=2)
    save_tiny(tmp_path / "draft", seed=1, layers=1)
    prompts = [{"id": f"qa/{i}", "task": "qa", "prompt": text} for i, text in enumerate(("abab", "xyz"))]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(p) + "\n" for p in prompts))
    return tmp_path


def peers(models: Path, *arguments: str) -> dict[str, Any]:
    main(
        ["--target", str(models / "target"), "--draft", str(models / "draft"), "--threads", "1"]
        + ["--prompts", str(models / "prompts.jsonl"), "--max-tokens", "8", *arguments]
        + ["--json", str(models / "out/peers.json")]
    )
    return json.loads((models / "out/peers.json").read_text())  # type: ignore[no-any-return]


@pytest.mark.slow
def test_engines_take_turns_on_the_same_prompts_and_a_run_goes_on(
    models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    only = "slipstream bf16 none,slipstream bf16 suffix,transformers bf16 plain,llama.cpp q4_k_m plain"
    told = peers(models, "--only", only, "--rounds", "1")
    rows = {(r["engine"], r["setting"], r["prompt"]): r for r in told["answers"]}
    assert len(rows) == len(told["answers"]) == 3 * 2
    for prompt in ("qa/0", "qa/1"):
        plain = rows["slipstream", "bf16 none", prompt]
        assert plain["tokens"] == len(plain["ids"]) <= 8 and plain["seconds"] > 0
        assert rows["slipstream", "bf16 suffix", prompt]["ids"] == plain["ids"]
        assert rows["transformers", "bf16 plain", prompt]["prompt_tokens"] == plain["prompt_tokens"]
    assert "no GGUF file of" in told["missing"]["llama.cpp q4_k_m plain"]
    assert (models / "out/peers.png").exists() and "tokens/s of whole requests" in capsys.readouterr().out
    more = peers(models, "--only", only, "--rounds", "2", "--resume")
    assert more["answers"][:6] == told["answers"] and len(more["answers"]) == 12
    again = peers(models, "--table")
    assert again["rows"] == more["rows"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--only", "lama"), "no setting is called 'lama'"),
        (("--rounds", "0"), "--rounds must be at least 1"),
        (("--tasks", "poetry"), "unknown task 'poetry'; there are qa"),
        (("--table",), "holds no answers: measure first"),
    ],
)
def test_mistakes_are_told_in_one_line(
    models: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        peers(models, *arguments)
    error = capsys.readouterr().err
    assert ended.value.code == 2 and message in error and error.count("\n") == 1
