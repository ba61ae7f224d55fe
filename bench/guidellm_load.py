"""Load by a public generator, GuideLLM, on a Slipstream server: concurrency 1, 2, 4, 8, 16.

    python bench/guidellm_load.py --model qwen2.5-coder-0.5b --drafter ngram
    python bench/guidellm_load.py --url http://127.0.0.1:8000

GuideLLM comes from PyPI into an environment of its own (bench/environments.py), asks for the prompts of
--prompts as streamed chats, greedy, and writes its own report, as JSON and HTML, into --out. Without --url a
server is started, and every level is run on it twice: with the drafter, and plain (`speculative.drafter:
none` in each request). All levels ask the same prompts, so give a drafter that remembers no answers (ngram,
suffix:remember=false). Any other server of OpenAI's kind can be given with --url too, then once, as it is.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from common import DRAFT, PROMPTS, machine, read_prompts, versions
from environments import prepare
from serve_common import Served, find_model, serve
from serve_load import PLAIN, SPECULATIVE
from slipstream.errors import ModelError, SlipstreamError
from slipstream.model.load import resolve
from slipstream.model.store import write_atomic

OUT = Path("bench/out/guidellm")


def command(
    python: Path,
    served: Served,
    tokenizer: Path,
    data: Path,
    report: Path,
    level: int,
    args: argparse.Namespace,
) -> list[str]:
    """GuideLLM's words for one report, at one concurrency: --override takes no numbers of requests."""
    body: dict[str, Any] = {"temperature": 0.0}
    if report.name.startswith(PLAIN):
        body["speculative"] = {"drafter": "none"}
    backend = {
        "kind": "openai_http",
        "target": served.url,
        "model": served.model,
        "request_format": "/v1/chat/completions",
        "extras": {"body": body},
    }
    mapper = {"kind": "generative_column_mapper"}
    mapper |= {
        "column_mappings": {"text_column": "prompt", "output_tokens_count_column": "output_tokens_count"}
    }
    words = [
        "--backend",
        json.dumps(backend),
        "--profile",
        json.dumps({"kind": "concurrent", "streams": [level]}),
    ]
    words += ["--data", json.dumps({"kind": "json_file", "path": str(data)})]
    words += ["--data-column-mapper", json.dumps(mapper)]
    words += ["--tokenizer", json.dumps({"kind": "huggingface_auto", "model": str(tokenizer)})]
    words += ["--constraint", json.dumps({"kind": "max_requests", "count": args.requests * level})]
    for kind in ("json", "html"):
        words += ["--output", json.dumps({"kind": kind, "path": str(report.with_suffix(f".{kind}"))})]
    return [str(python.parent / "guidellm"), "run", *words, "--disable-console-interactive"]


def facts(report: Path) -> dict[str, float]:
    """Of GuideLLM's report: requests that failed, tokens/s of all clients together, medians in ms."""
    (one,) = json.loads(report.read_text(encoding="utf-8"))["benchmarks"]
    measured = one["metrics"]
    good = {name: value["successful"] for name, value in measured.items() if name.endswith(("_ms", "_count"))}
    return {
        "failed": measured["request_totals"]["errored"] + measured["request_totals"]["incomplete"],
        "rate": good["output_token_count"]["total_sum"] / one["duration"],
        "first": good["time_to_first_token_ms"]["median"],
        "each": good["inter_token_latency_ms"]["median"],
    }


def table(out: Path, reports: Sequence[str], levels: Sequence[int]) -> list[str]:
    lines = [
        "| concurrency | setting | tokens/s | against plain | first p50, ms | a token p50, ms | failed |",
        "|---:|---|---:|---:|---:|---:|---:|",
    ]
    for level in levels:
        found = {name: facts(out / f"{name}-{level}.json") for name in reports}
        for name, one in found.items():
            ratio = f"{one['rate'] / found[PLAIN]['rate']:.2f}" if PLAIN in found else "-"
            lines.append(
                f"| {level} | {name} | {one['rate']:.1f} | {ratio} | {one['first']:.0f} | {one['each']:.1f} |"
                f" {one['failed']:.0f} |"
            )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default=DRAFT, help="also whose tokenizer counts, with --url")
    parser.add_argument("--drafter", default="ngram", metavar="NAME[:KEY=VALUE,…]")
    parser.add_argument("--url", help="a server that runs already")
    parser.add_argument("--concurrency", default="1,2,4,8,16")
    parser.add_argument("--requests", type=int, default=4, help="a level, times the concurrency")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--prompts", type=Path, default=PROMPTS / "drafters.jsonl", metavar="FILE")
    parser.add_argument("--out", type=Path, default=OUT, metavar="FOLDER")
    args = parser.parse_args()
    try:
        rows = read_prompts(args.prompts)
        python, tokenizer = prepare("guidellm"), resolve(args.model)
        out = args.out.absolute()
        out.mkdir(parents=True, exist_ok=True)
        data = out / "prompts.jsonl"
        asked = [{"prompt": row["prompt"], "output_tokens_count": args.max_tokens} for row in rows]
        data.write_text("".join(json.dumps(one) + "\n" for one in asked), encoding="utf-8")
        with ExitStack() as stack:
            if args.url:
                served, reports = Served(args.url, find_model(args.url)), ["server"]
            else:
                most = max(args.concurrency.split(","), key=int)
                options = ["--drafter", args.drafter, "--max-rows", most, "--threads", str(args.threads)]
                options += ["--no-prefix-cache"]  # levels ask the same prompts: nothing may be known already
                served = stack.enter_context(serve(args.model, *options, log=out / "server.log"))
                reports = [SPECULATIVE, PLAIN]
            levels = [int(level) for level in args.concurrency.split(",")]
            for level in levels:
                for name in reports:
                    words = command(python, served, tokenizer, data, out / f"{name}-{level}", level, args)
                    if subprocess.call(words, env={**os.environ, "HF_HUB_OFFLINE": "1"}):
                        raise ModelError("GuideLLM ended with an error, see above")
    except SlipstreamError as error:
        parser.exit(2, f"error: {error}\n")
    lines = [f"{machine(args.threads)}; {versions()}", "", *table(out, reports, levels)]
    print("\n".join(lines))
    write_atomic(out / "table.md", "\n".join(lines) + "\n")
    print(f"reports of {', '.join(reports)} in {out}")


if __name__ == "__main__":
    main()
