"""What SGLang, llama.cpp and Slipstream say at /metrics, for tests/watch.

    python bench/watch_records.py slipstream FILE
    python bench/watch_records.py llama.cpp FILE
    python bench/watch_records.py sglang FILE --wheel sglang-0.5.23-….whl

slipstream  `slipstream serve tiny` with the house draft model.
llama.cpp   its server, of the environment `llamacpp` of bench/environments.py: --model with --draft as GGUF.
sglang      does not run on a CPU from PyPI. Its wheel's own collectors write its metrics, called as its
            scheduler and its tokenizer process call them; all else of the wheel is empty modules. They are
            told the counts of Slipstream's answers to the same questions, by SGLang's formulas.

The servers answer 8 questions, two at a time, before they are read. (vLLM: bench/vllm_serves.py --record.)
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import httpx

from common import DRAFT, TARGET
from environments import prepare
from gguf_models import gguf_file
from peer_driver import WORKERS
from peer_servers import free_port, server
from serve_common import serve
from slipstream.cli.output import progress
from slipstream.errors import ParameterError, SlipstreamError
from slipstream.model.store import write_atomic
from vllm_serves import PROMPTS

LENGTH = 3


def ask(url: str, model: str) -> None:
    """All questions, two at a time."""

    def some(first: int) -> None:
        for question in PROMPTS[first::2]:
            body = {"model": model, "prompt": question, "max_tokens": 48, "temperature": 0}
            httpx.post(f"{url}/v1/completions", json=body, timeout=600).raise_for_status()

    threads = [threading.Thread(target=some, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def slipstream(args: argparse.Namespace) -> str:
    options = ("--drafter", f"draft_model:num_speculative_tokens={LENGTH}", "--controller", "fixed")
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch, "log")
        with serve("tiny", *options, "--threads", str(args.threads), log=log) as served:
            ask(served.url, served.model)
            return httpx.get(f"{served.url}/metrics", timeout=60).text


def llamacpp(args: argparse.Namespace) -> str:
    with progress(calm=True) as shown:
        model, draft = (str(gguf_file(name, progress=shown)) for name in (args.model, args.draft))
    port = free_port()
    config = {
        "model": model,
        "threads": args.threads,
        "rows": 2,
        "context": 2048,
        "port": port,
        "metrics": True,
        "speculative": {"draft": {"model": draft, "n_max": LENGTH}},
    }
    command = [str(prepare("llamacpp")), str(WORKERS / "serve_llamacpp.py"), json.dumps(config)]
    log = Path("bench/out/watch-records-llamacpp.log")
    with server(command, f"http://127.0.0.1:{port}", log, {}) as url:
        ask(url, args.model)
        return httpx.get(f"{url}/metrics", timeout=60).text


class Unset:
    """Settings of which none is set, but those a number is needed of."""

    prefill_delayer_max_delay_passes = 1

    def __getattr__(self, name: str) -> None:
        return None


class Asleep(MetaPathFinder, Loader):
    """Every module of the wheel is empty, but those of `awake` and what lies below them."""

    def __init__(self, awake: Sequence[str]) -> None:
        self.awake = awake

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname.split(".")[0] != "sglang" or any(fullname.startswith(name) for name in self.awake):
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        asleep = MagicMock(name=spec.name)
        asleep.__name__, asleep.__all__ = spec.name, []
        return asleep  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        root = next(p for p in sys.path if Path(p, "sglang").is_dir())
        module.__path__ = [str(Path(root, *module.__name__.split(".")))]


def sglang(args: argparse.Namespace) -> str:
    """SGLang's exposition after the answers of `slipstream`: two ranks of an engine that knows priorities."""
    if args.wheel is None:
        raise ParameterError("sglang's metrics need --wheel (pip download --no-deps sglang) and msgspec")
    from prometheus_client import REGISTRY, generate_latest

    from slipstream.watch.metrics import parse

    folder = "sglang/srt/observability"
    told = parse(slipstream(args), "slipstream", 0.0)
    assert told.drafts and told.accepted is not None and told.tokens
    with tempfile.TemporaryDirectory() as scratch:
        with zipfile.ZipFile(args.wheel) as wheel:
            wheel.extractall(
                scratch, [n for n in wheel.namelist() if n.startswith("sglang/srt/observability/")]
            )
        sys.path.insert(0, scratch)
        sys.meta_path.insert(0, Asleep((folder.replace("/", "."),)))
        made = importlib.import_module("sglang.srt.observability.metrics_collector")
        for settings in ("disagg", "observability", "parallel", "schedule", "serving"):
            setattr(made, f"get_{settings}", Unset)
        count = made.QueueCount
        stats = made.SchedulerStats(
            num_running_reqs=count(2, {0: 1, 5: 1}),
            num_queue_reqs=count(1, {5: 1}),
            gen_throughput=told.tokens / 10,
            spec_accept_length=1 + told.accepted / told.drafts,
            spec_accept_rate=told.accepted / (told.drafts * LENGTH),
            spec_num_steps=LENGTH,
            spec_num_draft_tokens=LENGTH + 1,
        )
        same = {"model_name": TARGET, "engine_type": "unified", "priority": ""}
        scheduler = made.SchedulerMetricsCollector(
            labels={**same, "tp_rank": 0, "pp_rank": 0, "moe_ep_rank": 0}, server_args=MagicMock()
        )
        for rank in range(2):  # --enable-metrics-for-all-schedulers: each says the same
            scheduler.labels["tp_rank"] = rank
            scheduler.log_stats(stats)
        tokenizer = made.TokenizerMetricsCollector(labels=same)
        for number in range(len(PROMPTS)):
            tokenizer.observe_one_finished_request(
                labels={**same, "priority": str(5 * (number % 2))},
                prompt_tokens=4,
                generation_tokens=int(told.tokens) // len(PROMPTS),
                cached_tokens=0,
                e2e_latency=1.0,
                has_grammar=False,
                spec_verify_ct=int(told.drafts) // len(PROMPTS),
                is_streaming=bool(number % 2),
            )
        text = generate_latest(REGISTRY).decode()
    blocks = text.split("# HELP ")[1:]
    return "".join("# HELP " + block for block in blocks if block.startswith("sglang:"))


ENGINES: dict[str, Callable[[argparse.Namespace], str]] = {
    "slipstream": slipstream,
    "llama.cpp": llamacpp,
    "sglang": sglang,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("file", type=Path, help="where the text goes")
    parser.add_argument("--wheel", type=Path, help="of sglang")
    parser.add_argument("--model", default=TARGET)
    parser.add_argument("--draft", default=DRAFT)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    try:
        write_atomic(args.file, ENGINES[args.engine](args))
    except SlipstreamError as error:
        parser.exit(2, f"error: {error}\n")


if __name__ == "__main__":
    main()
