"""A long day of a server: random requests, clients that leave, broken and oversized ones.

Checks, and exits with 1 where one does not hold: every good answer equals the offline answer of the same
model; nothing waits, runs or is cached at the end; no answer is a server error; memory is flat (the mean of
the last third within 2 % of that of the second).

    python bench/serve_soak.py --model qwen2.5-coder-0.5b --requests 2000
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import torch

import slipstream
from common import PROMPTS, machine, make_parser, read_prompts, versions, write_json
from serve_common import Served, ask, serve
from slipstream.core.params import GrammarSpec, SamplingParams

LEAVING, MALFORMED, OVERSIZE = 0.20, 0.10, 0.05
BROKEN: list[dict[str, Any]] = [
    {"prompt": 7},
    {"prompt": "x", "temperature": -1},
    {"prompt": "x", "n": 1000},
    {"prompt": "x", "nonsense": True},
    {"messages": "x"},
    {"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "regex", "regex": "("}},
    {"messages": [{"role": "nobody", "content": "x"}]},
    {"prompt": "x", "model": "another"},
    {"prompt": [99999999]},
    {"prompt": "x", "speculative": {"drafter": "nobody"}},
]
SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}


def good_bodies(count: int, prompts: list[str], most: int, seed: int) -> list[dict[str, Any]]:
    """Requests with random parameters; a pool that is asked again and again in other company."""
    chance = random.Random(seed)
    made = []
    for i in range(count):
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": chance.choice(prompts)[: chance.randint(20, 1500)]}],
            "max_tokens": chance.randint(1, most),
            "temperature": chance.choice([0.0, 0.0, 0.3, 0.8, 1.2]),
            "seed": i,
        }
        for name, value in (
            ("top_p", 0.9),
            ("top_k", 20),
            ("min_p", 0.05),
            ("repetition_penalty", 1.1),
            ("presence_penalty", 0.5),
            ("frequency_penalty", 0.2),
            ("stop", ["\n\n"]),
            ("min_tokens", 1),
        ):
            if chance.random() < 0.2:
                body[name] = value
        if chance.random() < 0.1:
            body.pop("min_tokens", None)
            body["response_format"] = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
        made.append(body)
    return made


def offline(model: str, bodies: list[dict[str, Any]], threads: int) -> list[str]:
    """What the library says to the same requests, one by one, without drafting."""
    torch.set_num_threads(threads)
    texts = []
    with slipstream.load(model, "none") as session:
        for body in bodies:
            values = {k: v for k, v in body.items() if k not in ("messages", "stop", "response_format")}
            values["stop"] = tuple(body.get("stop", ()))
            if "response_format" in body:
                schema = body["response_format"]["json_schema"]["schema"]
                values["grammar"] = GrammarSpec("json_schema", json.dumps(schema))
            params: SamplingParams = session.defaults.with_(**values)
            texts.append(session.generate(body["messages"], params).text)
    return texts


async def soak(
    served: Served, bodies: list[dict[str, Any]], args: argparse.Namespace
) -> tuple[list[tuple[int, str]], Counter[str], list[float]]:
    """(number of the body, text) of every good answer; how requests ended; memory over time."""
    chance = random.Random(args.seed)
    answers: list[tuple[int, str]] = []
    ends: Counter[str] = Counter()
    memory: list[float] = []
    todo = iter(range(args.requests))
    drafters = ["ngram", "none", None]

    async def client_of(number: int) -> None:
        async with httpx.AsyncClient(timeout=None) as client:
            for _ in todo:
                kind = chance.random()
                index = chance.randrange(len(bodies))
                body = {**bodies[index], "speculative": {"drafter": chance.choice(drafters)}}
                if kind < MALFORMED:
                    await refused(client, chance.choice(BROKEN))
                elif kind < MALFORMED + OVERSIZE:
                    await refused(client, {"prompt": "x" * (5 << 20)})
                elif kind < MALFORMED + OVERSIZE + LEAVING:
                    await leaving(client, {**body, "max_tokens": args.max_tokens * 4})
                else:
                    answers.append((index, (await patient(client, body)).text))
                    ends["answered"] += 1

    async def refused(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        try:
            response = await client.post(served.url + path, json=body)
            ends[f"refused {response.status_code}"] += 1
        except httpx.TransportError:  # refused while it was still being sent
            ends["refused, connection closed"] += 1

    async def leaving(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
        try:
            await asyncio.wait_for(ask(client, served.url, body), chance.uniform(0.0, args.patience))
            ends["answered before it would have left"] += 1
        except asyncio.TimeoutError:
            ends["left"] += 1
        except httpx.HTTPStatusError as error:
            ends[f"left, {error.response.status_code}"] += 1

    async def patient(client: httpx.AsyncClient, body: dict[str, Any]) -> Any:
        """Comes back as often as the server asks for it."""
        while True:
            try:
                return await ask(client, served.url, body)
            except httpx.HTTPStatusError as error:
                if error.response.status_code != 429:
                    raise
                ends["429"] += 1
                await asyncio.sleep(min(float(error.response.headers["Retry-After"]), 2.0))

    async def watch() -> None:
        while True:
            memory.append(served.resident_bytes / (1 << 20))
            await asyncio.sleep(args.sample)

    watching = asyncio.ensure_future(watch())
    try:
        await asyncio.gather(*(client_of(i) for i in range(args.clients)))
    finally:
        watching.cancel()
    return answers, ends, memory


def main() -> int:
    parser = make_parser(__doc__, "serve_soak", 48)
    parser.set_defaults(prompts=PROMPTS / "drafters.jsonl")
    parser.add_argument("--model", default="qwen2.5-coder-0.5b")
    parser.add_argument("--drafter", default="ngram")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--distinct", type=int, default=60, help="different good requests")
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--patience", type=float, default=4.0, help="most seconds of a client that leaves")
    parser.add_argument("--sample", type=float, default=1.0, help="seconds between two looks at the memory")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    prompts = [p["prompt"] for p in read_prompts(args.prompts)]
    bodies = good_bodies(args.distinct, prompts, args.max_tokens, args.seed)
    expected = offline(args.model, bodies, args.threads)
    options = ["--drafter", args.drafter, "--threads", str(args.threads), "--max-waiting", "12"]
    with serve(args.model, *options, log=Path("bench/out/serve_soak.log")) as served:
        began = time.monotonic()
        answers, ends, memory = asyncio.run(soak(served, bodies, args))
        seconds = time.monotonic() - began
        deadline = time.monotonic() + 60
        while (told := served.metrics())["num_requests_running"] and time.monotonic() < deadline:
            time.sleep(0.2)
    wrong = [index for index, text in answers if text != expected[index]]
    third = len(memory) // 3
    second, last = statistics.mean(memory[third : 2 * third]), statistics.mean(memory[2 * third :])
    errors = sum(count for end, count in ends.items() if " 5" in end)
    claims = {
        f"{len(answers) - len(wrong)} of {len(answers)} answers equal the offline ones": not wrong,
        f"memory: second third {second:.0f} MiB, last {last:.0f} MiB": abs(last / second - 1) <= 0.02,
        f"{errors} server errors": errors == 0,
        f"at the end {told['num_requests_running']:.0f} run, {told['num_requests_waiting']:.0f} wait,"
        f" {told['kv_cache_usage_perc']:.0%} of the cache is promised": not (
            told["num_requests_running"] or told["num_requests_waiting"] or told["kv_cache_usage_perc"]
        ),
    }
    print(f"{machine(args.threads)}; {versions()}\n{args.requests} requests in {seconds:.0f} s")
    for end, count in sorted(ends.items()):
        print(f"  {count:5} {end}")
    for claim, holds in claims.items():
        print(f"{'holds ' if holds else 'BROKEN'} {claim}")
    record = {"ends": ends, "memory": memory, "seconds": seconds, "claims": claims, "wrong": wrong}
    write_json(args.json, record, args)
    return int(not all(claims.values()))


if __name__ == "__main__":
    raise SystemExit(main())
