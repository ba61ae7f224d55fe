"""A local engine as a child process: started, waited for, explained when it dies, and never left behind."""

from __future__ import annotations

import http.client
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from slipstream.errors import SlipstreamError
from slipstream.watch.fetch import open_url

_GRACE = 20.0
_TAIL = 4000


class DeployError(SlipstreamError):
    """The engine did not start, died, or does not do what the plan says."""


# What engines write before they die, and what it means. The first that fits is told.
_REASONS = (
    (
        r"address already in use|Errno 98",
        "the port was taken meanwhile: choose another with --set port=N",
    ),
    (
        r"Available memory on node",  # v1/worker/cpu_worker.py
        "less memory is free than vLLM's CPU build wants to reserve: set VLLM_CPU_KVCACHE_SPACE to the GiB"
        " that its cache may take, or --set 'extra={\"gpu-memory-utilization\": 0.5}'",
    ),
    (
        r"out of memory|OutOfMemoryError|MemoryError|No available memory for the cache blocks"
        r"|can(?:'t|not) allocate memory",
        "out of memory: a smaller max_model_len, fewer max_running, a quantised draft, or more"
        " tensor_parallel",
    ),
    (
        r"no module or parameter named|size mismatch|shape mismatch|== loaded_weight\.shape|do not match"
        r"|exceeds dimension size",
        "the drafter's tensors do not fit: it is of another model or layout; `slipstream export` writes"
        " one that fits",
    ),
    (
        r"same vocabulary size",
        "draft and target have vocabularies of different size: choose a draft of the target's family",
    ),
    (
        r"validation error|Unsupported speculative method|unrecognized arguments|invalid choice|ValueError",
        "the engine refuses the configuration: run `slipstream lint` on it with the engine's exact version",
    ),
    (
        r"ModuleNotFoundError|ImportError|command not found",
        "the engine's installation is broken",
    ),
    (
        r"(?:exited|died) unexpectedly|EngineDeadError",  # v1/engine/core_client.py
        "a process of the engine was ended, most likely by the system for lack of memory",
    ),
)


class Server:
    """An engine's process and its log. A context manager: leaving it stops everything that was started."""

    def __init__(self, command: Sequence[str], host: str, port: int, log: Path) -> None:
        """Starts it. Raises DeployError if the program is missing or the port is taken."""
        program = shutil.which(command[0])
        if program is None:
            raise DeployError(
                f"there is no program {command[0]}: install the engine, or name it with --executable"
            )
        require_free(host, port)
        self.host, self.port, self.log = host, port, log
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            self._out = log.open("wb")
        except OSError as error:
            raise DeployError(
                f"the log {log} cannot be written ({error.strerror}): name another with --log"
            ) from error
        try:
            self.process = subprocess.Popen(
                [program, *command[1:]],
                stdin=subprocess.DEVNULL,
                stdout=self._out,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that its workers can be stopped with it
            )
        except OSError as error:
            self._out.close()
            raise DeployError(f"{program} cannot be started ({error.strerror})") from error

    @property
    def url(self) -> str:
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::", "") else self.host
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    def wait_healthy(self, timeout: float, every: float = 0.5) -> float:
        """Seconds until /health answers 200. Raises DeployError when the process dies or time is up."""
        start = time.monotonic()
        while time.monotonic() - start < timeout:
            self.require_alive()
            if self._healthy():
                return time.monotonic() - start
            time.sleep(every)
        raise DeployError(
            f"{self.url}/health did not answer within {timeout:.0f} s: give more with --timeout, or see"
            f" {self.log}"
        )

    def _healthy(self) -> bool:
        try:
            with open_url(f"{self.url}/health", 5) as answer:
                return bool(answer.status == 200)
        except (OSError, ValueError, http.client.HTTPException):
            return False

    def require_alive(self) -> None:
        """DeployError with the reason if the process has ended."""
        code = self.process.poll()
        if code is not None:
            raise DeployError(
                f"the engine ended ({_ended(code)}): {self.reason(code)}; its log is {self.log}"
            )

    def reason(self, code: int | None = None) -> str:
        """What the log says about the end, in words."""
        text = self.log.read_bytes()[-200_000:].decode("utf-8", errors="replace")
        if code == -signal.SIGKILL:
            return "it was killed, most likely by the system for lack of memory"
        for pattern, meaning in _REASONS:
            if re.search(pattern, text, re.IGNORECASE):
                return f"{meaning} ({_line(text, pattern)})"
        lines = [line for line in text.splitlines() if line.strip()]
        # of vLLM's processes the first that fails knows why; the last says that one failed
        causes = [line for line in lines if re.search(r"\w+Error: ", line) and "See root cause" not in line]
        return (causes or lines or ["it said nothing"])[-1][:300]

    def stop(self) -> None:
        """End the process and all that it started: politely, then not; a second Ctrl-C makes it "not"."""
        try:
            self._end(signal.SIGTERM, _GRACE)
        finally:
            self._end(signal.SIGKILL, 5.0)
            self.process.wait()
            self._out.close()

    def _end(self, number: signal.Signals, patience: float) -> None:
        if not self._group_alive():
            return
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline and self._group_alive():
            time.sleep(0.05)

    def _group_alive(self) -> bool:
        self.process.poll()  # reaps it, so that only its children keep the group alive
        try:
            os.killpg(self.process.pid, 0)
        except (ProcessLookupError, PermissionError):
            return False
        return True

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def require_free(host: str, port: int) -> None:
    """DeployError if something listens there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1" if host in ("localhost", "") else host, port))
        except OSError as error:
            raise DeployError(
                f"port {port} of {host} cannot be used ({error.strerror}): stop what listens there, or"
                " choose another"
                " with --set port=N"
            ) from error


def _ended(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"status {code}"


def _line(text: str, pattern: str) -> str:
    for line in reversed(text.splitlines()):
        if re.search(pattern, line, re.IGNORECASE):
            return " ".join(line.split())[:200]
    return ""
