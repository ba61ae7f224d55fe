"""Point masses: a draft whose tokens were chosen without looking at the target's noise."""

from __future__ import annotations

from slipstream.core.draft import Draft
from slipstream.verify.view import TargetView, Verdict


def point_mass(draft: Draft, view: TargetView) -> Verdict:
    """Draw y from the target at the node; a child carries y: descend; else y is the next token.

    The output is the target's own draws whatever was drafted, so it is the output of plain decoding
    for the same seed, and its law needs no argument. Equal in law to rejection with q = 1 at the
    drafted token. Works for any tree.
    """
    node, path = 0, list[int]()
    while True:
        token = view.token(node)
        child = draft.tree.find_child(node, token)
        if child is None:
            return Verdict(tuple(path), token)
        path.append(child)
        node = child
