"""What `drafters.py` says of its results: tables, and whether each target is met."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from rich.console import Console
from rich.table import Table

from common import Clock, Log, Row, by_prompt, rate, ratios, same_ids, spread, whole
from slipstream.core.sequence import first_difference
from slipstream.core.stats import DraftCounts, SourceCounts
from slipstream.model.progress import size

PLAIN = "none"
POSITIONS = 6
CHAIN, TREES = "draft", ("draft-w2-n7", "draft-w3-n7", "draft-w2-n15", "draft-w3-n15")
COPYING = ("summarization", "edit")


def decoding(row: Row) -> float:
    """Seconds without the target's reading of the prompt; a drafter's reading of it stays."""
    return float(row["seconds"] - row["parts"]["prefill"])


CLOCKS: dict[str, Clock] = {"whole requests": whole, "decoding only": decoding}


@dataclass(frozen=True)
class Summary:
    """One setting over all its answers.

    ms_a_draft and drafted_a_second leave out the first draft of each answer, for which a drafter may read
    the prompt; drafter_share is of the whole time, that reading included. memory: bytes beyond the target.
    """

    answers: int
    counts: DraftCounts
    ms_a_draft: float | None
    drafted_a_second: float | None
    drafter_share: float
    memory: int

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Summary:
        counts = DraftCounts()
        for row in rows:
            sources = {k: SourceCounts(**v) for k, v in row["counts"]["sources"].items()}
            counts.add(DraftCounts(**{**row["counts"], "sources": sources}))
        drafted = [r for r in rows if r["first_draft"]]
        seconds = sum(r["parts"]["drafter"] - r["first_draft"]["seconds"] for r in drafted)
        drafts = counts.drafts - len(drafted)
        tokens = counts.draft_tokens - sum(r["first_draft"]["tokens"] for r in drafted)
        return cls(
            len(rows),
            counts,
            1000 * seconds / drafts if drafts else None,
            tokens / seconds if drafts else None,
            sum(r["parts"]["drafter"] for r in rows) / sum(map(whole, rows)),
            max(r["memory"] for r in rows),
        )


@dataclass(frozen=True)
class Target:
    """An aim of the project. met None: not measured."""

    aim: str
    met: bool | None
    found: str = ""

    def __str__(self) -> str:
        verdict = {True: "met", False: "NOT MET", None: "not measured"}[self.met]
        return f"{self.aim}: {verdict}{f'; {self.found}' if self.found else ''}"


@dataclass(frozen=True)
class Sheet:
    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]

    def rich(self) -> Table:
        table = Table(title=self.title, title_justify="left")
        for i, name in enumerate(self.head):
            table.add_column(name, justify="right" if i else "left", overflow="fold")
        for row in self.rows:
            table.add_row(*row)
        return table

    def markdown(self) -> str:
        lines = [self.head, ["---", *["---:"] * (len(self.head) - 1)], *self.rows]
        return "\n".join([f"**{self.title}**", "", *(f"| {' | '.join(line)} |" for line in lines), ""])


class Report:
    """order: settings as they shall be listed. notes: what a reader must know of one."""

    def __init__(self, log: Log, order: Sequence[str], notes: Mapping[str, str]) -> None:
        self._log, self._notes = log, notes
        there = {r["setting"] for r in log.rows}
        self.measured = [name for name in order if name in there]
        self.missing = {
            name: reason for run in log.runs for name, reason in run["missing"].items() if name not in there
        }
        self.specs = {name: spec for run in log.runs for name, spec in run["specs"].items()}
        self.tasks = list(dict.fromkeys(r["task"] for r in log.rows))

    def rows(self, name: str, task: str | None = None) -> list[Row]:
        return [r for r in self._log.rows if r["setting"] == name and task in (None, r["task"])]

    @cached_property
    def summaries(self) -> dict[str, Summary]:
        return {name: Summary.of(self.rows(name)) for name in self.measured}

    def ratio(
        self, name: str, task: str | None = None, base: str = PLAIN, clock: Clock = whole
    ) -> float | None:
        """Tokens over seconds against another setting's, over the prompts that both have answered."""
        mine, theirs = by_prompt(self.rows(name, task)), by_prompt(self.rows(base, task))
        both = [key for key in mine if key in theirs]
        if not both:
            return None
        return rate([mine[k] for k in both], clock) / rate([theirs[k] for k in both], clock)

    # -- tables ---------------------------------------------------------------------------------

    def sheets(self) -> list[Sheet]:
        return [self._drafting(), self._rates(), *(self._ratios(title) for title in CLOCKS)]

    def _drafting(self) -> Sheet:
        head = ["setting", "tau", *(f"α{i}" for i in range(1, POSITIONS + 1))]
        head += ["nodes/draft", "ms/draft", "share of time", "extra memory", "same as plain"]
        lines = []
        for name, s in self.summaries.items():
            accepted = s.counts.conditional_acceptance[:POSITIONS]
            cells = [name, f"{s.counts.tau:.2f}", *(f"{a:.2f}" for a in accepted)]
            cells += ["-"] * (POSITIONS - len(accepted))
            cells.append(f"{s.counts.draft_tokens / s.counts.drafts:.1f}" if s.counts.drafts else "-")
            cells.append("-" if s.ms_a_draft is None else f"{s.ms_a_draft:.2f}")
            cells += [f"{100 * s.drafter_share:.1f} %", size(s.memory) if s.memory else "-"]
            lines.append([*cells, self._same(name)])
        for name, reason in self.missing.items():
            lines.append([name, *["-"] * (len(head) - 2), reason if len(reason) < 30 else "see below"])
        return Sheet("drafting", head, lines)

    def _same(self, name: str) -> str:
        """Answers with the ids of plain decoding, of those that both have."""
        mine, plain = self.rows(name), self.rows(PLAIN)
        return f"{same_ids(mine, plain)}/{len(by_prompt(mine).keys() & by_prompt(plain).keys())}"

    def _rates(self) -> Sheet:
        lines = [
            [
                name,
                *(tokens_a_second(self.rows(name, task), whole) for task in self.tasks),
                *(tokens_a_second(self.rows(name), clock) for clock in CLOCKS.values()),
            ]
            for name in self.measured
        ]
        head = ["setting", *self.tasks, "all", "all, decoding only"]
        return Sheet("tokens/s of whole requests, prompt reading included", head, lines)

    def _ratios(self, title: str) -> Sheet:
        clock = CLOCKS[title]
        lines = [
            [
                name,
                *(times(self.ratio(name, task, clock=clock)) for task in (*self.tasks, None)),
                spread(ratios(self.rows(name), self.rows(PLAIN), clock)),
            ]
            for name in self.measured
        ]
        head = ["setting", *self.tasks, "all", "each prompt: median (min-max)"]
        return Sheet(f"tokens/s against plain decoding, {title}", head, lines)

    # -- what follows from them -----------------------------------------------------------------

    def targets(self) -> list[Target]:
        return [
            self._at_least("suffix", self.tasks, 1.0, "every task"),
            self._at_least("suffix", COPYING, 1.8, "summarisation and code editing"),
            self._int8(),
            *(self._deeper(tree) for tree in TREES),
            self._chains_are_plain(),
        ]

    def _at_least(self, name: str, tasks: Sequence[str], least: float, where: str) -> Target:
        aim = f"{name} at least {least} times plain on {where}"
        met, told = True, []
        for title, clock in CLOCKS.items():
            of = {task: self.ratio(name, task, clock=clock) for task in tasks}
            known = {task: ratio for task, ratio in of.items() if ratio is not None}
            if len(known) < len(of):
                return Target(aim, None)
            below = {task: ratio for task, ratio in known.items() if ratio < least}
            lowest = min(known, key=lambda task: known[task])
            met = met and not (clock is whole and below)
            shown = ", ".join(f"{task} {times(r)}" for task, r in (below or {lowest: known[lowest]}).items())
            told.append(f"{title}: {'below' if below else 'lowest'} {shown}")
        return Target(aim, met, "; ".join(told))

    def _int8(self) -> Target:
        aim, int8 = "int8 draft at least 1.3 times the bf16 draft's tokens/s", f"{CHAIN}-int8"
        ours, bf16 = (s.drafted_a_second if (s := self.summaries.get(n)) else None for n in (int8, CHAIN))
        if ours is None or bf16 is None:
            return Target(aim, None)
        found = (
            f"drafting {ours:.2f} against {bf16:.2f} tokens/s, {times(ours / bf16)};"
            f" decoding with it, whole requests, {times(self.ratio(int8, base=CHAIN))}"
        )
        return Target(aim, ours >= 1.3 * bf16, found)

    def _deeper(self, tree: str) -> Target:
        aim = f"{tree} has a higher tau than the chain of equal depth"
        if not {tree, CHAIN} <= set(self.measured):
            return Target(aim, None)
        ours, chain = self._taus(tree, CHAIN)
        return Target(aim, ours > chain, f"{ours:.3f} against {chain:.3f}")

    def _taus(self, *names: str) -> list[float]:
        """Over the prompts that all of these have answered."""
        rows = [by_prompt(self.rows(name)) for name in names]
        both = [key for key in rows[0] if all(key in of for of in rows)]
        return [Summary.of([of[key] for key in both]).counts.tau if both else 0.0 for of in rows]

    def _chains_are_plain(self) -> Target:
        """Chains must give plain decoding's tokens; a tree may part from them where two nearly tie."""
        drafting = [name for name in self.measured if name != PLAIN]
        trees = [name for name in drafting if self.summaries[name].counts.branched]
        chains = [name for name in drafting if name not in trees]
        wrong, parted = (
            [f"{name} {where}" for name in names for where in self._partings(name)]
            for names in (chains, trees)
        )
        found = [f"chains part {', '.join(wrong)}"] if wrong else []
        found.append(f"trees part: {', '.join(parted) or 'nowhere'}")
        aim = "every chain gives plain decoding's tokens"
        return Target(aim, not wrong if chains else None, "; ".join(found))

    def _partings(self, name: str) -> list[str]:
        """Where its answers first differ from plain decoding's."""
        plain = by_prompt(self.rows(PLAIN))
        told = []
        for key, row in by_prompt(self.rows(name)).items():
            at = first_difference(row["ids"], plain[key]["ids"]) if key in plain else None
            if at is not None:
                told.append(f"on {key[0]} from token {at}")
        return told

    def remarks(self) -> list[str]:
        """What else the figures must not be read without."""
        told = [
            "α1, α2, …: accepted at this depth, of the drafts accepted up to it. ms/draft: without the first"
            " draft of an answer, for which a draft model reads the prompt. Decoding only: without the"
            " target's reading of the prompt.",
            *map(self._named, self.measured),
            *(f"{name} is not measured: {reason}" for name, reason in self.missing.items()),
        ]
        for name in self.measured:
            forgot = sum(r["forgot"] for r in self.rows(name))
            if forgot:
                told.append(f"{name}: {forgot} answers came after a resume and began with an empty memory")
        return told

    def _named(self, name: str) -> str:
        note = self._notes.get(name)
        return f"{name}: {self.specs[name]}{f' ({note})' if note else ''}"

    def provenance(self) -> list[str]:
        runs = self._log.runs
        first = runs[0]
        where = " / ".join(dict.fromkeys(f"{r['machine']}; {r['versions']}" for r in runs))
        answers, rounds = len(self.rows(PLAIN)), 1 + max(r["round"] for r in self._log.rows)
        return [
            where,
            f"{first['target']} {first['dtype']}, draft {first['draft']}, greedy, {first['max_tokens']}"
            f" tokens, {answers} plain answers in {rounds} round(s), measured in {len(runs)} run(s)",
        ]

    def show(self, console: Console, markdown: bool) -> None:
        lines = self.remarks()
        if markdown:
            console.print("\n".join(self.provenance()), "\n", soft_wrap=True, markup=False)
            for sheet in self.sheets():
                console.print(sheet.markdown(), soft_wrap=True, markup=False)
            lines = [f"- {line}" for line in [*lines, *map(str, self.targets())]]
            console.print("\n".join(lines), soft_wrap=True, markup=False)
            return
        console.print("\n".join(self.provenance()), "\n", markup=False)
        for sheet in self.sheets():
            console.print(sheet.rich(), "\n")
        console.print("\n".join([*lines, "", *map(str, self.targets())]), markup=False)

    def record(self) -> dict[str, Any]:
        """All of it, for other programs."""
        return {
            "runs": self._log.runs,
            "missing": self.missing,
            "summaries": {name: self._summary(name) for name in self.measured},
            "targets": [asdict(target) for target in self.targets()],
            "rows": self._log.rows,
        }

    def _summary(self, name: str) -> dict[str, Any]:
        summary = self.summaries[name]
        return {
            **asdict(summary),
            "tau": summary.counts.tau,
            "conditional_acceptance": summary.counts.conditional_acceptance,
            "same_as_plain": self._same(name),
            **{
                title: {task or "all": self.ratio(name, task, clock=clock) for task in (*self.tasks, None)}
                for title, clock in CLOCKS.items()
            },
        }


def times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"


def tokens_a_second(rows: Sequence[Row], clock: Clock) -> str:
    return f"{rate(rows, clock):.2f}" if rows else "-"
