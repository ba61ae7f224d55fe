"""Peers' processes as `peers.py` sees them: one computes, the others are stopped; who stays in memory."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil

from peer_processes import GB, Process
from slipstream.errors import SlipstreamError
from slipstream.model.memory import available
from slipstream.model.progress import size

HERE = Path(__file__).parent
WORKERS = HERE / "peer_workers"
READY_SECONDS, ANSWER_SECONDS = 1800.0, 1800.0
RESERVE = 2 * GB  # left free, for files that the engines map and for everything else


class PeerError(SlipstreamError):
    """A peer cannot be had, or broke off; the others go on."""


class Worker:
    """A peer's process, from its start to its end. about: what the engine says of itself."""

    def __init__(self, process: Process, logs: Path) -> None:
        """Starts it and waits until it can answer. Raises PeerError, and what `Process.prepare` raises."""
        self.process = process
        python, config, variables = process.prepare()
        logs.mkdir(parents=True, exist_ok=True)
        self._log = logs / f"{process.name.replace(' ', '-').replace(',', '')}.log"
        source = [str(HERE), str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")]
        ours = {"PYTHONPATH": os.pathsep.join(filter(None, source))} if process.own else {}
        with self._log.open("w", encoding="utf-8") as log:
            self._child = subprocess.Popen(
                [str(python), str(WORKERS / process.script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, **ours, **variables, "HF_HUB_OFFLINE": "1"},
                start_new_session=True,  # a group of its own, to stop and go on together
            )
        self._read = b""
        self._paused = False
        try:
            self._tell(config)
            self.about: dict[str, Any] = self._hear(READY_SECONDS)["ready"]
        except BaseException:
            self.close()
            raise

    def ask(self, setting: str, ids: list[int], max_tokens: int) -> dict[str, Any]:
        self._tell({"setting": setting, "ids": ids, "max_tokens": max_tokens})
        return self._hear(ANSWER_SECONDS)

    def forget(self) -> None:
        self._tell({"forget": True})
        self._hear(READY_SECONDS)

    def pause(self) -> None:
        """None of its threads runs from here on, not even one that only waits busily."""
        os.killpg(self._child.pid, signal.SIGSTOP)
        self._paused = True

    def resume(self) -> None:
        if self._paused:
            os.killpg(self._child.pid, signal.SIGCONT)
            self._paused = False

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.resume()
        assert self._child.stdin is not None and self._child.stdout is not None
        with contextlib.suppress(OSError):
            self._child.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()
        self._child.stdout.close()

    @property
    def cpu_seconds(self) -> float:
        """Of all its processes that live."""
        return sum(t.user + t.system for t in self._each(psutil.Process.cpu_times))

    def _each(self, what: Any) -> list[Any]:
        found = []
        try:
            for one in (head := psutil.Process(self._child.pid), *head.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    found.append(what(one))
        except psutil.NoSuchProcess:
            pass
        return found

    def _tell(self, message: dict[str, Any]) -> None:
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(json.dumps(message).encode() + b"\n")
            self._child.stdin.flush()
        except OSError:
            raise PeerError(self._ended()) from None

    def _hear(self, seconds: float) -> dict[str, Any]:
        assert self._child.stdout is not None
        deadline = time.monotonic() + seconds
        with selectors.DefaultSelector() as waiting:
            waiting.register(self._child.stdout, selectors.EVENT_READ)
            while b"\n" not in self._read:
                if not waiting.select(max(0.0, deadline - time.monotonic())):
                    raise PeerError(f"{self.process.name} said nothing for {seconds:.0f} s: see {self._log}")
                piece = os.read(self._child.stdout.fileno(), 1 << 16)
                if not piece:
                    raise PeerError(self._ended())
                self._read += piece
        line, _, self._read = self._read.partition(b"\n")
        told: dict[str, Any] = json.loads(line)
        if "error" in told:
            raise PeerError(f"{self.process.name}: {told['error'][:500]}; see {self._log}")
        return told

    def _ended(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["no word"]
        return f"the process of {self.process.name} ended ({lines[-1][:300]}): see {self._log}"


class Crew:
    """The workers that are in memory. Those that leave room for the largest other one stay, stopped."""

    def __init__(self, processes: list[Process], logs: Path) -> None:
        self._processes = processes
        self._logs = logs
        self._resting: dict[str, Worker] = {}

    def take(self, process: Process) -> Worker:
        """The worker, going. Raises PeerError if there is no room for it or it cannot start."""
        resting = self._resting.pop(process.name, None)
        if resting is not None:
            resting.resume()
            return resting
        while available() < process.needs + RESERVE and self._resting:
            self._resting.pop(next(iter(self._resting))).close()  # whose turn is longest ago
        room = available()
        if room < process.needs + RESERVE:
            raise PeerError(
                f"{process.name} may need {size(process.needs)} of memory beside {size(RESERVE)} of reserve,"
                f" and {size(room)} are free: close other programs"
            )
        return Worker(process, self._logs)

    def leave(self, worker: Worker) -> None:
        """Its turn is over."""
        here = {worker.process.name, *self._resting}
        others = [p.needs for p in self._processes if p.name not in here]
        if available() >= max(others, default=0) + RESERVE:
            worker.pause()
            self._resting[worker.process.name] = worker
        else:
            worker.close()

    def close(self) -> None:
        while self._resting:
            self._resting.popitem()[1].close()


class Watch:
    """How much of the machine others took while a worker computed, as a share of all its cores."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._at = self._now()

    def others(self) -> float:
        busy, own, clock = (b - a for a, b in zip(self._at, self._now(), strict=True))
        return max(0.0, busy - own) / (clock * (os.cpu_count() or 1))

    def _now(self) -> tuple[float, float, float]:
        t = psutil.cpu_times()
        busy = t.user + t.nice + t.system + t.irq + t.softirq + t.steal
        return busy, self._worker.cpu_seconds, time.monotonic()
