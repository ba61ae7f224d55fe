"""Does the real vLLM load what we export, and accept of it what we accept?

    python bench/vllm_loads.py [--work DIR]

The targets are tiny models of random weights: one whose next token depends on the last alone, for
which heads that are always right can be written down, and an ordinary one. Slipstream decodes with every
drafter here, vLLM in the environment `vllm` of bench/environments.py (a minute each on two cores): greedy
tokens must be vLLM's own plain ones, and acceptance by position ours within 5 points. Heads that are always
right must be accepted always: tensors, tapped layers and vocabulary arrived where they belong.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import slipstream
from slipstream import SamplingParams
from slipstream.errors import SlipstreamError
from slipstream.export.vllm import export_vllm
from slipstream.heads.io import save_eagle, save_medusa
from slipstream.testing.heads import (
    memoryless_model,
    perfect_eagle,
    perfect_medusa,
    random_eagle,
    random_medusa,
)
from slipstream.testing.tiny import save_tiny, tiny_model
from vllm_cases import Case, answers_of, chain_of, compared, completed, theirs

TOKENS, LENGTH = 160, 3
SHAPE = {"hidden": 128, "layers": 4, "head_dim": 32}  # vLLM's CPU attention has no smaller heads


def prepare(root: Path) -> tuple[list[list[int]], list[Case]]:
    """Writes targets and drafters, exports these, and decodes with them."""
    simple = memoryless_model(vocab_size=100, **SHAPE)
    usual = tiny_model(vocab_size=300, **SHAPE)
    shape = {"head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    folders = {
        "simple": save_tiny(root / "simple", model=simple),
        "usual": save_tiny(root / "usual", model=usual),
    }
    draft = save_tiny(root / "draft", vocab_size=300, seed=0, **{**SHAPE, "layers": 4})
    made: dict[str, tuple[str, str, Path]] = {"draft-same": ("usual", "draft_model", draft)}

    def heads(name: str, base: str, method: str, save: Callable[[Path], object]) -> None:
        save(root / f"raw-{name}")
        made[name] = (base, method, root / f"raw-{name}")

    last = SHAPE["layers"]
    heads("one-right", "simple", "eagle", lambda f: save_eagle(perfect_eagle(simple, 1, **shape), f))
    heads("three-right", "simple", "eagle3", lambda f: save_eagle(perfect_eagle(simple, 3, **shape), f))
    heads("medusa-right", "simple", "medusa", lambda f: save_medusa(perfect_medusa(simple, LENGTH), f))
    heads("one-random", "usual", "eagle", lambda f: save_eagle(random_eagle(usual, 1, **shape), f))
    for flag in (False, True):
        taps = (1, 2, last - 1)
        head = random_eagle(
            usual, 3, aux_layers=taps, draft_vocab_size=200, norm_before_residual=flag, scale=0.1, **shape
        )
        heads(f"three-random-{flag}", "usual", "eagle3", lambda f, head=head: save_eagle(head, f))
    heads(
        "medusa-random",
        "usual",
        "medusa",
        lambda f: save_medusa(random_medusa(usual, LENGTH, output="target", draft_vocab_size=200), f),
    )

    prompts = [[(7 * i + 3 * j) % 90 for j in range(5 + i)] for i in range(8)]
    cases = []
    params = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
    for name, (base, method, folder) in made.items():
        for layout in ("published", "speculators") if method == "eagle3" else ("published",):
            out = root / f"head-{name.replace('-', '')}-{layout}"
            export_vllm(folder, out, folders[base], layout=layout, num_speculative_tokens=LENGTH)  # type: ignore[arg-type]
            spec = chain_of(method, folder, LENGTH)
            with slipstream.load(str(folders[base]), drafter=spec, dtype="float32") as session:
                done = session.generate(prompts, params)
            words = {"method": method, "model": str(out), "num_speculative_tokens": LENGTH}
            here = completed(done)
            cases.append(Case(f"{name}-{layout}", str(folders[base]), words, here, "right" in name))
            print(cases[-1].name, [round(p, 3) for p in here.rates(LENGTH)[0]], flush=True)
    return prompts, cases


def check(root: Path, prompts: list[list[int]], cases: list[Case], threads: int) -> int:
    """How many cases are otherwise in vLLM."""

    def run(name: str, target: str, words: dict[str, Any] | None) -> dict[str, Any] | str:
        asked = {
            "target": target,
            "speculative": words,
            "prompts": prompts,
            "max_tokens": TOKENS,
            "end_ids": [],
            "dtype": "float32",
            "context": 256,
            "rows": 8,
        }
        return theirs(name, asked, root, threads, 600.0)

    plain = {
        target: run(f"plain-{Path(target).name}", target, None)
        for target in dict.fromkeys(c.target for c in cases)
    }
    bad = 0
    for case in cases:
        found, base = run(case.name, case.target, case.speculative), plain[case.target]
        if isinstance(found, str) or isinstance(base, str):
            bad += 1
            print(f"{case.name}: DOES NOT RUN: {found if isinstance(found, str) else base}", flush=True)
            continue
        same = sum(a == b for a, b in zip(found["tokens"], base["tokens"], strict=True))
        mine = sum(a == b for a, b in zip(found["tokens"], case.ours.tokens, strict=True))
        words, fine = compared(case, answers_of(found))
        fine &= same == len(prompts)
        bad += not fine
        print(
            f"{case.name}: {'fine' if fine else 'OTHERWISE'}; {words}; tokens as vLLM's plain ones {same} of"
            f" {len(prompts)}, as ours {mine}",
            flush=True,
        )
    return bad


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--work", type=Path, help="a new folder to keep everything in")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", default="", metavar="PART", help="cases whose names have this in them")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        root = (args.work or Path(scratch)).absolute()
        try:
            prompts, cases = prepare(root)
            return 1 if check(root, prompts, [c for c in cases if args.only in c.name], args.threads) else 0
        except SlipstreamError as error:
            parser.exit(2, f"error: {error}\n")


if __name__ == "__main__":
    sys.exit(main())
