"""The planner and the goodput controller against a full sweep on the real pair.

    python bench/sweep.py [--minutes 90] [--html bench/out/sweep.html]

Three drafters at five lengths and with `goodput`, on three tasks, at batch 1, 4 and 8, plain decoding beside
them in every round; and a drafter that is always wrong. From the bundle follow the figures, each with its
target and whether it is met: how many predictions are within 10 % of what was measured, what the planned
setting reaches of the sweep's best, whether what was predicted to be slower is, what goodput reaches of the
best fixed lengths, and what a useless drafter costs.

The curves come from --measurement; where that file does not exist, they are measured into it first, which is
not within --minutes. A sweep that was killed or ran out of time goes on with the same command; --report only
tells what there is. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import slipstream
from common import DRAFT, TARGET
from slipstream.bench.bundle import Plan, read_bench
from slipstream.bench.figures import USELESS
from slipstream.bench.journal import journal_of, keep_bundle
from slipstream.bench.report import Report, make_report, to_html, to_json
from slipstream.bench.run import bench
from slipstream.cli.bench import choose
from slipstream.cli.bench_show import show, show_figures
from slipstream.cli.measure import numbers
from slipstream.cli.output import print_json, progress
from slipstream.cost.bundle import Bundle, read_bundle
from slipstream.errors import SlipstreamError
from slipstream.model.store import write_atomic
from slipstream.plan.measure import Plan as Curves
from slipstream.plan.measure import measure
from slipstream.prompts.rows import Row

USELESS_LENGTH = 4


def drafters(args: argparse.Namespace) -> list[str]:
    """As --drafter takes them; the useless one last."""
    own = args.drafter or [f"draft_model:model={args.draft}", "ngram", "suffix"]
    return [*own, f"{USELESS}:num_speculative_tokens={USELESS_LENGTH}"]


def curves(session: slipstream.Session, args: argparse.Namespace, asked: Sequence[Row], shown: Any) -> Bundle:
    """Measured now, or read from the file if it is there."""
    if args.measurement.exists():
        return read_bundle(args.measurement)
    batches, lengths = numbers("batches", args.batches), numbers("lengths", args.lengths)
    depths = tuple(sorted({1, *lengths, USELESS_LENGTH}))
    plan = Curves(
        rows=tuple(sorted({1, *batches})), depths=depths, tokens=max(args.max_tokens, max(depths) + 3)
    )
    found = measure(session, args.target, drafters(args), asked, plan, shown)
    write_atomic(args.measurement, found.model_dump_json(indent=1) + "\n")
    return found


def run(args: argparse.Namespace) -> Report:
    if args.report:
        measured = read_bundle(args.measurement) if args.measurement.exists() else None
        return make_report(read_bench(args.out), measured, claims=True)
    torch.set_num_threads(args.threads)
    asked = choose(args.prompts, [], args.limit)
    plan = Plan(
        drafters=drafters(args),
        lengths=list(numbers("lengths", args.lengths)),
        controllers=[f"goodput:curve={args.measurement}"],
        batches=list(numbers("batches", args.batches)),
        rounds=args.rounds,
        tokens=args.max_tokens,
    )
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with progress(calm=True) as shown:
        shown.stage(f"loading {args.target}", 0)
        with slipstream.load(args.target, dtype=args.dtype, max_rows=max(plan.batches)) as session:
            measured = curves(session, args, asked, shown)
            found = bench(
                session,
                args.target,
                plan,
                asked,
                keep=journal_of(args.out),
                minutes=args.minutes,
                command=["python", *sys.argv],
                progress=shown,
            )
    keep_bundle(args.out, found)
    return make_report(found, measured, claims=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    folder = Path("bench/out")
    parser.add_argument("--target", default=TARGET)
    parser.add_argument("--draft", default=DRAFT)
    parser.add_argument("--drafter", action="append", metavar="SPEC", help="instead of the three; repeatable")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--lengths", default="1,2,3,5,7")
    parser.add_argument("--batches", default="1,4,8")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="default: the small set of our own")
    parser.add_argument("--limit", type=int, default=4, help="prompts of each task")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--minutes", type=float, help="begin nothing that would end later")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--measurement", type=Path, default=folder / "sweep-measure.json", metavar="FILE")
    parser.add_argument("--out", type=Path, default=folder / "sweep.json", metavar="FILE")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write a report with charts")
    parser.add_argument("--report", action="store_true", help="measure nothing, tell what is in --out")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    args = parser.parse_args(argv)
    try:
        report = run(args)
        if args.html is not None:
            write_atomic(args.html, to_html(report))
    except SlipstreamError as error:
        parser.exit(2, f"error: {error}\n")
    if args.json:
        print_json(to_json(report))
    else:
        show(report)
        show_figures(report)
    if not report.exact:
        parser.exit(1)


if __name__ == "__main__":
    main()
