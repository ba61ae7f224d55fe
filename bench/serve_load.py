"""Load on a server: tokens/s and latencies at several concurrencies, with and without speculation.

Both settings are asked of one server by turns (a request chooses its drafter), and other servers by turns
with them, so a machine that drifts hurts all alike. One process of each must fit into memory.

    python bench/serve_load.py --model qwen2.5-coder-0.5b --drafter ngram
    python bench/serve_load.py --url http://127.0.0.1:8000 --peer vllm=http://127.0.0.1:9000
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from common import PROMPTS, machine, make_parser, read_prompts, spread, versions, write_json
from serve_common import Reply, Served, ask, find_model, serve


@dataclass(frozen=True)
class Setting:
    """One column of the table. extra: fields beyond OpenAI's that make it what it is."""

    name: str
    url: str
    model: str
    extra: dict[str, Any]


async def load(setting: Setting, bodies: Sequence[dict[str, Any]], concurrency: int) -> dict[str, Any]:
    """All requests, `concurrency` at a time: raw times, and what was generated."""
    gate = asyncio.Semaphore(concurrency)
    limits = httpx.Limits(max_connections=concurrency)
    loop = asyncio.get_running_loop()
    async with httpx.AsyncClient(timeout=None, limits=limits) as client:

        async def one(body: dict[str, Any]) -> Reply:
            async with gate:
                return await ask(client, setting.url, {"model": setting.model, **body, **setting.extra})

        began = loop.time()
        replies = await asyncio.gather(*(one(body) for body in bodies))
        seconds = loop.time() - began
    return {
        "setting": setting.name,
        "concurrency": concurrency,
        "seconds": seconds,
        "tokens": sum(r.tokens for r in replies),
        "first": [r.first for r in replies],
        # Chunks may hold several tokens: the time a token is from tokens, never from chunks.
        "each": [(r.whole - r.first) / (r.tokens - 1) for r in replies if r.tokens > 1],
        "texts": [r.text for r in replies],
    }


def bodies_of(args: argparse.Namespace, count: int, first: int) -> list[dict[str, Any]]:
    """Requests that differ from round to round, so that nothing is answered from memory."""
    prompts = read_prompts(args.prompts)
    made = []
    for i in range(first, first + count):
        text = prompts[i % len(prompts)]["prompt"]
        again = i // len(prompts)
        content = text if not again else f"{text}\n({again})"
        body: dict[str, Any] = {"messages": [{"role": "user", "content": content}], "seed": i}
        made.append({**body, "max_tokens": args.max_tokens, "temperature": args.temperature})
    return made


def summary(runs: Sequence[dict[str, Any]], settings: Sequence[Setting], base: str) -> list[str]:
    lines = [
        "| concurrency | setting | tokens/s | against plain | first token p50 / p95, s | a token p50, ms |",
        "|---|---|---|---|---|---|",
    ]
    for concurrency in sorted({r["concurrency"] for r in runs}):
        for setting in settings:
            own = [r for r in runs if (r["setting"], r["concurrency"]) == (setting.name, concurrency)]
            plain = [r for r in runs if (r["setting"], r["concurrency"]) == (base, concurrency)]
            rates = [r["tokens"] / r["seconds"] for r in own]
            pairs = zip(rates, (r["tokens"] / r["seconds"] for r in plain), strict=True)
            first = sorted(t for r in own for t in r["first"])
            each = [t for r in own for t in r["each"]]
            lines.append(
                f"| {concurrency} | {setting.name} | {spread(rates)} | {spread([a / b for a, b in pairs])} |"
                f" {statistics.median(first):.2f} / {first[int(0.95 * (len(first) - 1))]:.2f} |"
                f" {1e3 * statistics.median(each):.1f} |"
            )
    return lines


def different(runs: Sequence[dict[str, Any]], one: str, other: str) -> int:
    """Answers whose text differs between two settings that must agree."""
    by_key = {(r["setting"], r["concurrency"], r["round"]): r["texts"] for r in runs}
    return sum(
        a != b
        for (name, concurrency, round_), texts in by_key.items()
        if name == one
        for a, b in zip(texts, by_key[other, concurrency, round_], strict=True)
    )


def main() -> int:
    parser = make_parser(__doc__, "serve_load", 128)
    parser.set_defaults(rounds=3, prompts=PROMPTS / "drafters.jsonl")
    parser.add_argument("--model", default="qwen2.5-coder-0.5b")
    parser.add_argument("--drafter", default="ngram", metavar="NAME[:KEY=VALUE,...]")
    parser.add_argument("--controller", default=None)
    parser.add_argument("--url", help="a slipstream server that runs already, instead of starting one")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=URL", help="another server")
    parser.add_argument("--concurrency", default="1,2,4,8,16")
    parser.add_argument("--requests", type=int, default=4, help="a level and round, times the concurrency")
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()
    levels = [int(c) for c in args.concurrency.split(",")]
    with ExitStack() as stack:
        if args.url:
            served = Served(args.url, find_model(args.url))
        else:
            options = ["--drafter", args.drafter, "--max-rows", str(max(levels))]
            options += ["--threads", str(args.threads)]
            options += ["--no-prefix-cache"]  # or what one setting has read, the next would find
            options += ["--controller", args.controller] if args.controller else []
            served = stack.enter_context(serve(args.model, *options, log=Path("bench/out/serve_load.log")))
        settings = [
            Setting("plain", served.url, served.model, {"speculative": {"drafter": "none"}}),
            Setting("speculative", served.url, served.model, {}),
        ]
        for peer in args.peer:
            name, _, url = peer.partition("=")
            settings.append(Setting(name, url, find_model(url), {}))
        for setting in settings:  # warm-up
            asyncio.run(load(setting, bodies_of(args, 1, 0), 1))
        runs: list[dict[str, Any]] = []
        first = 1
        for round_ in range(args.rounds):
            for i, concurrency in enumerate(levels):
                bodies = bodies_of(args, args.requests * concurrency, first)
                first += len(bodies)
                turn = (round_ + i) % len(settings)
                for setting in (*settings[turn:], *settings[:turn]):
                    runs.append({"round": round_, **asyncio.run(load(setting, bodies, concurrency))})
                    write_json(args.json, {"runs": runs}, args)
    print(f"{machine(args.threads)}; {versions()}\n")
    print("\n".join(summary(runs, settings, "plain")))
    wrong = different(runs, "speculative", "plain")
    total = sum(len(r["texts"]) for r in runs if r["setting"] == "plain")
    print(f"\n{total - wrong} of {total} answers have the words of plain decoding")
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
