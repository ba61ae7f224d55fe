"""`slipstream run` and `slipstream drafters` as a person types them, on tiny checkpoints."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import slipstream
from slipstream.cli import answer, drafters, generation, main
from slipstream.cli.chat import chat as chat_on_terminal
from slipstream.cli.run import DEFAULT_MODEL
from slipstream.core.params import SamplingParams
from slipstream.core.stats import DraftCounts
from slipstream.engine.session import Completion, Session
from slipstream.model.catalogue import find
from slipstream.plan.memory import plan_memory
from slipstream.testing.quantised import every_size, lacks_int8
from slipstream.testing.tiny import save_tiny, tiny_tokenizer

COMMAND = [sys.executable, "-m", "slipstream.cli.main", "run"]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny matrices take longer on two threads, much longer on cores that others use."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints: target, draft (other weights), long (a context that outlasts a test), bare, foreign."""
    root = tmp_path_factory.mktemp("models")
    save_tiny(root / "target")
    save_tiny(root / "draft", seed=1, layers=1)
    save_tiny(root / "long", max_position_embeddings=100_000)
    bare = tiny_tokenizer()
    bare.chat_template = None
    save_tiny(root / "bare", tokenizer=bare)
    # the same symbols under other ids
    foreign = json.loads(tiny_tokenizer().backend_tokenizer.to_str())
    vocab = foreign["model"]["vocab"]
    foreign["model"]["vocab"] = {s: 255 - i for s, i in vocab.items()}
    save_tiny(root / "foreign")
    (root / "foreign" / "tokenizer.json").write_text(json.dumps(foreign))
    save_tiny(root / "sampling")
    path = root / "sampling" / "generation_config.json"
    told = json.loads(path.read_text()) | {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "top_k": 20}
    path.write_text(json.dumps(told))
    return root


@pytest.fixture
def invoke(models: Path):
    def call(*arguments: str, model: str = "target", stdin: str | None = None, **env: str):
        return CliRunner().invoke(
            main.build_app(),
            ["run", "--model", str(models / model), *arguments],
            prog_name="slipstream",
            input=stdin,
            env={"NO_COLOR": None, **env},
        )

    return call


@pytest.fixture
def submitted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, SamplingParams]]:
    """What reaches the engine."""
    seen: list[tuple[Any, SamplingParams]] = []
    submit = Session.submit

    def spy(self: Session, prompt: Any, params: Any = None, **template: Any) -> Any:
        seen.append((prompt, params))
        return submit(self, prompt, params, **template)

    monkeypatch.setattr(Session, "submit", spy)
    return seen


def reference(models: Path, prompt: Any, name: str = "target", **params: Any) -> Completion:
    with slipstream.load(str(models / name)) as session:
        return session.generate(prompt, session.defaults.with_(**params))


def chat(*contents: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": c} for i, c in enumerate(contents)]


# -- text ---------------------------------------------------------------------------------------


def test_text_goes_to_stdout_and_all_else_to_stderr(invoke, models):
    got = invoke("hello", "--max-tokens", "30")
    assert got.exit_code == 0
    assert got.stdout == reference(models, chat("hello"), max_tokens=30).text + "\n"
    for word in ("loading", "tokens", "tokens/s", "tau", "target", "prefill", "drafter", "other", "memory"):
        assert word in got.stderr


def test_the_system_message_and_plain_text_reach_the_prompt(invoke, models):
    system = [{"role": "system", "content": "be brief"}, *chat("hello")]
    for arguments, prompt in ((["--system", "be brief"], system), (["--no-chat-template"], "hello")):
        got = invoke("hello", "--max-tokens", "9", *arguments)
        assert got.stdout == reference(models, prompt, max_tokens=9).text + "\n"


def test_a_model_without_template_continues_plain_text_and_says_so(invoke, models):
    got = invoke("hello", "--max-tokens", "9", model="bare")
    assert got.exit_code == 0 and "no chat template" in got.stderr
    assert got.stdout == reference(models, "hello", max_tokens=9).text + "\n"


def test_standard_input_is_the_prompt(invoke, models):
    asked = invoke("hello", "--max-tokens", "9")
    assert invoke("--max-tokens", "9", stdin="hello\n").stdout == asked.stdout
    plain = invoke("--max-tokens", "9", "--no-chat-template", stdin="hello\n")
    assert plain.stdout == reference(models, "hello\n", max_tokens=9).text + "\n"


def test_several_answers_are_those_of_consecutive_seeds(invoke, models):
    options = ("--max-tokens", "9", "--temperature", "1")
    got = invoke("hello", "--n", "2", "--seed", "5", *options)
    for seed in (5, 6):
        assert f"seed {seed} ---\n{invoke('hello', '--seed', str(seed), *options).stdout}" in got.stdout


# -- options ------------------------------------------------------------------------------------


def test_every_sampling_option_reaches_the_engine(invoke, submitted):
    wanted: dict[str, Any] = {
        "max_tokens": 3, "temperature": 0.5, "top_p": 0.8, "top_k": 7, "min_p": 0.01,
        "repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": -0.3, "seed": 11, "n": 2,
    }  # fmt: skip
    flags = [part for k, v in wanted.items() for part in (f"--{k.replace('_', '-')}", str(v))]
    assert invoke("hello", *flags, "--stop", "zz", "--stop", "\n\n").exit_code == 0
    assert [params for _, params in submitted] == [SamplingParams(**wanted, stop=("zz", "\n\n"))]


def test_unset_options_are_the_checkpoints_own(invoke, submitted):
    invoke("hello", "--max-tokens", "2", "--top-p", "0.5", model="sampling")
    (_, params), = submitted  # fmt: skip
    assert (params.temperature, params.top_p, params.top_k) == (0.7, 0.5, 20)
    assert isinstance(params.seed, int)


def test_load_options_reach_load(invoke, monkeypatch):
    seen: dict[str, Any] = {}

    def spy(model: str, drafter: str, **options: Any) -> Session:
        seen.update(options, model=model, drafter=drafter)
        return load(model, drafter, **options)

    load = slipstream.load
    monkeypatch.setattr("slipstream.api.load", spy)
    before = torch.get_num_threads()
    try:
        got = invoke(
            "hello", "--drafter", "ngram:max_n=3", "--controller", "additive:start=3", "--dtype", "bfloat16",
            "--device", "cpu", "--threads", "2", "--context", "30", "--trust-remote-code", "--json",
            "--weights", "plain",
        )  # fmt: skip
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    report = json.loads(got.stdout)
    assert report["finish_reason"] == "length" and report["prompt_tokens"] + len(report["tokens"]) == 30
    del seen["progress"]
    assert Path(seen.pop("model")).name == "target"
    assert seen == {
        "drafter": "ngram:max_n=3", "controller": "additive:start=3", "dtype": "bfloat16", "device": "cpu",
        "context": 30, "trust_remote_code": True, "weights": "plain", "embedding": "plain",
    }  # fmt: skip


@pytest.mark.skipif(lacks_int8(), reason="this CPU has no int8 products")
def test_int8_weights_are_told_and_compare_equal(invoke, models, tmp_path):
    options = ("--max-tokens", "12", "--drafter", f"draft_model:model={models / 'target'}")
    int8 = ("--weights", "int8", "--embedding", "int8")
    with every_size():
        got = invoke("hello", *options, *int8, "--compare", SLIPSTREAM_CACHE=str(tmp_path))
        assert got.exit_code == 0 and "int8 weights: the answer is the int8 model's own" in got.stderr
        got = invoke("hello", *options, *int8, "--json", SLIPSTREAM_CACHE=str(tmp_path))
    report = json.loads(got.stdout)
    assert (report["weights"], report["embedding"], report["dtype"]) == ("int8", "int8", "float32")
    assert len(list((tmp_path / "int8").iterdir())) == 1


def test_the_default_model_is_in_the_catalogue():
    assert find(DEFAULT_MODEL) is not None


# -- json and compare ---------------------------------------------------------------------------


def test_json_is_one_object_with_the_promised_keys(invoke, models):
    got = invoke(
        "hello", "--json", "--max-tokens", "12", "--drafter", f"draft_model:model={models / 'target'}"
    )
    assert got.exit_code == 0
    report = json.loads(got.stdout)
    answered = reference(models, chat("hello"), max_tokens=12)
    assert report["text"] == answered.text and tuple(report["tokens"]) == answered.tokens
    assert report["finish_reason"] == "length" and report["prompt_tokens"] == answered.prompt_tokens
    assert report["tokens_per_second"] > 0 and report["decode_tokens_per_second"] > 0
    assert report["tau"] > 1 and all(0 <= rate <= 1 for rate in report["acceptance_per_position"])
    assert set(report["seconds"]) == {"target", "prefill", "drafter", "other", "total"}
    parts = sum(report["seconds"][k] for k in ("target", "prefill", "drafter", "other"))
    assert 0 < parts <= report["seconds"]["total"]
    assert report["peak_memory_bytes"] > 50_000_000
    assert set(report["versions"]) == {"slipstream", "torch", "transformers", "python"}
    assert Path(report["model"]).name == "target" and report["drafter"].startswith("draft_model:")
    assert (report["max_tokens"], report["dtype"], report["device"]) == (12, "float32", "cpu")
    assert report["threads"] == 1 and report["context"] == 2048
    plan = plan_memory(str(models / "target"), report["drafter"], context=report["prompt_tokens"] + 12)
    assert report["drafter_memory_bytes"] == pytest.approx(plan.drafter.total, rel=0.1)
    assert isinstance(report["seed"], int)
    assert not {"completions", "plain_tokens_per_second", "speedup", "identical"} & set(report)


def test_json_of_several_answers_lists_them(invoke):
    report = json.loads(
        invoke("hello", "--json", "--n", "2", "--temperature", "1", "--max-tokens", "5").stdout
    )
    first, second = report["completions"]
    assert {k: report[k] for k in first} == first and second["seed"] == first["seed"] + 1


@pytest.mark.parametrize("temperature", ["0", "1"])
@pytest.mark.parametrize("drafter", ["ngram:min_n=1", "draft_model:model={}"])
def test_compare_finds_the_same_tokens(invoke, models, drafter, temperature):
    spec = drafter.format(models / "draft")
    options = ("--max-tokens", "20", "--temperature", temperature, "--drafter", spec)
    report = json.loads(invoke("hello", "--compare", "--json", *options).stdout)
    assert report["identical"] is True and report["identical_expected"] is True
    ratio = report["tokens_per_second"] / report["plain_tokens_per_second"]
    assert report["speedup"] == pytest.approx(ratio)


def test_compare_warms_both_sides_alike_and_tells(invoke, submitted):
    got = invoke("hello", "--compare", "--max-tokens", "20")
    assert got.exit_code == 0 and "identical" in got.stderr and "warm-up of 8 tokens each" in got.stderr
    told = [line.split(" (")[0] for line in got.stderr.splitlines()]
    places = [told.index(f"{what}") for what in ("warming up plain decoding", "warming up ngram")]
    assert places == sorted(places) and "the same again with plain decoding" in told[places[1] :]
    (cold, first), (cold_too, second), (prompt, params), (prompt_too, params_too) = submitted
    assert first == second and first.max_tokens == 8 and first.ignore_eos
    assert cold == cold_too == prompt[::-1] and prompt == prompt_too and params == params_too


def test_the_memory_of_the_drafter_is_told(invoke, models):
    options = ("--max-tokens", "9", "--drafter", f"draft_model:model={models / 'draft'}")
    for more in ([], ["--compare"]):
        assert re.search(r"at its peak; the drafter held \d+ kB", invoke("hello", *options, *more).stderr)
    assert re.search(r"\(draft_model, \d+ kB more memory\)", invoke("hello", *options, "--compare").stderr)
    assert "drafter held" not in invoke("hello", "--max-tokens", "9", "--drafter", "none").stderr


def test_drawn_drafts_may_differ_and_are_no_failure(invoke, models):
    spec = f"draft_model:model={models / 'draft'},sampled=true"
    options = ("--compare", "--max-tokens", "15", "--temperature", "1", "--seed", "3", "--drafter", spec)
    got = invoke("hello", *options)
    assert got.exit_code == 0 and "only the law is equal" in got.stderr


def test_a_broken_promise_exits_1(invoke, monkeypatch):
    """Were the plain tokens others, the comparison would say so."""
    calls = []
    real = generation.generate

    def fake(session: Any, prompt: Any, params: SamplingParams, *rest: Any) -> Any:
        calls.append(params)
        return real(
            session, prompt, params.with_(temperature=5.0, seed=1) if len(calls) == 4 else params, *rest
        )

    monkeypatch.setattr(generation, "generate", fake)
    monkeypatch.setattr(
        generation, "warm_up_both", lambda s, p, r, *rest: calls.extend([r, r]) or s.use("none")
    )
    got = invoke("hello", "--compare", "--max-tokens", "20")
    assert got.exit_code == 1 and "DIFFER from position" in got.stderr


def test_where_tokens_part():
    def outcome(*tokens: int) -> generation.Outcome:
        done = Completion("", tokens, 1, "stop", (False,) * len(tokens), None, DraftCounts(), 0)
        return generation.Outcome((done,), done.seconds, 1.0)

    assert generation.Comparison(outcome(1, 2), outcome(1, 2)).differs_at is None
    assert generation.Comparison(outcome(1, 2), outcome(1, 3)).differs_at == 1
    assert generation.Comparison(outcome(1, 2), outcome(1, 2, 3)).differs_at == 2


# -- colours ------------------------------------------------------------------------------------


def test_colours_only_when_asked_and_the_text_stays(invoke, models):
    options = ("hello", "--max-tokens", "12", "--drafter", f"draft_model:model={models / 'target'}")
    plain = invoke(*options)
    assert "\x1b[" not in plain.stdout
    assert invoke(*options, "--colour", "drafts").stdout == plain.stdout  # no terminal here
    green = invoke(*options, "--color", "always", NO_COLOR="1").stdout
    assert green.count(answer.DRAFTED) == green.count(answer.RESET) > 0
    assert green.replace(answer.DRAFTED, "").replace(answer.RESET, "") == plain.stdout


# -- mistakes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--temperature", "-1"], "temperature"),
        (["--top-p", "0"], "top_p must be in (0, 1]"),
        (["--top-p", "1.5"], "top_p must be in (0, 1]"),
        (["--max-tokens", "0"], "max_tokens"),
        (["--n", "0"], "n must be"),
        (["--stop", ""], "stop"),
        (["--threads", "0"], "threads must be from 1 to 1024"),
        (["--context", "1"], "context must be at least 2"),
        (["--colour", "blue"], "--colour must be drafts, always or never"),
        (["--json", "--colour", "always"], "--json has no colours"),
        (["--system", "x", "--no-chat-template"], "--system needs the chat template"),
        (["--compare", "--drafter", "none"], "choose a --drafter"),
        (["--drafter", "ngrm"], "did you mean 'ngram'?"),
        (["--drafter", "ngram:max_m=2"], "did you mean 'max_n'?"),
        (
            ["--drafter", "draft_model:tiny"],
            "what follows 'draft_model' must be written key=value, not 'tiny'",
        ),
        (["--drafter", "ngram:4,min_n=1"], "must be written key=value, not '4,min_n=1'"),
        (["--drafter", "ngram:max_n=two"], "a whole number"),
        (["--drafter", "ngram:max_n=100000000000"], "max_n <= 1024"),
        (["--drafter", "recycle:k=1200"], "from 1 to 256"),
        (["--threads", "100000"], "threads must be from 1 to 1024"),
        (["--drafter", "draft_model"], "name one with draft_model:model=FOLDER"),
        (["--drafter", "eagle"], "name one with eagle:heads=FOLDER"),
        (["--drafter", "./none.py:Mine"], "does not exist"),
        (["--drafter", "draft_model:model={}/foreign"], "vocabular"),
        (["--drafter", "draft_model:model=./nowhere/at/all"], "./nowhere/at/all"),
        (["--drafter", "cascade:drafters=sufix+ngram"], "did you mean 'suffix'?"),
        (["--drafter", "selfspec:exit=-1"], "exit must be a number of layers"),
        (["--controller", "fixd"], "unknown controller"),
        (["--controller", "additive:start=99"], "min <= start <= max"),
        (["world"], "put it in quotes: slipstream run 'hello world'"),
        (["--dtype", "int3"], "dtype must be"),
        (["--weights", "int3"], "weights must be plain or int8"),
        (["--embedding", "int8"], "embedding int8 goes with weights int8"),
        (["--device", "gpu"], "device must be"),
        (["--model", "./nowhere/at/all"], "./nowhere/at/all"),
    ],
)
def test_a_mistake_is_one_line_and_exit_2(invoke, models, arguments, told):
    got = invoke("hello", *(a.format(models) for a in arguments))
    wrong(got, told)


@pytest.mark.parametrize("stdin", ["", "\n", "  \n"])
def test_an_empty_prompt_is_refused(invoke, stdin):
    wrong(invoke(stdin=stdin), "the prompt is empty")
    wrong(invoke(stdin, stdin="ignored"), "the prompt is empty")


def test_a_prompt_beyond_the_context_is_refused(invoke):
    wrong(invoke("hello" * 10, "--context", "20"), "context holds 20")


def test_system_without_any_template_is_refused(invoke):
    wrong(invoke("hello", "--system", "x", model="bare"), "no chat template")


def wrong(got: Any, told: str) -> None:
    errors = [line for line in got.stderr.splitlines() if line.startswith("slipstream: error: ")]
    assert got.exit_code == 2 and got.stdout == ""
    assert len(errors) == 1 and told in errors[0] and got.stderr.splitlines()[-1] == errors[0]
    assert "Traceback" not in got.stderr


# -- drafters -----------------------------------------------------------------------------------


def invoke_drafters(*arguments: str) -> Any:
    return CliRunner().invoke(main.build_app(), ["drafters", *arguments], prog_name="slipstream")


def test_drafters_are_listed_with_their_options():
    listed = {d["name"]: d for d in json.loads(invoke_drafters("--json").stdout)}
    assert {"none", "ngram", "draft_model"} <= set(listed)
    ngram = listed["ngram"]
    assert ngram["summary"].startswith("Prompt lookup") and ngram["where"] == "built in"
    assert ngram["options"][0] == {
        "name": "max_n", "type": "int", "default": "4", "help": "longest suffix looked for"
    }  # fmt: skip
    assert listed["none"]["options"] == []
    assert next(o for o in listed["crossvocab"]["options"] if o["name"] == "model")["default"] is None
    table = invoke_drafters().stdout
    assert "num_speculative_tokens=7" in table and "--drafter NAME:option=value" in table


def test_controllers_are_listed_with_their_options():
    got = CliRunner().invoke(main.build_app(), ["controllers", "--json"], prog_name="slipstream")
    listed = {c["name"]: c for c in json.loads(got.stdout)}
    assert set(listed) >= {"additive", "fixed"} and listed["additive"]["summary"].startswith(
        "Draft length that"
    )
    assert {"name": "start", "type": "int", "default": "5"}.items() <= listed["additive"]["options"][
        0
    ].items()
    table = CliRunner().invoke(main.build_app(), ["controllers"], prog_name="slipstream").stdout
    assert "raise_above=0.85" in table and "--controller NAME:option=value" in table
    assert "slipstream controllers" in invoke_drafters().stdout


def test_every_built_in_option_is_explained():
    for drafter in (*drafters.listed(), *drafters.listed_controllers()):
        if drafter.where == "built in":
            assert [o.name for o in drafter.options if not o.help] == [], drafter.name


def test_a_drafter_that_cannot_be_imported_does_not_break_the_list(monkeypatch):
    real = slipstream.drafters.find_drafter

    def breaking(name: str) -> Any:
        if name == "ngram":
            raise ImportError("no such\nlibrary")
        return real(name)

    monkeypatch.setattr("slipstream.drafters.find_drafter", breaking)
    listed = {d["name"]: d for d in json.loads(invoke_drafters("--json").stdout)}
    assert listed["ngram"]["error"] == "no such library" and listed["none"]["error"] is None
    assert "cannot be used: no such library" in invoke_drafters().stdout


# -- signals and chat turns, in this process ----------------------------------------------------


@pytest.fixture
def signal_after(monkeypatch: pytest.MonkeyPatch):
    """Sends this process a signal when so many events have been shown."""

    def arm(number: int, events: int) -> None:
        show, seen = answer.Painter.__call__, []

        def shown_then_signalled(self: answer.Painter, event: Any) -> None:
            show(self, event)
            seen.append(event)
            if len(seen) == events:
                os.kill(os.getpid(), number)

        monkeypatch.setattr(answer.Painter, "__call__", shown_then_signalled)

    return arm


def test_sigterm_ends_with_what_there_is(invoke, models, signal_after):
    signal_after(signal.SIGTERM, 4)
    got = invoke("hello", "--compare", model="long")
    assert got.exit_code == 143
    assert got.stdout.endswith("\n") and "interrupted" in got.stderr and "speed-up" not in got.stderr
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_an_interrupted_json_run_is_still_one_object(invoke, monkeypatch):
    step = slipstream.engine.engine.Engine.step

    def interrupted(self: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return step(self)

    monkeypatch.setattr("slipstream.engine.engine.Engine.step", interrupted)
    got = invoke("hello", "--json")
    assert got.exit_code == 130
    report = json.loads(got.stdout)
    assert report["finish_reason"] == "cancelled" and len(report["tokens"]) == 1


def typed(monkeypatch: pytest.MonkeyPatch, *lines: str | BaseException) -> None:
    waiting = iter(lines)

    def ask(prompt: str) -> str:
        line = next(waiting)
        if isinstance(line, BaseException):
            raise line
        return line

    monkeypatch.setattr("builtins.input", ask)


def test_ctrl_c_stops_an_answer_but_not_the_chat(models, monkeypatch, capsys, submitted, signal_after):
    signal_after(signal.SIGINT, 30)
    typed(monkeypatch, "hello", KeyboardInterrupt(), "", "again", "/exit")
    with slipstream.load(str(models / "long")) as session:
        params = session.defaults.with_(max_tokens=40)
        assert chat_on_terminal(session, params, None, answer.Painter(sys.stdout, False)) == 0
        cut = session.tokenizer.decode(submitted[1][0])
    out, err = capsys.readouterr()
    assert "stopped]" in err and "/exit or Ctrl-D leaves." in err
    # what there was of the first answer is part of the conversation, and the second went to its end
    assert cut.startswith("<user>hello") and "<user>again" in cut and len(submitted[1][0]) > 30 + 20
    assert err.count("tokens/s") == 2 and out.endswith("\n")


def test_help_lists_what_can_be_typed(models, monkeypatch, capsys):
    typed(monkeypatch, "/help", "/halp", "/quit")
    with slipstream.load(str(models / "target")) as session:
        assert chat_on_terminal(session, session.defaults, None, answer.Painter(sys.stdout, False)) == 0
    told = capsys.readouterr().err
    listed, mistaken = told.split("There is no /halp")
    for command in ("/reset", "/exit", "/help", "Ctrl-C"):
        assert re.search(rf"^{command} +\w", listed, re.MULTILINE)
    assert "/reset, /exit, /help" in mistaken and "Ctrl-C" not in mistaken


def test_a_turn_beyond_the_context_is_taken_back(models, monkeypatch, capsys, submitted):
    typed(monkeypatch, "hello " * 20, "hi", EOFError())
    with slipstream.load(str(models / "target"), context=60) as session:
        params = session.defaults.with_(max_tokens=5)
        assert chat_on_terminal(session, params, "be brief", answer.Painter(sys.stdout, False)) == 0
        asked = session.tokenizer.decode(submitted[1][0])
    assert asked.startswith("<system>be brief") and "hello" not in asked
    assert "context holds 60" in capsys.readouterr().err


# -- real processes -----------------------------------------------------------------------------


def start(models: Path, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    environment = {k: v for k, v in os.environ.items() if k != "NO_COLOR"} | {"OMP_NUM_THREADS": "1"}
    command = [*COMMAND, "--model", str(models / "long"), "--drafter", "none", *arguments]
    return subprocess.Popen(command, env=environment, **options)


def test_ctrl_c_ends_with_what_there_is(models):
    process = start(models, "hello", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    head = os.read(process.stdout.fileno(), 1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    text, told = (head + out).decode(), err.decode()
    assert text.endswith("\n") and len(text) > 1
    assert "interrupted" in told and "tokens/s" in told and "Traceback" not in told


def test_a_closed_pipe_ends_quietly(models):
    process = start(models, "hello", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    os.read(process.stdout.fileno(), 1)
    process.stdout.close()
    with process.stderr:
        told = process.stderr.read().decode()
    assert process.wait(timeout=60) == 141
    assert "Traceback" not in told and "BrokenPipe" not in told and "tokens/s" not in told


class Terminal:
    """A chat in a pseudo-terminal."""

    def __init__(self, models: Path, *arguments: str) -> None:
        self.master, slave = pty.openpty()
        self.process = start(
            models, *arguments, stdin=slave, stdout=slave, stderr=slave, start_new_session=True
        )
        os.close(slave)
        self.seen = ""

    def close(self) -> None:
        self.process.kill()
        self.process.wait(timeout=60)
        os.close(self.master)

    def type(self, line: str) -> None:
        os.write(self.master, line.encode())

    def until(self, pattern: str, seconds: float = 60) -> str:
        """What is shown up to the pattern, which is taken with it."""
        end = time.monotonic() + seconds
        raw = b""
        while not (found := re.search(pattern, self.seen, re.DOTALL)):
            assert time.monotonic() < end, f"{pattern!r} not in {self.seen!r}"
            if select.select([self.master], [], [], 0.2)[0]:
                raw += os.read(self.master, 65536)
                try:
                    self.seen += raw.decode().replace("\r\n", "\n")
                    raw = b""
                except UnicodeDecodeError:
                    continue  # half a character
        shown, self.seen = self.seen[: found.end()], self.seen[found.end() :]
        return shown

    def say(self, line: str) -> None:
        """Types a line once asked for one: before, readline hasn't the terminal yet, and it'd echo twice."""
        self.until(">>> ")
        self.type(f"{line}\n")
        self.until(re.escape(line) + "\n")

    def turn(self, line: str) -> str:
        """The answer to a line."""
        self.say(line)
        return self.until(r"\n[^\n]*\[\d+ tokens?, [^\n]*\n").rpartition("\n")[0].rpartition("\n")[0]


def test_a_turn_reads_what_was_said_since_the_last_one(models, monkeypatch, capsys):
    typed(monkeypatch, "hello " * 100, "again", "/exit")
    with slipstream.load(str(models / "target")) as session:
        params = session.defaults.with_(max_tokens=8)
        assert chat_on_terminal(session, params, None, answer.Painter(sys.stdout, False)) == 0
        assert 512 <= session.engine.prefix_counts.hits < 700
    capsys.readouterr()


def shown(text: str) -> str:
    return text.translate(answer._PICTURES).removesuffix("\n")


def test_a_chat_keeps_its_history_until_it_is_reset(models):
    terminal = Terminal(models, "--max-tokens", "12", "--colour", "never")
    try:
        first = terminal.turn("hello")
        assert first == shown((one := reference(models, chat("hello"), "long", max_tokens=12)).text)
        second = terminal.turn("again")
        assert second == shown(
            reference(models, chat("hello", one.text, "again"), "long", max_tokens=12).text
        )
        terminal.say("/reset")
        terminal.until("forgotten")
        assert terminal.turn("hello") == first
        terminal.say("/nonsense")
        terminal.until("There is no /nonsense")
        # An end typed before the prompt is there would be lost when readline takes the terminal over.
        terminal.until(">>> ")
        terminal.type("\x04")
        assert terminal.process.wait(timeout=60) == 0
    finally:
        terminal.close()


def test_a_chat_refuses_options_that_need_a_prompt(models):
    for option in ("--json", "--compare", "--no-chat-template"):
        terminal = Terminal(models, option, "--drafter", "ngram")
        try:
            terminal.until(rf"slipstream: error: {option} needs a prompt[^\n]*\n")
            assert terminal.process.wait(timeout=60) == 2
        finally:
            terminal.close()


@pytest.mark.parametrize(
    "mistake",
    [
        ["--drafter", "ngrm"], ["--drafter", "draft_model:modl=x"], ["--drafter", "crossvocab"], ["world"],
        ["--drafter", "cascade:drafters=suffix+nothing"], ["--controller", "additiv"], ["--top-p", "2"],
    ],
)  # fmt: skip
def test_a_mistake_is_told_before_anything_heavy_is_imported(mistake, monkeypatch, capsys):
    code = (
        "import sys; from slipstream.cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as end: sys.exit(end.code + bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "run", "hello", *mistake], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and "slipstream: error: " in done.stderr, done.stderr


@pytest.mark.parametrize("redirection", [">&-", "2>&-", "<&-", ">&- 2>&- <&-"])
def test_closed_streams_are_as_good_as_none(redirection):
    command = f"{sys.executable} -m slipstream.cli.main drafters {redirection}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stderr == ""


def test_a_terminal_of_few_letters_shows_question_marks():
    done = subprocess.run(
        [sys.executable, "-m", "slipstream.cli.main", "drafters"],
        capture_output=True,
        check=False,
        env={**os.environ, "PYTHONIOENCODING": "latin1"},
    )
    assert done.returncode == 0 and b"model=?" in done.stdout


def test_the_package_is_a_command_too():
    done = subprocess.run(
        [sys.executable, "-m", "slipstream", "version"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, f"slipstream {slipstream.__version__}\n")


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from slipstream.cli.main import build_app; build_app();"
        " sys.exit(bool({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
