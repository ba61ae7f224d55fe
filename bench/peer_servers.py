"""Other engines' servers beside Slipstream's, for bench/serve_load.py.

    python bench/peer_servers.py -- python bench/serve_load.py --model qwen2.5-coder-0.5b --drafter ngram
    python bench/peer_servers.py

starts `vllm serve` (its CPU build) and llama.cpp's server (through xllamacpp) on free ports, in the
environments of bench/environments.py, and waits until they answer. With a command it runs that with `--peer
NAME=URL …` added, then ends the servers and gives the command's status; without one it prints those words and
serves until Ctrl-C. Both get the same model (bf16, and the Q4_K_M file it was made of), room for --rows
requests at once and all threads. No prompt is kept for later ones that begin alike, for settings that are
asked the same by turns would find each other's; --prefix-cache leaves that as the servers have it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rich.console import Console

from common import DRAFT
from environments import prepare
from gguf_models import gguf_file
from peer_driver import WORKERS
from peer_processes import vllm_variables
from peer_settings import LLAMACPP, VLLM
from serve_common import answers, wait_until
from slipstream.cli.output import TerminalProgress
from slipstream.deploy.program import find_program
from slipstream.errors import SlipstreamError
from slipstream.model.load import resolve

END_SECONDS = 60.0
OUT = Path("bench/out")


@contextmanager
def server(command: Sequence[str], url: str, log: Path, variables: dict[str, str]) -> Iterator[str]:
    """The command's server, once `url`/health gives 200; ended with all that it started. log: its words."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as out:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env={**os.environ, "HF_HUB_OFFLINE": "1", **variables},
            start_new_session=True,  # Ctrl-C is ours to hear; what the server starts ends with it
        )
        try:
            yield wait_until(child, lambda: url if answers(f"{url}/health") else None, log)
        finally:
            child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(END_SECONDS)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def vllm(args: argparse.Namespace, port: int) -> tuple[list[str], dict[str, str]]:
    program = find_program(str(prepare("vllm").parent / "vllm"))
    command = [*program.words, str(resolve(args.model))]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", args.model]
    command += ["--dtype", "bfloat16", "--max-model-len", str(args.context), "--max-num-seqs", str(args.rows)]
    command += [] if args.prefix_cache else ["--no-enable-prefix-caching"]
    return command, {**vllm_variables(args.threads), "VLLM_CPU_KVCACHE_SPACE": "2"}


def llamacpp(args: argparse.Namespace, port: int) -> tuple[list[str], dict[str, str]]:
    progress = TerminalProgress(Console(stderr=True), None)
    config = {
        "model": args.gguf or str(gguf_file(args.model, progress=progress)),
        "threads": args.threads,
        "rows": args.rows,
        "context": args.rows * args.context,
        "port": port,
        "prefix_cache": args.prefix_cache,
    }
    return [str(prepare("llamacpp")), str(WORKERS / "serve_llamacpp.py"), json.dumps(config)], {}


SERVERS = {VLLM: vllm, LLAMACPP: llamacpp}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default=DRAFT)
    parser.add_argument("--only", default=",".join(SERVERS), metavar="NAME,…", help="of vllm and llama.cpp")
    parser.add_argument("--rows", type=int, default=16, help="requests answered at once")
    parser.add_argument("--context", type=int, default=2048, help="tokens of a request, with its answer")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--prefix-cache", action="store_true")
    parser.add_argument("--gguf", default="", metavar="FILE", help="instead of the catalogue's")
    parser.add_argument("command", nargs="*", metavar="-- COMMAND …")
    args = parser.parse_args()
    names = [name.strip() for name in args.only.split(",")]
    wrong = [name for name in names if name not in SERVERS]
    if wrong:
        parser.exit(2, f"error: unknown server {wrong[0]!r}; there are {', '.join(SERVERS)}\n")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers end with us
    words: list[str] = []
    try:
        with ExitStack() as stack:
            for name in names:
                print(f"starting {name}", file=sys.stderr, flush=True)
                port = free_port()
                command, variables = SERVERS[name](args, port)
                log = OUT / f"peer-server-{name}.log"
                url = stack.enter_context(server(command, f"http://127.0.0.1:{port}", log, variables))
                words += ["--peer", f"{name}={url}"]
            if args.command:
                return subprocess.call([*args.command, *words])
            print(shlex.join(words), flush=True)
            with contextlib.suppress(KeyboardInterrupt):
                signal.pause()
    except SlipstreamError as error:
        parser.exit(2, f"error: {error}\n")
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
