"""Counts of drafts and the rates derived from them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.core.stats import DraftCounts, Seconds, SourceCounts

# depth, extra nodes beside the chain, accepted, emitted less than all of accepted + 1
verifications = st.tuples(st.integers(0, 5), st.integers(0, 4), st.integers(0, 5), st.integers(0, 5)).map(
    lambda v: (v[0], v[0] + (v[1] if v[0] else 0), min(v[2], v[0]), max(1, min(v[2], v[0]) + 1 - v[3]))
)


def test_rates_of_known_verifications() -> None:
    counts = DraftCounts()
    counts.record(depth=0, nodes=0, accepted=0, emitted=1)  # a plain step
    counts.record(depth=3, nodes=3, accepted=3, emitted=4)
    counts.record(depth=3, nodes=3, accepted=1, emitted=2)
    counts.record(depth=2, nodes=2, accepted=0, emitted=1)
    assert (counts.passes, counts.emitted, counts.drafts) == (4, 8, 3)
    assert (counts.draft_tokens, counts.accepted_tokens) == (8, 4)
    assert counts.tau == 2.0 and counts.acceptance_rate == 0.5
    assert counts.drafted_at == [3, 3, 2]
    assert counts.acceptance_per_position == pytest.approx([2 / 3, 1 / 3, 1 / 3])
    assert counts.conditional_acceptance == pytest.approx([2 / 3, 1 / 2, 1.0])


def test_what_lies_behind_an_end_counts_neither_as_accepted_nor_as_refused() -> None:
    counts = DraftCounts()
    counts.record(depth=4, nodes=4, accepted=4, emitted=2)
    assert counts.accepted_tokens == 2 and counts.emitted == 2
    assert counts.tested_at == [1, 1, 0, 0] and counts.accepted_at == [1, 1, 0, 0]
    assert counts.conditional_acceptance == [1.0, 1.0, 0.0, 0.0]


def test_nothing_counted_gives_zeros() -> None:
    counts = DraftCounts()
    assert (counts.tau, counts.acceptance_rate) == (0.0, 0.0)
    assert counts.acceptance_per_position == counts.conditional_acceptance == []


@given(st.lists(verifications, max_size=12))
def test_counts_hold_together(steps: list[tuple[int, int, int, int]]) -> None:
    counts = DraftCounts()
    for step in steps:
        counts.record(*step)
    assert counts.accepted_tokens == sum(counts.accepted_at) <= counts.draft_tokens
    for drafted, tested, accepted in zip(
        counts.drafted_at, counts.tested_at, counts.accepted_at, strict=True
    ):
        assert drafted >= tested >= accepted
    whole = [step for step in steps if step[3] == step[2] + 1]
    uncut = DraftCounts()
    for step in whole:
        uncut.record(*step)
    assert uncut.emitted == uncut.accepted_tokens + uncut.passes


@given(st.lists(verifications, max_size=8), st.lists(verifications, max_size=8))
def test_adding_counts_is_counting_both(
    one: list[tuple[int, int, int, int]], other: list[tuple[int, int, int, int]]
) -> None:
    sums, parts = DraftCounts(), [DraftCounts(), DraftCounts()]
    for part, steps in zip(parts, (one, other), strict=True):
        for step in steps:
            sums.record(*step)
            part.record(*step)
    parts[0].add(parts[1])
    assert parts[0] == sums


def test_drawn_and_branching_drafts_are_told_apart() -> None:
    counts = DraftCounts()
    counts.record(3, 3, 2, 3)
    counts.record(0, 0, 0, 1, sampled=True)  # nothing was drafted
    assert counts.sampled_drafts == 0 and not counts.branched
    counts.record(3, 3, 2, 3, sampled=True)
    counts.record(2, 5, 1, 2)
    assert counts.sampled_drafts == 1 and counts.branched


def test_counts_by_source_add_up_by_name() -> None:
    counts, more = DraftCounts(), DraftCounts()
    counts.record(3, 5, 2, 3, sources={"a": SourceCounts(1, 3, 2), "b": SourceCounts(1, 3, 1)})
    counts.record(2, 2, 0, 1, sources={"a": SourceCounts(1, 2, 0)})
    counts.record(0, 0, 0, 1)
    more.record(1, 1, 1, 2, sources={"b": SourceCounts(1, 1, 1)})
    counts.add(more)
    assert counts.sources == {"a": SourceCounts(2, 5, 2), "b": SourceCounts(2, 4, 2)}


def test_seconds_subtract() -> None:
    before = Seconds(1.0, 2.0, 3.0, 4.0)
    after = before.copy()
    after.target += 0.5
    assert after - before == Seconds(0.5, 0.0, 0.0, 0.0) and before.target == 1.0
