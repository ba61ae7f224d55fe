"""How a target's weights are kept: plain, as its dtype says, or as int8."""

from __future__ import annotations

from typing import Literal

from slipstream.errors import ParameterError

Precision = Literal["plain", "int8"]
PRECISIONS = ("plain", "int8")


def check_precision(weights: str, embedding: str) -> None:
    """ParameterError for a precision of linear layers or of the input embedding that there is not."""
    for name, value in (("weights", weights), ("embedding", embedding)):
        if value not in PRECISIONS:
            raise ParameterError(f"{name} must be {' or '.join(PRECISIONS)}, not {value!r}")
    if embedding == "int8" and weights != "int8":
        raise ParameterError("embedding int8 goes with weights int8: give both, or leave out the embedding")
