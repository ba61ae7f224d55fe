"""Speculative sampling of a chain that was drawn from a known law (arXiv 2211.17192, 2302.01318)."""

from __future__ import annotations

import torch

from slipstream.core.draft import Draft
from slipstream.errors import DrafterError
from slipstream.verify.view import TargetView, Verdict


def rejection(draft: Draft, view: TargetView) -> Verdict:
    """Accept x ~ q with probability min(1, p(x)/q(x)); after a rejection draw norm(max(0, p - q)).

    Leviathan et al., algorithm 1. All accepted: the bonus token is the target's own draw at the
    leaf. Raises DrafterError for a q row that is not a law over the target's vocabulary.
    """
    node, path = 0, list[int]()
    while children := draft.tree.children(node):
        child = children[0]
        p, q = view.probs(node), _drafted_law(draft, node)  # [V], [V]
        p = p.to(q.device)
        if p.shape != q.shape:
            raise DrafterError(f"the drafter's q has {len(q)} tokens, the target {len(p)}: pad or cut it")
        drafted = draft.tree.tokens[child]
        if drafted >= len(q):
            raise DrafterError(f"the drafter drew token {drafted}, but ids end at {len(q) - 1}")
        # No division, and strict: u = 0 must not accept a token that the target forbids.
        if not view.uniform(node) * float(q[drafted]) < float(p[drafted]):
            return Verdict(tuple(path), view.draw(node, residual(p, q)))
        path.append(child)
        node = child
    return Verdict(tuple(path), view.token(node))


def residual(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """norm(max(0, p - q)), float64 [V].

    Where that is empty, p <= q everywhere, so p = q and a rejection had probability 0: p, then.
    """
    rest = (p - q).clamp(min=0.0)  # [V]
    mass = rest.sum()
    return rest / mass if mass > 0.0 else p  # [V]


def _drafted_law(draft: Draft, node: int) -> torch.Tensor:
    """q at a node in float64 [V], normalised: a float32 row sums to 1 only up to its rounding."""
    row = None if draft.q is None else draft.q[node]
    if row is None or row.dim() != 1:
        raise DrafterError("rejection needs one q row [V] for every drafted token")
    q = row.double()  # [V]
    mass = float(q.sum())
    if not 0.0 < mass < float("inf") or float(q.amin()) < 0.0:
        raise DrafterError(f"the drafter's q row is not a law: it sums to {mass}")
    return q / mass  # [V]
