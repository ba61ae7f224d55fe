"""How much to draft: fixed lengths, additive raise and lower."""

from __future__ import annotations

from slipstream.control.additive import Additive
from slipstream.control.base import Controller, RowOutcome, RowState
from slipstream.control.fixed import Fixed
from slipstream.core.spec import make_config, parse_spec
from slipstream.errors import ParameterError

__all__ = ["KINDS", "Additive", "Controller", "Fixed", "RowOutcome", "RowState", "build_controller"]

KINDS = {kind.name: kind for kind in (Fixed, Additive)}


def build_controller(
    spec: str | Controller | None, default_length: int, default_nodes: int = 0
) -> Controller:
    """From `fixed`, `fixed:num_speculative_tokens=4`, `additive:…`; None is the drafter's own size."""
    if isinstance(spec, Controller):
        return spec
    name, values = parse_spec(spec or "fixed")
    if name not in KINDS:
        raise ParameterError(f"unknown controller {name!r}; there are {', '.join(sorted(KINDS))}")
    if name == "fixed":
        values.setdefault("num_speculative_tokens", str(default_length))
        values.setdefault("nodes", str(default_nodes))
    kind = KINDS[name]
    return kind(make_config(kind.Config, name, values))  # type: ignore[arg-type]
