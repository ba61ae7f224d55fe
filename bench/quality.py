"""What a target loses when its weights are kept in fewer bits: KL and perplexity, HumanEval.

    python bench/quality.py [--candidates int8,q8_0,q4_k_m=FILE.gguf] [--humaneval FILE] [--resume]

Every candidate reads the same tokens: this project's documents, its own code (src/slipstream/core) and the
prompts of the benches, in windows of their own. KL is that of the candidate's next-token law from the plain
model's, in nats, mean over all positions; its error is the standard error of that mean. The plain model's
logits are kept in a folder beside --json, so that no two models are in memory at once.

candidates: plain (the reference itself), int8 (--weights int8), int8+embedding (--embedding int8, too), q8_0
(every matrix through the quantiser of the gguf package and back, as a Q8_0 file holds it), or NAME=MODEL, any
model that Slipstream loads, such as a GGUF file of the same model. Models that are loaded from GGUF files are
computed in bf16.

--humaneval takes a file in the format of openai/human-eval, one problem a line. Answers are greedy, and RUN
on this machine, in processes with a limit on time and memory but no other fence. Each result is appended to
a .jsonl file beside --json as soon as it is there; --resume goes on with that file.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import torch
from rich.console import Console
from rich.progress import Progress
from safetensors.torch import load_file, save_file
from torch import nn

import slipstream
from common import PROMPTS, TARGET, Log, Row, machine, read_prompts, versions, write_json
from humaneval import Problem, ask, judge, read_problems
from slipstream.engine.session import Session
from slipstream.errors import ParameterError, SlipstreamError
from slipstream.model.load import load, resolve
from slipstream.model.pack import PackRow
from slipstream.model.store import manifest, require_room

ROOT = Path(__file__).parents[1]
PLAIN = "plain"
OURS = {
    PLAIN: {},
    "int8": {"weights": "int8"},
    "int8+embedding": {"weights": "int8", "embedding": "int8"},
}
GGUF = {
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
    "q5_0": gguf.GGMLQuantizationType.Q5_0,
    "q4_0": gguf.GGMLQuantizationType.Q4_0,
}
Window = tuple[str, int, list[int]]  # the text's part, a number, token ids
CHUNK = 64  # positions whose laws are compared at once


# -- what is read -------------------------------------------------------------------------------------


def texts() -> dict[str, str]:
    """The parts by name."""

    def joined(files: Sequence[Path]) -> str:
        return "\n\n".join(path.read_text(encoding="utf-8") for path in files)

    prompts = [p["prompt"] for path in sorted(PROMPTS.glob("*.jsonl")) for p in read_prompts(path)]
    return {
        "documents": joined([ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]),
        "code": joined(sorted((ROOT / "src/slipstream/core").glob("*.py"))),
        "prompts": "\n\n".join(prompts),
    }


def windows(
    tokenizer: Any, parts: dict[str, str], length: int, count: int
) -> list[tuple[str, int, list[int]]]:
    """(part, number, token ids): the first whole windows of every part."""
    found = []
    for name, text in parts.items():
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(ids) < length:
            raise ParameterError(f"the {name} are only {len(ids)} tokens: give a --window of at most that")
        for number in range(min(count, len(ids) // length)):
            found.append((name, number, ids[number * length : (number + 1) * length]))
    return found


def digest(found: Sequence[Window]) -> str:
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()[:16]


# -- candidates ---------------------------------------------------------------------------------------


def specs(names: str, target: str) -> dict[str, str]:
    """Name -> model, checked before anything is loaded."""
    found = {}
    for part in filter(None, (p.strip() for p in names.split(","))):
        name, equals, model = part.partition("=")
        if equals and name and model:
            found[name] = model
        elif not equals and (name in OURS or name in GGUF):
            found[name] = target
        else:
            known = ", ".join([*OURS, *GGUF])
            raise ParameterError(f"unknown candidate {part!r}; there are {known}, and NAME=MODEL")
    return found


@contextmanager
def opened(name: str, model: str, dtype: str) -> Iterator[Session]:
    if name in GGUF:
        loaded = load(model, dtype=dtype)
        through_gguf(loaded.model, GGUF[name])
        session = slipstream.load(loaded)
    else:
        session = slipstream.load(model, "none", dtype=dtype, **OURS.get(name, {}))
    with session:
        yield session


@torch.no_grad()
def through_gguf(model: nn.Module, kind: gguf.GGMLQuantizationType, rows: int = 4096) -> None:
    """Every matrix as a GGUF file of this kind holds it, in the model's dtype again."""
    done: dict[int, nn.Parameter] = {}
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if not isinstance(weight, nn.Parameter) or weight.dim() != 2 or id(weight) in done:
            continue
        if weight.shape[1] % gguf.GGML_QUANT_SIZES[kind][0]:
            continue  # llama.cpp leaves such rows as they are, too
        parts = [
            torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(part.float().numpy(), kind), kind))
            for part in torch.split(weight, rows)
        ]
        weight.data = torch.cat([part.to(weight.dtype) for part in parts])
        done[id(weight)] = weight


# -- laws ---------------------------------------------------------------------------------------------


def logits(session: Session, ids: Sequence[int]) -> torch.Tensor:
    """[n - 1, V] in the model's dtype, of the positions whose next token is known."""
    runner, slot = session.engine.runner, 0
    runner.cache.open(slot)
    try:
        out = runner.forward([PackRow(slot, ids)]).logits
    finally:
        runner.cache.close(slot)
    assert out is not None
    return out[:-1, : session.info.vocab_size].clone()


def compare(found: torch.Tensor, plain: torch.Tensor, ids: Sequence[int]) -> Row:
    """Sums over positions: KL to plain, its square, negative log likelihoods, and equal likeliest tokens."""
    if found.shape != plain.shape:
        raise ParameterError(
            f"this model has {found.shape[1]} tokens and the reference {plain.shape[1]}: compare models of"
            " one vocabulary"
        )
    following = torch.tensor(ids[1:])
    sums = dict.fromkeys(("kl", "kl_squared", "nll", "nll_plain", "agree", "kl_most"), 0.0)
    for at in range(0, len(found), CHUNK):
        part = slice(at, at + CHUNK)
        q, p = (torch.log_softmax(row[part].double(), -1) for row in (found, plain))  # [n, V]
        kl = (p.exp() * (p - q)).sum(-1)
        index = following[part, None]
        sums["kl"] += float(kl.sum())
        sums["kl_squared"] += float((kl * kl).sum())
        sums["kl_most"] = max(sums["kl_most"], float(kl.max()))
        sums["nll"] -= float(q.gather(1, index).sum())
        sums["nll_plain"] -= float(p.gather(1, index).sum())
        sums["agree"] += float((q.argmax(-1) == p.argmax(-1)).sum())
    return {"positions": len(found), **sums}


class Reference:
    """The plain model's logits, a file a window."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def forget(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def _file(self, part: str, number: int) -> Path:
        return self._folder / f"{part}-{number}.safetensors"

    def make(
        self, args: argparse.Namespace, todo: Sequence[tuple[str, int, list[int]]], progress: Progress
    ) -> None:
        missing = [w for w in todo if not self._file(w[0], w[1]).is_file()]
        if not missing:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        with opened(PLAIN, args.target, args.dtype) as session:
            width = session.info.vocab_size * next(session.info.model.parameters()).element_size()
            require_room(
                self._folder, width * sum(len(ids) for *_, ids in missing), "the plain model's logits"
            )
            for part, number, ids in progress.track(missing, description=f"{PLAIN}: reading"):
                file = self._file(part, number)
                partial = file.with_suffix(".partial")
                save_file({"logits": logits(session, ids)}, partial)
                partial.replace(file)

    def get(self, part: str, number: int) -> torch.Tensor:
        return load_file(self._file(part, number))["logits"]


# -- measuring ----------------------------------------------------------------------------------------


def measure(args: argparse.Namespace, log: Log, wanted: dict[str, str], problems: Sequence[Problem]) -> None:
    tokenizer = _tokenizer(args.target)
    read = windows(tokenizer, texts(), args.window, args.windows) if args.windows else []
    what = {
        "target": args.target,
        "dtype": args.dtype,
        "text": digest(read),
        "answer_tokens": args.max_tokens,
        "humaneval": hashlib.sha256(args.humaneval.read_bytes()).hexdigest()[:16] if problems else None,
    }
    _same_conditions(log, what)
    log.start({**what, "machine": machine(args.threads), "versions": versions(), "specs": wanted})
    compared = {(r["setting"], r["part"], r["window"]) for r in log.rows if "kl" in r}
    judged = {(r["setting"], r["task"]) for r in log.rows if "passed" in r}
    reference = Reference(args.json.with_suffix("") / what["text"])
    if not args.resume:
        reference.forget()
    with Progress(console=Console(stderr=True)) as progress:
        if any(name != PLAIN for name in wanted):
            reference.make(args, read, progress)
        for name, model in wanted.items():
            unread = [w for w in read if (name, w[0], w[1]) not in compared] if name != PLAIN else []
            unasked = [p for p in problems if (name, p.task) not in judged]
            if not unread and not unasked:
                continue
            with opened(name, model, args.dtype) as session:
                held = {"setting": name, "weights": session.engine.runner.weight_bytes}
                for part, number, ids in progress.track(unread, description=f"{name}: reading"):
                    row = compare(logits(session, ids), reference.get(part, number), ids)
                    log.add({**held, "part": part, "window": number, **row})
                session.use(args.drafter)
                groups = [unasked[i : i + args.batch] for i in range(0, len(unasked), args.batch)]
                for group in progress.track(groups, description=f"{name}: answering"):
                    for problem, answer in zip(group, ask(session, group, args.max_tokens), strict=True):
                        verdict = judge(problem, answer.text, args.seconds)
                        log.add({**held, "task": problem.task, **verdict, "ids": list(answer.tokens)})


def _tokenizer(target: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(resolve(target)), local_files_only=True)


def _same_conditions(log: Log, what: dict[str, Any]) -> None:
    for run in log.runs:
        for key, value in what.items():
            if run[key] is not None and value is not None and run[key] != value:
                raise ParameterError(
                    f"{log.path} was measured with {key} {run[key]}, now it is {value}: give another --json,"
                    " or leave out --resume to begin again"
                )


# -- what came out ------------------------------------------------------------------------------------


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Of one candidate. error: the standard error of the mean KL."""
    laws, answers = [r for r in rows if "kl" in r], [r for r in rows if "passed" in r]
    told: dict[str, Any] = {"weights": rows[0]["weights"], "problems": len(answers)}
    told["passed"] = sum(r["passed"] for r in answers)
    n = sum(r["positions"] for r in laws)
    if n:
        kl, square = (sum(r[key] for r in laws) / n for key in ("kl", "kl_squared"))
        told |= {
            "positions": n,
            "kl": kl,
            "error": math.sqrt(max(square - kl * kl, 0.0) / n),
            "kl_most": max(r["kl_most"] for r in laws),
            "perplexity": math.exp(sum(r["nll"] for r in laws) / n),
            "perplexity_plain": math.exp(sum(r["nll_plain"] for r in laws) / n),
            "agree": sum(r["agree"] for r in laws) / n,
        }
    return told


def markdown(found: dict[str, dict[str, Any]]) -> str:
    lines = [
        "| weights | GB | KL to plain, nats | perplexity | of plain's | same likeliest token | HumanEval |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, s in found.items():
        cells = ["", "", "", ""]
        if "kl" in s:
            cells = [
                f"{s['kl']:.5f} ± {s['error']:.5f}",
                f"{s['perplexity']:.4f}",
                f"{s['perplexity'] / s['perplexity_plain']:.4f}",
                f"{s['agree']:.2%}",
            ]
        solved = f"{s['passed']} of {s['problems']}" if s["problems"] else ""
        lines.append(f"| {name} | {s['weights'] / 1e9:.2f} | {' | '.join(cells)} | {solved} |")
    return "\n".join(lines)


def run(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    wanted = specs(args.candidates, args.target)
    problems = read_problems(args.humaneval)[: args.limit or None] if args.humaneval is not None else []
    if args.json.suffix == ".jsonl":
        raise ParameterError("--json names the .json file; the .jsonl file lies beside it")
    log = Log(args.json.with_suffix(".jsonl"), args.resume or args.table)
    if not args.table:
        measure(args, log, wanted, problems)
    names = list(dict.fromkeys(r["setting"] for r in log.rows))
    if not names:
        raise ParameterError(f"{log.path} holds no results: measure first")
    return {name: summary([r for r in log.rows if r["setting"] == name]) for name in names}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--candidates", default="int8,int8+embedding,q8_0", metavar="NAME[=MODEL],…")
    parser.add_argument("--target", default=TARGET)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--window", type=int, default=512, help="tokens read at once")
    parser.add_argument("--windows", type=int, default=4, help="of each part of the text; 0: none")
    parser.add_argument("--humaneval", type=Path, metavar="FILE", help="answers are run on this machine")
    parser.add_argument("--limit", type=int, default=0, help="problems used, the first ones; 0: all")
    parser.add_argument("--max-tokens", type=int, default=512, help="of an answer")
    parser.add_argument("--seconds", type=float, default=10.0, help="that an answer's tests may take")
    parser.add_argument("--batch", type=int, default=8, help="problems answered at once")
    parser.add_argument("--drafter", default="ngram", help="for the answers, which it does not change")
    parser.add_argument("--json", type=Path, default=Path("bench/out/quality.json"), metavar="FILE")
    parser.add_argument("--resume", action="store_true", help="go on with the .jsonl file beside --json")
    parser.add_argument("--table", action="store_true", help="only show what is in that file")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    try:
        found = run(args)
        source = str((manifest(resolve(args.target)) or {}).get("source", ""))
    except SlipstreamError as error:
        parser.exit(2, f"error: {error}\n")
    console = Console(width=200, highlight=False)
    console.print(f"{args.target}, {args.dtype}; {machine(args.threads)}; {versions()}\n")
    console.print(markdown(found), markup=False, soft_wrap=True)
    if source.endswith(".gguf"):
        console.print(
            f"\nThe plain model here was itself made from {source}: a candidate from that file equals it, and"
            " what is told of the others is how far they are from that file's numbers, not the publisher's.",
            soft_wrap=True,
        )
    write_json(args.json, {"candidates": found, "source": source}, args)


if __name__ == "__main__":
    main()
