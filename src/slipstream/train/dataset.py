"""A data folder: conversations with the target's answers, tokenised, as `slipstream train data` makes it.

answers.jsonl    a finished conversation a line, appended one by one
manifest.json    the target, the arguments, the versions, counts
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from slipstream.errors import ParameterError
from slipstream.model import disk
from slipstream.model.identity import require_same, versions
from slipstream.model.store import read_json
from slipstream.prompts.rows import Message
from slipstream.train.samples import Sample, Split

ANSWERS = "answers.jsonl"
MANIFEST = "manifest.json"
FORMAT = 1
_FIELDS = ("target", "arguments", "held_out", "runs")  # without which a manifest is none


@dataclass(frozen=True)
class Conversation:
    """What was asked and answered. samples: one, or one a turn where the template writes earlier turns
    differently once the conversation goes on. finish: why each answer ended."""

    key: str
    messages: tuple[Message, ...]
    samples: tuple[Sample, ...]
    finish: tuple[str, ...] = ()
    where: str = ""

    @property
    def answer_tokens(self) -> int:
        return sum(sum(sample.loss) for sample in self.samples)

    def to_json(self) -> dict[str, Any]:
        return {
            "key": self.key,
            "messages": [dict(m) for m in self.messages],
            "samples": [{"tokens": list(s.tokens), "loss": _spans(s.loss)} for s in self.samples],
            "finish": list(self.finish),
            "where": self.where,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Conversation:
        return cls(
            value["key"],
            tuple(value["messages"]),
            tuple(_sample(s["tokens"], s["loss"]) for s in value["samples"]),
            tuple(value["finish"]),
            value["where"],
        )


def _spans(loss: Sequence[bool]) -> list[list[int]]:
    """Where loss is True, as [start, end) pairs."""
    spans, at = [], 0
    for on, run in groupby(loss):
        end = at + len(list(run))
        if on:
            spans.append([at, end])
        at = end
    return spans


def _sample(tokens: Sequence[int], spans: Sequence[Sequence[int]]) -> Sample:
    loss = [False] * len(tokens)
    for start, end in spans:
        loss[start:end] = [True] * (end - start)
    return Sample(tuple(tokens), tuple(loss))


def split_of(key: str, held_out: float) -> Split:
    """The same conversation is always on the same side, whatever others there are."""
    return "heldout" if int(key[:13], 16) / 16**13 < held_out else "train"


@dataclass(frozen=True)
class DataSet:
    """The samples of a data folder and its manifest."""

    manifest: Mapping[str, Any]
    train: tuple[Sample, ...]
    heldout: tuple[Sample, ...]

    def samples(self, split: Split) -> tuple[Sample, ...]:
        return self.train if split == "train" else self.heldout


def load_data(folder: Path, *, max_length: int | None = None, limit_tokens: int | None = None) -> DataSet:
    """Reads a data folder, also of a run that has not ended.

    max_length: most tokens of a sample, the rest is cut off. limit_tokens: most tokens in all, up to a
    whole sample.

    With two conversations or more (within the limits) at least one is held out, unless the folder was made
    with none.
    """
    manifest = read_manifest(folder)
    found = list(_conversations(folder))
    chosen: list[tuple[str, Sample]] = []
    total = 0
    for conversation, sample in ((c, s) for c in found for s in c.samples):
        cut = Sample(sample.tokens[:max_length], sample.loss[:max_length])
        if not any(cut.loss):
            continue
        total += len(cut.tokens)
        if limit_tokens is not None and total > limit_tokens:
            break
        chosen.append((conversation.key, cut))
    sides = _sides([key for key, _ in chosen], float(manifest["held_out"]))
    split: dict[Split, list[Sample]] = {"train": [], "heldout": []}
    for key, cut in chosen:
        split[sides[key]].append(cut)
    if not split["train"]:
        raise ParameterError(
            f"{folder} has {len(found)} finished conversations and none is left to train on: let"
            " slipstream train data make more, or raise the limits"
        )
    return DataSet(manifest, tuple(split["train"]), tuple(split["heldout"]))


def _conversations(folder: Path, *, mend: bool = False) -> Iterator[Conversation]:
    """The finished ones. ParameterError names the line of one that is not as it was written."""
    path = folder / ANSWERS
    for number, value in enumerate(disk.read_lines(path, mend=mend), start=1):
        try:
            conversation = Conversation.from_json(value)
        except (KeyError, TypeError, ValueError) as error:
            raise disk.damaged(path, number, error) from None
        yield conversation


def _sides(keys: Sequence[str], held_out: float) -> dict[str, Split]:
    """The side of each conversation; with two or more neither side is empty, unless none is held out."""
    sides: dict[str, Split] = {key: split_of(key, held_out) for key in keys}
    if held_out > 0 and len(sides) > 1:
        for side in ("heldout", "train"):
            if side not in sides.values():
                sides[min(sides)] = side  # type: ignore[assignment]
    return sides


def read_manifest(folder: Path) -> dict[str, Any]:
    if not (folder / MANIFEST).is_file():
        raise ParameterError(f"{folder} has no {MANIFEST}: make it with slipstream train data … -o {folder}")
    manifest = read_json(folder / MANIFEST)
    if manifest.get("kind") != "data" or manifest.get("format") != FORMAT:
        raise ParameterError(
            f"{folder} is not a data folder of this version: make one with slipstream train data"
        )
    if missing := [name for name in _FIELDS if name not in manifest]:
        raise ParameterError(f"{folder / MANIFEST} is damaged (no {missing[0]}): make the data again")
    return manifest


@dataclass
class DataWriter:
    """A data folder that grows; its user holds it (`disk.alone`). Opening one that is there already continues
    it: the target and all that decides what an answer is must be the same."""

    folder: Path
    target: Mapping[str, Any]
    arguments: Mapping[str, Any]
    held_out: float
    done: set[str] = field(default_factory=set)
    answer_tokens: int = 0
    runs: list[Any] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        with disk.writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        if (self.folder / MANIFEST).is_file():
            self._continue(read_manifest(self.folder))
        elif not disk.is_empty(self.folder):
            raise ParameterError(f"{self.folder} is not empty and no data folder: choose another --output")
        self.save(complete=False)

    def _continue(self, manifest: Mapping[str, Any]) -> None:
        require_same(manifest["target"], self.target, "answers", self.folder)
        known = {**manifest["arguments"], "held_out": manifest["held_out"]}
        now = {**self.arguments, "held_out": self.held_out}
        for name in sorted(known.keys() | now.keys()):
            if known.get(name) != now.get(name):
                raise ParameterError(
                    f"{self.folder} was begun with {name} {known.get(name)!r}, not {now.get(name)!r}:"
                    " give the same, or choose another --output"
                )
        self.runs = list(manifest["runs"])
        told = (*_FIELDS, "kind", "format", "complete", "conversations", "answer_tokens", "versions")
        self.facts = {name: value for name, value in manifest.items() if name not in told}
        for conversation in _conversations(self.folder, mend=True):
            self.done.add(conversation.key)
            self.answer_tokens += conversation.answer_tokens

    def add(self, conversation: Conversation) -> None:
        disk.append_line(self.folder / ANSWERS, conversation.to_json())
        self.done.add(conversation.key)
        self.answer_tokens += conversation.answer_tokens

    def save(self, *, complete: bool, run: Mapping[str, Any] | None = None, **facts: Any) -> dict[str, Any]:
        """Writes the manifest, with one more run if it made answers; gives it."""
        if run is not None and run["answers"]:
            self.runs.append(dict(run))
        self.facts.update(facts)  # those of the last run stand until this one ends
        manifest = {
            "kind": "data",
            "format": FORMAT,
            "target": dict(self.target),
            "arguments": dict(self.arguments),
            "held_out": self.held_out,
            "complete": complete,
            "conversations": len(self.done),
            "answer_tokens": self.answer_tokens,
            **self.facts,
            "runs": self.runs,
            "versions": versions(),
        }
        disk.write_whole(self.folder / MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())
        return manifest
