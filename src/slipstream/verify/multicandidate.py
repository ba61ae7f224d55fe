"""Multi-candidate verification: a tree whose nodes were drawn from known laws.

A node's children are tried in the order they were drawn. Each is a rejection test of its own, against what
the ones before it have left of the target's law. Which law a later child was drawn from, the tree says:

- `allow_duplicates` False: **without replacement**, the way of RSD (arXiv 2402.14160) and Sequoia
  (2402.12374): q with the earlier siblings removed, renormalised. `logits.law.draw_siblings` draws so.
- `allow_duplicates` True: **independently**, each from q itself, as in SpecInfer (2305.09781). A repeated
  token is refused, for after its first refusal nothing is left of it, and its trial counts like any other.

In both cases all siblings that were drawn must be there, in their order: a candidate that is left out
for its token, or a tree whose best-scored sampled nodes are kept, has another law than the one assumed.
"""

from __future__ import annotations

import torch

from slipstream.core.draft import Draft
from slipstream.verify.rejection import drafted_token, laws, residual
from slipstream.verify.view import TargetView, Verdict


def multi_candidate(draft: Draft, view: TargetView) -> Verdict:
    """At a node r_1 = p, s_1 = q; child x_j is accepted with probability min(1, r_j(x_j) / s_j(x_j)).

    Refused: r_{j+1} = norm(max(0, r_j - s_j)), and s_{j+1} = s_j without x_j, renormalised, or q again
    for independent candidates. None accepted: the next token is drawn from what is left, r. A leaf
    gives the target's own draw. One child a node: this is `rejection`, draw for draw.

    Raises DrafterError for a q row that is not a law over the target's vocabulary.
    """
    node, path = 0, list[int]()
    while draft.tree.children(node):
        child, rest = _try_children(draft, view, node)
        if child is None:
            return Verdict(tuple(path), view.draw(node, rest))
        path.append(child)
        node = child
    return Verdict(tuple(path), view.token(node))


def _try_children(draft: Draft, view: TargetView, node: int) -> tuple[int | None, torch.Tensor]:
    """The child accepted at `node`, if any, and the law [V] of the next token if none is."""
    r, s = laws(draft, view, node)  # [V], [V]
    for trial, child in enumerate(draft.tree.children(node)):
        token = drafted_token(draft, child, s)
        # A uniform for each sibling: the first one's refusal says that its own was large.
        if view.uniform(node, trial) * float(s[token]) < float(r[token]):
            return child, r
        r = residual(r, s)  # [V]; with s as it was when x was drawn, x included
        if not draft.tree.allow_duplicates:
            s = s.index_fill(0, torch.tensor([token], device=s.device), 0.0)  # [V]
            mass = float(s.sum())
            if not mass > 0.0:
                break  # q has nothing else to offer; r is exact as it stands
            s = s / mass
    return None, r
