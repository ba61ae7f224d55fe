"""Rules that turn a draft and the target's answers into accepted tokens.

All keep the target's law but `typical`, which nobody gets without saying lossy=True.
"""

from __future__ import annotations

from collections.abc import Callable

from slipstream.core.draft import Draft
from slipstream.errors import ParameterError
from slipstream.verify.block import block
from slipstream.verify.multicandidate import multi_candidate
from slipstream.verify.pointmass import point_mass
from slipstream.verify.rejection import rejection
from slipstream.verify.typical import typical
from slipstream.verify.view import LogitsView, TargetView, Verdict, ViewRow, build_views

Rule = Callable[[Draft, TargetView], Verdict]

RULES = ("auto", "rejection", "block", "typical")

__all__ = [
    "RULES",
    "LogitsView",
    "Rule",
    "TargetView",
    "Verdict",
    "ViewRow",
    "block",
    "build_views",
    "check_rule",
    "choose_rule",
    "multi_candidate",
    "point_mass",
    "rejection",
    "typical",
]


def check_rule(rule: str, lossy: bool = False) -> bool:
    """Whether output under `rule` is lossy; raises ParameterError where it may not be used.

    `lossy` is the permission: without it there is no lossy rule, and an exact rule stays exact with it.
    """
    if rule not in RULES:
        raise ParameterError(f"rule must be one of {', '.join(RULES)}, not {rule!r}")
    if rule == "typical" and lossy is not True:  # "false" from a settings file is no permission
        raise ParameterError(
            "typical acceptance changes the output: it is no longer what the target would say;"
            " pass lossy=True to allow that, or leave rule at 'auto'"
        )
    return rule == "typical"


def choose_rule(draft: Draft, rule: str = "auto", *, lossy: bool = False) -> Rule:
    """The rule for a draft: how it was drawn decides, `rule` only where there is a choice.

    Without q: point masses. A sampled chain: `rejection`, or `block` when asked for. A sampled tree:
    `multi_candidate`. "typical" takes any draft, and needs lossy=True.
    """
    if check_rule(rule, lossy):
        return typical
    if draft.q is None:
        return point_mass
    if not draft.tree.is_chain:
        return multi_candidate
    return block if rule == "block" else rejection
