"""Slipstream and other engines on the same prompts, in one run: who gives how many tokens a second.

    python bench/peers.py [--only 'slipstream*,llama.cpp*'] [--each 1] [--resume] [--list]

Each engine runs in an environment of its own, which is made from PyPI at first use (bench/environments.py),
in processes that load once and answer prompts one after the other. Only one of them computes at a time: the
others are stopped (SIGSTOP) and stay in memory where there is room. A round has every setting answer every
prompt, one process after the other, in an order that rotates from round to round: A B C, B C A, …; inside a
process settings take turns from prompt to prompt.

What is the same for all: the ids of the prompt (the target's chat template and tokenizer), greedy decoding,
the token limit, the threads, the end tokens; no prompt is kept for the next request. Tokens are the ids
generated after the prompt, the end token included: an answer that is neither as long as the limit nor ends
in an end token is refused as wrongly counted. Seconds are the wall time of the whole request, prompt reading
included, taken in the engine's process. Who learns from answers begins each round without memory. The model
is the same too: bf16 weights are what the Q4_K_M file holds, and Q8_0 is made of it.

A setting's source is told beside it: the engine's own documentation of what is best, or its defaults. It
writes --json, a .jsonl of all answers beside it (with --resume it goes on there), and a chart. The engine
that wins is told by one setting for all prompts, never by the best of each.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from transformers import AutoTokenizer

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
from drafters import chosen as named
from peer_driver import Crew, PeerError, Watch, Worker
from peer_processes import Models, Process, context_for, processes
from peer_report import PeerReport
from peer_settings import SETTINGS, Setting, chosen
from prompts.make_drafters import spaced
from slipstream.cli.output import TerminalProgress
from slipstream.errors import ParameterError, SlipstreamError
from slipstream.model.checkpoint import inspect
from slipstream.model.generation import generation_defaults
from slipstream.model.load import resolve
from slipstream.model.quiet import quiet

WARM_UP = 16


def few(prompts: Sequence[Row], each: int) -> list[Row]:
    """At most `each` prompts of a task, evenly spaced, in their order; all if 0."""
    if not each:
        return list(prompts)
    kept: list[Row] = []
    for task in dict.fromkeys(p["task"] for p in prompts):
        of = [p for p in prompts if p["task"] == task]
        kept += spaced(of, min(each, len(of)))
    return [p for p in prompts if p in kept]


def counted(told: dict[str, Any], max_tokens: int, eos_ids: Sequence[int]) -> list[int]:
    """The answer's ids, checked to be what is counted everywhere. Raises PeerError."""
    ids = [int(i) for i in told["ids"]]
    ends = [i for i, token in enumerate(ids) if token in eos_ids]
    whole = len(ids) == max_tokens or (bool(ids) and ids[-1] in eos_ids)
    if not whole or len(ids) > max_tokens or (ends and ends[0] != len(ids) - 1):
        raise PeerError(
            f"an answer of {len(ids)} tokens is neither {max_tokens} long nor ended by an end token"
            f" (end tokens at {ends}): the counts would not be comparable"
        )
    return ids


def answers(
    worker: Worker,
    todo: Sequence[tuple[int, Setting]],
    encoded: Sequence[list[int]],
    models: Models,
    max_tokens: int,
) -> Iterator[tuple[int, Setting, Row]]:
    """A process's part of a round, answer by answer: the prompt's index, the setting, what was found."""
    shortest = min(encoded, key=len)
    for name in dict.fromkeys(setting.name for _, setting in todo):
        worker.ask(name, shortest, min(WARM_UP, max_tokens))
    if worker.process.learns:
        worker.forget()
    for i, setting in todo:
        watch = Watch(worker)
        told = worker.ask(setting.name, encoded[i], max_tokens)
        others = watch.others()
        ids = counted(told, max_tokens, models.eos_ids)
        yield i, setting, {**told, "ids": ids, "tokens": len(ids), "others": others}


def measure(
    args: argparse.Namespace,
    log: Log,
    wanted: Sequence[Setting],
    prompts: Sequence[Row],
    models: Models,
    encoded: Sequence[list[int]],
    what: dict[str, Any],
) -> None:
    """Fill the log with what it lacks. A peer that fails is left out, and told why."""
    console = Console(stderr=True)
    everyone, missing = processes(wanted, models)
    done = {(r["engine"], r["setting"], r["prompt"], r["round"]) for r in log.rows}
    about: dict[str, Any] = {}
    log.start({**what, "machine": machine(args.threads), "versions": versions(), "missing": missing})
    crew = Crew(everyone, args.json.parent / "peers")

    def part(process: Process, round_: int, progress: Progress) -> None:
        by_name = {s.name: s for s in process.settings}
        order = turns(list(by_name), len(prompts), 1)
        todo = [
            (i, by_name[name])
            for _, i, name in order
            if (by_name[name].engine, name, prompts[i]["id"], round_) not in done
        ]
        if not todo:
            return
        broken = len(todo) < len(prompts) * len(by_name)
        worker = crew.take(process)
        about[process.name] = worker.about
        try:
            for i, setting, found in answers(worker, todo, encoded, models, args.max_tokens):
                told = {"engine": setting.engine, "setting": setting.name, "round": round_}
                told |= {"task": prompts[i]["task"], "prompt": prompts[i]["id"]}
                told |= {"prompt_tokens": len(encoded[i]), "forgot": broken and setting.learns}
                log.add({**told, **found})
                progress.update(progress.task_ids[0], advance=1, refresh=True)
        except BaseException:
            worker.close()
            raise
        crew.leave(worker)

    total = sum(len(p.settings) for p in everyone) * len(prompts) * args.rounds
    try:
        with Progress(console=console, auto_refresh=False) as progress:  # nothing shall run beside the peers
            progress.add_task("", total=total, completed=len(done))
            for round_ in range(args.rounds):
                first = round_ % max(1, len(everyone))
                for process in (*everyone[first:], *everyone[:first]):
                    if any(s.full in missing for s in process.settings):
                        continue  # it failed in an earlier round
                    said = f"round {round_ + 1}: {process.name}"
                    progress.update(progress.task_ids[0], description=said, refresh=True)
                    try:
                        part(process, round_, progress)
                    except SlipstreamError as error:
                        missing.update({s.full: str(error) for s in process.settings})
                        console.print(f"{process.name} is left out: {error}", markup=False, soft_wrap=True)
                    log.update({"missing": missing, "about": about})
    finally:
        crew.close()


def run(args: argparse.Namespace) -> PeerReport:
    if args.rounds < 1:
        raise ParameterError(f"--rounds must be at least 1, not {args.rounds}")
    if args.json.suffix == ".jsonl":
        raise ParameterError("--json names the .json file; the .jsonl file lies beside it")
    wanted = chosen(args.only)
    prompts = [prompt for path in args.prompts for prompt in read_prompts(path)]
    tasks = named(args.tasks, list(dict.fromkeys(p["task"] for p in prompts)), "task")
    prompts = few([p for p in prompts if p["task"] in tasks], args.each)
    log = Log(args.json.with_suffix(".jsonl"), args.resume or args.table)
    digest = hashlib.sha256(json.dumps([[p["id"], p["prompt"]] for p in prompts]).encode()).hexdigest()[:16]
    what = {
        "target": args.target,
        "draft": args.draft,
        "max_tokens": args.max_tokens,
        "prompts": digest,
        "threads": args.threads,
    }
    if not args.table:
        for earlier in log.runs:
            require_same(log.path, earlier, what)
        progress = TerminalProgress(Console(stderr=True), None)
        folders = (resolve(args.target, progress=progress), resolve(args.draft, progress=progress))
        with quiet():
            tokenizer = AutoTokenizer.from_pretrained(str(folders[0]), local_files_only=True)
        checkpoint = inspect(folders[0])
        first = tokenizer.eos_token_id
        ends = generation_defaults(checkpoint.generation, checkpoint.config, first).eos_ids
        encoded = encode(tokenizer, prompts)
        models = Models(
            args.target,
            args.draft,
            folders,
            tuple(sorted(ends, key=lambda i: i != first)),
            args.threads,
            context_for(encoded, args.max_tokens),
            progress,
            {"target": args.target_gguf, "draft": args.draft_gguf},
        )
        measure(args, log, wanted, prompts, models, encoded, what)
    if not log.rows:
        raise ParameterError(f"{log.path} holds no answers: {reasons(log) or 'measure first'}")
    return PeerReport(log, SETTINGS)


def reasons(log: Log) -> str:
    return "; ".join(reason for run in log.runs for reason in run["missing"].values())


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__, "drafters", max_tokens=128, several=True)
    parser.set_defaults(rounds=3, json=Path("bench/out/peers.json"))
    parser.add_argument(
        "--only", default="", metavar="PATTERN,…", help="settings, as 'llama.cpp*'; see --list"
    )
    parser.add_argument("--tasks", default="", metavar="NAME,…", help="only the prompts of these tasks")
    parser.add_argument(
        "--each", type=int, default=0, metavar="N", help="at most N prompts of a task; 0: all"
    )
    parser.add_argument("--resume", action="store_true", help="go on with the .jsonl file beside --json")
    parser.add_argument("--table", action="store_true", help="only show what is in that file")
    parser.add_argument("--markdown", action="store_true", help="print the tables as Markdown")
    parser.add_argument("--list", action="store_true", help="only list the settings and their sources")
    parser.add_argument("--target", default=TARGET)
    parser.add_argument("--draft", default=DRAFT)
    parser.add_argument("--target-gguf", default="", metavar="FILE", help="instead of the catalogue's")
    parser.add_argument("--draft-gguf", default="", metavar="FILE", help="instead of the catalogue's")
    args = parser.parse_args(argv)
    if args.list:
        for setting in SETTINGS:
            print(f"{setting.full}{'' if setting.usual else ' (only if named)'}: {setting.source}")
        return
    try:
        report = run(args)
        report.show(Console(width=200, highlight=False), args.markdown)
        write_json(args.json, report.record(), args)
        report.chart(args.json)
    except SlipstreamError as error:
        parser.exit(2, f"error: {error}\n")


if __name__ == "__main__":
    main()
