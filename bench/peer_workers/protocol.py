"""What a peer's process and `peers.py` say to each other: a JSON object a line, over stdin and stdout.

First the configuration comes in and {"ready": {...}} goes out. Then questions come, {"setting", "ids",
"max_tokens"}, and each is answered by {"ids", "seconds", …}: the ids generated after the prompt, the end
token included, and the wall time from having the prompt's ids to having the answer's, measured here for all
engines alike. {"forget": true} begins a new round: nothing of earlier answers may be remembered. What goes
wrong is told as {"error": ...}. The process ends when its stdin does.

This needs nothing but Python, for it runs in every peer's environment. Whatever an engine prints goes to
stderr, which `peers.py` keeps as a log.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, Protocol


class Peer(Protocol):
    """An engine, loaded. about: what it says of itself, for the record."""

    about: dict[str, Any]

    def answer(self, setting: str, ids: list[int], max_tokens: int) -> list[int]:
        """The ids of a greedy answer."""

    def told(self) -> dict[str, Any]:
        """What else is known of that answer: drafted and accepted tokens. Not timed."""

    def forget(self) -> None: ...


def serve(make: Callable[[dict[str, Any]], Peer]) -> None:
    """Answers until stdin ends. make: the engine from its configuration."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def tell(message: dict[str, Any]) -> None:
        out.write(json.dumps(message) + "\n")
        out.flush()

    try:
        peer = make(json.loads(sys.stdin.readline()))
        tell({"ready": peer.about})
        for line in sys.stdin:
            question = json.loads(line)
            if question.pop("forget", False):
                peer.forget()
                tell({"forgot": True})
                continue
            began = time.perf_counter()
            ids = peer.answer(**question)
            seconds = time.perf_counter() - began
            tell({"ids": ids, "seconds": seconds, **peer.told()})
    except Exception as error:
        traceback.print_exc()
        tell({"error": f"{type(error).__name__}: {error}"})
    finally:
        out.flush()
        sys.stderr.flush()
        os._exit(0)  # some engines' threads outlive the interpreter
