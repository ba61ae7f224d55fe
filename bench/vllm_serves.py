"""`slipstream deploy` and `watch` with the real `vllm serve`: under load, and when things go wrong.

    python bench/vllm_serves.py [--only load,port,…] [--record FILE]

Starts vLLM's server, of the environment `vllm` of bench/environments.py, with the house models (tiny;
--target takes another) by `slipstream deploy`, and tries, each in turn:

load      clients ask for --seconds, more at once than run together; `watch` meanwhile. Its tokens are the
          clients' own, its tau and positions those of vLLM's counters, it sees requests run and wait, advises
          to turn drafting off above what runs, and draws its chart when it is stopped. --record keeps what
          /metrics said.
port      a second deploy to the same port.
kill      the server is killed: deploy ends, and `watch` says that nobody answers.
core      the process of vLLM's engine is killed, as the system does that lacks memory.
memory    a cache larger than the memory.
misfit    a head whose tensors are not of the shape that its config says.
other     a head of another model of the same shape: it loads, and next to nothing is accepted.
width     a head for another hidden size: refused before anything starts.

After each nothing may be left running. Ends with 1 if anything is otherwise than said here.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch

from environments import prepare
from peer_processes import vllm_variables
from peer_servers import free_port
from serve_common import wait_until
from slipstream.errors import SlipstreamError
from slipstream.export.target import read_parts
from slipstream.export.vllm import export_vllm
from slipstream.heads.io import load_eagle, save_eagle
from slipstream.model.house import house_drafter
from slipstream.model.load import resolve
from slipstream.testing.heads import random_eagle
from slipstream.testing.tiny import tiny_model

TRIALS = ("load", "port", "kill", "core", "memory", "misfit", "other", "width")
EAGER = ("--set", 'extra={"enforce-eager": true}')  # what is to fail need not be compiled
MARK = "SLIPSTREAM_TRIAL"  # in the environment of all that is started here
SLIPSTREAM = [sys.executable, "-m", "slipstream.cli.main"]
PROMPTS = [f"def {name}(" for name in ("read", "write", "close", "open_file", "main", "parse", "sort", "add")]


@dataclass
class Bench:
    """What the trials share. wrong: what was otherwise."""

    args: argparse.Namespace
    work: Path
    target: Path
    head: Path
    executable: Path
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    wrong: list[str] = field(default_factory=list)

    def must(self, name: str, fine: bool, told: str) -> None:
        print(f"{name}: {'fine' if fine else 'OTHERWISE'}: {told}", flush=True)
        if not fine:
            self.wrong.append(f"{name}: {told}")

    def command(self, port: int, head: Path, *more: str) -> list[str]:
        words = [*SLIPSTREAM, "deploy", "vllm", "--executable", str(self.executable)]
        words += ["--target", str(self.target), "--drafter", "eagle3", "--model", str(head), "--tokens", "3"]
        words += ["--set", f"port={port}", "--set", f"max_running={self.args.running}"]
        words += ["--set", "max_model_len=512", "--timeout", str(self.args.timeout)]
        return [*words, "--log", str(self.work / f"vllm-{port}.log"), *more]

    def variables(self, **more: str) -> dict[str, str]:
        return {
            **os.environ,
            **vllm_variables(self.args.threads),
            "HF_HUB_OFFLINE": "1",
            MARK: self.mark,
            **more,
        }

    def left(self) -> list[str]:
        """What still runs of all that was started here."""
        found = []
        for process in psutil.process_iter(["pid", "name", "status"]):
            try:
                if (
                    process.info["status"] != psutil.STATUS_ZOMBIE
                    and process.environ().get(MARK) == self.mark
                ):
                    found.append(f"{process.info['pid']} {process.info['name']}")
            except psutil.Error:
                continue
        return found

    def nothing_left(self, name: str) -> None:
        deadline = time.monotonic() + 10
        while self.left() and time.monotonic() < deadline:
            time.sleep(0.2)
        self.must(name, not self.left(), f"left running: {self.left() or 'nothing'}")

    def ends(self, name: str, command: list[str], status: int, said: str, **variables: str) -> None:
        """The command ends with this status and says this, in one line and without a traceback."""
        done = subprocess.run(
            command, env=self.variables(**variables), capture_output=True, text=True, check=False
        )
        last = done.stderr.strip().splitlines()[-1:] or [""]
        fine = done.returncode == status and re.search(said, last[0]) is not None
        fine &= "Traceback" not in done.stderr
        self.must(name, fine, f"status {done.returncode}: {last[0]}")
        self.nothing_left(name)

    @contextmanager
    def served(self, port: int, *more: str) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
        """`slipstream deploy`, once it serves; and the file of what it says."""
        said = self.work / f"deploy-{port}.txt"
        with said.open("w") as out:
            child = subprocess.Popen(
                self.command(port, self.head, *more), stdout=out, stderr=out, env=self.variables()
            )
            try:
                wait_until(
                    child, lambda: "until Ctrl-C" if "until Ctrl-C" in said.read_text() else None, said
                )
                yield child, said
            finally:
                if child.poll() is None:
                    child.send_signal(signal.SIGTERM)
                child.wait(60)

    def watch(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*SLIPSTREAM, "watch", *words], capture_output=True, text=True, env=self.variables(), check=False
        )


def counters(url: str) -> tuple[dict[str, float], list[float], str]:
    """vLLM's counters by name, accepted by position, and the text, read without our own parser."""
    text = httpx.get(f"{url}/metrics", timeout=60).text
    totals: dict[str, float] = {}
    positions: dict[int, float] = {}
    for line in text.splitlines():
        if not line.startswith("vllm:"):
            continue
        name, value = line.split("{")[0].split(" ")[0], float(line.rsplit(" ", 1)[1])
        where = re.search(r'_total{.*position="(\d+)"', line)
        if where:
            positions[int(where[1])] = positions.get(int(where[1]), 0.0) + value
        totals[name] = totals.get(name, 0.0) + value
    return totals, [positions[i] for i in sorted(positions)], text


def clients(url: str, model: str, count: int, seconds: float) -> int:
    """So many clients ask at once, one thing after another, until time is up. Tokens that they got."""
    got, lock, end = [0], threading.Lock(), time.monotonic() + seconds

    def ask(number: int) -> None:
        turn = number
        while time.monotonic() < end:
            body = {
                "model": model,
                "prompt": PROMPTS[turn % len(PROMPTS)],
                "max_tokens": 96,
                "temperature": 0,
            }
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=300)
            answer.raise_for_status()
            with lock:
                got[0] += answer.json()["usage"]["completion_tokens"]
            turn += 1

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return got[0]


def load(bench: Bench, port: int) -> None:
    url, history, chart = f"http://127.0.0.1:{port}", bench.work / "h.jsonl", bench.work / "c.png"
    before, _, _ = counters(url)
    words = [
        url,
        "--json",
        "--every",
        "1",
        "--off-above",
        "2",
        "--history",
        str(history),
        "--chart",
        str(chart),
    ]
    seen = bench.work / "watch.txt"
    with seen.open("w") as out:
        watching = subprocess.Popen(
            [*SLIPSTREAM, "watch", *words], stdout=out, stderr=subprocess.STDOUT, env=bench.variables()
        )
        wait_until(watching, lambda: "read" if history.exists() else None, seen)
        got = clients(url, str(bench.target), 2 * bench.args.running, bench.args.seconds)
        time.sleep(2.5)  # one more reading
        watching.send_signal(signal.SIGINT)
        status = watching.wait(60)
    after, positions, text = counters(url)
    bench.must(
        "load", status in (0, 130) and "Traceback" not in seen.read_text(), f"watch ends with {status}"
    )
    lines = [json.loads(line) for line in seen.read_text().splitlines() if line.startswith("[")]
    rows: list[dict[str, Any]] = [line[0] for line in lines]
    live = rows[1:]
    told = sum(row["tokens_per_second"] * row["seconds"] for row in live)
    made = after["vllm:generation_tokens_total"] - before["vllm:generation_tokens_total"]
    bench.must(
        "load",
        abs(told - got) < 1 and made == got,
        f"clients got {got} tokens, watch saw {told:.1f} in {len(live)} readings, vLLM counted {made:.0f}",
    )
    most = max(row["running"] for row in live), max(row["waiting"] for row in live)
    bench.must(
        "load",
        most[0] == bench.args.running and most[1] > 0,
        f"at most {most[0]:.0f} ran and {most[1]:.0f} waited",
    )
    busy = [row for row in live if row["running"] > 2 and (row["drafts"] or 0) >= 50]
    advised = sum(any("turn drafting off above 2" in a["text"] for a in row["advice"]) for row in busy)
    bench.must(
        "load", bool(busy) and advised == len(busy), f"advised in {advised} of {len(busy)} busy readings"
    )
    (row,) = json.loads(bench.watch(url, "--once", "--json").stdout)
    drafts = after["vllm:spec_decode_num_drafts_total"]
    tau = 1 + after["vllm:spec_decode_num_accepted_tokens_total"] / drafts
    rates = [p / drafts for p in positions]
    near = max(abs(a - b) for a, b in zip(row["per_position"], rates, strict=True))
    bench.must(
        "load",
        abs(row["tau"] - tau) < 1e-9 and near < 1e-9 and row["engine"] == "vllm",
        f"tau {row['tau']:.3f}, by position {[round(p, 3) for p in rates]} of {drafts:.0f} drafts",
    )
    bench.must("load", chart.read_bytes().startswith(b"\x89PNG"), f"a chart of {chart.stat().st_size} bytes")
    table = bench.watch(url, "--once", "--off-above", "64")
    bench.must("load", " vllm " in table.stdout, f"a table of {len(table.stdout.splitlines())} lines")
    if bench.args.record:
        bench.args.record.write_text(text.replace(str(bench.target), "tiny"))


def port(bench: Bench, taken: int) -> None:
    done = subprocess.run(
        bench.command(taken, bench.head), env=bench.variables(), capture_output=True, text=True, check=False
    )
    last = done.stderr.strip().splitlines()[-1]
    bench.must("port", done.returncode == 2 and f"port {taken}" in last, f"status {done.returncode}: {last}")
    answers = httpx.get(f"http://127.0.0.1:{taken}/health", timeout=30).status_code
    bench.must("port", answers == 200, f"the first server answers {answers}")


def victims(child: subprocess.Popen[bytes]) -> tuple[psutil.Process, list[psutil.Process]]:
    """vLLM's server, and the processes that it started."""
    (server,) = psutil.Process(child.pid).children()
    return server, server.children(recursive=True)


def killed(bench: Bench, name: str, child: subprocess.Popen[bytes], said: Path, url: str) -> None:
    server, workers = victims(child)
    victim = server if name == "kill" else next((w for w in workers if "Engine" in w.name()), workers[-1])
    print(f"{name}: killing {victim.name()} of {[p.name() for p in (server, *workers)]}", flush=True)
    victim.kill()
    status = child.wait(120)
    last = said.read_text().strip().splitlines()[-1]
    wanted = "signal SIGKILL" if name == "kill" else "the engine ended"
    fine = status == 2 and wanted in last and "Traceback" not in said.read_text()
    bench.must(name, fine, f"status {status}: {last}")
    gone = bench.watch(url, "--once", "--json")
    row = json.loads(gone.stdout)[0]
    bench.must(name, gone.returncode == 1 and "cannot be reached" in row.get("error", ""), f"watch: {row}")
    bench.nothing_left(name)


def misfit(bench: Bench) -> Path:
    """The head, with a config that says another width of its MLP."""
    folder = bench.work / "misfit"
    shutil.copytree(bench.head, folder)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**raw, "intermediate_size": raw["intermediate_size"] * 2})
    )
    return folder


def other(bench: Bench) -> Path:
    """The head's shapes with the numbers of no head at all."""
    parts = read_parts(bench.target)
    head = load_eagle(bench.head, parts)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in head.named_parameters():
            if weight.dim() > 1 and "embed" not in name:
                weight.copy_(torch.randn(weight.shape, generator=generator).to(weight.dtype) * 0.05)
    save_eagle(head, bench.work / "raw-other")
    export_vllm(bench.work / "raw-other", bench.work / "other", bench.target)
    return bench.work / "other"


def width(bench: Bench) -> Path:
    save_eagle(
        random_eagle(tiny_model(layers=6, hidden=64), 3, aux_layers=(1, 2, 3), hidden_size=64),
        out := bench.work / "width",
    )
    return out


def try_all(bench: Bench) -> None:
    only = bench.args.only.split(",")
    if {"load", "port", "kill"} & {*only}:
        taken = free_port()
        with bench.served(taken, "--set", "predicted_tau=1.2") as (child, said):
            print(said.read_text(), flush=True)
            if "load" in only:
                load(bench, taken)
            if "port" in only:
                port(bench, taken)
            if "kill" in only:
                killed(bench, "kill", child, said, f"http://127.0.0.1:{taken}")
        bench.nothing_left("load")
    if "core" in only:
        with bench.served(taken := free_port(), *EAGER) as (child, said):
            killed(bench, "core", child, said, f"http://127.0.0.1:{taken}")
    for name, head, status, words, variables in (
        ("memory", lambda: bench.head, 2, "memory", {"VLLM_CPU_KVCACHE_SPACE": "4000"}),
        ("misfit", lambda: misfit(bench), 2, "tensors do not fit", {}),
        ("other", lambda: other(bench), 1, "next to nothing is accepted", {}),
        ("width", lambda: width(bench), 2, "hidden size", {}),
    ):
        if name in only:
            bench.ends(
                name, bench.command(free_port(), head(), *EAGER, "--check"), status, words, **variables
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--target", default="tiny")
    parser.add_argument("--head", type=Path, help="an EAGLE-3 head; default: the house's")
    parser.add_argument("--only", default=",".join(TRIALS))
    parser.add_argument("--seconds", type=float, default=20, help="of load")
    parser.add_argument("--running", type=int, default=4, help="requests that run together")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--timeout", type=float, default=600, help="seconds until vLLM is healthy")
    parser.add_argument("--record", type=Path, metavar="FILE", help="keep what /metrics said under load")
    parser.add_argument("--work", type=Path, help="a new folder to keep everything in")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers end with us
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background shells ignore it
    with tempfile.TemporaryDirectory() as scratch:
        work = (args.work or Path(scratch)).absolute()
        work.mkdir(parents=True, exist_ok=True)
        try:
            target = resolve(args.target)
            head = args.head or house_drafter("eagle", read_parts(target).fingerprint)
            export_vllm(head, work / "head", target)
            bench = Bench(args, work, target, work / "head", prepare("vllm").parent / "vllm")
            try_all(bench)
        except SlipstreamError as error:
            parser.exit(2, f"error: {error}\n")
    for line in bench.wrong:
        print(f"OTHERWISE: {line}")
    return 1 if bench.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
