"""`lint`, `config`, `export`, `watch` and `deploy` as a person types them. deploy meets a small fake of
`vllm serve`.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from slipstream.cli.main import build_app
from slipstream.testing.tiny import save_tiny

HERE = Path(__file__).parent
DRAFT = '{"method": "draft", "model": "a/b", "num_speculative_tokens": 2}'
Invoke = Callable[..., Result]


@pytest.fixture
def invoke() -> Invoke:
    def call(*arguments: str, stdin: str | None = None) -> Result:
        return CliRunner().invoke(build_app(), list(arguments), prog_name="slipstream", input=stdin)

    return call


@pytest.fixture(autouse=True)
def _own_signals() -> Iterator[None]:
    """deploy's answer to SIGTERM ends with its test."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


# -- lint -------------------------------------------------------------------------------------------


def test_lint_ends_with_0_1_or_2(invoke: Invoke, tmp_path: Path) -> None:
    bad = invoke("lint", DRAFT, "--engine", "vllm==0.32.0")
    assert bad.exit_code == 1 and 'write "draft_model"' in bad.stdout
    good = invoke("lint", DRAFT.replace("draft", "draft_model"))
    assert good.exit_code == 0 and "no faults for vllm" in good.stdout
    for arguments, message in (
        (("lint", str(tmp_path / "none.yaml")), "there is no file"),
        (("lint", "missing"), "there is no file missing"),
        (("lint", str(tmp_path)), "is a folder"),
        (("lint", "hello there"), "neither a command line"),
        (("lint", '{"target": "t", "drafter": "ngram"}'), "slipstream config vllm --plan"),
        (("lint", '{"schema": "slipstream-plan/1"}'), "slipstream config vllm --plan"),
        (("lint", "vllm serve t", "--engine", "sglang"), "give --engine vllm, or none"),
        (("lint", DRAFT, "--engine", "tgi"), "is unknown"),
    ):
        done = invoke(*arguments)
        assert (
            done.exit_code == 2
            and message in done.stderr
            and done.stderr.count("\n") == 1
            and not done.stdout
        )


def test_lint_as_json(invoke: Invoke) -> None:
    done = invoke("lint", DRAFT, "--json")
    found = json.loads(done.stdout)
    assert done.exit_code == 1 and found["clean"] is False
    assert [set(f) for f in found["faults"]] == [{"rule", "where", "message", "fix", "severity", "fixable"}]
    fixed = json.loads(invoke("lint", DRAFT, "--json", "--fix").stdout)
    assert json.loads(fixed["fixed"])["method"] == "draft_model" and fixed["left"] == []


def test_fix_writes_the_file_or_prints_the_text(invoke: Invoke, tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("# mine\nmethod: draft\nmodel: a/b\nnum_speculative_tokens: 2\n")
    done = invoke("lint", str(file), "--fix")
    assert done.exit_code == 0 and "(fixed)" in done.stdout
    assert file.read_text() == "# mine\nmethod: draft_model\nmodel: a/b\nnum_speculative_tokens: 2\n"
    assert [p.name for p in tmp_path.iterdir()] == ["serve.yaml"]
    before = file.stat().st_mtime_ns
    assert invoke("lint", str(file), "--fix").exit_code == 0 and file.stat().st_mtime_ns == before
    printed = invoke("lint", "-", "--fix", stdin=DRAFT)
    assert printed.exit_code == 0 and json.loads(printed.stdout)["method"] == "draft_model"
    left = invoke(
        "lint", '{"method": "draft_model", "model": "my-eagle-x", "num_speculative_tokens": 1}', "--fix"
    )
    assert left.exit_code == 1 and "(not fixed)" in left.stderr


def test_warnings_count_when_strict(invoke: Invoke) -> None:
    text = '{"method": "ngram", "num_speculative_tokens": 3}'
    assert invoke("lint", text).exit_code == 0 and invoke("lint", text, "--strict").exit_code == 1


# -- config -----------------------------------------------------------------------------------------


def test_config_prints_every_form(invoke: Invoke, tmp_path: Path) -> None:
    base = ("config", "vllm==0.32.0", "--target", "t", "--drafter", "eagle3", "--model", "h", "--tokens", "2")
    assert invoke(*base).stdout.startswith("vllm serve t \\\n  --host")
    config = json.loads(invoke(*base, "--form", "json", "--per-batch", "1-8:2,9:0").stdout)
    assert config["num_speculative_tokens_per_batch_size"] == [[1, 8, 2], [9, 9, 0]]
    file = tmp_path / "m.yaml"
    assert invoke(*base, "--form", "manifest", "-o", str(file)).exit_code == 0
    assert invoke("lint", str(file)).exit_code == 0
    sglang = ("config", "sglang", "--target", "t", "--drafter", "ngram")
    assert invoke(*sglang).stdout.startswith("python -m sglang.launch_server \\\n  --model-path t \\\n")
    done = invoke(*sglang, "--form", "yaml", "-o", str(tmp_path / "s.yaml"))
    assert f"written: {tmp_path / 's.yaml'}" in done.stderr
    assert "no faults for sglang" in invoke("lint", str(tmp_path / "s.yaml")).stdout
    everything = json.loads(invoke(*base, "--json", "--tp", "2").stdout)
    assert (
        everything["speculative_config"]["method"] == "eagle3"
        and "--tensor-parallel-size" in everything["command"]
    )


def test_config_refuses_with_the_reason(invoke: Invoke, tmp_path: Path) -> None:
    done = invoke("config", "vllm==0.33.0", "--target", "t", "--drafter", "medusa", "--model", "m")
    assert done.exit_code == 2 and "0.8.5 to 0.32.0" in done.stderr and not done.stdout
    assert "give --target" in invoke("config", "vllm").stderr
    assert "FIRST-LAST:LENGTH" in invoke("config", "vllm", "--target", "t", "--per-batch", "x").stderr
    assert "name=value" in invoke("config", "vllm", "--target", "t", "--set", "x").stderr
    plan = tmp_path / "plan.json"
    plan.write_text('{"target": "t", "drafter": "ngram", "port": 9001}')
    done = invoke("config", "vllm==0.24.0", "--plan", str(plan), "--set", "prompt_lookup_max=6")
    assert "--port 9001" in done.stdout and '"prompt_lookup_max": 6' in done.stdout


def test_config_says_what_is_missing(invoke: Invoke) -> None:
    plain = invoke("config", "vllm", "--target", "t")
    assert plain.exit_code == 0 and "name a --drafter" in plain.stderr
    none = invoke("config", "vllm", "--target", "t", "--form", "json")
    assert none.exit_code == 2 and "name a --drafter" in none.stderr and not none.stdout
    for command in (
        ("config", "vllm==99.0.0", "--target", "t"),
        ("lint", "vllm serve t", "--engine", "vllm==99"),
    ):
        newer = invoke(*command)
        assert newer.exit_code == 0 and "is newer than 0.33.0" in newer.stderr
    lengths = invoke("config", "vllm", "--target", "t", "--drafter", "ngram", "--per-batch", "1-8:5,9:0")
    assert '"num_speculative_tokens": 5' in lengths.stdout
    model = invoke("config", "vllm", "--target", "t", "--model", "m")
    assert model.exit_code == 2 and "say how it drafts" in model.stderr
    field = invoke("config", "vllm", "--target", "t", "--set", "max_len=3")
    assert field.exit_code == 2 and "did you mean max_model_len?" in field.stderr
    yaml = ("config", "llama.cpp", "--target", "t.gguf", "--form", "yaml")
    assert invoke(*yaml).exit_code == 2 and "reads no YAML" in invoke(*yaml).stderr


def test_engines_are_told_names_that_they_know(invoke: Invoke) -> None:
    done = invoke("config", "vllm", "--target", "qwen2.5-coder-1.5b", "--drafter", "ngram")
    assert done.stdout.startswith("vllm serve Qwen/Qwen2.5-Coder-1.5B-Instruct ")
    assert "note: qwen2.5-coder-1.5b is a name of Slipstream's" in done.stderr


def test_a_plans_version_stays(invoke: Invoke, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text('{"engine": "vllm==0.32.0", "target": "t", "drafter": "medusa", "model": "m"}')
    assert invoke("config", "vllm", "--plan", str(plan)).exit_code == 0, "0.32.0 has Medusa"
    assert invoke("config", "vllm==0.33.0", "--plan", str(plan)).exit_code == 2
    assert "sglang 0.5.23" in invoke("config", "sglang", "--plan", str(plan)).stderr


@pytest.mark.parametrize(
    "command", [("config", "vllm", "--target", "t", "--form", "yaml"), ("watch", "--alerts", "vllm")]
)
def test_without_the_extra_one_line_says_so(command: tuple[str, ...]) -> None:
    code = (
        "import sys; sys.modules['ruamel'] = None\n"
        "from slipstream.cli.main import main\n"
        f"main({[*command]!r})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert "pip install 'slipstream-lm[scale]'" in done.stderr


def test_help_and_document_name_every_field(invoke: Invoke) -> None:
    from slipstream.export.deploy_plan import DeployPlan

    told = invoke("config", "--help").stdout
    page = (HERE.parents[1] / "docs" / "scale-out.md").read_text(encoding="utf-8")
    by_options = [
        "engine",
        "target",
        "drafter",
        "model",
        "num_speculative_tokens",
        "per_batch_size",
        "off_above",
    ]
    by_options += ["tensor_parallel", "draft_tensor_parallel"]
    for name in DeployPlan.model_fields:
        assert f"`{name}`" in page, name
        assert name in by_options or re.search(rf"\b{name}\b", told), name


# -- export -----------------------------------------------------------------------------------------


def test_export_says_who_takes_it(invoke: Invoke, tmp_path: Path) -> None:
    target = save_tiny(tmp_path / "target")
    draft = save_tiny(tmp_path / "draft", layers=1)
    out = tmp_path / "out"
    arguments = ("export", "vllm", str(draft), "--target", str(target), "-o", str(out))
    done = invoke(*arguments)
    assert done.exit_code == 0 and "taken by: vllm 0.15.0 and newer" in done.stdout
    assert "start it: vllm serve" in done.stdout and (out / "config.json").is_file()
    again = invoke(*arguments)
    assert again.exit_code == 2 and "not empty" in again.stderr
    start = json.loads(invoke(*arguments[:-1], str(tmp_path / "two"), "--json").stdout)["start"]
    assert invoke("lint", start, "--engine", "vllm==0.32.0").exit_code == 0, "what it says to start is right"
    assert "name the target" in invoke("export", "vllm", str(draft), "-o", str(tmp_path / "x")).stderr


@pytest.mark.parametrize(
    ("drafter", "kind"), [("eagle", "eagle3"), ("medusa", "medusa"), ("draft_model", "draft_model")]
)
def test_export_takes_the_drafters_that_come_with_slipstream(
    invoke: Invoke, tmp_path: Path, drafter: str, kind: str
) -> None:
    done = invoke("export", "vllm", drafter, "--target", "tiny", "-o", str(tmp_path / "out"), "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["kind"] == kind and (tmp_path / "out" / "config.json").is_file()


def test_export_takes_a_drafter_as_it_is_said_elsewhere(invoke: Invoke, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    assert invoke("export", "vllm", "eagle", "--target", "tiny", "-o", str(first)).exit_code == 0
    done = invoke("export", "vllm", f"eagle:heads={first}", "--target", "tiny", "-o", str(second))
    assert done.exit_code == 0, done.output
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()
    light = invoke("export", "vllm", "ngram", "--target", "tiny", "-o", str(tmp_path / "x"))
    assert light.exit_code == 2 and "no weights of its own" in light.stderr
    without = invoke("export", "hf", "eagle", "-o", str(tmp_path / "x"))
    assert without.exit_code == 2 and "--target" in without.stderr
    other = save_tiny(tmp_path / "other")
    none = invoke("export", "vllm", "medusa", "--target", str(other), "-o", str(tmp_path / "x"))
    assert none.exit_code == 2 and "no medusa for this target" in none.stderr


# -- watch ------------------------------------------------------------------------------------------


@pytest.fixture
def served() -> Iterator[Callable[[str], str]]:
    """Serves recorded metrics; gives the address of a file's."""
    folder = HERE.parent / "watch"

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            file = folder / f"{self.path.strip('/').split('/')[0]}.prom"
            raw = file.read_bytes() if file.is_file() else b"nothing"
            self.send_response(200 if file.is_file() else 404)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield lambda name: f"http://127.0.0.1:{server.server_port}/{name}/metrics"
    server.shutdown()
    server.server_close()


def test_watch_reads_many_servers(invoke: Invoke, served: Callable[[str], str], tmp_path: Path) -> None:
    urls = [served(name) for name in ("vllm", "sglang", "llamacpp", "slipstream")]
    history, chart = tmp_path / "h.jsonl", tmp_path / "c.png"
    done = invoke("watch", *urls, "--once", "--json", "--history", str(history), "--chart", str(chart))
    rows = json.loads(done.stdout)
    assert done.exit_code == 0 and [round(row["tau"], 2) for row in rows] == [2.5, 2.52, 3.34, 2.52]
    assert all(row["advice"] for row in rows) and chart.read_bytes().startswith(b"\x89PNG")
    assert len(history.read_text().splitlines()) == 4
    table = invoke("watch", urls[0], "--once")
    assert "2.50" in table.stdout and "80% 50% 20%" in table.stdout and " vllm " in table.stdout
    live = invoke("watch", urls[0], "--json", "--every", "0.1", "--count", "2")
    first, second = (json.loads(line)[0] for line in live.stdout.splitlines())
    assert first["drafts"] == 1000 and second["drafts"] == 0 and second["seconds"] > 0


def test_watch_fits_a_terminal(served: Callable[[str], str]) -> None:
    import io

    from rich.console import Console

    from slipstream.cli.watch import _Watcher
    from slipstream.watch.rates import ASSUMED_COST

    urls = [served(name) for name in ("vllm", "sglang", "llamacpp", "slipstream", "none")]
    out = io.StringIO()
    watcher = _Watcher([url for url in urls], ASSUMED_COST, 4, None, None)
    Console(file=out, width=80).print(watcher.table(watcher.look()))
    text = out.getvalue()
    for head in ("SERVER", "ENGINE", "ACCEPTED", "BY POSITION", "TOKENS/S", "RUNNING", "WAITING"):
        assert head in text, "not folded"
    assert "80% 50% 20%" in text and "llama.cpp" in text
    assert f"! {urls[0].removesuffix('/metrics').removeprefix('http://')}: 8 requests run" in text
    assert "answers 404" in text


def test_watch_that_is_piped_writes_every_reading(invoke: Invoke, served: Callable[[str], str]) -> None:
    done = invoke("watch", served("vllm"), "--every", "0.1", "--count", "2")
    assert done.exit_code == 0 and done.stdout.count("TAU") == 2


def test_watch_says_what_is_wrong(invoke: Invoke, served: Callable[[str], str]) -> None:
    gone = invoke("watch", served("none"), served("vllm"), "--once", "--json")
    rows = json.loads(gone.stdout)
    assert gone.exit_code == 1 and "answers 404" in rows[0]["error"] and rows[1]["engine"] == "vllm"
    busy = invoke("watch", served("vllm"), "--once", "--off-above", "4", "--json")
    (first, *_) = json.loads(busy.stdout)[0]["advice"]
    assert busy.exit_code == 1 and "turn drafting off above 4" in first["text"]
    assert invoke("watch").exit_code == 2 and invoke("watch", "x", "--chart", "c.png").exit_code == 2
    none = invoke("watch", "--history", "none.jsonl", "--chart", "c.png")
    assert none.exit_code == 2 and "there is no history" in none.stderr
    rules = invoke("watch", "--alerts", "vllm", "--predicted-tau", "2.5")
    assert rules.exit_code == 0 and "SpeculationBelowPlan" in rules.stdout


# -- deploy -----------------------------------------------------------------------------------------


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def deploy(
    invoke: Invoke, tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Result]:
    """Runs deploy on the fake; afterwards nothing of it may be left."""
    pids = tmp_path / "pids"
    monkeypatch.setenv("FAKE_VLLM_PIDS", str(pids))

    def call(mode: str, *arguments: str, drafter: bool = True) -> Result:
        monkeypatch.setenv("FAKE_VLLM", mode)
        drafts = ("--drafter", "draft_model", "--model", "small") if drafter else ()
        done = invoke(
            *("deploy", "vllm", "--version", "0.32.0", "--target", "big", *drafts, "--executable"),
            *(str(HERE / "fake_vllm.py"), "--set", f"port={port}", "--log", str(tmp_path / "log")),
            *("--check", "--timeout", "20", *arguments),
        )
        if pids.exists():
            assert not [pid for pid in map(int, pids.read_text().split()) if alive(pid)], "left running"
        return done

    return call


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.slow
def test_deploy_starts_checks_and_stops(deploy: Callable[..., Result]) -> None:
    done = deploy("good", "--set", "predicted_tau=2.4", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["problem"] is None and found["text"] == " fine" and found["model"] == "big"
    assert found["measured"]["tau"] == pytest.approx(2.5) and found["measured"]["drafts"] >= 50
    assert json.loads(found["command"][-1])["method"] == "draft_model"
    assert "big answers; nothing is drafted" in deploy("good", drafter=False).stdout


@pytest.mark.parametrize(
    ("mode", "plan", "message"),
    [
        ("near-zero", (), "next to nothing is accepted"),
        ("weak", ("--set", "predicted_tau=2.4"), "far below the 2.40"),
    ],
)
@pytest.mark.slow
def test_deploy_fails_loudly_when_acceptance_is_not_there(
    deploy: Callable[..., Result], mode: str, plan: tuple[str, ...], message: str
) -> None:
    done = deploy(mode, *plan)
    assert done.exit_code == 1 and message in done.stderr
    assert (deploy(mode).exit_code == 0) == (mode == "weak"), "without a prediction only near zero is a fault"


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("refuses", "refuses the configuration"),
        ("memory", "out of memory"),
        ("reserve", "VLLM_CPU_KVCACHE_SPACE"),
        ("core", "process of the engine was ended"),
        ("other-head", "tensors do not fit"),
        ("misfit", "tensors do not fit"),
        ("odd", "KeyError: 'odd'"),
        ("killed", "lack of memory"),
        ("dies", "does not answer"),
        ("mute", "no text"),
        ("error", "answers 404"),
    ],
)
@pytest.mark.slow
def test_deploy_says_why_it_failed(deploy: Callable[..., Result], mode: str, message: str) -> None:
    done = deploy(mode)
    assert done.exit_code == 2 and message in done.stderr, done.stderr
    assert "Traceback" not in done.output


@pytest.mark.slow
def test_deploy_meets_a_taken_port_a_missing_program_and_a_slow_start(
    deploy: Callable[..., Result], invoke: Invoke, port: int, tmp_path: Path
) -> None:
    done = deploy("slow", "--timeout", "1")
    assert done.exit_code == 2 and "within 1 s" in done.stderr
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        done = deploy("good")
        assert done.exit_code == 2 and f"port {port}" in done.stderr
    done = invoke(
        "deploy", "vllm", "--version", "0.32.0", "--target", "t", "--executable", str(tmp_path / "none")
    )
    assert done.exit_code == 2 and "there is no program" in done.stderr


def test_deploy_starts_vllm_only(invoke: Invoke, tmp_path: Path) -> None:
    done = invoke("deploy", "sglang", "--target", "t")
    assert done.exit_code == 2 and "only vLLM is started" in done.stderr
    assert "slipstream config sglang" in done.stderr
    plan = tmp_path / "plan.json"
    plan.write_text('{"engine": "llama.cpp", "target": "t.gguf"}')
    assert "slipstream config llama.cpp" in invoke("deploy", "vllm", "--plan", str(plan)).stderr


def test_deploy_takes_the_installed_version_for_a_plan_without_one(invoke: Invoke, tmp_path: Path) -> None:
    plan, file = tmp_path / "plan.json", tmp_path / "m.yaml"
    fake = ("--executable", str(HERE / "fake_vllm.py"), "--manifest", str(file))
    for engine, version in (("vllm", "0.32.0"), ("vllm==0.31.0", "0.31.0")):
        plan.write_text(json.dumps({"engine": engine, "target": "t"}))
        assert invoke("deploy", "vllm", "--plan", str(plan), *fake).exit_code == 0
        assert f"vllm-openai:v{version}" in file.read_text()
    assert invoke("deploy", "vllm==0.30.0", "--plan", str(plan), *fake).exit_code == 0
    assert "vllm-openai:v0.30.0" in file.read_text()


def test_deploy_writes_a_manifest(invoke: Invoke, tmp_path: Path) -> None:
    file = tmp_path / "m.yaml"
    done = invoke(
        "deploy",
        "vllm",
        "--version",
        "0.32.0",
        "--target",
        "t",
        "--drafter",
        "ngram",
        "--manifest",
        str(file),
    )
    assert done.exit_code == 0 and "kubectl apply" in done.stdout and invoke("lint", str(file)).exit_code == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_the_engine_too(tmp_path: Path, port: int, number: signal.Signals) -> None:
    """SIGHUP is a closed terminal."""
    pids = tmp_path / "pids"
    environment: dict[str, Any] = {**os.environ, "FAKE_VLLM": "good", "FAKE_VLLM_PIDS": str(pids)}
    command = [
        sys.executable,
        "-m",
        "slipstream.cli.main",
        "deploy",
        "vllm",
        "--version",
        "0.32.0",
        "--target",
        "big",
    ]
    command += [
        "--executable",
        str(HERE / "fake_vllm.py"),
        "--set",
        f"port={port}",
        "--log",
        str(tmp_path / "log"),
    ]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as running:
        assert running.stderr is not None
        for line in running.stderr:
            if "until Ctrl-C" in line:
                break
        started = [int(pid) for pid in pids.read_text().split()]
        assert all(alive(pid) for pid in started)
        running.send_signal(number)
        assert running.wait(30) == 128 + number
    deadline = time.monotonic() + 5
    while any(alive(pid) for pid in started) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in started if alive(pid)]


# -- the document -----------------------------------------------------------------------------------


def block(heading: str, page: str = "docs/scale-out.md") -> list[list[str]]:
    """The words of the commands in the first shell block below a heading."""
    text = (HERE.parents[1] / page).read_text(encoding="utf-8")
    code = re.findall(r"```sh\n(.*?)```", text[text.index(f"# {heading}\n") :], re.DOTALL)[0]
    return [shlex.split(line, comments=True) for line in code.splitlines()]


@pytest.mark.slow
def test_the_five_commands(
    invoke: Invoke, served: Callable[[str], str], port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FAKE_VLLM", "good")
    monkeypatch.setenv("FAKE_VLLM_PIDS", str(tmp_path / "pids"))
    commands = block("From laptop to cluster in five commands")
    assert [words[1] for words in commands] == ["export", "deploy", "config", "lint", "watch"]
    instead = {"qwen2.5-coder-1.5b": "tiny", "http://localhost:8000": served("vllm")}
    more = {
        "deploy": ("--executable", str(HERE / "fake_vllm.py"), "--set", f"port={port}"),
        "watch": ("--once",),
    }
    for words in commands:
        done = invoke(*(instead.get(word, word) for word in words[1:]), *more.get(words[1], ()))
        assert done.exit_code == 0, f"{shlex.join(words)}: {done.output}"
    assert not [pid for pid in map(int, (tmp_path / "pids").read_text().split()) if alive(pid)]
    assert {"head-for-vllm", "vllm.yaml"} <= {path.name for path in tmp_path.iterdir()}


def test_from_a_plan(invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for words in block("Worked example", "README.md"):
        if words[0] == "echo":
            (tmp_path / words[-1]).write_text(words[1])
    planned, configured = block("From `slipstream plan`")
    assert planned[-2:] == [">", "plan.json"]
    (tmp_path / "plan.json").write_text(invoke(*planned[1:-2]).stdout)
    done = invoke(*configured[1:])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["num_speculative_tokens_per_batch_size"] == [[1, 8, 9], [9, 350, 3], [351, 512, 0]]
    assert told["model"] == "meta-llama/Llama-3.2-1B-Instruct" and "Speculation pays" in done.stderr
    assert "--tensor-parallel-size 4" in invoke(*configured[1:-2]).stdout
    unnamed = invoke("config", "vllm", "--plan", "plan.json")
    assert unnamed.exit_code == 2 and "--target" in unnamed.stderr
