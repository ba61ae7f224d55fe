"""Medusa and EAGLE-3 heads for a catalogue model, trained here on answers of its own.

    python bench/real_heads.py [--until data|states|medusa|eagle|ship]

Every stage is a command that a person could type, it is printed, and it resumes: what is there is not made
again, so the script may be stopped at any time. The prompts are those of `slipstream train prompts`, which
have no benchmark's text in them. The int8 model answers, for in batches it is about twice as fast here; the
states are those of the model in its own dtype. Answers and states lie in bench/out/heads (about 4 GB), the
heads are put into models/heads, where `--drafter medusa` and `eagle` find them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from common import TARGET
from tiny_models import folder_bytes, ship, slip

ROOT = Path(__file__).parents[1]
WORK = ROOT / "bench" / "out" / "heads"
HEADS = ROOT / "models" / "heads"
STAGES = ("data", "states", "medusa", "eagle", "ship")
# So that the heads together stay below 80 MB in bfloat16.
DRAFT_VOCAB, MLP = 4608, 1536


def answers(work: Path, model: str, prompts: int, tokens: int) -> None:
    asked = work / "prompts.jsonl"
    if not asked.exists():
        slip("train", "prompts", "-n", prompts, "-o", asked)
    slip(
        "train", "data", model, "--prompts", asked, "-o", work / "data", "--weights", "int8",
        "--temperature", 0, "--max-tokens", 192, "--batch", 16, "--held-out", 0.04, "--limit-tokens", tokens,
    )  # fmt: skip


def states(work: Path, model: str) -> None:
    slip(
        "train", "capture", model, "--data", work / "data", "-o", work / "states",
        "--for", "eagle3", "--last", "--top-k", 0,
    )  # fmt: skip


def train(work: Path, model: str, kind: str, epochs: float) -> None:
    common = ["--data", work / "states", "-o", work / kind, "--epochs", epochs, "--batch-size", 4]
    common += ["--checkpoint-every", 50, "--measure-every", 200, "--heldout-batches", 8]
    if kind == "medusa":
        slip("train", "medusa", model, *common, "--heads", 4, "--share-output", "--lr", 1e-3)
        return
    slip(
        "train", "eagle", model, *common, "--draft-vocab", DRAFT_VOCAB, "--mlp", MLP, "--unroll", 4,
        "--lr", 5e-4, "--precision", "bf16",
    )  # fmt: skip


def place(work: Path, model: str) -> None:
    for kind in ("medusa", "eagle"):
        ship(work / kind, HEADS / model / kind)
    print(f"{folder_bytes(HEADS / model) / 1e6:.1f} MB in {HEADS / model}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default=TARGET)
    parser.add_argument("--work", type=Path, default=WORK)
    parser.add_argument("--until", choices=STAGES, default=STAGES[-1], help="the last stage to do")
    parser.add_argument("--prompts", type=int, default=2400)
    parser.add_argument("--tokens", type=int, default=260_000, help="of answers")
    parser.add_argument("--epochs", type=float, default=2.0)
    args = parser.parse_args()
    work = args.work / args.model
    work.mkdir(parents=True, exist_ok=True)
    todo = {
        "data": lambda: answers(work, args.model, args.prompts, args.tokens),
        "states": lambda: states(work, args.model),
        "medusa": lambda: train(work, args.model, "medusa", args.epochs),
        "eagle": lambda: train(work, args.model, "eagle", args.epochs),
        "ship": lambda: place(work, args.model),
    }
    for stage in STAGES[: STAGES.index(args.until) + 1]:
        todo[stage]()


if __name__ == "__main__":
    main()
