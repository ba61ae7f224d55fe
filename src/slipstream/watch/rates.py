"""What happened between two readings: tau, acceptance, tokens a second, the length that would have been
best.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from slipstream.watch.metrics import Reading

# What a drafted token costs, as a part of a target pass, where nobody measured it: an EAGLE head's or a
# small draft's.
ASSUMED_COST = 0.1
_LONGEST = 16


@dataclass(frozen=True)
class Rates:
    """per_position: accepted at position i / drafts (unconditional, as vLLM reports it). tau: tokens a
    verified draft, the bonus token included. best_length: from the measured acceptance and an assumed or
    given cost of a drafted token. seconds: of the interval; None: since the server's start.
    """

    url: str
    engine: str
    seconds: float | None
    drafts: float | None
    tau: float | None
    acceptance: float | None
    per_position: tuple[float, ...]
    length: float | None
    best_length: int | None
    tokens_per_second: float | None
    running: float | None
    waiting: float | None

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "per_position": list(self.per_position)}


def rates(now: Reading, before: Reading | None = None, cost: float = ASSUMED_COST) -> Rates:
    """Over the time between two readings of one server; without an earlier one, since its start.

    A server that was restarted in between counts from its start.
    """
    if before is not None and _restarted(now, before):
        before = None
    seconds = None if before is None else now.at - before.at

    def since(name: str) -> float | None:
        value, old = getattr(now, name), getattr(before, name) if before is not None else 0.0
        return None if value is None else value - (old or 0.0)

    drafts, draft_tokens, accepted = since("drafts"), since("draft_tokens"), since("accepted")
    earlier = before.per_position if before is not None else ()
    positions = [v - (earlier[i] if i < len(earlier) else 0.0) for i, v in enumerate(now.per_position)]
    per_position = tuple(v / drafts for v in positions) if drafts else ()
    tau, acceptance, length = now.tau, now.acceptance, now.steps
    if drafts and accepted is not None:
        tau = 1 + accepted / drafts
    if draft_tokens:
        acceptance = accepted / draft_tokens if accepted is not None else acceptance
        length = draft_tokens / drafts if drafts else length
    tokens = since("tokens")
    speed = now.throughput
    if seconds and tokens is not None:
        speed = tokens / seconds
    return Rates(
        now.url,
        now.engine,
        seconds,
        drafts,
        tau,
        acceptance,
        per_position,
        length,
        best_length(per_position, cost) if per_position else None,
        speed,
        now.running,
        now.waiting,
    )


def _restarted(now: Reading, before: Reading) -> bool:
    pairs = ((now.tokens, before.tokens), (now.drafts, before.drafts))
    return any(new is not None and old is not None and new < old for new, old in pairs)


def best_length(per_position: tuple[float, ...], cost: float) -> int:
    """The K that maximises (1 + a_1 + … + a_K) / (1 + K cost).

    Beyond what was drafted, a_i goes on falling as between the last two positions. 0: plain decoding is best.
    """
    longest = [*per_position]
    if not longest:
        return 0
    fall = longest[-1] / longest[-2] if len(longest) > 1 and longest[-2] > 0 else longest[-1]
    while len(longest) < _LONGEST:
        longest.append(longest[-1] * min(fall, 1.0))
    best, most, emitted = 0, 1.0, 1.0
    for k, accepted in enumerate(longest, 1):
        emitted += accepted
        if emitted / (1 + k * cost) > most + 1e-9:
            best, most = k, emitted / (1 + k * cost)
    return best
