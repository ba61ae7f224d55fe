"""One generation driven from the command line: it can be interrupted, and it is timed."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from slipstream.cli.output import TerminalProgress
from slipstream.core.draft import Drafter
from slipstream.core.params import SamplingParams
from slipstream.core.sequence import Event, first_difference
from slipstream.core.stats import DraftCounts, Seconds
from slipstream.engine.session import Completion, Session
from slipstream.model.progress import Progress

WARM_UP_TOKENS = 8


class Interrupts:
    """While open, the first SIGINT or SIGTERM is only noted; after it, signals act as before.

    So an answer ends between two steps, with everything it had, and a second Ctrl-C still stops a step
    that hangs.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():  # others may not set handlers
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def __exit__(self, *_: Any) -> None:
        self._restore()

    @property
    def status(self) -> int:
        """The exit status that shells expect: 128 and the signal's number."""
        return 128 + self.number if self.number else 0


@dataclass(frozen=True)
class Outcome:
    """What one call gave. wall: its seconds from the encoded prompt to the last token, prefill included.

    drafter_memory_bytes: the most the drafter held beyond the target's own.
    """

    completions: tuple[Completion, ...]
    seconds: Seconds
    wall: float
    drafter_memory_bytes: int = 0

    @property
    def first(self) -> Completion:
        return self.completions[0]

    @property
    def num_tokens(self) -> int:
        return sum(len(c.tokens) for c in self.completions)

    @property
    def rate(self) -> float:
        """Generated tokens a second of wall time."""
        return self.num_tokens / self.wall if self.wall else 0.0

    @property
    def decode_rate(self) -> float:
        """Generated tokens a second, the time for reading the prompt left out."""
        decoding = self.wall - self.seconds.prefill
        return self.num_tokens / decoding if decoding > 0 else 0.0

    @property
    def counts(self) -> DraftCounts:
        """Of all answers together."""
        total = DraftCounts()
        for completion in self.completions:
            total.add(completion.counts)
        return total


def generate(
    session: Session,
    prompt: Sequence[int],
    params: SamplingParams,
    interrupts: Interrupts,
    show: Callable[[Event], None] = lambda event: None,
) -> Outcome:
    """Answer one prompt, showing each event; an interrupt ends it with what there is."""
    before, began = session.engine.seconds.copy(), time.perf_counter()
    rows = session.submit(prompt, params)
    try:
        while any(not row.finished for row in rows) and interrupts.number is None:
            for event in session.engine.turn():
                show(event)
        for event in session.cancel(rows):
            show(event)
    except BaseException:
        session.cancel(rows)
        raise
    wall = time.perf_counter() - began
    seconds = session.engine.seconds - before
    # What was learned from the last row is held after it has ended.
    held = max(session.engine.drafter_peak_bytes, session.drafter.memory_bytes)
    return Outcome(tuple(session.completion(row, seconds) for row in rows), seconds, wall, held)


@dataclass(frozen=True)
class Comparison:
    """The same request with the drafter and without."""

    drafted: Outcome
    plain: Outcome

    @property
    def speedup(self) -> float:
        return self.drafted.rate / self.plain.rate if self.plain.rate else 0.0

    @property
    def identical(self) -> bool:
        return self.differs_at is None

    @property
    def differs_at(self) -> int | None:
        """Position of the first token that differs, in the first answer that does."""
        pairs = zip(self.drafted.completions, self.plain.completions, strict=True)
        found = (first_difference(ours.tokens, theirs.tokens) for ours, theirs in pairs)
        return next((at for at in found if at is not None), None)

    @property
    def why_not_expected(self) -> str | None:
        """Why the tokens may differ although nothing is wrong; None where they must not."""
        return self.drafted.counts.why_not_plain


def counting(drawn: TerminalProgress, text: str, total: int) -> Callable[[Event], None]:
    """For `generate`: shows how many tokens there are by now, of `total`; 0 is unknown."""
    done = 0
    drawn.stage(text, total, "tokens")

    def show(event: Event) -> None:
        nonlocal done
        done += len(event.tokens)
        drawn.at(done)

    return show


def warm_up(session: Session, prompt: Sequence[int], params: SamplingParams, interrupts: Interrupts) -> None:
    """A short generation, so that first-call costs are not timed.

    The prompt is the real one backwards: the same length takes the same kernels and cache widths, and
    a drafter with a memory learns nothing from it.
    """
    short = params.with_(
        max_tokens=WARM_UP_TOKENS, min_tokens=0, ignore_eos=True, stop=(), stop_token_ids=(), n=1
    )
    generate(session, prompt[::-1], short, interrupts)


def warm_up_both(
    session: Session,
    prompt: Sequence[int],
    params: SamplingParams,
    interrupts: Interrupts,
    controller: str | None,
    progress: Progress,
) -> Drafter:
    """Warm plain decoding and the session's drafter, which is set again; gives the plain one."""
    drafter = session.drafter
    plain = session.use("none")
    progress.stage("warming up plain decoding", 0)
    warm_up(session, prompt, params, interrupts)
    session.use(drafter, controller)
    progress.stage(f"warming up {drafter.name}", 0)
    warm_up(session, prompt, params, interrupts)
    session.use(drafter, controller)  # a fresh controller: it has learnt from the warm-up
    return plain


def peak_memory_bytes() -> int:
    """Most memory this process has had resident so far."""
    if sys.platform == "win32":
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB
