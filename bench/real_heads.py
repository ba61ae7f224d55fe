"""Medusa and EAGLE-3 heads for a catalogue model, trained here on answers of its own.

    python bench/real_heads.py [--until data|states|medusa|eagle|ship]

Every stage is a command that a person could type, it is printed, and it resumes: what is there is not made
again, so the script may be stopped at any time. The prompts are those of `slipstream train prompts`, which
have no benchmark's text in them. The int8 model answers, for in batches it is about twice as fast here; the
states are those of the model in its own dtype. Answers and states lie in bench/out/heads (about 2 GB), the
heads are put into models/heads, where `--drafter medusa` and `eagle` find them.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from common import TARGET
from tiny_models import ROOT, folder_bytes, ship, slip

WORK = Path("bench") / "out" / "heads"  # below ROOT: what ships must not name folders of this machine
HEADS = Path("models") / "heads"
STAGES = ("data", "states", "medusa", "eagle", "ship")
# So that the heads together stay below 80 MB in bfloat16. Medusa's heads speak through the target's own LM
# head: their vocabulary costs time in training, and nothing on disk.
DRAFT_VOCAB, MLP, MEDUSA_VOCAB = 6000, 1152, 8192
EPOCHS = {"medusa": 3, "eagle": 4}


def answers(work: Path, model: str, prompts: int, tokens: int) -> None:
    asked = work / "prompts.jsonl"
    if not asked.exists():
        slip("train", "prompts", "-n", prompts, "-o", asked)
    slip(
        "train", "data", model, "--prompts", asked, "-o", work / "data", "--weights", "int8",
        "--temperature", 0, "--max-tokens", 192, "--batch", 32, "--held-out", 0.04, "--limit-tokens", tokens,
    )  # fmt: skip


def states(work: Path, model: str, tokens: int) -> None:
    slip(
        "train", "capture", model, "--data", work / "data", "-o", work / "states",
        "--for", "eagle3", "--last", "--top-k", 1, "--limit-tokens", tokens,
    )  # fmt: skip


def train(work: Path, model: str, kind: str) -> None:
    common = [model, "--data", work / "states", "-o", work / kind, "--epochs", EPOCHS[kind]]
    common += ["--batch-size", 2, "--precision", "bf16", "--checkpoint-every", 150, "--measure-every", 150]
    if kind == "medusa":
        shape = ["--heads", 4, "--share-output", "--draft-vocab", MEDUSA_VOCAB, "--lr", 1e-3]
    else:
        shape = ["--draft-vocab", DRAFT_VOCAB, "--mlp", MLP, "--unroll", 4, "--lr", 4e-4]
    slip("train", kind, *common, *shape)


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
    parser.add_argument("--tokens", type=int, default=130_000, help="of answers")
    parser.add_argument("--states", type=int, default=155_000, help="tokens of text to learn from")
    args = parser.parse_args()
    os.chdir(ROOT)
    work = args.work / args.model
    work.mkdir(parents=True, exist_ok=True)
    todo = {
        "data": lambda: answers(work, args.model, args.prompts, args.tokens),
        "states": lambda: states(work, args.model, args.states),
        "medusa": lambda: train(work, args.model, "medusa"),
        "eagle": lambda: train(work, args.model, "eagle"),
        "ship": lambda: place(work, args.model),
    }
    for stage in STAGES[: STAGES.index(args.until) + 1]:
        todo[stage]()


if __name__ == "__main__":
    main()
