"""What aligning a drafter with its target brings: vocabulary, temperature and context.

    make tiny-models && python bench/alignment.py [--steps 300] [--only vocab,context] [--seeds 3]

EAGLE-3 heads of the tiny house target, trained on the states that `make tiny-models` left in bench/out/tiny,
with the same number of steps; one option differs from the first line at a time. That one is trained with
several seeds: what lies within their spread says nothing. tau is what the
trainer measures on the held-out answers, walking them as the engine does (docs/train.md): that of one chain.
Every run resumes and is kept in bench/out/alignment; the table goes to bench/out/alignment.json, too.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from rich.console import Console
from rich.table import Table

from slipstream.model.store import write_atomic
from tiny_models import HOUSE, ROOT, slip
from tiny_models import WORK as TINY

OUT = Path("bench") / "out" / "alignment"
BASE = {"draft-vocab": 1024, "unroll": 4, "temperature": 1.0}
AXES: dict[str, tuple[str, tuple[float, ...]]] = {
    "vocab": ("draft-vocab", (128, 512, 2048)),
    "context": ("unroll", (1, 2)),
    "temperature": ("temperature", (0.25, 0.5, 2.0)),
}


def variants(only: list[str], seeds: int) -> list[dict[str, float]]:
    """The base with each seed, then what differs from the first by one option."""
    base = [BASE | {"seed": seed} for seed in range(seeds)]
    return base + [base[0] | {AXES[a][0]: value} for a in only for value in AXES[a][1]]


def train(variant: dict[str, float], states: Path, target: Path, steps: int) -> dict[str, object]:
    """One head, and what its trainer expects of it."""
    out = OUT / "-".join(f"{name}{value:g}" for name, value in variant.items()) / str(steps)
    if not (out / "slipstream.json").is_file():
        options = [x for name, value in variant.items() for x in (f"--{name}", f"{value:g}")]
        slip(
            "train", "eagle", target, "--data", states, "-o", out, "--mlp", 512, "--batch-size", 8,
            "--steps", steps, "--lr", 2e-3, "--measure-every", 0, *options,
        )  # fmt: skip
    expected = json.loads((out / "slipstream.json").read_text(encoding="utf-8"))["run"]["expected"]
    return {**variant, "steps": steps, "tau": expected["tau"], "conditional": expected["conditional"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--only", default=",".join(AXES), help="of " + ", ".join(AXES))
    parser.add_argument("--seeds", type=int, default=3, help="of the first line")
    parser.add_argument("--states", type=Path, default=TINY / "states")
    parser.add_argument("--target", type=Path, default=HOUSE / "target")
    args = parser.parse_args()
    os.chdir(ROOT)
    asked = args.only.split(",")
    if unknown := set(asked) - set(AXES):
        parser.error(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(AXES)}")
    if args.seeds < 1:
        parser.error("--seeds must be at least 1")
    if not args.states.is_dir():
        parser.error(f"{args.states} is not there: run make tiny-models first, or name states with --states")
    rows = [train(v, args.states, args.target, args.steps) for v in variants(asked, args.seeds)]
    table = Table(
        "draft vocabulary", "steps unrolled", "temperature", "seed", "tau", "accepted at depth 1, 2, …"
    )
    for row in rows:
        depths = " ".join(f"{x:.2f}" for x in row["conditional"])  # type: ignore[attr-defined]
        table.add_row(
            f"{row['draft-vocab']:g}",
            f"{row['unroll']:g}",
            f"{row['temperature']:g}",
            f"{row['seed']:g}",
            f"{row['tau']:.2f}",
            depths,
        )
    Console(width=100).print(table)
    write_atomic(OUT.with_suffix(".json"), json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
