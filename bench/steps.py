"""How long a step takes, against the time that reading its weights takes, and where the rest goes.

    python bench/steps.py [--models qwen2.5-coder-1.5b,qwen2.5-coder-0.5b] [--weights plain,int8]

The limit is the bytes of all weights that a step multiplies by (the head included, a table of embeddings
not: of it only rows are looked up) over the read bandwidth of this machine, which is measured before and
after every setting; the best counts. Rows are tokens computed at once: of one sequence, as when a draft is
verified, or of so many sequences, a token each. Where a step's time goes is told by PyTorch's profiler, in
further steps: what is not inside an operator is Python.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch.profiler import ProfilerActivity, profile

from common import DRAFT, TARGET, machine, versions, write_json
from slipstream.model.load import load
from slipstream.model.pack import PackRow
from slipstream.model.runner import Runner
from slipstream.model.store import write_atomic
from slipstream.plan.rates import bandwidth

AIMS = {"plain": 1.25, "int8": 1.5}  # of the limit, at 8 rows
WARM, STEPS, PROFILED = 3, 15, 5
PARTS = {
    "linear layers": ("linear", "addmm", "aten::mm", "int8pack_mm"),
    "attention": ("scaled_dot_product", "attention"),
    "copies": ("copy", "cat", "pad", "fill"),
}


def read_bytes(runner: Runner) -> int:
    """Of the weights that every step reads whole."""
    table: Any = runner.model.get_input_embeddings()
    head: Any = runner.model.get_output_embeddings()
    shared = getattr(head, "weight", None) is table.weight
    return runner.weight_bytes - (0 if shared else table.weight.nbytes)


def shapes(rows: Sequence[int]) -> list[tuple[str, int, int]]:
    """(name, sequences, tokens of each)."""
    found = [(f"{n} of one", 1, n) for n in rows]
    return found + [(f"{n} sequences", n, 1) for n in rows if n > 1]


def measure(runner: Runner, sequences: int, tokens: int, context: int) -> dict[str, Any]:
    """Seconds of steps, and by the profiler of their parts."""
    slots = range(sequences)
    vocab = min(runner.vocab_size, 1000)
    for slot in slots:
        runner.cache.open(slot)
        runner.extend(slot, [(7 * i + slot) % vocab for i in range(context)])
    rows = [PackRow(slot, [(slot + 3 * i) % vocab for i in range(tokens)]) for slot in slots]

    def step() -> float:
        began = time.perf_counter()
        runner.forward(rows)
        return time.perf_counter() - began

    try:
        for _ in range(WARM):
            step()
        seconds = [step() for _ in range(STEPS)]
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            profiled = sum(step() for _ in range(PROFILED))
    finally:
        for slot in slots:
            runner.cache.close(slot)
    parts = dict.fromkeys((*PARTS, "other operators"), 0.0)
    for event in seen.key_averages():
        name = next(
            (p for p, words in PARTS.items() if any(w in event.key for w in words)), "other operators"
        )
        parts[name] += event.self_cpu_time_total / 1e6
    middle = statistics.median(seconds)
    # The profiler slows Python and small operators; the shares are what is told.
    shares = {name: value / profiled for name, value in parts.items()}
    shares["Python"] = max(0.0, 1 - sum(shares.values()))
    return {"seconds": seconds, "median": middle, "shares": shares}


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    settings = [(m, w) for m in args.models.split(",") for w in args.weights.split(",")]
    cpu = torch.device("cpu")
    rows = [int(n) for n in args.rows.split(",")]
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("steps", total=len(settings) * len(shapes(rows)))
        for model, weights in settings:
            runner = Runner(load(model, weights=weights).model, pack=True)
            rates = [bandwidth(cpu)]
            here = []
            for name, sequences, tokens in shapes(rows):
                one = measure(runner, sequences, tokens, args.context)
                here.append(
                    {"model": model, "weights": weights, "shape": name, "rows": sequences * tokens, **one}
                )
                progress.advance(task)
            rates.append(bandwidth(cpu))
            for one in here:
                one |= {"read_bytes": read_bytes(runner), "bandwidth": max(rates)}
                one["limit"] = one["read_bytes"] / one["bandwidth"]
                one["ratio"] = one["median"] / one["limit"]
            found += here
            write_json(args.json, {"steps": found}, args)
            runner.close()
            del runner
    return found


def table(found: Sequence[dict[str, Any]]) -> list[str]:
    parts = list(found[0]["shares"])
    shares = " | ".join(f"{part}, %" for part in parts)
    lines = [
        f"| model | weights | rows | step, ms | min-max | limit, ms | ratio | {shares} |",
        "|---|---|---|" + "---:|" * (4 + len(parts)),
    ]
    for one in found:
        low, high = min(one["seconds"]), max(one["seconds"])
        shares = " | ".join(f"{100 * one['shares'][p]:.0f}" for p in parts)
        lines.append(
            f"| {one['model']} | {one['weights']} | {one['shape']} | {1e3 * one['median']:.1f} |"
            f" {1e3 * low:.1f}-{1e3 * high:.1f} | {1e3 * one['limit']:.1f} | {one['ratio']:.2f} | {shares} |"
        )
    return lines


def verdict(found: Sequence[dict[str, Any]]) -> list[str]:
    lines = []
    for one in found:
        if one["shape"] == "8 of one":
            aim = AIMS[one["weights"]]
            met = "met" if one["ratio"] <= aim else "NOT MET"
            lines.append(
                f"{one['model']} {one['weights']}: {one['ratio']:.2f} of the limit, aim {aim}: {met}"
            )
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", default=f"{TARGET},{DRAFT}")
    parser.add_argument("--weights", default="plain,int8")
    parser.add_argument("--rows", default="1,4,8,16")
    parser.add_argument("--context", type=int, default=256, help="tokens before the step")
    parser.add_argument("--json", type=Path, default=Path("bench/out/steps.json"), metavar="FILE")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    found = run(args)
    rate = statistics.median(one["bandwidth"] for one in found) / 1e9
    lines = [
        f"{machine(args.threads)}; {versions()}; reads {rate:.1f} GB/s",
        "",
        *table(found),
        "",
        *verdict(found),
    ]
    print("\n".join(lines))
    write_atomic(args.json.with_suffix(".md"), "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
