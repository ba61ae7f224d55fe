"""The faults that can be planted in a running engine, so that a proof can be seen to fail.

`SLIPSTREAM_FAULT=NAME` plants one of them (`engine.faults` does it). They are mistakes that speculative
decoding is known for. All are in what is drafted: plain decoding stays what it is.
"""

from __future__ import annotations

import difflib
import os

from slipstream.errors import ParameterError

ENVIRONMENT = "SLIPSTREAM_FAULT"
THRESHOLD = 0.1  # of the fault of that name

FAULTS = {
    "threshold": f"a drafted token is accepted wherever the target gives it more than {THRESHOLD:g}",
    "residual": "after a refusal the next token is drawn from max(0, p - q) without renormalising it",
    "bonus": "the token after a fully accepted draft is taken one position too early",
    "stale-cache": "keys and values of refused tokens stay in the cache (no rollback)",
    "sibling": "a node of a tree attends to its elder siblings as well",
    "position": "nodes of a tree are placed by their number instead of their depth",
    "draft-temperature": "a sampled draft hands over q at twice the temperature it was drawn at",
    "noise": "the uniform that refused a token is used again for the draw that replaces it",
    "penalty": "penalties and bans do not count the drafted tokens before a position",
    "end": "an end or stop token inside an accepted draft does not end the answer",
}
"""Name -> what is wrong, in one line."""


class FaultWarning(UserWarning):
    """Given by every engine that a fault is planted in."""


def planted_fault() -> str | None:
    """The fault that the environment asks for; ParameterError, with all names, for one that is not known."""
    name = os.environ.get(ENVIRONMENT)
    if not name:
        return None
    if name not in FAULTS:
        close = difflib.get_close_matches(name, FAULTS, 1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise ParameterError(f"{ENVIRONMENT}={name} is no fault: {hint}there are {', '.join(FAULTS)}")
    return name


def warning_of(name: str) -> str:
    """What everybody is told who runs with it."""
    return f"{ENVIRONMENT}={name}: the output is WRONG ON PURPOSE ({FAULTS[name]}); unset it"
