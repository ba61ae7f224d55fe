"""Does the real vLLM load what we export, and accept of it what we accept?

    python bench/vllm_loads.py prepare DIR          in Slipstream's environment: targets and drafters
    VLLM/bin/python bench/vllm_loads.py check DIR   in vLLM's: runs them (a minute each on two cores)

The targets are tiny models of random weights: one whose next token depends on the last alone, for
which heads that are always right can be written down, and an ordinary one. `prepare` also decodes with
Slipstream, `check` with vLLM: greedy tokens must be vLLM's own plain ones, and acceptance by position
ours within 5 points. Heads that are always right must be accepted always: tensors, tapped layers and
vocabulary arrived where they belong.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

TOKENS, LENGTH = 160, 3  # many tokens: the last draft of an answer is cut, here and there otherwise
SHAPE = {"hidden": 128, "layers": 4, "head_dim": 32}  # vLLM's CPU attention has no smaller heads


def prepare(root: Path) -> None:
    import slipstream
    from slipstream import SamplingParams
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

    simple = memoryless_model(vocab_size=100, **SHAPE)
    usual = tiny_model(vocab_size=300, **SHAPE)
    shape = {"head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    folders = {
        "simple": save_tiny(root / "simple", model=simple),
        "usual": save_tiny(root / "usual", model=usual),
    }
    draft = save_tiny(root / "draft", vocab_size=300, seed=0, **{**SHAPE, "layers": 4})
    made: dict[str, tuple[str, str, Path]] = {"draft-same": ("usual", "draft_model", draft)}

    def heads(name: str, base: str, method: str, save: Any) -> None:
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
    cases: list[dict[str, Any]] = []
    for name, (base, method, folder) in made.items():
        for layout in ("published", "speculators") if method == "eagle3" else ("published",):
            out = root / f"head-{name.replace('-', '')}-{layout}"
            export_vllm(folder, out, folders[base], layout=layout, num_speculative_tokens=LENGTH)  # type: ignore[arg-type]
            spec = {
                "draft_model": f"draft_model:model={folder},num_speculative_tokens={LENGTH}",
                "medusa": f"medusa:heads={folder},topk=1x1x1",
            }.get(method, f"eagle:heads={folder},top_k=1,num_speculative_tokens={LENGTH},nodes={LENGTH}")
            with slipstream.load(str(folders[base]), drafter=spec, dtype="float32") as session:
                params = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
                answers = session.generate(prompts, params)
                counts = session.engine.counts
            cases.append(
                {
                    "name": f"{name} ({layout})",
                    "target": str(folders[base]),
                    "speculative": {"method": method, "model": str(out), "num_speculative_tokens": LENGTH},
                    "right": "right" in name,
                    "ours": counts.acceptance_per_position[:LENGTH],
                    "tokens": [list(a.tokens) for a in answers],
                }
            )
            print(name, layout, [round(p, 3) for p in cases[-1]["ours"]])
    (root / "cases.json").write_text(json.dumps({"prompts": prompts, "cases": cases}))


def one(root: Path, index: int) -> None:
    """In a process of its own: one case, or -1 and -2 for the plain targets. Prints JSON on the last line."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", HF_HUB_OFFLINE="1")
    from vllm import LLM, SamplingParams

    data = json.loads((root / "cases.json").read_text())
    plain = {-1: str(root / "simple"), -2: str(root / "usual")}
    case = {"target": plain[index], "speculative": None} if index < 0 else data["cases"][index]
    llm = LLM(
        case["target"],
        speculative_config=case["speculative"],
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=256,
        max_num_seqs=8,
        enforce_eager=True,
        disable_log_stats=False,
        enable_prefix_caching=False,
    )
    params = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": p} for p in data["prompts"]], params)
    found: dict[str, Any] = {"tokens": [list(o.outputs[0].token_ids) for o in outputs]}
    for metric in llm.get_metrics():
        if metric.name == "vllm:spec_decode_num_drafts":
            found["drafts"] = metric.value
        elif metric.name == "vllm:spec_decode_num_accepted_tokens_per_pos":
            found["accepted"] = list(metric.values)
    print("\n" + json.dumps(found), flush=True)
    os._exit(0)


def check(root: Path) -> int:
    cases = json.loads((root / "cases.json").read_text())["cases"]

    def run(index: int) -> dict[str, Any] | str:
        command = [sys.executable, __file__, "one", str(root), str(index)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        last = done.stdout.strip().rsplit("\n", 1)[-1]
        if done.returncode or not last.startswith("{"):
            wrong = [line for line in done.stderr.splitlines() if "Error" in line]
            return (wrong or done.stderr.splitlines() or ["it said nothing"])[-1][-300:]
        return json.loads(last)

    plain = {str(root / "simple"): run(-1), str(root / "usual"): run(-2)}
    bad = 0
    for index, case in enumerate(cases):
        found, base = run(index), plain[case["target"]]
        if isinstance(found, str) or isinstance(base, str):
            bad += 1
            print(f"{case['name']}: DOES NOT RUN: {found if isinstance(found, str) else base}", flush=True)
            continue
        rates = [a / found["drafts"] for a in found["accepted"]]
        same = sum(a == b for a, b in zip(found["tokens"], base["tokens"], strict=True))
        ours = sum(a == b for a, b in zip(found["tokens"], case["tokens"], strict=True))
        if case["right"] and rates[0] < 0.999:
            rates[0] = 0.0  # a head that cannot be wrong was
        far = max(abs(a - b) for a, b in zip(rates, case["ours"], strict=True))
        fine = same == len(base["tokens"]) and far <= 0.05
        bad += not fine
        told = " ".join(f"{a:.3f}/{b:.3f}" for a, b in zip(rates, case["ours"], strict=True))
        print(
            f"{case['name']}: {'fine' if fine else 'OTHERWISE'}; accepted by position, vLLM/ours: {told};"
            f" tokens as vLLM's plain ones {same} of {len(base['tokens'])}, as ours {ours}",
            flush=True,
        )
    return 1 if bad else 0


if __name__ == "__main__":
    step, where = sys.argv[1], Path(sys.argv[2]).resolve()
    if step == "prepare":
        where.mkdir(parents=True)  # a new folder
        prepare(where)
    elif step == "one":
        one(where, int(sys.argv[3]))
    else:
        sys.exit(check(where))
