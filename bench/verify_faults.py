"""Does `slipstream verify` find every planted fault, and nothing where there is none?

Runs it with its defaults, as a process of its own, once with each fault and some times without one, each time
with another seed; prints the figure of docs/lossless.md. Some minutes with the tiny model.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from slipstream.core.fault import ENVIRONMENT, FAULTS
from slipstream.model.store import write_atomic

OUT = Path("bench/out/verify_faults.json")


def verify(options: list[str], fault: str | None) -> dict[str, Any]:
    """One run: its exit status and what it found."""
    env = {key: value for key, value in os.environ.items() if key != ENVIRONMENT}
    if fault is not None:
        env[ENVIRONMENT] = fault
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "slipstream.cli.main", "verify", "--json", *options],
        env=env,
        capture_output=True,
        text=True,
    )
    if done.returncode not in (0, 1):
        sys.exit(f"verify ended with {done.returncode}: {done.stderr[-2000:]}")
    told = json.loads(done.stdout)
    return {
        "fault": fault,
        "exit": done.returncode,
        "verdict": told["verdict"],
        "reasons": told["reasons"],
        "smallest_p": min(law["p_value"] for law in told["laws"]),
        "samples": sum(law["samples"] for law in told["laws"]),
        "answers": sum(check["answers"] for check in told["identity"]),
        "seconds": time.perf_counter() - began,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--drafter", default="ngram")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--correct", type=int, default=20, help="runs without a fault")
    parser.add_argument("--minutes", type=float, default=30.0, help="limit of each run")
    parser.add_argument("--json", type=Path, default=OUT, metavar="FILE")
    asked = parser.parse_args()
    options = ["--model", asked.model, "--drafter", asked.drafter, "--minutes", str(asked.minutes)]
    options += ["--dtype", asked.dtype]
    runs = []
    for seed, fault in enumerate([*FAULTS, *[None] * asked.correct]):
        run = verify([*options, "--seed", str(seed)], fault)
        runs.append(run)
        print(
            f"{fault or 'no fault':18} {run['verdict']:14} smallest p {run['smallest_p']:.1e}"
            f"  {len(run['reasons'])} reasons  {run['seconds']:.0f} s",
            flush=True,
        )
    found = sum(run["exit"] == 1 for run in runs if run["fault"])
    passed = sum(run["exit"] == 0 for run in runs if not run["fault"])
    print(f"{found} of {len(FAULTS)} faults found, {passed} of {asked.correct} correct runs pass")
    write_atomic(asked.json, json.dumps(runs, indent=1) + "\n")
    sys.exit(int(found < len(FAULTS) or passed < asked.correct))


if __name__ == "__main__":
    main()
