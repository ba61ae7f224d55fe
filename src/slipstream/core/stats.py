"""Raw counts of what was drafted and accepted. Rates are derived, never stored.

Three different numbers go by the name "acceptance rate" (vllm#9565). From these counts:
accepted / drafted tokens is `acceptance_rate`; accepted at position i / drafts is
`acceptance_per_position` (unconditional, as vLLM and llama.cpp report it); accepted at i / tested
at i, where tested means that everything before it was accepted, is `conditional_acceptance`, the one
a cost model needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest


@dataclass
class SourceCounts:
    """Counts of the drafts that one drafter, or part of a composed one, made or had a share in."""

    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0


_NUMBERS = ("passes", "emitted", "drafts", "sampled_drafts", "draft_tokens", "accepted_tokens")
_BY_POSITION = ("drafted_at", "tested_at", "accepted_at")


@dataclass
class DraftCounts:
    """Counts of one sequence, or summed over many. Only emitted tokens count."""

    passes: int = 0  # target passes (verifications), plain steps included
    emitted: int = 0  # tokens made final
    drafts: int = 0  # passes with a draft that was not empty
    sampled_drafts: int = 0  # of those, drawn from a law q and verified by the ratio test
    draft_tokens: int = 0
    accepted_tokens: int = 0
    drafted_at: list[int] = field(default_factory=list)  # drafts that reached depth i+1
    tested_at: list[int] = field(default_factory=list)  # of those, all before depth i+1 accepted
    accepted_at: list[int] = field(default_factory=list)
    # By who drafted: in a merged tree several may have drafted a token, which then counts for each.
    sources: dict[str, SourceCounts] = field(default_factory=dict)

    def record(
        self,
        depth: int,
        nodes: int,
        accepted: int,
        emitted: int,
        sampled: bool = False,
        sources: Mapping[str, SourceCounts] | None = None,
    ) -> None:
        """One verification: draft depth and drafted nodes, accepted drafted tokens, emitted tokens.

        sampled: the draft carried a law q. sources: what each source had in it and kept of it
        (`Draft.counts_by_source`). What was accepted but lies behind an end (EOS, stop string, limit) was
        not emitted and does not count, neither as accepted nor as tested.
        """
        accepted = min(accepted, emitted)
        self.passes += 1
        self.emitted += emitted
        self.drafts += nodes > 0
        self.sampled_drafts += nodes > 0 and sampled
        self.draft_tokens += nodes
        self.accepted_tokens += accepted
        while len(self.drafted_at) < depth:
            for counter in (self.drafted_at, self.tested_at, self.accepted_at):
                counter.append(0)
        for i in range(depth):
            self.drafted_at[i] += 1
            self.tested_at[i] += accepted >= i and emitted > i
            self.accepted_at[i] += accepted > i
        for source, counts in (sources or {}).items():
            self._add_source(source, counts)

    def _add_source(self, source: str, more: SourceCounts) -> None:
        counts = self.sources.setdefault(source, SourceCounts())
        counts.drafts += more.drafts
        counts.draft_tokens += more.draft_tokens
        counts.accepted_tokens += more.accepted_tokens

    def copy(self) -> DraftCounts:
        found = DraftCounts()
        found.add(self)
        return found

    def __sub__(self, before: DraftCounts) -> DraftCounts:
        """What was counted since; the sources are left out."""
        found = DraftCounts(*(getattr(self, n) - getattr(before, n) for n in _NUMBERS))
        for name in _BY_POSITION:
            now, then = getattr(self, name), getattr(before, name)
            setattr(found, name, [n - t for n, t in zip_longest(now, then, fillvalue=0)])
        return found

    def add(self, other: DraftCounts) -> None:
        for name in _NUMBERS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in _BY_POSITION:
            mine, theirs = getattr(self, name), getattr(other, name)
            mine.extend([0] * (len(theirs) - len(mine)))
            for i, value in enumerate(theirs):
                mine[i] += value
        for source, counts in other.sources.items():
            self._add_source(source, counts)

    @property
    def tau(self) -> float:
        """Tokens emitted a target pass, the bonus token included; 1 is plain decoding."""
        return self.emitted / self.passes if self.passes else 0.0

    @property
    def branched(self) -> bool:
        """Whether any draft was a tree with branches rather than a chain."""
        return self.draft_tokens > sum(self.drafted_at)

    @property
    def why_not_plain(self) -> str | None:
        """Why tokens may differ from plain decoding's although nothing is wrong; None: they must not.

        Only chains of point masses promise the very same tokens: a drawn draft promises the law, and a
        branching one adds numbers in another order, so a near-tie may fall the other way.
        """
        if self.sampled_drafts:
            return "drafts are drawn at random, so only the law is equal"
        if self.branched:
            return "drafts branch, so near-ties may round the other way"
        return None

    @property
    def acceptance_rate(self) -> float:
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else 0.0

    @property
    def acceptance_per_position(self) -> list[float]:
        """accepted at position i / drafts (unconditional)."""
        return _ratios(self.accepted_at, [self.drafts] * len(self.accepted_at))

    @property
    def conditional_acceptance(self) -> list[float]:
        """accepted at position i / drafts in which everything before it was accepted."""
        return _ratios(self.accepted_at, self.tested_at)


def _ratios(over: Sequence[int], under: Sequence[int]) -> list[float]:
    return [a / b if b else 0.0 for a, b in zip(over, under, strict=True)]


@dataclass
class PrefixCounts:
    """Prompt tokens of all sequences that were admitted, and of these those computed for another before."""

    queries: int = 0
    hits: int = 0


@dataclass
class Seconds:
    """Wall-clock seconds of engine steps, by where they went."""

    target: float = 0.0
    prefill: float = 0.0
    drafter: float = 0.0
    other: float = 0.0

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(
            self.target + other.target,
            self.prefill + other.prefill,
            self.drafter + other.drafter,
            self.other + other.other,
        )

    def __sub__(self, before: Seconds) -> Seconds:
        return Seconds(
            self.target - before.target,
            self.prefill - before.prefill,
            self.drafter - before.drafter,
            self.other - before.other,
        )

    def copy(self) -> Seconds:
        return Seconds(self.target, self.prefill, self.drafter, self.other)
