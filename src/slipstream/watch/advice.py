"""What the numbers advise, in words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slipstream.watch.rates import Rates

ENOUGH = 50  # drafts before anything is said about acceptance
_NOTHING = 0.02  # of first tokens accepted: the head is wrong, not weak
_FAR = 0.3


@dataclass(frozen=True, slots=True)
class Advice:
    """level: fine, look, act."""

    level: Literal["fine", "look", "act"]
    text: str


def advise(seen: Rates, off_above: int | None = None, predicted_tau: float | None = None) -> list[Advice]:
    """off_above: running requests above which drafting stops paying there, if that was measured.
    predicted_tau: of the plan. The first advice is the most urgent one.
    """
    found = list[Advice]()
    if seen.drafts is None and seen.tau is None:
        return [
            Advice("look", "this server reports no speculative decoding: it is off, or too old to report it")
        ]
    if seen.drafts == 0:
        return [Advice("look", "nothing was drafted: no requests, or drafting is switched off at this load")]
    if seen.drafts is not None and seen.drafts < ENOUGH:
        return [Advice("look", f"{seen.drafts:.0f} drafts are too few to judge; {ENOUGH} are enough")]
    first = seen.per_position[0] if seen.per_position else None
    if first is not None and first < _NOTHING:
        found.append(
            Advice(
                "act",
                f"{first:.1%} of first tokens are accepted: the drafter does not belong to this target"
                " (another model's"
                " head, tapped layers counted otherwise, another vocabulary); export it again or turn it off",
            )
        )
    elif first is not None and first < _FAR:
        found.append(
            Advice(
                "act",
                f"only {first:.0%} of first tokens are accepted: the draft is too far from the target's"
                " family or from"
                " your texts; train it on your prompts, or use n-grams",
            )
        )
    elif first is None and seen.tau is not None and seen.tau < 1.1:
        found.append(Advice("act", f"tau is {seen.tau:.2f}, that of no drafting at all: check the drafter"))
    if predicted_tau is not None and seen.tau is not None and seen.tau - 1 < 0.5 * (predicted_tau - 1):
        found.append(
            Advice(
                "act",
                f"tau is {seen.tau:.2f} where the plan predicts {predicted_tau:.2f}: not the same drafter"
                " or texts",
            )
        )
    if off_above is not None and seen.running is not None and seen.running > off_above:
        found.append(
            Advice(
                "act",
                f"{seen.running:.0f} requests run, and above {off_above} the batch is compute-bound: turn"
                " drafting off"
                f" above {off_above} (`slipstream config --off-above {off_above}`)",
            )
        )
    if not found and seen.best_length is not None and seen.length is not None:
        found.extend(_length(seen.best_length, seen.length, seen.per_position))
    if seen.waiting and seen.running is not None and seen.waiting > seen.running:
        found.append(
            Advice(
                "look", f"{seen.waiting:.0f} requests wait: drafting helps latency, more replicas help this"
            )
        )
    if not found and seen.best_length is None:
        return [
            Advice(
                "fine",
                "nothing is wrong; acceptance by position is not told here, so no length can be advised",
            )
        ]
    return found or [Advice("fine", "drafting pays as it is")]


def _length(best: int, length: float, per_position: tuple[float, ...]) -> list[Advice]:
    drafted = min(round(length), len(per_position))  # a tree has more tokens than levels
    tokens = "1 token" if best == 1 else f"{best} tokens"
    if best == 0:
        return [Advice("look", "drafting costs more than it brings at this acceptance: turn it off")]
    if best < drafted:
        last = per_position[drafted - 1]
        return [
            Advice(
                "look",
                f"the draft is too long: {last:.0%} of drafts reach token {drafted}; draft {tokens}",
            )
        ]
    if best > drafted:
        return [
            Advice("look", f"the draft is short: {per_position[-1]:.0%} reach its end; try up to {tokens}")
        ]
    return []
