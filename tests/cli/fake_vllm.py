#!/usr/bin/env python3
"""Answers like `vllm serve`, as far as `slipstream deploy` looks. FAKE_VLLM says what goes wrong."""

import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MODE = os.environ.get("FAKE_VLLM", "")
ACCEPTED = {"good": (0.8, 0.5, 0.2), "near-zero": (0.01, 0.0, 0.0), "weak": (0.35, 0.1, 0.0)}
DRAFTS = 20  # a request


def say_and_end(text: str, code: int = 1) -> None:
    print(text, file=sys.stderr, flush=True)
    sys.exit(code)


def main() -> None:
    arguments = sys.argv[1:]
    if arguments == ["--version"]:
        print("0.32.0")
        return
    assert arguments[0] == "serve", arguments
    options = dict(zip(arguments[2::2], arguments[3::2], strict=True))
    config = json.loads(options.get("--speculative-config", "null"))
    if MODE == "refuses":
        say_and_end("pydantic_core.ValidationError: 1 validation error for SpeculativeConfig\nmethod")
    if MODE == "memory":
        say_and_end("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB")
    if MODE == "reserve":
        say_and_end(
            "ValueError: Available memory on node 0 (5.0/23.0 GiB) on startup is less than desired CPU memory"
        )
    if MODE == "misfit":
        say_and_end(
            "(Worker) RuntimeError: start (0) + length (1024) exceeds dimension size (512).\n"
            "RuntimeError: Engine core initialization failed. See root cause above."
        )
    if MODE == "odd":
        say_and_end(
            "(Worker) KeyError: 'odd'\nRuntimeError: Engine core initialization failed. See root cause above."
        )
    if MODE == "core":
        say_and_end("MPClient: engine core exited unexpectedly; starting cleanup\nleaked semaphores", 0)
    if MODE == "other-head":
        say_and_end(
            "ValueError: There is no module or parameter named 'model.layers.0.x' in EagleLlamaForCausalLM"
        )
    if MODE == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if MODE == "slow":
        time.sleep(60)
    # a worker that only its group's signal reaches
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
    with open(os.environ["FAKE_VLLM_PIDS"], "w") as file:
        file.write(f"{os.getpid()} {worker.pid}")
    counts = {"drafts": 0, "requests": 0}
    accepted = ACCEPTED.get(MODE, ACCEPTED["good"])

    class Handler(BaseHTTPRequestHandler):
        def send(self, text: str, kind: str = "application/json", code: int = 200) -> None:
            raw = text.encode()
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def do_GET(self) -> None:
            if self.path == "/health":
                self.send("")
            elif self.path == "/v1/models":
                self.send(json.dumps({"data": [{"id": arguments[1]}]}))
            else:
                self.send(metrics(), "text/plain")

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert body["model"] == arguments[1] and body["temperature"] == 0
            if MODE == "dies":
                os._exit(3)
            if MODE == "error":
                self.send('{"error": "the model does not exist"}', code=404)
                return
            counts["requests"] += 1
            counts["drafts"] += DRAFTS if config else 0
            self.send(json.dumps({"choices": [{"text": "" if MODE == "mute" else " fine"}]}))

        def log_message(self, *_: object) -> None:
            pass

    def metrics() -> str:
        if not config:
            return "# TYPE vllm:generation_tokens_total counter\nvllm:generation_tokens_total 5.0\n"
        drafts = counts["drafts"]
        lines = [
            f"vllm:spec_decode_num_drafts_total {drafts}",
            f"vllm:spec_decode_num_draft_tokens_total {3 * drafts}",
            f"vllm:spec_decode_num_accepted_tokens_total {sum(accepted) * drafts}",
            f"vllm:generation_tokens_total {drafts}",
        ]
        for i, share in enumerate(accepted):
            lines.append(
                f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{i}"}} {share * drafts}'
            )
        return "\n".join(lines) + "\n"

    server = ThreadingHTTPServer((options["--host"], int(options["--port"])), Handler)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))  # and leaves its worker behind
    server.serve_forever()


if __name__ == "__main__":
    main()
