"""How long a step takes on a GPU, against the time that its memory takes, with and without CUDA graphs.

    python bench/gpu.py [--batches 1,4,16,64] [--widths 1,4,8,16,64] [--json FILE]

Nothing is downloaded: weights are random, in the shape of an 8B model (Llama 3.1's), and the drafter is one
that is right as often as it is told to be. First, in float32 and with a smaller model, the tokens of
the GPU are compared with those of the CPU: plain, drafted, graphed and not. Then every batch (sequences) and
width (tokens of each, as when a draft is verified) is measured: the limit is the bytes of all weights that
a step multiplies by, and of the keys and values it looks at, over the read bandwidth, which is measured
as well; beside it stands what the arithmetic alone would take. Then whole answers, plain and drafted.
"""

from __future__ import annotations

import argparse
import copy
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from common import versions, write_json
from slipstream.core.draft import Draft, Drafter, DraftRequest
from slipstream.core.params import SamplingParams
from slipstream.core.tree import TokenTree
from slipstream.drafters.none import NoConfig, NoDrafter
from slipstream.engine.engine import Engine
from slipstream.model.graphs import CudaGraphs, Recorder
from slipstream.model.pack import PackRow
from slipstream.model.runner import Runner
from slipstream.model.static_runner import StaticRunner
from slipstream.model.store import write_atomic
from slipstream.plan.here import cpu_name
from slipstream.plan.rates import bandwidth, matrix_rate
from slipstream.plan.timing import timed
from slipstream.testing.adversaries import DraftFor, FunctionDrafter, Known, random_tree, upcoming
from slipstream.testing.oracle import Request, run_all
from steps import read_bytes

NO_GPU = "There is no CUDA GPU here that torch can use: nothing was measured (--device cpu tries the script)."
SHAPES: dict[str, dict[str, int]] = {
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
    },
    "check": {
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "vocab_size": 32000,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 300,
    },
}
WARM, STEPS = 3, 15
TREE = (-1, 0, 0, 1, 1, 2, 3, 3)


def random_model(shape: str, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Of weights that depend on the shape and the device alone."""
    config = LlamaConfig(**SHAPES[shape], max_position_embeddings=8192, tie_word_embeddings=False)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.eval()
    model.requires_grad_(False)
    return model  # type: ignore[no-any-return]


def right_at(rate: float, known: Known, vocab: int) -> DraftFor:
    """Chains of which every token is right with that probability, whatever stands before it."""

    def draft(request: DraftRequest) -> Draft:
        chance = random.Random(f"{request.seed} {len(request.tokens)}")
        right = upcoming(known, request)[: request.budget.depth]
        tokens = [t if chance.random() < rate else (t + 1) % vocab for t in right]
        return Draft(TokenTree.chain(request.root, tokens))

    return draft


def recorders(device: torch.device) -> dict[str, Callable[[], Recorder | None]]:
    """The ways to run a step: on a CPU there are no graphs."""
    plain: dict[str, Callable[[], Recorder | None]] = {"plain": lambda: None}
    return plain | ({"graphed": lambda: CudaGraphs(device)} if device.type == "cuda" else {})


def requests(vocab: int, count: int, tokens: int) -> list[Request]:
    chance = random.Random(0)
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    return [Request(tuple(chance.randrange(vocab) for _ in range(32)), params, i) for i in range(count)]


def answers(runner: Runner, draft: DraftFor | None, length: int, asked: Sequence[Request]) -> dict[str, Any]:
    """Tokens of all requests, decoded together, with seconds and tokens a target pass."""
    drafter: Drafter = (
        NoDrafter(NoConfig(), None)  # type: ignore[arg-type]
        if draft is None
        else FunctionDrafter(draft, length)
    )
    engine = Engine(runner, drafter, max_rows=len(asked))
    told: list[list[int]] = []
    seconds = timed(runner.device, lambda: told.extend(run_all(engine, asked)))
    return {"told": told, "seconds": seconds, "tau": engine.counts.emitted / engine.counts.passes}


# -- exactness ------------------------------------------------------------------------------------------


def check(args: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """The tokens of the device against those of the CPU, both in float32."""
    cpu_model = random_model(args.check_shape, torch.float32, torch.device("cpu"))
    twin = copy.deepcopy(cpu_model).to(device)  # type: ignore[arg-type]
    vocab = SHAPES[args.check_shape]["vocab_size"]
    asked = requests(vocab, args.check_prompts, args.check_tokens)
    tree = [PackRow(0, [(7 * i) % vocab for i in range(len(TREE))], TREE)]
    with closing(Runner(cpu_model, pack=False)) as runner:
        truth = answers(runner, None, 0, asked)["told"]
        runner.cache.open(0)
        runner.extend(0, asked[0].prompt)
        want = runner.forward(tree).logits
    assert want is not None
    known = {r.seed: told for r, told in zip(asked, truth, strict=True)}
    drafts = {
        "plain decoding": None,
        "chains": right_at(args.acceptance, known, vocab),
        "trees": random_tree(known, vocab),
    }
    found = []
    for how, recorder in recorders(device).items():
        with closing(StaticRunner(twin, pack=False, recorder=recorder())) as static:
            for name, draft in drafts.items():
                told = answers(static, draft, args.length, asked)["told"]
                differ = [i for i, one in enumerate(told) if one != truth[i]]
                margins = [margin(cpu_model, asked[i], truth[i], told[i]) for i in differ]
                found.append(
                    {
                        "how": how,
                        "drafts": name,
                        "answers": len(told),
                        "same": len(told) - len(differ),
                        "margins": margins,
                        "not_recorded": static.not_recorded,
                    }
                )
            static.cache.open(0)
            static.extend(0, asked[0].prompt)
            got = static.forward(tree).logits
            assert got is not None
            error = float(((got.cpu() - want).norm(dim=-1) / want.norm(dim=-1)).max())
            found[-1]["logits_error"] = error
    return found


@torch.inference_mode()
def margin(model: PreTrainedModel, request: Request, right: Sequence[int], told: Sequence[int]) -> float:
    """How far apart the CPU's logits of the two tokens are where answers part."""
    at = next(i for i, (a, b) in enumerate(zip(right, told, strict=True)) if a != b)
    row = model(input_ids=torch.tensor([[*request.prompt, *right[:at]]]), use_cache=False).logits[0, -1]
    return float(row[right[at]] - row[told[at]])


# -- steps ----------------------------------------------------------------------------------------------


def kv_bytes(runner: Runner) -> int:
    """Of one token."""
    config = runner.config
    width = 2 * config.num_key_value_heads * config.head_dim
    return int(config.num_hidden_layers * width * next(runner.model.parameters()).itemsize)


def steps(runner: Runner, args: argparse.Namespace, advance: Callable[[], None]) -> dict[str, list[float]]:
    """Seconds of the steps by batch and width."""
    vocab = runner.vocab_size
    most = max(args.batches)
    for slot in range(most):
        runner.cache.open(slot)
        if slot == 0:
            runner.extend(slot, [(7 * i) % vocab for i in range(args.context)])
        else:  # what is in there does not change how long a step takes
            runner.cache.copy_prefix(0, slot, args.context)
    found = {}
    for batch in args.batches:
        for width in args.widths:
            rows = [PackRow(slot, [(slot + 3 * i) % vocab for i in range(width)]) for slot in range(batch)]
            work = partial(runner.forward, rows)
            times = [timed(runner.device, work) for _ in range(WARM + STEPS)]
            found[f"{batch}x{width}"] = times[WARM:]
            advance()
    for slot in range(most):
        runner.cache.close(slot)
    return found


def measure(args: argparse.Namespace, model: PreTrainedModel, device: torch.device) -> list[dict[str, Any]]:
    ways = recorders(device)
    taken: dict[str, dict[str, list[float]]] = {}
    rates, dtype = [bandwidth(device)], next(model.parameters()).dtype
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("steps", total=len(ways) * len(args.batches) * len(args.widths))
        for how, recorder in ways.items():
            with closing(
                StaticRunner(model, pack=False, rows=max(args.batches), recorder=recorder())
            ) as runner:
                taken[how] = steps(runner, args, lambda: progress.advance(task))
                read, each = read_bytes(runner), kv_bytes(runner)
                if runner.not_recorded:
                    print(f"{how}: {runner.not_recorded}", file=sys.stderr)
    rates.append(bandwidth(device))
    arithmetic = matrix_rate(device, dtype)
    found = []
    for batch in args.batches:
        for width in args.widths:
            tokens = batch * width
            one: dict[str, Any] = {
                "batch": batch,
                "width": width,
                "bytes": read + batch * (args.context + width) * each,
                "bandwidth": max(rates),
                "arithmetic": 2 * tokens * read / dtype.itemsize / arithmetic,
                "seconds": {how: times[f"{batch}x{width}"] for how, times in taken.items()},
            }
            one["limit"] = one["bytes"] / one["bandwidth"]
            one["median"] = {how: statistics.median(times) for how, times in one["seconds"].items()}
            found.append(one)
    return found


# -- whole answers --------------------------------------------------------------------------------------


def generate(args: argparse.Namespace, model: PreTrainedModel, device: torch.device) -> list[dict[str, Any]]:
    """Plain and drafted answers of each batch, run twice: shapes are recorded in the first run."""
    found = []
    vocab = int(model.config.vocab_size)
    for how, recorder in recorders(device).items():
        for batch in args.batches:
            asked = requests(vocab, batch, args.tokens)
            with closing(StaticRunner(model, pack=False, rows=batch, recorder=recorder())) as runner:
                plain = [answers(runner, None, 0, asked) for _ in range(2)][1]
                known = {r.seed: told for r, told in zip(asked, plain["told"], strict=True)}
                draft = right_at(args.acceptance, known, vocab)
                drafted = [answers(runner, draft, args.length, asked) for _ in range(2)][1]
            same = sum(a == b for a, b in zip(plain["told"], drafted["told"], strict=True))
            total = batch * args.tokens
            found.append(
                {
                    "how": how,
                    "batch": batch,
                    "plain": total / plain["seconds"],
                    "drafted": total / drafted["seconds"],
                    "tau": drafted["tau"],
                    "same": same,
                }
            )
    return found


# -- what is told ---------------------------------------------------------------------------------------


def told_check(found: Sequence[dict[str, Any]]) -> list[str]:
    lines = [
        "| float32, against the CPU | drafts | same answers | margins where not | logits' error |",
        "|---|---|---:|---|---:|",
    ]
    for one in found:
        margins = ", ".join(f"{m:.1e}" for m in one["margins"]) or "-"
        error = f"{one['logits_error']:.1e}" if "logits_error" in one else ""
        lines.append(
            f"| {one['how']} | {one['drafts']} | {one['same']} of {one['answers']} | {margins} | {error} |"
        )
    return lines


def told_steps(found: Sequence[dict[str, Any]]) -> list[str]:
    ways = list(found[0]["median"])
    heads = " | ".join(f"{how}, ms | of the limit" for how in ways)
    lines = [
        f"| batch | width | limit, ms | arithmetic, ms | {heads} |",
        "|---:|---:|---:|---:|" + "---:|---:|" * len(ways),
    ]
    for one in found:
        times = " | ".join(
            f"{1e3 * one['median'][h]:.2f} | {one['median'][h] / one['limit']:.2f}" for h in ways
        )
        lines.append(
            f"| {one['batch']} | {one['width']} | {1e3 * one['limit']:.2f} |"
            f" {1e3 * one['arithmetic']:.2f} | {times} |"
        )
    return lines


def told_answers(found: Sequence[dict[str, Any]], args: argparse.Namespace) -> list[str]:
    lines = [
        f"| {args.length} drafted, {args.acceptance:.0%} right | batch | plain, tok/s | drafted, tok/s |"
        " ratio | tokens a pass | same answers |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for one in found:
        lines.append(
            f"| {one['how']} | {one['batch']} | {one['plain']:.1f} | {one['drafted']:.1f} |"
            f" {one['drafted'] / one['plain']:.2f} | {one['tau']:.2f} | {one['same']} of {one['batch']} |"
        )
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    def whole(text: str) -> list[int]:
        return [int(n) for n in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--check-shape", choices=SHAPES, default="check", help="of the model in float32")
    parser.add_argument("--check-prompts", type=int, default=8)
    parser.add_argument("--check-tokens", type=int, default=64)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--batches", type=whole, default=[1, 4, 16, 64])
    parser.add_argument("--widths", type=whole, default=[1, 4, 8, 16, 64])
    parser.add_argument("--context", type=int, default=256, help="tokens before the step")
    parser.add_argument("--tokens", type=int, default=128, help="of whole answers")
    parser.add_argument("--length", type=int, default=4, help="drafted tokens")
    parser.add_argument("--acceptance", type=float, default=0.8, help="how often a drafted token is right")
    parser.add_argument("--json", type=Path, default=Path("bench/out/gpu.json"), metavar="FILE")
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print(NO_GPU, file=sys.stderr)
        return 2
    record: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
        "versions": versions(),
        "exact": check(args, device),
    }
    lines = [f"{record['device']}; {record['versions']}", "", *told_check(record["exact"])]
    model = random_model(args.shape, getattr(torch, args.dtype), device)
    record["steps"] = measure(args, model, device)
    write_json(args.json, record, args)
    rate = record["steps"][0]["bandwidth"] / 1e9
    lines += ["", f"{args.shape} in {args.dtype}, reads {rate:.0f} GB/s", "", *told_steps(record["steps"])]
    record["answers"] = generate(args, model, device)
    write_json(args.json, record, args)
    lines += ["", *told_answers(record["answers"], args)]
    print("\n".join(lines))
    write_atomic(args.json.with_suffix(".md"), "\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
