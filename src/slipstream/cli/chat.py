"""The conversation that `slipstream run` holds on a terminal when it is given no prompt."""

from __future__ import annotations

import contextlib
import signal

from slipstream.cli.answer import Painter, Summary
from slipstream.cli.generation import Interrupts, generate
from slipstream.core.params import SamplingParams
from slipstream.engine.inputs import encode
from slipstream.engine.session import Session
from slipstream.errors import SlipstreamError
from slipstream.model.cache import columns

PROMPT = ">>> "
Message = dict[str, str]
COMMANDS = {
    "/reset": "forget the conversation",
    "/exit": "leave, as Ctrl-D and /quit do",
    "/help": "this list",
    "Ctrl-C": "stop an answer; what there is of it stays in the conversation",
}


def chat(session: Session, params: SamplingParams, system: str | None, painter: Painter) -> int:
    """Turn by turn until /exit or Ctrl-D; gives the exit status. Ctrl-C stops an answer, not the chat."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (arrow keys and history in input(); not on Windows)
    summary = Summary()
    summary.note(
        "Chat: /reset starts anew, /exit or Ctrl-D leaves, Ctrl-C stops an answer, /help lists these."
    )
    # A turn reads only what was said since the last one, within the memory that one answer may take anyway.
    session.engine.limit_cache(columns(session.engine.context))
    session.engine.limit_prefixes(session.engine.context)
    opening: list[Message] = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    while True:
        line = _ask(summary)
        if line is None or line in ("/exit", "/quit"):
            return 0
        if line == "/reset":
            messages = list(opening)
            summary.note("The conversation is forgotten.")
        elif line == "/help":
            for command, meaning in COMMANDS.items():
                summary.note(f"{command:<8}{meaning}")
        elif line.startswith("/") and " " not in line:
            summary.note(f"There is no {line}; there are {', '.join(c for c in COMMANDS if c[0] == '/')}.")
        elif line:
            messages.append({"role": "user", "content": line})
            status = _turn(session, params, messages, painter, summary)
            if status == 128 + signal.SIGTERM:
                return status


def _ask(summary: Summary) -> str | None:
    """The next line, None at its end."""
    try:
        return input(PROMPT).strip()
    except EOFError:
        print()
        return None
    except KeyboardInterrupt:
        print()
        summary.note("/exit or Ctrl-D leaves.")
        return ""


def _turn(
    session: Session, params: SamplingParams, messages: list[Message], painter: Painter, summary: Summary
) -> int:
    """Answer the last message and add the answer; without one, the message is taken back."""
    try:
        with Interrupts() as interrupts:
            outcome = generate(session, encode(session.tokenizer, messages), params, interrupts, painter)
    except SlipstreamError as error:  # a full context, most likely: the chat goes on
        messages.pop()
        summary.note(f"{error} (/reset forgets the conversation)")
        return 0
    painter.end_line()
    summary.brief(outcome)
    if outcome.first.text:
        messages.append({"role": "assistant", "content": outcome.first.text})
    else:
        messages.pop()
    return interrupts.status
