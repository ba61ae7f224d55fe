"""What the benches share: prompts, the order of measuring, rates, results on disk, provenance."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

import slipstream
from prompts.make_drafters import COMPLETE, TASKS
from slipstream.engine.inputs import chat_ids
from slipstream.errors import ParameterError
from slipstream.model.store import write_atomic
from slipstream.plan.here import cpu_name

TARGET, DRAFT = "qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b"
PROMPTS = Path(__file__).parent / "prompts"

Row = dict[str, Any]
"""One answer: setting, task, prompt (its id), round, tokens (generated ids, the end token included), seconds
(the whole request, prompt reading included), ids."""


def make_parser(
    doc: str | None, name: str, max_tokens: int, several: bool = False
) -> argparse.ArgumentParser:
    """The options that all benches have; `name` names the prompts and the results. several: --prompts takes
    more than one file, and is a list."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=max_tokens)
    prompts = PROMPTS / f"{name}.jsonl"
    if several:
        parser.add_argument("--prompts", type=Path, nargs="+", default=[prompts], metavar="FILE")
    else:
        parser.add_argument("--prompts", type=Path, default=prompts, metavar="FILE")
    parser.add_argument("--json", type=Path, default=Path(f"bench/out/{name}.json"), metavar="FILE")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    return parser


def read_prompts(path: Path) -> list[dict[str, Any]]:
    """Objects with id, task and prompt, one a line; questions of Spec-Bench and problems of HumanEval, as
    they are published, become such."""
    try:
        return [as_prompt(json.loads(line)) for line in path.read_text(encoding="utf-8").strip().split("\n")]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ParameterError(
            f"the prompts {path} cannot be read ({error!r}): every line must be an object with id, task and"
            " prompt, a question of Spec-Bench (question_id, category, turns) or a problem of HumanEval"
            " (task_id, entry_point, prompt)"
        ) from error


def as_prompt(row: dict[str, Any]) -> dict[str, Any]:
    """Of a conversation the first turn."""
    if "turns" in row:
        category = str(row.get("task") or row["category"])
        task = category if category in TASKS else "mt_bench"
        return {"id": f"{task}/{row['question_id']}", "task": task, "prompt": str(row["turns"][0])}
    if "entry_point" in row:
        prompt = COMPLETE.format(prompt=row["prompt"].strip())
        return {"id": str(row["task_id"]), "task": "humaneval", "prompt": prompt}
    return {**row, "id": str(row["id"]), "task": str(row["task"]), "prompt": str(row["prompt"])}


def encode(tokenizer: Any, prompts: Sequence[dict[str, Any]]) -> list[list[int]]:
    """Every prompt as a user's message."""
    return [chat_ids(tokenizer, [{"role": "user", "content": p["prompt"]}]) for p in prompts]


def turns(names: Sequence[str], prompts: int, rounds: int) -> Iterator[tuple[int, int, str]]:
    """(round, prompt, setting): every prompt by every setting before the next prompt, in an order that
    rotates, so a machine that drifts hurts all settings alike."""
    for round_ in range(rounds):
        for prompt in range(prompts):
            first = (prompt + round_) % len(names)
            for name in (*names[first:], *names[:first]):
                yield round_, prompt, name


def whole(row: Row) -> float:
    """Seconds of the request."""
    return float(row["seconds"])


Clock = Callable[[Row], float]


def rate(rows: Sequence[Row], seconds: Clock = whole) -> float:
    """All tokens over all seconds."""
    return float(sum(r["tokens"] for r in rows)) / sum(map(seconds, rows))


def by_prompt(rows: Sequence[Row]) -> dict[tuple[Any, int], Row]:
    return {(r["prompt"], r["round"]): r for r in rows}


def ratios(rows: Sequence[Row], base: Sequence[Row], seconds: Clock = whole) -> list[float]:
    """Each answer's rate over that of the other setting's answer to the same prompt in the same round."""
    other = by_prompt(base)
    pairs = [(r, b) for r in rows if (b := other.get((r["prompt"], r["round"])))]
    return [rate([r], seconds) / rate([b], seconds) for r, b in pairs]


def spread(values: Sequence[float]) -> str:
    """median (min-max)."""
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})" if values else "-"


def same_ids(rows: Sequence[Row], base: Sequence[Row]) -> int:
    """How many answers have the ids of the other setting's answer."""
    other = by_prompt(base)
    return sum(r["ids"] == other[key]["ids"] for key, r in by_prompt(rows).items() if key in other)


def machine(threads: int) -> str:
    return f"{cpu_name()}, {os.cpu_count()} cores, {threads} threads"


def versions() -> str:
    return (
        f"slipstream {slipstream.__version__}, torch {torch.__version__},"
        f" transformers {transformers.__version__}; Python {platform.python_version()}"
    )


def write_json(path: Path, record: dict[str, Any], args: argparse.Namespace) -> None:
    """The record and the arguments it was made with."""
    write_atomic(path, json.dumps({**record, "arguments": {k: str(v) for k, v in vars(args).items()}}))


def require_same(path: Path, then: dict[str, Any], now: dict[str, Any]) -> None:
    """ParameterError if what a file was measured with is not what would be measured with now."""
    for key, value in now.items():
        if key in then and then[key] != value:
            raise ParameterError(
                f"{path} was measured with {key} {then[key]}, now it is {value}: give another --json, or"
                " leave out --resume to begin again"
            )


class Log:
    """Results that outlive the process: a JSON line each, on disk as soon as it is there.

    runs: one a process that added something, what it says of itself. rows: answers. Without `resume` an
    earlier file is kept beside the new one, as *.bak.
    """

    def __init__(self, path: Path, resume: bool) -> None:
        self.path = path
        self.runs: list[dict[str, Any]] = []
        self.rows: list[Row] = []
        path.parent.mkdir(parents=True, exist_ok=True)
        if resume:
            self._read()
        elif path.exists():
            path.replace(path.with_name(f"{path.name}.bak"))

    def _read(self) -> None:
        text = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
        complete, _, torn = text.rpartition("\n")  # a process that was killed may have left half a line
        for number, line in enumerate(complete.split("\n") if complete else (), start=1):
            try:
                kind, value = next(iter(json.loads(line).items()))
                if kind == "more":
                    self.runs[-1].update(value)
                else:
                    {"run": self.runs, "row": self.rows}[kind].append(value)
            except (ValueError, LookupError, AttributeError, TypeError, StopIteration):
                raise ParameterError(
                    f"{self.path}, line {number} is damaged: remove it, or leave out --resume"
                ) from None
        if torn:
            write_atomic(self.path, f"{complete}\n" if complete else "")

    def start(self, run: dict[str, Any]) -> None:
        """A process begins to measure."""
        self._append({"run": run})
        self.runs.append(run)

    def update(self, more: dict[str, Any]) -> None:
        """What the process learned since of how it measures."""
        self._append({"more": more})
        self.runs[-1].update(more)

    def add(self, row: Row) -> None:
        self._append({"row": row})
        self.rows.append(row)

    def _append(self, value: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(value) + "\n")
            file.flush()
            os.fsync(file.fileno())
