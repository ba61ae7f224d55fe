"""`Sequence`: one request's tokens and its end. The only place where tokens become final.

`commit` takes what a verification yields and applies the stop rules token by token, in order, so a
block that runs past an end is cut exactly where plain decoding would have stopped. Text, ids,
log-probabilities, counters, noise positions and caches are all cut at the length it returns.
"""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from typing import Literal

from slipstream.core.params import SamplingParams
from slipstream.core.stats import DraftCounts
from slipstream.core.text import TextStream

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Raw log-probability of a chosen token and of the most likely ones at its position."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Event:
    """What one step added to one sequence. drafted[i] tells whether token i was drafted and accepted.

    pieces[i] is the text that became final with token i: its own, after what was held back before it
    (half a character, the possible beginning of a stop string). A cancellation has no tokens and at most
    one piece. lossy: the rule it came by does not keep the target's law.
    """

    seq_id: int
    tokens: tuple[int, ...]
    pieces: tuple[str, ...]
    drafted: tuple[bool, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    lossy: bool = False

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass
class Sequence:
    """A request. `tokens` are prompt and output; the last one is the root while it runs.

    room is how many tokens may be added before the context is full. The seed is resolved: noise at
    absolute position i is keyed by (seed, i), whatever the batch or the drafter.
    """

    id: int
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    eos_ids: frozenset[int]
    room: int
    stream: TextStream | None = None
    group: int | None = None
    lossy: bool = False  # decoded by a rule that does not keep the target's law
    cached_tokens: int = 0  # of the prompt, that were computed for another sequence
    tokens: list[int] = field(default_factory=list)
    drafted: list[bool] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    counts: DraftCounts = field(default_factory=DraftCounts)
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def num_output(self) -> int:
        return len(self.tokens) - len(self.prompt)

    @property
    def limit(self) -> int:
        """Most output tokens: the request's own limit or the context's room, whichever is less."""
        return self.room if self.params.max_tokens is None else min(self.params.max_tokens, self.room)

    @property
    def remaining(self) -> int:
        return self.limit - self.num_output

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def text(self) -> str:
        return self.stream.text if self.stream else ""

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end the answer."""
        eos = frozenset() if self.params.ignore_eos else self.eos_ids
        return eos | frozenset(self.params.stop_token_ids)

    def commit(self, tokens: Tokens[int], num_drafted: int, logprobs: Tokens[TokenLogprob] = ()) -> Event:
        """Make tokens final, in order, until an end is met; the event holds those that were kept.

        The first `num_drafted` were drafted and accepted. What comes first in token order wins: an
        EOS before a stop string, a stop string before the length limit at the same token. After the
        end, nothing is kept.
        """
        kept = 0
        pieces = []
        for token in tokens:
            if self.finished:
                break
            self.tokens.append(token)
            self.drafted.append(kept < num_drafted)
            kept += 1
            self.finish_reason = self._end_at(token)
            if self.stream and self.finished and self.stream.finish():
                self.finish_reason = "stop"
            pieces.append(self.stream.take() if self.stream else "")
        kept_logprobs = tuple(logprobs[:kept])
        self.logprobs.extend(kept_logprobs)
        return Event(
            self.id,
            tuple(tokens[:kept]),
            tuple(pieces),
            tuple(i < num_drafted for i in range(kept)),
            kept_logprobs,
            self.finish_reason,
            self.lossy,
        )

    def _end_at(self, token: int) -> FinishReason | None:
        early = self.num_output < self.params.min_tokens
        if token in self.stop_ids and not early:
            return "stop"
        if self.stream and self.stream.push(token, check_stop=not early):
            return "stop"
        return "length" if self.remaining <= 0 else None

    def cancel(self) -> Event:
        """End now, with what there is."""
        self.finish_reason = "cancelled"
        held = ""
        if self.stream:
            self.stream.finish()
            held = self.stream.take()
        return Event(self.id, (), (held,) if held else (), finish_reason="cancelled", lossy=self.lossy)


def first_difference(one: Tokens[int], other: Tokens[int]) -> int | None:
    """Where two outputs part, or the shorter one ends; None where they are the same."""
    if len(one) == len(other) and all(a == b for a, b in zip(one, other, strict=True)):
        return None
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
