"""Trained drafters in the real vLLM: do they load, change no token, and get accepted as they are here?

    python bench/vllm_real.py --eagle1 bench/out/heads/qwen2.5-coder-1.5b/one
    python bench/vllm_real.py --target tiny --dtype float32

Exports a draft model, an EAGLE-1, an EAGLE-3 and a Medusa head of one target with `slipstream export vllm`,
lets Slipstream answer the same prompts greedily with each, as a chain, then vLLM without and with each, in
the environment `vllm` of bench/environments.py. Says for each: how many of vLLM's answers are its own plain
ones; of every other the first differing token, held against the target's logits as `slipstream verify` does
(a near-tie, or broken); acceptance by position in both engines, counted alike (bench/vllm_cases.py); the
speed. What was answered is kept in --work, so the script may be stopped and goes on. Ends with 1 if a drafter
does not load, a difference is no near-tie, or a position is off by more than 5 points.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch

import slipstream
from common import DRAFT, PROMPTS, TARGET, encode, machine, read_prompts, versions, write_json
from slipstream import SamplingParams
from slipstream.engine.session import Session
from slipstream.errors import DrafterError, SlipstreamError
from slipstream.export.vllm import export_vllm
from slipstream.model.house import house_drafter
from slipstream.model.load import resolve
from slipstream.model.parts import ModelParts
from slipstream.proof.reference import Reference
from tiny_models import difference
from vllm_cases import Answers, Case, answers_of, chain_of, compared, completed, digest, theirs

KINDS = ("draft_model", "eagle", "eagle3", "medusa")


def folders(args: argparse.Namespace, fingerprint: str) -> dict[str, Path]:
    """Where the drafters are, by kind: as named, else those that come with Slipstream."""
    found: dict[str, Path] = {}
    for kind, named, house in (
        ("draft_model", args.draft, "draft"),
        ("eagle", args.eagle1, ""),
        ("eagle3", args.eagle3, "eagle"),
        ("medusa", args.medusa, "medusa"),
    ):
        if kind not in args.only:
            continue
        if named:
            found[kind] = resolve(named) if kind == "draft_model" else Path(named)
            continue
        try:
            if house:
                found[kind] = house_drafter(house, fingerprint)
            else:
                print(f"{kind}: left out: none comes with Slipstream, name one with --eagle1", flush=True)
        except DrafterError as error:
            print(f"{kind}: left out: {error}", flush=True)
    return found


def here(session: Session, args: argparse.Namespace, prompts: list[list[int]]) -> tuple[list[Case], Answers]:
    """Exports every drafter, and decodes with it."""
    params = SamplingParams(max_tokens=args.max_tokens, temperature=0)
    target = resolve(args.target)
    plain = completed(session.generate(prompts, params))
    cases = []
    for kind, folder in folders(args, ModelParts.of(session.info.model).fingerprint).items():
        out = args.work / f"for-vllm-{kind.replace('_', '')}"
        shutil.rmtree(out, ignore_errors=True)
        length = args.tokens
        report = export_vllm(folder, out, target, num_speculative_tokens=length)
        session.use(chain_of(kind, folder, length))
        began = time.perf_counter()
        done = session.generate(prompts, params)
        seconds = time.perf_counter() - began
        words = {"method": report.kind, "model": str(out), "num_speculative_tokens": length}
        cases.append(Case(kind, str(target), words, completed(done)))
        rates, drafts = cases[-1].ours.rates(length)
        undrafted = sum(a.counts.passes - a.counts.drafts for a in done)
        print(
            f"{kind} here: {sum(len(a.tokens) for a in done) / seconds:.1f} tokens/s,"
            f" {drafts} drafts, {[round(r, 3) for r in rates]}, {undrafted} passes without a draft",
            flush=True,
        )
    session.use("none")
    return cases, plain


def audit(
    reference: Reference, prompts: list[list[int]], plain: Answers, other: Answers
) -> list[dict[str, Any]]:
    """Every answer that left the plain one, and how near the two tokens were."""
    found = []
    for number, (prompt, one, two) in enumerate(zip(prompts, plain.tokens, other.tokens, strict=True)):
        if one != two:
            found.append({"prompt": number, **difference(reference, prompt, one, two)})
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--target", default=TARGET)
    parser.add_argument("--draft", help=f"default: the house's, for {TARGET} {DRAFT}")
    parser.add_argument("--eagle1", metavar="FOLDER")
    parser.add_argument("--eagle3", metavar="FOLDER")
    parser.add_argument("--medusa", metavar="FOLDER")
    parser.add_argument("--only", default=",".join(KINDS))
    parser.add_argument("--prompts", type=Path, default=PROMPTS / "drafters.jsonl")
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=4, help="drafted a step")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rows", type=int, default=1, help="answers that grow at once in vLLM")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--work", type=Path, default=Path("bench/out/vllm-real"))
    parser.add_argument("--json", type=Path, default=Path("bench/out/vllm-real.json"))
    args = parser.parse_args()
    args.only = args.only.split(",")
    args.work = args.work.absolute()
    if args.draft is None and args.target == TARGET:
        args.draft = DRAFT
    try:
        return run(args)
    except SlipstreamError as error:
        parser.exit(2, f"error: {error}\n")


def run(args: argparse.Namespace) -> int:
    torch.set_num_threads(args.threads)
    asked = read_prompts(args.prompts)[: args.count]
    with slipstream.load(args.target, dtype=args.dtype, context=args.context) as session:
        prompts = encode(session.tokenizer, asked)
        room = args.context - args.max_tokens - args.tokens
        prompts = [p[-room:] for p in prompts]
        ends = sorted(session.engine.eos_ids)
        cases, mine = here(session, args, prompts)
    common = {
        "target": str(resolve(args.target)),
        "prompts": prompts,
        "max_tokens": args.max_tokens,
        "end_ids": ends,
        "dtype": args.dtype,
        "context": args.context,
        "rows": args.rows,
    }
    told: dict[str, Any] = {}
    for name, words in (("plain", None), *((c.name, c.speculative) for c in cases)):
        print(f"{name} in vLLM …", flush=True)
        made = words and digest(Path(words["model"]))
        asked = {**common, "speculative": words, "digest": made}
        told[name] = theirs(name, asked, args.work, args.threads)
    if isinstance(told["plain"], str):
        print(f"vLLM does not even decode plainly: {told['plain']}")
        return 1
    base = answers_of(told["plain"])
    rows = [{"name": "plain", "seconds": told["plain"]["seconds"], "tokens": sum(map(len, base.tokens))}]
    bad = 0
    with slipstream.load(args.target, dtype=args.dtype, context=args.context) as session:
        reference = Reference(session.engine)
        between = audit(reference, prompts, mine, base)
        print(
            f"plain, vLLM {told['plain']['version']}: {speed(told['plain']):.1f} tokens/s; as Slipstream's"
            f" {len(prompts) - len(between)} of {len(prompts)},"
            f" {sum(d['near_tie'] for d in between)} differ by a near-tie"
        )
        for case in cases:
            found = told[case.name]
            if isinstance(found, str):
                bad += 1
                print(f"{case.name}: DOES NOT RUN: {found}")
                rows.append({"name": case.name, "error": found})
                continue
            answers = answers_of(found)
            apart = audit(reference, prompts, base, answers)
            broken = [d for d in apart if not d["near_tie"]]
            words, fine = compared(case, answers)
            fine &= not broken
            bad += not fine
            print(
                f"{case.name}: {'fine' if fine else 'OTHERWISE'}; {speed(found):.1f} tokens/s; as vLLM's"
                f" plain ones {len(prompts) - len(apart)} of {len(prompts)}, near-ties"
                f" {len(apart) - len(broken)}, broken {len(broken)}; {words}",
                flush=True,
            )
            for d in broken:
                print(f"    BROKEN: {d}")
            rows.append(
                {
                    "name": case.name,
                    "seconds": found["seconds"],
                    "tokens": sum(map(len, answers.tokens)),
                    "differences": apart,
                    "theirs": answers.rates(case.length),
                    "ours": case.ours.rates(case.length),
                    "vllm's own": [a / found["drafts"] for a in found["accepted"]],
                    "fine": fine,
                }
            )
    record = {
        "vllm": told["plain"]["version"],
        "machine": machine(args.threads),
        "versions": versions(),
        "rows": rows,
        "between plain answers": between,
    }
    write_json(args.json, record, args)
    return 1 if bad else 0


def speed(told: dict[str, Any]) -> float:
    return float(sum(map(len, told["tokens"])) / told["seconds"])


if __name__ == "__main__":
    sys.exit(main())
