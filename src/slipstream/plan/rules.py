"""Rules of thumb for choosing a draft, as numbers, with what each miss costs; and the checklist."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slipstream.cost.accept import Acceptance, wilson
from slipstream.cost.curve import DraftTime
from slipstream.cost.model import best_length
from slipstream.plan.page import counted, gigabytes
from slipstream.plan.setup import Candidate, Setup

if TYPE_CHECKING:
    from slipstream.plan.advise import BatchAdvice

SPEED_RATIO, ACCEPTANCE, SIZE_RATIO = 5.0, 0.70, 1 / 5
ENOUGH = 200  # tested tokens from which an acceptance rate is worth planning with


@dataclass(frozen=True)
class Rule:
    """One rule for one drafter. passed: None where it cannot be told. cost: what the miss costs, in words.

    lost: the speed-up that meeting the rule, and nothing else, would have, less the one there is.
    """

    name: str
    wanted: str
    value: str
    passed: bool | None
    lost: float = 0.0
    cost: str = ""


@dataclass(frozen=True)
class Check:
    """One line of the checklist. passed: None where it cannot be told."""

    name: str
    passed: bool | None
    detail: str


@dataclass(frozen=True)
class _Scaled:
    """A drafter that takes another time."""

    draft: DraftTime
    factor: float

    def draft_seconds(self, rows: int, depth: int, nodes: int, context: float = 0.0) -> float:
        return self.factor * self.draft.draft_seconds(rows, depth, nodes, context)

    def draft_error(self, rows: int, depth: int, nodes: int) -> float:
        return self.draft.draft_error(rows, depth, nodes)


def check_rules(setup: Setup, candidate: Candidate, batch: int) -> tuple[Rule, ...]:
    """Speed ratio, acceptance, size and vocabulary at one batch size."""
    return (
        _speed(setup, candidate, batch),
        _acceptance(setup, candidate, batch),
        _size(setup, candidate, batch),
        _vocabulary(candidate),
    )


def _gain(setup: Setup, candidate: Candidate, batch: int, draft: DraftTime, seen: Acceptance) -> float:
    longest = max(candidate.longest, 1)
    return best_length(setup.costs, draft, seen, batch, longest).speedup


def _lost(
    setup: Setup,
    candidate: Candidate,
    batch: int,
    draft: DraftTime | None = None,
    seen: Acceptance | None = None,
) -> tuple[float, str]:
    now = _gain(setup, candidate, batch, candidate.draft, candidate.rate)
    then = _gain(setup, candidate, batch, draft or candidate.draft, seen or candidate.rate)
    return then - now, f"speed-up {now:.2f} instead of {then:.2f} at batch {batch}"


def _speed(setup: Setup, candidate: Candidate, batch: int) -> Rule:
    name, wanted = "speed ratio", f"target step at least {SPEED_RATIO:g} times a drafted token"
    step = float(setup.step.seconds(batch, 1, setup.context))
    token = candidate.draft.draft_seconds(batch, 1, 1, setup.context)
    if not token:
        return Rule(name, wanted, "drafting is free", True)
    ratio = step / token
    if ratio >= SPEED_RATIO:
        return Rule(name, wanted, f"{ratio:.1f}", True)
    lost, cost = _lost(setup, candidate, batch, draft=_Scaled(candidate.draft, ratio / SPEED_RATIO))
    return Rule(name, wanted, f"{ratio:.1f}", False, lost, cost)


def _acceptance(setup: Setup, candidate: Candidate, batch: int) -> Rule:
    seen, name, wanted = candidate.rate, "acceptance", f"at least {ACCEPTANCE:.0%} of tested tokens"
    low, high = wilson(sum(seen.accepted), sum(seen.tested))
    value = (
        f"{seen.rate:.0%} as given"
        if setup.given and not candidate.trees
        else f"{seen.rate:.0%} ({low:.0%} to {high:.0%})"
    )
    if seen.rate >= ACCEPTANCE:
        return Rule(name, wanted, value, True)
    better = Acceptance.synthetic([ACCEPTANCE], max(candidate.longest, 1))
    lost, cost = _lost(setup, candidate, batch, seen=better)
    return Rule(name, wanted, value, False, max(lost, 0.0), cost if lost > 0 else "nothing at this batch")


def _size(setup: Setup, candidate: Candidate, batch: int) -> Rule:
    name, wanted = "size", "at most 1/5 of the target's parameters"
    if not candidate.parameters:
        return Rule(name, wanted, "no weights", True)
    ratio = candidate.parameters / setup.parameters
    value = f"1/{1 / ratio:.1f}"
    if ratio <= SIZE_RATIO:
        return Rule(name, wanted, value, True)
    more = candidate.memory_bytes * (1 - SIZE_RATIO / ratio)
    lost, cost = _lost(setup, candidate, batch, draft=_Scaled(candidate.draft, SIZE_RATIO / ratio))
    return Rule(
        name, wanted, value, False, lost, f"{gigabytes(more)} more memory; {cost}, if its time shrank too"
    )


def _vocabulary(candidate: Candidate) -> Rule:
    name, wanted = "vocabulary", "the target's own"
    if candidate.same_vocabulary:
        return Rule(name, wanted, "same", True)
    cost = "drafts must be translated (crossvocab): greedy drafts only, and words that differ are lost"
    if candidate.same_vocabulary is None:
        return Rule(
            name, wanted, "not known: the heads differ a little in width", None, cost=f"if not: {cost}"
        )
    return Rule(name, wanted, "another", False, cost=cost)


def checklist(
    setup: Setup, batches: Sequence[BatchAdvice], rules: Mapping[str, Sequence[Rule]]
) -> tuple[Check, ...]:
    """What should be so before speculation is turned on."""
    first = batches[0]
    best = first.best.drafter if first.best else first.options[0].drafter
    checks = [
        Check(
            f"memory-bound at batch {b.batch}",
            b.regime == "memory-bound",
            f"at most 10 % more for a step with {counted(b.spare, 'more token')} a row"
            if b.spare
            else "one more token adds more than 10 %",
        )
        for b in batches
    ]
    checks += [
        Check(f"{best}: {rule.name}", rule.passed, f"{rule.value} ({rule.wanted})" + _after(rule.cost))
        for rule in rules[best]
    ]
    for b in batches:
        if b.fits is not None:
            needed = b.memory + (b.best.memory if b.best else 0.0)
            checks.append(
                Check(
                    f"fits in memory at batch {b.batch}",
                    b.fits,
                    f"{gigabytes(needed)} of {gigabytes(setup.memory)} at context {setup.context}",
                )
            )
    for b in batches:
        option = b.best or b.options[0]
        p = option.prediction
        checks.append(
            Check(
                f"a gain is certain at batch {b.batch}",
                option.sure and option.pays,
                f"{p.speedup:.2f} times as fast ({p.low:.2f} to {p.high:.2f}) with {option.drafter}",
            )
        )
    if setup.estimate:
        checks.append(
            Check("measured, not estimated", False, "run `slipstream measure` on the machine itself")
        )
        return tuple(checks)
    tested = 0.0 if setup.given else min(sum(c.rate.tested) for c in setup.candidates)
    detail = f"the least of any drafter is {tested:.0f} tested tokens (wanted: {ENOUGH})"
    if setup.given:
        detail = "as given, not counted"
    checks.append(Check("acceptance counted often enough", tested >= ENOUGH, detail))
    detail = "; ".join(setup.busy) or f"repeats differ by at most {setup.spread or 0.0:.0%}"
    checks.append(Check("the machine was quiet", not setup.busy, detail))
    return tuple(checks)


def _after(cost: str) -> str:
    return f": {cost}" if cost else ""
