"""A `llama-server` program, which this process starts and asks."""

from __future__ import annotations

import socket
import subprocess
import time
import urllib.error
import urllib.request
from typing import Any

from llamacpp_http import LlamaCpp
from protocol import serve

KINDS = {"draft": "draft-simple", "ngram_mod": "ngram-mod", "ngram_simple": "ngram-simple"}
FLAGS = {"model": "--model-draft"}  # the others: --spec-KIND-FIELD


class LlamaServer(LlamaCpp):
    """program: the file, in the configuration."""

    def start(self) -> str:
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
        self._child = subprocess.Popen([self.config["program"], *words(self.config), "--port", str(port)])
        address = f"http://127.0.0.1:{port}"
        while not healthy(address):
            if self._child.poll() is not None:
                raise RuntimeError(f"llama-server ended with status {self._child.returncode}")
            time.sleep(0.2)
        return address

    def stop(self) -> None:
        self._child.terminate()
        self._child.wait()

    def build(self) -> dict[str, Any]:
        command = [self.config["program"], "--version"]
        said = subprocess.run(command, capture_output=True, text=True, check=True)
        return {"build": (said.stdout + said.stderr).strip(), "words": words(self.config)}


def words(config: dict[str, Any]) -> list[str]:
    """llama-server's command line."""
    threads = str(config["threads"])
    said = ["--model", config["model"], "--ctx-size", str(config["context"]), "--parallel", "1"]
    said += ["--threads", threads, "--threads-batch", threads, "--host", "127.0.0.1"]
    said += ["--no-cache-prompt", "--cache-ram", "0"]
    if config["speculative"]:
        said += ["--spec-type", ",".join(KINDS[kind] for kind in config["speculative"])]
    for kind, fields in config["speculative"].items():
        for field, value in fields.items():
            said += [FLAGS.get(field, f"--spec-{kind}-{field}".replace("_", "-")), str(value)]
    return said


def healthy(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=10) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


serve(LlamaServer)
