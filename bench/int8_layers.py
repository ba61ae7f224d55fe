"""int8 linear layers against packed plain ones, by shape and rows: from which size on int8 gains.

    python bench/int8_layers.py [--model qwen2.5-coder-1.5b] [--shapes 896x896,256x1536] [--json FILE]

Shapes are out x in; without --shapes those of the models (nothing is downloaded: sizes will do) and some
between. Of every shape there are so many copies that no cache holds them, as in a model, and passes over all
copies alternate between the two formats. A step of up to 4 rows is run as one of 4
(`slipstream.model.pack.ROWS`), so 4, 8 and 16 rows count. The ratio is the int8 layer's time, quantising its
input included, over the packed plain layer's; below 1 int8 is faster. Plain is bfloat16, or float32 on a CPU
without fast products of it, as `--dtype auto` is.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import nn

from common import DRAFT, TARGET, machine, versions
from slipstream.errors import ParameterError, SlipstreamError
from slipstream.model.blueprint import Blueprint
from slipstream.model.int8 import SMALLEST, Int8Linear, quantise, require_int8
from slipstream.model.load import choose_dtype
from slipstream.model.pack import ROWS as LEAST
from slipstream.model.packed import PackedLinear
from slipstream.model.store import write_atomic

ROWS = (1, 2, 4, 8, 16)
BETWEEN = ((512, 512), (512, 1024), (1024, 1024), (1024, 2048), (2048, 2048), (4096, 4096))
Shape = tuple[int, int]


def shapes_of(model: str) -> list[Shape]:
    """[out, in] of a model's linear layers, each once."""
    found = Blueprint.of(model).model.modules()
    return sorted({(m.out_features, m.in_features) for m in found if isinstance(m, nn.Linear)})


def read_shapes(text: str) -> list[Shape]:
    try:
        found = [tuple(int(n) for n in part.split("x")) for part in text.split(",") if part.strip()]
        pairs = [(out, inner) for out, inner in found if out > 0 and inner > 0]
    except ValueError:
        raise ParameterError(f"--shapes must be like 896x896,256x1536, not {text!r}") from None
    if len(pairs) != len(found) or not pairs:
        raise ParameterError(f"--shapes must be like 896x896,256x1536, not {text!r}")
    return pairs


@torch.inference_mode()
def measure(shape: Shape, rows: Sequence[int], rounds: int, working_set: int) -> dict[int, dict[str, float]]:
    """Rows -> milliseconds of a layer in either format, medians. working_set: bytes of all plain copies."""
    out, inner = shape
    dtype = choose_dtype("auto", "bfloat16", "cpu")
    linear = nn.Linear(inner, out, bias=False, dtype=dtype)
    count = max(1, round(working_set / linear.weight.nbytes))
    quantised = quantise(linear.weight)
    formats: dict[str, list[nn.Module]] = {
        "plain": [PackedLinear.of(linear) for _ in range(count)],
        "int8": [Int8Linear.together([quantised], [None])[0] for _ in range(count)],
    }
    found = {}
    for n in rows:
        x = torch.randn(n, inner).to(dtype)
        seconds: dict[str, list[float]] = {name: [] for name in formats}
        for _ in range(rounds + 1):
            for name, layers in formats.items():
                seconds[name].append(timed(lambda layers=layers, x=x: [layer(x) for layer in layers]))
        found[n] = {name: 1e3 * statistics.median(s[1:]) / count for name, s in seconds.items()}
    return found


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def gains(found: dict[int, dict[str, float]], rows: int = LEAST) -> bool:
    """Whether int8 is the faster one in a step of so many rows."""
    return found[rows]["int8"] < found[rows]["plain"]


def smallest(results: dict[Shape, dict[int, dict[str, float]]]) -> int | None:
    """The least number of elements from which on every measured shape gains; None: not even the largest."""
    least = None
    for shape, found in sorted(results.items(), key=lambda item: item[0][0] * item[0][1], reverse=True):
        if not gains(found):
            break
        least = shape[0] * shape[1]
    return least


def report(results: dict[Shape, dict[int, dict[str, float]]], rows: Sequence[int]) -> Table:
    table = Table("out x in", "elements", *(f"{n} rows: plain ms, int8 ms, ratio" for n in rows))
    for (out, inner), found in sorted(results.items(), key=lambda item: item[0][0] * item[0][1]):
        cells = [
            f"{t['plain']:.3f} {t['int8']:.3f} {t['int8'] / t['plain']:.2f}" for t in (found[n] for n in rows)
        ]
        table.add_row(f"{out} x {inner}", f"{out * inner:,}", *cells)
    return table


def run(args: argparse.Namespace) -> None:
    require_int8()
    if LEAST not in args.rows:
        raise ParameterError(f"--rows must have {LEAST} among them: that is what a step takes at least")
    models = args.model or [TARGET, DRAFT]
    wanted = (
        read_shapes(args.shapes)
        if args.shapes
        else sorted({*BETWEEN, *(s for m in models for s in shapes_of(m))})
    )
    results: dict[Shape, dict[int, dict[str, float]]] = {}
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("measuring", total=len(wanted))
        for shape in wanted:
            results[shape] = measure(shape, args.rows, args.rounds, args.working_set << 20)
            progress.advance(task)
    console = Console(width=200, highlight=False)
    console.print(f"{machine(args.threads)}; {versions()}")
    console.print(report(results, args.rows))
    least = smallest(results)
    console.print(
        f"int8 gains at {LEAST} rows from",
        f"{least:,} elements on" if least else "no size on",
        f"(slipstream.model.int8.SMALLEST is {SMALLEST:,})",
    )
    if args.json is not None:
        told: dict[str, Any] = {"machine": machine(args.threads), "versions": versions()}
        rows = [{"out": o, "in": i, "rows": n, **t} for (o, i), f in results.items() for n, t in f.items()]
        args.json.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(args.json, json.dumps({**told, "rows": rows}))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", action="append", help="whose shapes; may be repeated")
    parser.add_argument("--shapes", default="", metavar="OUTxIN,…")
    parser.add_argument("--rows", type=lambda t: tuple(map(int, t.split(","))), default=ROWS, metavar="N,…")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--working-set", type=int, default=256, metavar="MIB", help="of the plain copies")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    try:
        run(args)
    except SlipstreamError as error:
        parser.exit(2, f"error: {error}\n")


if __name__ == "__main__":
    main()
