"""Whether the answers are plain decoding's, token for token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from slipstream.bench.bundle import BenchBundle, PromptInfo, Run, Setting
from slipstream.core.sequence import first_difference


@dataclass(frozen=True)
class Difference:
    """An answer that parts from plain decoding's at token `at`. why: what makes that no fault; None: it is
    one."""

    setting: Setting
    prompt: str
    round: int
    at: int
    why: str | None

    @property
    def broken(self) -> bool:
        return self.why is None

    def __str__(self) -> str:
        told = self.why or "the same tokens were promised"
        name = f"{self.setting.label} ({self.setting.where})"
        return f"DIFFERENT TOKENS: {name} on {self.prompt} from token {self.at}; {told}"


def part(setting: Setting, prompts: Sequence[PromptInfo], run: Run, plain: Run) -> Iterator[Difference]:
    """Where a run's answers part from plain decoding's answers to the same unit."""
    for ours, theirs in zip(run.answers, plain.answers, strict=True):
        at = first_difference(ours.ids, theirs.ids)
        if at is not None:
            why = ours.counts.counts.why_not_plain
            yield Difference(setting, prompts[ours.prompt].name, run.round, at, why)


def differences(bundle: BenchBundle) -> list[Difference]:
    """Of every run against plain decoding beside it, and of plain decoding between rounds."""
    plain = {(r.round, r.unit): r for r in bundle.runs if bundle.of(r).plain}
    first: dict[int, Run] = {}
    for (_, unit), run in plain.items():
        first.setdefault(unit, run)
    found: list[Difference] = []
    for run in bundle.runs:
        setting = bundle.of(run)
        beside = first.get(run.unit) if setting.plain else plain.get((run.round, run.unit))
        if beside is not None and beside is not run:
            found += part(setting, bundle.prompts, run, beside)
    return found
