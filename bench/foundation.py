"""Slipstream against Hugging Face `generate`, everything in one process, on the real pair.

    python bench/foundation.py [--rounds 1] [--max-tokens 96] [--json FILE]

Twelve prompts (code, prose, edit), greedy, bf16. Every prompt is answered by every setting before
the next prompt starts, in an order that rotates, so a machine that drifts hurts all settings alike.
Tokens are counted the same way on both sides: ids generated after the prompt, the end token
included. A setting's rate is its total tokens over its total seconds, prompt reading included. Slipstream's
settings run first once alone, to take the peak memory before Hugging Face's copies are loaded.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from transformers import AutoModelForCausalLM

import slipstream
from common import (
    DRAFT,
    TARGET,
    Row,
    encode,
    machine,
    make_parser,
    rate,
    ratios,
    read_prompts,
    same_ids,
    spread,
    turns,
    versions,
    write_json,
)
from slipstream import SamplingParams
from slipstream.drafters import build_drafter
from slipstream.model.load import resolve
from slipstream.model.quiet import quiet

OURS = {
    "slipstream none": "none",
    "slipstream ngram": "ngram",
    "slipstream draft_model γ=3": f"draft_model:model={DRAFT},num_speculative_tokens=3",
    "slipstream draft_model γ=6": f"draft_model:model={DRAFT},num_speculative_tokens=6",
}
PLAIN, HF_PLAIN = "slipstream none", "hf generate"
HF_ASSISTED = ("hf assisted, 5 constant", "hf assisted, dynamic threshold", "hf prompt lookup")
Setting = Callable[[list[int], int], list[int]]


def our_settings(session: slipstream.Session) -> dict[str, Setting]:
    shared = build_drafter(OURS["slipstream draft_model γ=3"], session.info)

    def setting(spec: str) -> Setting:
        length = spec.rpartition("num_speculative_tokens=")[2] if "draft_model" in spec else None
        drafter = shared if length else build_drafter(spec, session.info)
        controller = f"fixed:num_speculative_tokens={length}" if length else None

        def answer(ids: list[int], max_tokens: int) -> list[int]:
            session.engine.set_drafter(drafter, controller)
            return list(session.generate(ids, SamplingParams(max_tokens=max_tokens)).tokens)

        return answer

    return {name: setting(spec) for name, spec in OURS.items()}


def hf_settings(target_name: str = TARGET, draft_name: str = DRAFT) -> dict[str, Setting]:
    with quiet():
        target = AutoModelForCausalLM.from_pretrained(resolve(target_name), dtype=torch.bfloat16).eval()
        draft = AutoModelForCausalLM.from_pretrained(resolve(draft_name), dtype=torch.bfloat16).eval()

    def setting(assistant: dict[str, Any] | None = None, **options: Any) -> Setting:
        def answer(ids: list[int], max_tokens: int) -> list[int]:
            if assistant is not None:
                for key, value in assistant.items():
                    setattr(draft.generation_config, key, value)
                options["assistant_model"] = draft
            line = torch.tensor([ids])
            with quiet():
                out = target.generate(
                    line,
                    attention_mask=torch.ones_like(line),
                    max_new_tokens=max_tokens,
                    do_sample=False,
                    **options,
                )
            return out[0, len(ids) :].tolist()  # type: ignore[no-any-return]

        return answer

    constant = {"num_assistant_tokens_schedule": "constant"}
    return {
        HF_PLAIN: setting(),
        HF_ASSISTED[0]: setting(
            {**constant, "num_assistant_tokens": 5, "assistant_confidence_threshold": 0.0}
        ),
        HF_ASSISTED[1]: setting(
            {**constant, "num_assistant_tokens": 20, "assistant_confidence_threshold": 0.4}
        ),
        HF_ASSISTED[2]: setting(prompt_lookup_num_tokens=10),
    }


def peak_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = make_parser(__doc__, "foundation", max_tokens=96)
    parser.add_argument("--no-hf", action="store_true", help="only Slipstream's own settings")
    parser.add_argument("--weights", default="plain", help="of Slipstream's target: plain or int8")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    console = Console(stderr=True)
    prompts = read_prompts(args.prompts)

    session = slipstream.load(TARGET, dtype="bfloat16", weights=args.weights)
    settings = our_settings(session)
    encoded = encode(session.tokenizer, prompts)
    longest = max(range(len(encoded)), key=lambda i: len(encoded[i]))
    for answer in settings.values():  # warm-up, with all the memory a setting will need
        answer(encoded[longest], 16)
    memory = {"peak_rss": peak_memory(), "weights": session.engine.memory_bytes}
    memory["kv"] = kv_bytes(session, len(encoded[longest]) + args.max_tokens)
    if not args.no_hf:
        hf = hf_settings()
        for answer in hf.values():
            answer(encoded[0], 8)
        settings |= hf

    rows: list[Row] = []
    names = list(settings)
    shares: dict[str, dict[str, float]] = {}
    with Progress(console=console) as progress:
        task = progress.add_task("measuring", total=args.rounds * len(prompts) * len(names))
        for round_, i, name in turns(names, len(prompts), args.rounds):
            before = session.engine.seconds.copy()
            clock = time.perf_counter()
            tokens = settings[name](encoded[i], args.max_tokens)
            seconds = time.perf_counter() - clock
            rows.append(
                {
                    "setting": name,
                    "task": prompts[i]["task"],
                    "prompt": prompts[i]["id"],
                    "round": round_,
                    "tokens": len(tokens),
                    "seconds": seconds,
                    "ids": tokens,
                }
            )
            if name in OURS:
                spent, sums = session.engine.seconds - before, shares.setdefault(name, {})
                for part in ("target", "prefill", "drafter", "other"):
                    sums[part] = sums.get(part, 0.0) + getattr(spent, part)
            progress.advance(task)
    report(rows, names, shares, memory, args)


def kv_bytes(session: slipstream.Session, tokens: int) -> int:
    """Bytes of keys and values of one row in target and draft, for that many tokens rounded up to 512."""
    total = 0
    for spec in (TARGET, DRAFT):
        config = json.loads((resolve(spec) / "config.json").read_text())
        heads, layers = config["num_key_value_heads"], config["num_hidden_layers"]
        size = config["hidden_size"] // config["num_attention_heads"]
        total += 2 * 2 * heads * size * layers * -(-tokens // 512) * 512
    return total


def report(
    rows: list[Row],
    names: list[str],
    shares: dict[str, dict[str, float]],
    memory: dict[str, int],
    args: argparse.Namespace,
) -> None:
    console = Console(width=118)
    tasks = list(dict.fromkeys(r["task"] for r in rows))
    of = {
        (n, t): [r for r in rows if r["setting"] == n and t in (None, r["task"])]
        for n in names
        for t in (*tasks, None)
    }
    console.print(f"{machine(args.threads)}; {versions()}")
    console.print(
        f"{TARGET} bf16, weights {args.weights}, greedy, {args.max_tokens} tokens, {args.rounds} round(s)\n"
    )
    table = Table(
        "setting", *tasks, "total", "vs hf", "per-prompt ratio to hf: median (min-max)", "same as plain"
    )
    base = of.get((HF_PLAIN, None), [])
    for name in names:
        mine = of[name, None]
        cells = [f"{rate(of[name, t]):.2f}" for t in tasks]
        total = rate(mine)
        against = f"{total / rate(base):.2f}x" if base else "-"
        same = f"{same_ids(mine, of[PLAIN, None])}/{len(mine)}"
        table.add_row(name, *cells, f"{total:.2f}", against, spread(ratios(mine, base)), same)
    console.print(table)

    best = {t: max((n for n in names if n in OURS), key=lambda n, t=t: rate(of[n, t])) for t in tasks}
    chosen = rate([r for t in tasks for r in of[best[t], t]])
    lines = [
        f"best drafter per task: {', '.join(f'{t}: {n}' for t, n in best.items())} -> {chosen:.2f} tok/s"
    ]
    if base:
        plain_hf = rate(of[HF_PLAIN, None])
        assisted = max(HF_ASSISTED, key=lambda n: rate(of[n, None]))
        lines += [
            f"plain / hf generate: {rate(of[PLAIN, None]) / plain_hf:.2f} (aim 1.25)",
            f"best per task / hf generate: {chosen / plain_hf:.2f} (aim 1.8)",
            f"best per task / best hf assisted ({assisted}):"
            f" {chosen / rate(of[assisted, None]):.2f} (aim 1.4)",
        ]
    for name, parts in shares.items():
        whole = sum(parts.values())
        lines.append(
            f"{name}: "
            + ", ".join(f"{part} {100 * s / whole:.1f} %" for part, s in parts.items())
            + " (other: aim at most 5 %)"
        )
    need = memory["weights"] + memory["kv"]
    lines.append(
        f"peak memory of the process {memory['peak_rss'] / 1e9:.2f} GB; weights {memory['weights'] / 1e9:.2f}"
        f" + keys and values {memory['kv'] / 1e9:.2f} GB; {100 * (memory['peak_rss'] / need - 1):.1f} % above"
        " them (aim at most 15 %)"
    )
    console.print("\n".join(lines))
    record = {
        "machine": machine(args.threads),
        "versions": versions(),
        "memory": memory,
        "shares": shares,
        "rows": rows,
    }
    write_json(args.json, record, args)


if __name__ == "__main__":
    main()
