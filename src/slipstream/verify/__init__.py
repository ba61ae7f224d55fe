"""Rules that turn a draft and the target's answers into accepted tokens. All keep the target's law."""

from __future__ import annotations

from collections.abc import Callable

from slipstream.core.draft import Draft
from slipstream.errors import DrafterError
from slipstream.verify.pointmass import point_mass
from slipstream.verify.rejection import rejection
from slipstream.verify.view import LogitsView, TargetView, Verdict, ViewRow, build_views

Rule = Callable[[Draft, TargetView], Verdict]

__all__ = [
    "LogitsView",
    "Rule",
    "TargetView",
    "Verdict",
    "ViewRow",
    "build_views",
    "choose_rule",
    "point_mass",
    "rejection",
]


def choose_rule(draft: Draft) -> Rule:
    """The rule a draft must be verified with; raises DrafterError for a sampled tree."""
    if draft.q is None:
        return point_mass
    if draft.tree.is_chain:
        return rejection
    raise DrafterError(
        "a sampled tree needs multi-candidate verification, which is not there yet: "
        "draft a chain, or leave q out so that it is verified as point masses"
    )
