"""A `llama-server` program, which this process starts and asks."""

from __future__ import annotations

import socket
import subprocess
import time
import urllib.error
import urllib.request
from typing import Any

from llamacpp_http import Client
from protocol import serve

KINDS = {"draft": "draft-simple", "ngram_mod": "ngram-mod", "ngram_simple": "ngram-simple"}
FLAGS = {"model": "--model-draft"}  # the others: --spec-KIND-FIELD


class LlamaServer:
    def __init__(self, config: dict[str, Any]) -> None:
        """program: the file. The rest as `llamacpp_params.parameters`, and eos_ids."""
        self._config = config
        version = subprocess.run([config["program"], "--version"], capture_output=True, text=True, check=True)
        self._start()
        self.about = {"build": (version.stdout + version.stderr).strip(), "words": self._child.args}

    def _start(self) -> None:
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
        self._child = subprocess.Popen([self._config["program"], *words(self._config), "--port", str(port)])
        address = f"http://127.0.0.1:{port}"
        while not healthy(address):
            if self._child.poll() is not None:
                raise RuntimeError(f"llama-server ended with status {self._child.returncode}")
            time.sleep(0.2)
        self._client = Client(address, self._config["eos_ids"])

    def answer(self, setting: str, ids: list[int], max_tokens: int) -> list[int]:
        return self._client.answer(ids, max_tokens)

    def told(self) -> dict[str, Any]:
        return self._client.told()

    def forget(self) -> None:
        """`ngram_mod` remembers what it saw of other requests: a new server does not."""
        if "ngram_mod" in self._config["speculative"]:
            self._child.terminate()
            self._child.wait()
            self._start()


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
