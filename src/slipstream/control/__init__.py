"""How much to draft: fixed lengths, additive raise and lower, what pays by measurement."""

from __future__ import annotations

from slipstream.control.additive import Additive
from slipstream.control.base import Controller, RowOutcome, RowState
from slipstream.control.fixed import Fixed
from slipstream.control.goodput import Goodput, GoodputConfig
from slipstream.core.spec import make_config, parse_spec
from slipstream.errors import ParameterError

__all__ = [
    "KINDS",
    "Additive",
    "Controller",
    "Fixed",
    "Goodput",
    "GoodputConfig",
    "RowOutcome",
    "RowState",
    "build_controller",
    "goodput_config",
]

KINDS = {kind.name: kind for kind in (Fixed, Additive, Goodput)}


def build_controller(
    spec: str | Controller | None, default_length: int, default_nodes: int = 0, drafter: str = ""
) -> Controller:
    """From `fixed`, `fixed:num_speculative_tokens=4`, `additive:…`, `goodput:curve=FILE`; None is the
    drafter's own size, which is `default_length` tokens or a tree of `default_nodes`. drafter: whose curve
    goodput takes, unless the spec says it."""
    if isinstance(spec, Controller):
        return spec
    if spec is not None and not isinstance(spec, str):
        what = f"the class {spec.__name__}: make one of it" if isinstance(spec, type) else type(spec).__name__
        raise ParameterError(f"a controller is a name with options or a built Controller, not {what}")
    name, values = parse_spec(spec or "fixed")
    if name not in KINDS:
        raise ParameterError(f"unknown controller {name!r}; there are {', '.join(sorted(KINDS))}")
    if name == "fixed":
        values.setdefault("num_speculative_tokens", str(default_length))
        values.setdefault("nodes", str(default_nodes))
    if name == "goodput" and default_length and default_nodes > default_length:
        values.setdefault("nodes_per_level", str(default_nodes / default_length))
    if name == "goodput" and drafter:
        values.setdefault("drafter", drafter)
    kind = KINDS[name]
    return kind(make_config(kind.Config, name, values))  # type: ignore[arg-type]


def goodput_config(spec: str | None) -> GoodputConfig | None:
    """The options of `goodput:…`, in which the curve may be left out, for who has curves of his own. None is
    goodput as well; of other controllers there are none."""
    name, values = parse_spec(spec or Goodput.name)
    if name != Goodput.name:
        return None
    return make_config(GoodputConfig, name, {"curve": "", **values})
