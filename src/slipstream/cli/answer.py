"""How `slipstream run` shows an answer: text on stdout, a summary on stderr, or one JSON object."""

from __future__ import annotations

import io
import platform
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from itertools import groupby
from typing import Any, TextIO

from rich.text import Text

from slipstream.cli.generation import WARM_UP_TOKENS, Comparison, Outcome, peak_memory_bytes
from slipstream.cli.output import stderr
from slipstream.core.sequence import Event
from slipstream.engine.session import Completion
from slipstream.model.progress import size
from slipstream.version import __version__

DRAFTED, RESET = "\x1b[32m", "\x1b[0m"
# A model may emit control characters; on a terminal they could do anything, so their pictures are shown.
_PICTURES = {c: 0x2400 + c for c in range(32) if chr(c) not in "\t\n\r"} | {0x7F: 0x2421, 0x9B: 0xFFFD}


class Painter:
    """Writes answers to stdout token by token; drafted and accepted tokens in green if `colour`."""

    def __init__(self, out: TextIO, colour: bool) -> None:
        self.colour = colour
        if isinstance(out, io.TextIOWrapper):
            out.reconfigure(errors="replace")  # a terminal that lacks a character must not end the answer
        self._out = out
        self._terminal = out.isatty()
        self._open = False  # a line is begun and not ended

    def __call__(self, event: Event) -> None:
        flags = event.drafted or (False,) * len(event.pieces)
        for drafted, group in groupby(zip(flags, event.pieces, strict=True), key=lambda pair: pair[0]):
            self._write("".join(piece for _, piece in group), drafted and self.colour)
        self._out.flush()

    def several(self, completions: Sequence[Completion]) -> None:
        """Complete answers under headings. They grew side by side, so they were not streamed."""
        for i, completion in enumerate(completions, start=1):
            self._write(f"--- {i} of {len(completions)}, seed {completion.seed} ---\n", False)
            self._write(completion.text, False)
            self.end_line()

    def _write(self, text: str, coloured: bool) -> None:
        if not text:
            return
        self._open = not text.endswith("\n")
        shown = text.translate(_PICTURES) if self._terminal else text
        self._out.write(f"{DRAFTED}{shown}{RESET}" if coloured else shown)

    def end_line(self) -> None:
        if self._open:
            self._out.write("\n")
            self._open = False
        self._out.flush()


class Summary:
    """Prints what was measured, a line a fact, on stderr."""

    def __init__(self) -> None:
        self._console = stderr()

    def line(self, label: str, text: str, style: str = "") -> None:
        self._console.print(Text.assemble((f"{label:<12}", "dim"), (text, style)), soft_wrap=True)

    def note(self, text: str) -> None:
        self._console.print(Text(text, "dim"), soft_wrap=True)

    def brief(self, outcome: Outcome) -> None:
        """One line, between the turns of a chat."""
        counts = outcome.counts
        cut = ", stopped" if outcome.first.finish_reason == "cancelled" else ""
        full = ", cut at the limit" if outcome.first.finish_reason == "length" else ""
        self.note(
            f"[{_count(outcome.num_tokens, 'token')}, {outcome.rate:.1f} tokens/s,"
            f" tau {counts.tau:.2f}{cut}{full}]"
        )

    def full(self, outcome: Outcome, green: bool, seed: int | None) -> None:
        """seed: shown if given (it says nothing about greedy decoding)."""
        counts, seconds = outcome.counts, outcome.seconds
        ends = ", ".join(dict.fromkeys(_END[c.finish_reason] for c in outcome.completions))
        self._console.print()
        self.line("tokens", f"{outcome.num_tokens} in {outcome.wall:.2f} s; {ends}")
        self.line(
            "speed",
            f"{outcome.rate:.2f} tokens/s; {outcome.decode_rate:.2f} without reading"
            f" the prompt ({_count(outcome.first.prompt_tokens, 'token')})",
        )
        self.line("tau", f"{counts.tau:.2f} tokens a target pass, {_count(counts.passes, 'pass', 'passes')}")
        if counts.drafts:
            where = " (green above)" if green else ""
            self.line(
                "from drafts", f"{counts.accepted_tokens} of {outcome.num_tokens} tokens of the answer{where}"
            )
            self.line("accepted", f"{counts.accepted_tokens} of {counts.draft_tokens} drafted tokens")
            if len(counts.sources) > 1:
                parts = (f"{k} {c.accepted_tokens} of {c.draft_tokens}" for k, c in counts.sources.items())
                self.line("by part", ", ".join(parts))
            self.line(
                "at position", f"{_percent(counts.acceptance_per_position)} of drafts were right so far"
            )
        else:
            self.line("drafted", "nothing: every token came from plain decoding")
        self.line(
            "time",
            f"target {seconds.target:.2f} s, prefill {seconds.prefill:.2f} s,"
            f" drafter {seconds.drafter:.2f} s, other {seconds.other:.2f} s",
        )
        held = outcome.drafter_memory_bytes
        more = f"; the drafter held {size(held)}" if held else ""
        self.line("memory", f"{size(peak_memory_bytes())} at its peak{more}")
        if seed is not None:
            self.line("seed", str(seed))

    def compared(self, comparison: Comparison, name: str) -> None:
        ours, plain, at = comparison.drafted, comparison.plain, comparison.differs_at
        extra = size(ours.drafter_memory_bytes) if ours.drafter_memory_bytes else "no"
        self.line("drafting", f"{ours.rate:.2f} tokens/s ({name}, {extra} more memory)")
        self.line("plain", f"{plain.rate:.2f} tokens/s")
        if comparison.speedup >= 1:
            self.line("speed-up", f"{comparison.speedup:.2f}×", "bold green")
        else:
            self.line(
                "speed-up", f"{comparison.speedup:.2f}×: slower, this drafting does not pay here", "bold"
            )
        why = comparison.why_not_expected
        if at is None:
            self.line("tokens", "identical", "bold green")
        elif why is not None:
            self.line("tokens", f"differ from position {at}: {why}")
        else:
            self.line(
                "tokens",
                f"DIFFER from position {at}; they must not: please report this",
                "bold red",
            )
        self.note(f"One run each, after a warm-up of {WARM_UP_TOKENS} tokens each; prefill is included.")


_END = {"stop": "the model ended it", "length": "cut at the limit", "cancelled": "interrupted"}


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def _percent(rates: Sequence[float]) -> str:
    return " ".join(f"{100 * rate:.0f}" for rate in rates) + " %"


def as_json(outcome: Outcome, comparison: Comparison | None, **facts: Any) -> dict[str, Any]:
    """Everything of one run. Keys of one answer are those of the first; `completions` has all of several."""
    import torch

    seconds = outcome.seconds
    report: dict[str, Any] = {
        **_answer(outcome.first),
        "prompt_tokens": outcome.first.prompt_tokens,
        "tokens_per_second": outcome.rate,
        "decode_tokens_per_second": outcome.decode_rate,
        "seconds": {
            "target": seconds.target,
            "prefill": seconds.prefill,
            "drafter": seconds.drafter,
            "other": seconds.other,
            "total": outcome.wall,
        },
        "peak_memory_bytes": peak_memory_bytes(),
        "drafter_memory_bytes": outcome.drafter_memory_bytes,
        **facts,
        "versions": {
            "slipstream": __version__,
            "torch": torch.__version__,
            "transformers": version("transformers"),
            "python": platform.python_version(),
        },
    }
    if len(outcome.completions) > 1:
        report["completions"] = [_answer(c) for c in outcome.completions]
    if comparison is not None:
        report |= {
            "plain_tokens_per_second": comparison.plain.rate,
            "speedup": comparison.speedup,
            "identical": comparison.identical,
            "identical_expected": comparison.why_not_expected is None,
            "differs_at": comparison.differs_at,
            "warm_up_tokens": WARM_UP_TOKENS,
        }
    return report


def _answer(completion: Completion) -> dict[str, Any]:
    counts = completion.counts
    return {
        "text": completion.text,
        "tokens": list(completion.tokens),
        "finish_reason": completion.finish_reason,
        "seed": completion.seed,
        "tau": counts.tau,
        "acceptance_per_position": counts.acceptance_per_position,
        "acceptance_rate": counts.acceptance_rate,
        "target_passes": counts.passes,
        "drafted_tokens": counts.draft_tokens,
        "accepted_tokens": counts.accepted_tokens,
        "sources": {name: asdict(part) for name, part in counts.sources.items()},
    }
