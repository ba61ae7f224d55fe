"""Load on a server: tokens/s and latencies at several concurrencies, with and without speculation.

Both settings are asked of one server by turns (a request chooses its drafter), and other servers by turns
with them, so a machine that drifts hurts all alike. Later levels ask the same prompts with a number behind
them: give a drafter that remembers no answers (ngram, suffix:remember=false). One process of each must fit
into memory. Takes about a quarter of an hour for two settings of a 0.5B model on two cores.

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
from typing import TYPE_CHECKING, Any

import httpx

from common import PROMPTS, machine, make_parser, read_prompts, spread, versions, write_json
from serve_common import Reply, Served, ask, find_model, serve
from slipstream.model.store import write_atomic
from slipstream.plan.drawing import COLOURS, png

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PLAIN, SPECULATIVE = "plain", "speculative"
NOISE = 0.03  # of tokens/s between two runs of the same setting
FASTER = 1.5  # aimed at for a single client
WARM_UP = {"messages": [{"role": "user", "content": "Count to twenty."}], "max_tokens": 32}
_DRAFTED = "spec_decode_draft_tokens_per_row"


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
    """Requests that differ from round to round, so that no answer is known from an earlier one."""
    prompts = read_prompts(args.prompts)
    made = []
    for i in range(first, first + count):
        text = prompts[i % len(prompts)]["prompt"]
        again = i // len(prompts)
        content = text if not again else f"{text}\n({again})"
        body: dict[str, Any] = {"messages": [{"role": "user", "content": content}], "seed": i}
        made.append({**body, "max_tokens": args.max_tokens, "temperature": args.temperature})
    return made


def plan(levels: Sequence[int], rounds: int, requests: int, prompts: int) -> list[tuple[int, int, int, int]]:
    """(round, concurrency, requests, number of the first one) of every load, in order.

    requests: of a level and round; twice the concurrency if that is more, so that it is held for a while.
    Every level begins with the first prompt, goes on from round to round, and asks what no other has asked.
    """
    counts = [max(requests, 2 * concurrency) for concurrency in levels]
    stride = prompts * -(-rounds * max(counts) // prompts)
    return [
        (round_, concurrency, count, level * stride + round_ * count)
        for round_ in range(rounds)
        for level, (concurrency, count) in enumerate(zip(levels, counts, strict=True))
    ]


# -- what it says -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Level:
    """One setting at one concurrency, over the rounds. rates: tokens/s. ratios: of them to plain's."""

    concurrency: int
    setting: str
    rates: list[float]
    ratios: list[float]
    first: list[float]
    each: list[float]
    drafted: float | None


def levels_of(runs: Sequence[dict[str, Any]], base: str = PLAIN) -> list[Level]:
    """By concurrency, settings in order of appearance."""
    found = []
    for concurrency in sorted({r["concurrency"] for r in runs}):
        here = [r for r in runs if r["concurrency"] == concurrency]
        plain = {r["round"]: r["tokens"] / r["seconds"] for r in here if r["setting"] == base}
        for setting in dict.fromkeys(r["setting"] for r in here):
            own = [r for r in here if r["setting"] == setting]
            steps = sum(r["drafted"][0] for r in own if r.get("drafted"))
            found.append(
                Level(
                    concurrency,
                    setting,
                    [r["tokens"] / r["seconds"] for r in own],
                    [r["tokens"] / r["seconds"] / plain[r["round"]] for r in own if r["round"] in plain],
                    sorted(t for r in own for t in r["first"]),
                    [t for r in own for t in r["each"]],
                    sum(r["drafted"][1] for r in own if r.get("drafted")) / steps if steps else None,
                )
            )
    return found


def table(levels: Sequence[Level]) -> list[str]:
    """Markdown; values are medians (min-max) of the rounds."""
    lines = [
        "| concurrency | setting | tokens/s | against plain | drafted a row and step |"
        " first token p50 / p95, s | a token p50, ms |",
        "|---:|---|---:|---:|---:|---:|---:|",
    ]
    for at in levels:
        late = at.first[int(0.95 * (len(at.first) - 1))]
        drafted = "-" if at.drafted is None else f"{at.drafted:.2f}"
        each = f"{1e3 * statistics.median(at.each):.1f}" if at.each else "-"
        lines.append(
            f"| {at.concurrency} | {at.setting} | {spread(at.rates)} | {spread(at.ratios)} | {drafted} |"
            f" {statistics.median(at.first):.2f} / {late:.2f} | {each} |"
        )
    return lines


def verdict(levels: Sequence[Level]) -> list[str]:
    """The aims, and whether they are met."""
    own = {at.concurrency: statistics.median(at.ratios) for at in levels if at.setting == SPECULATIVE}
    slow = {c: r for c, r in own.items() if r < 1 - NOISE}
    told = ", ".join(f"{r:.2f} at {c}" for c, r in own.items())
    lines = [f"with speculation at least as fast as without (within {NOISE:.0%}): {_met(not slow)}; {told}"]
    if 1 in own:
        lines.append(f"at least {FASTER} times as fast at 1: {_met(own[1] >= FASTER)}; {own[1]:.2f}")
    return lines


def _met(aim: bool) -> str:
    return "met" if aim else "NOT MET"


def figure(levels: Sequence[Level]) -> Figure:
    """Tokens/s and the ratio to plain decoding over the concurrency; bars are the rounds' range."""
    from matplotlib.figure import Figure

    made = Figure(figsize=(9.5, 3.6))
    rates, ratios = made.subplots(1, 2)
    for i, setting in enumerate(dict.fromkeys(at.setting for at in levels)):
        own = [at for at in levels if at.setting == setting]
        places = [at.concurrency for at in own]
        for axes, values in ((rates, [at.rates for at in own]), (ratios, [at.ratios for at in own])):
            if not all(values) or (axes is ratios and setting == PLAIN):
                continue
            middle = [statistics.median(v) for v in values]
            low = [m - min(v) for m, v in zip(middle, values, strict=True)]
            high = [max(v) - m for m, v in zip(middle, values, strict=True)]
            style: dict[str, Any] = {"color": COLOURS[i % len(COLOURS)], "label": setting}
            axes.errorbar(places, middle, yerr=[low, high], marker="o", ms=4, capsize=3, **style)
    ratios.axhline(1.0, color="#1b1f24", linewidth=0.8, linestyle=(0, (4, 3)))
    for axes, name in ((rates, "tokens/s, all clients together"), (ratios, "times as fast as plain")):
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted({at.concurrency for at in levels}))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_ylim(bottom=0)
        axes.set(xlabel="concurrent clients", ylabel=name)
    rates.legend(loc="best")
    return made


def different(runs: Sequence[dict[str, Any]], one: str, other: str) -> int:
    """Answers whose text differs between two settings that must agree."""
    by_key = {(r["setting"], r["concurrency"], r["round"]): r["texts"] for r in runs}
    return sum(
        a != b
        for (name, concurrency, round_), texts in by_key.items()
        if name == one
        for a, b in zip(texts, by_key[other, concurrency, round_], strict=True)
    )


def measure(args: argparse.Namespace, settings: Sequence[Setting], served: Served) -> list[dict[str, Any]]:
    """All loads, written as they come."""
    levels = [int(c) for c in args.concurrency.split(",")]
    for setting in settings:
        asyncio.run(load(setting, [WARM_UP], 1))
    runs: list[dict[str, Any]] = []
    prompts = len(read_prompts(args.prompts))
    for round_, concurrency, count, first in plan(levels, args.rounds, args.requests, prompts):
        bodies = bodies_of(args, count, first)
        turn = (round_ + levels.index(concurrency)) % len(settings)
        for setting in (*settings[turn:], *settings[:turn]):
            ours = setting.url == served.url
            before = drafted(served) if ours else (0.0, 0.0)
            run = {"round": round_, **asyncio.run(load(setting, bodies, concurrency))}
            if ours:
                run["drafted"] = [now - then for now, then in zip(drafted(served), before, strict=True)]
            runs.append(run)
            write_json(args.json, {"runs": runs}, args)
    return runs


def drafted(served: Served) -> tuple[float, float]:
    """Steps until now, and the sum of their drafted tokens a row."""
    told = served.metrics()
    return told.get(f"{_DRAFTED}_count", 0.0), told.get(f"{_DRAFTED}_sum", 0.0)


def main() -> int:
    parser = make_parser(__doc__, "serve_load", 96)
    parser.set_defaults(rounds=2, prompts=PROMPTS / "drafters.jsonl")
    parser.add_argument("--model", default="qwen2.5-coder-0.5b")
    parser.add_argument("--drafter", default="ngram", metavar="NAME[:KEY=VALUE,...]")
    parser.add_argument("--controller", default=None, help="default: the server's own, goodput")
    parser.add_argument("--url", help="a slipstream server that runs already, instead of starting one")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=URL", help="another server")
    parser.add_argument("--concurrency", default="1,2,4,8,16")
    parser.add_argument("--requests", type=int, default=12, help="a level and round; at least 2 a client")
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()
    with ExitStack() as stack:
        if args.url:
            served = Served(args.url, find_model(args.url))
        else:
            most = max(int(c) for c in args.concurrency.split(","))
            options = ["--drafter", args.drafter, "--max-rows", str(most), "--threads", str(args.threads)]
            options += ["--no-prefix-cache"]  # or what one setting has read, the next would find
            options += ["--controller", args.controller] if args.controller else []
            served = stack.enter_context(serve(args.model, *options, log=Path("bench/out/serve_load.log")))
        settings = [
            Setting(PLAIN, served.url, served.model, {"speculative": {"drafter": "none"}}),
            Setting(SPECULATIVE, served.url, served.model, {}),
        ]
        for peer in args.peer:
            name, _, url = peer.partition("=")
            settings.append(Setting(name, url, find_model(url), {}))
        runs = measure(args, settings, served)
    levels = levels_of(runs)
    wrong = different(runs, SPECULATIVE, PLAIN)
    total = sum(len(r["texts"]) for r in runs if r["setting"] == PLAIN)
    lines = [f"{machine(args.threads)}; {versions()}", "", *table(levels), ""]
    lines += [*verdict(levels), f"{total - wrong} of {total} answers have the words of plain decoding"]
    print("\n".join(lines))
    write_atomic(args.json.with_suffix(".md"), "\n".join(lines) + "\n")
    args.json.with_suffix(".png").write_bytes(png(lambda: figure(levels)))
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
