"""Every drafter against plain decoding, in one engine on the real pair.

    python bench/drafters.py [--resume] [--only none,suffix] [--tasks edit,rag] [--markdown]

24 prompts (`bench/prompts/drafters.jsonl`), greedy, bf16. Every prompt is answered by every setting before
the next prompt starts, in an order that rotates, so a machine that drifts hurts all settings alike. Drafters
that use the same draft model share one copy of it; the int8 draft is a copy of its own. What a drafter learns
from one answer it keeps for the next ones, as when it serves; each round begins with new drafters.

Each answer is appended to a .jsonl file beside --json as soon as it is there; --resume goes on with that
file.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import cached_property
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

import slipstream
from common import (
    DRAFT,
    TARGET,
    Log,
    Row,
    encode,
    machine,
    make_parser,
    read_prompts,
    require_same,
    turns,
    versions,
    write_json,
)
from drafters_report import PLAIN, Report
from slipstream import SamplingParams
from slipstream.core.draft import Drafter, Observation
from slipstream.core.spec import make_config, parse_spec
from slipstream.drafters import TargetInfo, build_drafter, find_drafter
from slipstream.drafters.cascade import CascadeConfig, CascadeDrafter
from slipstream.drafters.crossvocab import CrossVocabConfig, CrossVocabDrafter
from slipstream.drafters.draft_model import DraftModelConfig, ModelDrafter
from slipstream.drafters.selfspec import SelfSpecDrafter
from slipstream.errors import ParameterError, SlipstreamError
from slipstream.model.load import load
from slipstream.model.runner import Runner
from slipstream.model.vocab import shared_vocabulary

NOTES = {"crossvocab": "the same draft as if its vocabulary were another: what tokenising anew costs"}


def specs(draft: str, selfspec: str = "", medusa: str = "", eagle: str = "") -> dict[str, str]:
    """Setting -> what `slipstream run --drafter` would be given. medusa, eagle: folders of heads; left out,
    those that come with Slipstream."""
    model = f"draft_model:model={draft},num_speculative_tokens=4"
    given = {"medusa": medusa, "eagle": eagle}
    heads = {name: f"{name}:heads={folder}," if folder else f"{name}:" for name, folder in given.items()}
    return {
        PLAIN: "none",
        "ngram": "ngram",
        "ngram-tree": "ngram:branches=3",
        "suffix": "suffix",
        "suffix-tree": "suffix:tree=true",
        "recycle": "recycle",
        "draft": model,
        "draft-w2-n7": f"{model},width=2,nodes=7",
        "draft-w3-n7": f"{model},width=3,nodes=7",
        "draft-w2-n15": f"{model},width=2,nodes=15",
        "draft-w3-n15": f"{model},width=3,nodes=15",
        "draft-int8": f"{model},quantise=int8",
        "selfspec": f"selfspec:{selfspec}" if selfspec else "selfspec",
        "cascade": f"cascade:model={draft}",
        "crossvocab": f"crossvocab:model={draft},mode=text,num_speculative_tokens=4",
        "medusa": f"{heads['medusa']}nodes=15",
        "medusa-n7": f"{heads['medusa']}nodes=7",
        "eagle": f"{heads['eagle']}nodes=15",
        "eagle-n7": f"{heads['eagle']}nodes=7",
        "eagle-chain": f"{heads['eagle']}top_k=1",
    }


class Workshop:
    """Builds drafters for one target. Those that use the draft model unquantised share one copy of it."""

    def __init__(self, target: TargetInfo, draft: str) -> None:
        self.target = target
        self.draft = draft

    @cached_property
    def _shared(self) -> tuple[Runner, Any]:
        """The draft model's runner and tokenizer; its vocabulary is the target's."""
        loaded = load(self.draft, dtype=self.target.dtype, device=self.target.device, **self.target.options)
        size = int(loaded.model.config.vocab_size)
        shared_vocabulary(self.target.tokenizer, loaded.tokenizer, self.target.vocab_size, size)
        return Runner(loaded.model, pack=True), loaded.tokenizer

    def build(self, spec: str) -> Drafter:
        name, values = parse_spec(spec)
        config = make_config(find_drafter(name).Config, name, values)  # type: ignore[attr-defined]
        if isinstance(config, CascadeConfig):
            return CascadeDrafter(config, self.target, parts=[self.build(part) for part in config.specs])
        whole = isinstance(config, DraftModelConfig) and config.quantise == "none" and not config.draft_vocab
        if whole and config.model == self.draft:
            return ModelDrafter(config, self.target, runner=self._shared[0])
        if isinstance(config, CrossVocabConfig) and config.model == self.draft:
            runner, tokenizer = self._shared
            return CrossVocabDrafter(config, self.target, runner=runner, tokenizer=tokenizer)
        return build_drafter(spec, self.target)


def answer(session: slipstream.Session, drafter: Drafter, ids: Sequence[int], max_tokens: int) -> Row:
    """One greedy answer, step by step, so that the first draft can be told from the others.

    first_draft: the drafter's seconds until its first draft was there, in which it may read the prompt, and
    the tokens of that draft. memory: the most bytes the drafter held beyond the target.
    """
    engine = session.engine
    engine.set_drafter(drafter)
    engine.drafter_peak_bytes = 0
    before, seconds, first = engine.seconds.copy(), 0.0, None
    (row,) = session.submit(ids, SamplingParams(max_tokens=max_tokens))
    try:
        while not row.finished:
            clock = time.perf_counter()
            engine.step()
            seconds += time.perf_counter() - clock
            if first is None and row.counts.drafts:
                spent = (engine.seconds - before).drafter
                first = {"seconds": spent, "tokens": row.counts.draft_tokens}
    finally:
        session.cancel([row])
    return {
        "prompt_tokens": len(ids),
        "tokens": len(row.output),
        "ids": row.output,
        "seconds": seconds,
        "parts": asdict(engine.seconds - before),
        "counts": asdict(row.counts),
        "first_draft": first,
        "memory": engine.drafter_peak_bytes,
    }


REMINDED = -1  # the engine's own ids begin at 0


def remind(drafter: Drafter, prompt: Sequence[int], output: Sequence[int]) -> None:
    """Tell a drafter that learns of an answer that an earlier process measured, as the engine told it then.

    All but the logits: what is learned from them is lost with the process.
    """
    told = ((0, prompt), (len(prompt) - 1, (prompt[-1], *output)))
    drafter.open(REMINDED, prompt)
    drafter.observe([Observation(REMINDED, at, tuple(t[:-1]), next_token=t[-1]) for at, t in told])
    drafter.close(REMINDED)


def explicit(spec: str, drafter: Drafter) -> str:
    """The spec with what was read from a file that may change."""
    if not isinstance(drafter, SelfSpecDrafter):
        return spec
    length, least = drafter.num_speculative_tokens, drafter.min_confidence
    return f"selfspec:skip={drafter.skip},num_speculative_tokens={length},min_confidence={least:g}"


def measure(
    args: argparse.Namespace, log: Log, wanted: dict[str, str], prompts: Sequence[Row], what: dict[str, Any]
) -> None:
    """Fill the log with what it lacks. wanted: setting -> spec; what: conditions of the measurement."""
    console, wanted = Console(stderr=True), dict(wanted)
    console.print(f"loading {args.target} and what drafts for it", markup=False)
    session = slipstream.load(args.target, dtype=args.dtype, weights=args.weights)
    workshop = Workshop(session.info, args.draft)
    drafters: dict[str, Drafter] = {}
    missing: dict[str, str] = {}
    try:
        for name, spec in list(wanted.items()):
            try:
                drafters[name] = workshop.build(spec)
                wanted[name] = explicit(spec, drafters[name])
            except SlipstreamError as error:
                missing[name] = str(error)
                console.print(f"{name} is not measured: {error}", markup=False, soft_wrap=True)
        same_conditions(log, what, wanted)
        encoded = encode(session.tokenizer, prompts)
        done = {(r["setting"], r["prompt"], r["round"]): r for r in log.rows}
        plan = [
            (round_, i, name, done.get((name, prompts[i]["id"], round_)))
            for round_, i, name in turns(list(drafters), len(prompts), args.rounds)
        ]
        todo = [name for *_, name, row in plan if row is None]
        console.print(f"warming up {len(set(todo))} settings, {len(todo)} answers to measure")
        for name in dict.fromkeys(todo):
            answer(session, drafters[name], min(encoded, key=len), min(16, args.max_tokens))
        learners = [name for name, drafter in drafters.items() if drafter.learns]
        where = {"machine": machine(args.threads), "versions": versions(), "load": os.getloadavg()}
        if todo:
            log.start({**what, **where, "specs": wanted, "missing": missing})
        begun, forgot = -1, set[str]()
        with Progress(console=console) as progress:
            task = progress.add_task("measuring", total=len(todo))
            for round_, i, name, row in plan:
                if round_ != begun:  # the warm-up and the rounds before must teach nothing
                    begun, forgot = round_, set()
                    drafters.update({n: workshop.build(wanted[n]) for n in learners})
                drafter = drafters[name]
                if row is not None:
                    if drafter.learns:
                        remind(drafter, encoded[i], row["ids"])
                        forgot.update([name] if drafter.needs.node_logits else [])
                    continue
                found = answer(session, drafter, encoded[i], args.max_tokens)
                told = {"setting": name, "task": prompts[i]["task"], "prompt": prompts[i]["id"]}
                log.add({**told, "round": round_, "run": len(log.runs), "forgot": name in forgot, **found})
                progress.advance(task)
    finally:
        session.engine.abandon()
        session.engine.set_drafter(None)
        for drafter in drafters.values():
            drafter.shutdown()
        session.close()


def same_conditions(log: Log, what: dict[str, Any], wanted: dict[str, str]) -> None:
    """ParameterError if the log was made in another way: its rows would not be comparable."""
    measured = {r["setting"] for r in log.rows}
    for run in log.runs:
        now = {**what, **{f"--drafter of {n}": s for n, s in wanted.items() if n in measured}}
        then = {**run, **{f"--drafter of {n}": s for n, s in run["specs"].items() if s}}
        require_same(log.path, then, now)


def chosen(names: str, known: Sequence[str], what: str) -> list[str]:
    """The names of a list with commas, in the order of `known`; all if it is empty."""
    asked = [name.strip() for name in names.split(",") if name.strip()]
    for name in asked:
        if name not in known:
            raise ParameterError(f"unknown {what} {name!r}; there are {', '.join(known)}")
    return [name for name in known if not asked or name in asked]


def run(args: argparse.Namespace) -> Report:
    if args.rounds < 1:
        raise ParameterError(f"--rounds must be at least 1, not {args.rounds}")
    every = specs(args.draft, args.selfspec, args.medusa, args.eagle)
    only = f"{PLAIN},{args.only}" if args.only else ""  # nothing can be compared without it
    wanted = {name: every[name] for name in chosen(only, list(every), "setting")}
    prompts = read_prompts(args.prompts)
    tasks = chosen(args.tasks, list(dict.fromkeys(p["task"] for p in prompts)), "task")
    prompts = [p for p in prompts if p["task"] in tasks]
    if args.json.suffix == ".jsonl":
        raise ParameterError("--json names the .json file; the .jsonl file lies beside it")
    log = Log(args.json.with_suffix(".jsonl"), args.resume or args.table)
    what = {
        "target": args.target,
        "draft": args.draft,
        "dtype": args.dtype,
        "weights": args.weights,
        "max_tokens": args.max_tokens,
        "prompts": hashlib.sha256(args.prompts.read_bytes()).hexdigest()[:16],
        "threads": args.threads,
    }
    if not args.table:
        torch.set_num_threads(args.threads)
        measure(args, log, wanted, prompts, what)
    if not any(r["setting"] == PLAIN for r in log.rows):
        raise ParameterError(f"{log.path} holds no answers of plain decoding: measure first")
    return Report(log, list(every), NOTES)


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__, "drafters", max_tokens=128)
    parser.add_argument("--only", default="", metavar="NAME,…", help="settings; plain decoding always")
    parser.add_argument("--tasks", default="", metavar="NAME,…", help="only the prompts of these tasks")
    parser.add_argument("--resume", action="store_true", help="go on with the .jsonl file beside --json")
    parser.add_argument("--table", action="store_true", help="only show what is in that file")
    parser.add_argument("--markdown", action="store_true", help="print the tables as Markdown")
    parser.add_argument("--target", default=TARGET)
    parser.add_argument("--draft", default=DRAFT)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--weights", default="plain", help="of the target: plain or int8")
    parser.add_argument(
        "--selfspec", default="", metavar="OPTIONS", help="as skip=a3-9 or exit=20; else the tuned set"
    )
    parser.add_argument("--medusa", default="", metavar="FOLDER", help="heads instead of the shipped ones")
    parser.add_argument("--eagle", default="", metavar="FOLDER", help="a head instead of the shipped one")
    args = parser.parse_args(argv)
    try:
        report = run(args)
    except SlipstreamError as error:
        parser.exit(2, f"error: {error}\n")
    report.show(Console(width=160, highlight=False), args.markdown)
    write_json(args.json, report.record(), args)


if __name__ == "__main__":
    main()
