"""Engines that cannot start or will not end, files that cannot be written: told, and nothing is left."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from ruamel.yaml import YAML
from typer.testing import CliRunner, Result

from slipstream.cli.main import build_app
from slipstream.deploy.check import complete
from slipstream.deploy.process import DeployError, Server, require_free
from slipstream.errors import ParameterError
from slipstream.export.config import settings
from slipstream.export.deploy_plan import make_plan
from slipstream.export.manifest import manifest, to_yaml

STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print('up', flush=True)
time.sleep(60)
"""


def invoke(*arguments: str, stdin: bytes | None = None) -> Result:
    return CliRunner().invoke(build_app(), list(arguments), prog_name="slipstream", input=stdin)


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def server(code: str, port: int, log: Path) -> Server:
    started = Server([sys.executable, "-c", code], "127.0.0.1", port, log)
    until = time.monotonic() + 20
    while log.stat().st_size == 0 and time.monotonic() < until:
        time.sleep(0.02)
    return started


def test_an_impatient_stop_kills(tmp_path: Path, port: int) -> None:
    """A second Ctrl-C while the engine is given time to end."""
    running = server(STUBBORN, port, tmp_path / "log")
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        running.stop()
    assert running.process.poll() == -signal.SIGKILL and time.monotonic() - start < 10


def test_what_cannot_be_started_or_logged(tmp_path: Path, port: int) -> None:
    program = tmp_path / "vllm"
    program.write_bytes(b"\x7fELFnone")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    with pytest.raises(DeployError, match="cannot be started"):
        Server([str(program)], "127.0.0.1", port, tmp_path / "log")
    for log in (tmp_path, program / "log"):
        with pytest.raises(DeployError, match="--log"):
            Server([sys.executable, "-c", ""], "127.0.0.1", port, log)
    require_free("::1" if socket.has_dualstack_ipv6() else "127.0.0.1", port)
    with pytest.raises(DeployError, match="no.such.host"):
        require_free("no.such.host.invalid", port)


def test_a_port_that_speaks_something_else(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for _ in range(2):
                client, _ = listener.accept()
                with client:
                    client.recv(65536)
                    client.sendall(b"-ERR unknown command\r\n")

        threading.Thread(target=serve, daemon=True).start()
        port = listener.getsockname()[1]
        with pytest.raises(DeployError, match="does not answer"):
            complete(f"http://127.0.0.1:{port}", "m", "p", 1)
        one = Server.__new__(Server)
        one.host, one.port = "127.0.0.1", port
        assert not one._healthy()


def test_an_ipv6_address() -> None:
    one = Server.__new__(Server)
    one.host, one.port = "::1", 8000
    assert one.url == "http://[::1]:8000"


# -- config -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["port", "host", "model", "speculative_config", "--tensor-parallel-size"])
def test_a_plan_says_each_thing_once(name: str) -> None:
    with pytest.raises(ParameterError, match="fields for"):
        make_plan(target="t", extra={name: "1"})


@pytest.mark.parametrize("rates", [[80.0], [-0.1], [float("nan")]])
def test_a_predicted_acceptance_is_a_part(rates: list[float]) -> None:
    with pytest.raises(ParameterError, match="predicted_acceptance"):
        make_plan(target="t", predicted_acceptance=rates)


EVIL = "a b'c\"$(touch x)`y`;\n- z: {w}\\ #é"


def test_names_are_quoted_for_the_shell_and_the_manifest() -> None:
    plan = make_plan(
        target=EVIL, drafter="draft_model", model=EVIL + "2", image=EVIL, extra={"served-model-name": EVIL}
    )
    made = settings(plan)
    assert shlex.split(made.shell().replace("\\\n", " ")) == made.command
    documents = list(YAML(typ="safe").load_all(manifest(made)))
    container = documents[0]["spec"]["template"]["spec"]["containers"][0]
    words = [*container["command"], *container["args"]]
    assert container["image"] == EVIL and [EVIL in w for w in words].count(True) == 2
    assert [w if w != "0.0.0.0" else plan.host for w in words] == made.command


@pytest.mark.parametrize(
    "text", ["on", "No", "y", "null", "~", "1e3", "0x1f", "1_000", "12:30:45", ".5", "+1", "007"]
)
def test_yaml_of_kubernetes_reads_text_as_text(text: str) -> None:
    assert to_yaml({"args": ["--flash-attn", text]}) == f'args:\n  - --flash-attn\n  - "{text}"\n'


def test_files_that_cannot_be_written(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for arguments in (
        ("config", "vllm==0.32.0", "--target", "t", "-o", str(file / "x.yaml")),
        ("config", "vllm==0.32.0", "--target", "t", "-o", str(tmp_path)),
        ("deploy", "vllm", "--version", "0.32.0", "--target", "t", "--manifest", str(file / "m.yaml")),
    ):
        done = invoke(*arguments)
        assert done.exit_code == 2 and "cannot be written" in done.stderr, done.output


# -- lint's files -----------------------------------------------------------------------------------

DRAFT = json.dumps({"method": "draft", "model": "c", "num_speculative_tokens": 2})


def test_a_repaired_file_stays_what_it_was(tmp_path: Path) -> None:
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    real.write_bytes(DRAFT.replace(", ", ",\r\n  ").encode() + b"\r\n")
    real.chmod(0o640)
    link.symlink_to(real)
    assert invoke("lint", str(link), "--fix").exit_code == 0
    assert link.is_symlink() and stat.S_IMODE(real.stat().st_mode) == 0o640
    fixed = real.read_bytes()
    assert b"draft_model" in fixed and fixed.count(b"\r\n") == fixed.count(b"\n") > 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link.json", "real.json"]


def test_a_file_without_a_repair_is_not_touched(tmp_path: Path) -> None:
    file = tmp_path / "s.json"
    file.write_text('{"method":"draft_model",  "model":"my-eagle-x","num_speculative_tokens":1}')
    before: Sequence[object] = file.stat(), file.read_bytes()
    assert invoke("lint", str(file), "--fix").exit_code == 1
    assert (file.stat(), file.read_bytes()) == tuple(before)


@pytest.mark.parametrize("raw", [b"\xff\xfe{\x00}\x00", b"\x80\x81", "é".encode("latin-1")])
def test_bytes_that_are_no_text(tmp_path: Path, raw: bytes) -> None:
    file = tmp_path / "s.json"
    file.write_bytes(raw)
    for done in (invoke("lint", str(file)), invoke("lint", "-", stdin=raw)):
        assert done.exit_code == 2 and "as text" in done.stderr and done.stderr.count("\n") == 1
