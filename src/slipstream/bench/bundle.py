"""The file that `slipstream bench` writes: raw seconds, counts and token ids of every answer. Version 1.

A *setting* is a way of decoding at one temperature and batch size, a *unit* the prompts of one task that are
answered together. Every setting answers every unit once a round, plain decoding among them. Rates, speed-ups
and predictions are derived when they are asked for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from slipstream.core.spec import parse_spec
from slipstream.core.stats import DraftCounts, Seconds
from slipstream.cost.accept import Acceptance
from slipstream.cost.bundle import (
    AcceptanceCounts,
    AtLeastOne,
    Count,
    MachineInfo,
    Positive,
    Raw,
    named,
    read_raw,
)
from slipstream.errors import ParameterError

VERSION = 1
PLAIN = "none"
_CURVES = ("curve", "drafter")  # options of a controller that say where its numbers come from

NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Setting(Raw):
    """drafter: as --drafter takes it, "none" is plain decoding. depth, nodes: the fixed size of its drafts,
    0 where a controller decides."""

    drafter: str
    depth: Count = 0
    nodes: Count = 0
    controller: str = ""
    temperature: NotNegative = 0.0
    batch: AtLeastOne = 1

    @property
    def plain(self) -> bool:
        return self.drafter == PLAIN

    @property
    def fixed(self) -> bool:
        """Whether it drafts, always as much."""
        return not self.plain and not self.controller

    @property
    def tree(self) -> bool:
        return self.nodes > self.depth

    @property
    def how(self) -> str:
        """How much it drafts, for people."""
        if self.plain:
            return ""
        if self.controller:
            name, values = parse_spec(self.controller)
            told = [f"{key}={value}" for key, value in values.items() if key not in _CURVES]
            return " ".join([name, *told])
        return f"{self.depth} of {self.nodes}" if self.tree else str(self.depth)

    @property
    def label(self) -> str:
        return "plain" if self.plain else f"{self.drafter} {self.how}"

    @property
    def where(self) -> str:
        """The conditions that it shares with plain decoding beside it."""
        warm = f", temperature {self.temperature:g}" if self.temperature else ""
        return f"batch {self.batch}{warm}"


class PromptInfo(Raw):
    """ids: its tokens, which a replay needs."""

    name: str
    task: str
    ids: list[Count] = Field(min_length=1)


class Unit(Raw):
    """Prompts (by place) of one task that are answered together, as many as the batch has rows; a task with
    fewer prompts repeats them."""

    task: str
    batch: AtLeastOne
    temperature: NotNegative
    prompts: list[Count] = Field(min_length=1)


class Counts(Raw):
    """`DraftCounts` of an answer."""

    passes: Count
    emitted: Count
    drafts: Count = 0
    sampled_drafts: Count = 0
    draft_tokens: Count = 0
    accepted_tokens: Count = 0
    drafted_at: list[Count] = Field(default_factory=list)
    tested_at: list[Count] = Field(default_factory=list)
    accepted_at: list[Count] = Field(default_factory=list)

    @classmethod
    def of(cls, counts: DraftCounts) -> Counts:
        return cls(**{name: getattr(counts, name) for name in cls.model_fields})

    @property
    def counts(self) -> DraftCounts:
        return DraftCounts(**self.model_dump())

    def acceptance(self, depth: int) -> Acceptance:
        """Of drafts that were asked to be so deep."""
        told = AcceptanceCounts.of(self.counts, drafter="", task="", depth=max(depth, 1))
        return told.acceptance


class Parts(Raw):
    """Seconds by where they went."""

    target: NotNegative
    prefill: NotNegative
    drafter: NotNegative
    other: NotNegative

    @classmethod
    def of(cls, seconds: Seconds) -> Parts:
        """What the clock says; differences of it may be a rounding below nothing."""
        return cls(**{name: max(getattr(seconds, name), 0.0) for name in cls.model_fields})

    @property
    def total(self) -> float:
        return self.target + self.prefill + self.drafter + self.other


class Steady(Raw):
    """The steps in which the whole batch decoded: no row in its first two passes, none near its end, where
    drafts are cut. context: mean length of the rows in these steps."""

    steps: Count
    tokens: Count
    context: NotNegative
    seconds: Parts


class Answer(Raw):
    """prompt: its place. ids: what was generated, the end token included. steady: counts of steady steps."""

    prompt: Count
    ids: list[Count] = Field(min_length=1)
    counts: Counts
    steady: Counts


class Run(Raw):
    """One unit answered with one setting. seconds: from the first prompt read to the last token. load: the
    machine's load average before it. session: the process that did it."""

    setting: Count
    unit: Count
    round: Count
    session: Count
    seconds: Positive
    parts: Parts
    steady: Steady
    answers: list[Answer] = Field(min_length=1)
    load: NotNegative = 0.0

    @property
    def tokens(self) -> int:
        return sum(len(a.ids) for a in self.answers)

    @property
    def decoding(self) -> float:
        """Seconds without the target's reading of the prompts; a drafter's reading of them stays."""
        return max(self.seconds - self.parts.prefill, 1e-9)


class DrafterNote(Raw):
    """memory_bytes: what it held beyond the target when it was built. weights: a hash of them, "" if none
    or unknown."""

    drafter: str
    memory_bytes: Count = 0
    weights: str = ""


class SessionNote(Raw):
    """A process that measured. busy_because: why the machine was not quiet when it began."""

    started: str
    command: list[str]
    load: NotNegative
    busy_because: list[str] = Field(default_factory=list)
    versions: dict[str, str]
    machine: MachineInfo


class Plan(Raw):
    """What to measure: every drafter at every length (none: its own) and with every controller, at every
    temperature and batch size. tokens: most of an answer. seed: of the answers; prompt i has seed + i."""

    drafters: list[str] = Field(default_factory=list)
    lengths: list[AtLeastOne] = Field(default_factory=list)
    controllers: list[str] = Field(default_factory=list)
    temperatures: list[NotNegative] = Field(default_factory=lambda: [0.0], min_length=1)
    batches: list[AtLeastOne] = Field(default_factory=lambda: [1], min_length=1)
    rounds: AtLeastOne = 3
    tokens: AtLeastOne = 64
    seed: int = 0


class TargetNote(Raw):
    """What `model.identity.identity` says of the target."""

    name: str
    fingerprint: str
    weights: str
    dtype: str
    hidden_size: AtLeastOne
    num_layers: AtLeastOne
    vocab_size: AtLeastOne
    tokenizer: str
    template: str | None


class Head(Raw):
    """All that the runs of one bundle have in common."""

    kind: Literal["slipstream-bench"]
    version: Literal[1]
    model: str
    target: TargetNote
    plan: Plan
    prompts: list[PromptInfo] = Field(min_length=1)
    settings: list[Setting] = Field(min_length=1)
    units: list[Unit] = Field(min_length=1)


class BenchBundle(Head):
    """complete: whether every setting has answered every unit in every round."""

    created: str
    complete: bool
    drafters: list[DrafterNote] = Field(default_factory=list)
    sessions: list[SessionNote] = Field(min_length=1)
    runs: list[Run] = Field(min_length=1)

    @model_validator(mode="after")
    def _everything_named_is_there(self) -> BenchBundle:
        for i, unit in enumerate(self.units):
            if max(unit.prompts) >= len(self.prompts):
                raise ValueError(f"units.{i}: there is no prompt {max(unit.prompts)}")
        done = [(run.round, run.unit, run.setting) for run in self.runs]
        if len(set(done)) < len(done):
            raise ValueError("runs: one of them is there twice")
        counts = {"setting": len(self.settings), "unit": len(self.units), "session": len(self.sessions)}
        for i, run in enumerate(self.runs):
            for name, count in counts.items():
                if getattr(run, name) >= count:
                    raise ValueError(f"runs.{i}: there is no {name} {getattr(run, name)}")
            if [a.prompt for a in run.answers] != self.units[run.unit].prompts:
                raise ValueError(f"runs.{i}: its answers are not to the prompts of unit {run.unit}")
        if not any(self.settings[run.setting].plain for run in self.runs):
            raise ValueError("runs: plain decoding is not among them, so nothing can be compared with it")
        return self

    @property
    def tasks(self) -> list[str]:
        return list(dict.fromkeys(unit.task for unit in self.units))

    def of(self, run: Run) -> Setting:
        return self.settings[run.setting]


def read_bench(path: Path) -> BenchBundle:
    """From a file. ParameterError names the file and what is wrong with it."""
    bundle = read_raw(path, BenchBundle, f"a bench bundle of version {VERSION}", "slipstream bench")
    with named(path):
        for i, run in enumerate(bundle.runs):
            for answer in run.answers:
                try:  # counts that contradict each other are told now
                    answer.counts.acceptance(len(answer.counts.drafted_at))
                    answer.steady.acceptance(len(answer.steady.drafted_at))
                except ParameterError as error:
                    raise ParameterError(f"runs.{i}: {error}") from None
    return bundle
