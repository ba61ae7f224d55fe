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
        p, q = laws(draft, view, node)  # [V], [V]
        drafted = drafted_token(draft, child, q)
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


def laws(draft: Draft, view: TargetView, node: int) -> tuple[torch.Tensor, torch.Tensor]:
    """p and q at a node with children, float64 [V] on q's device, each summing to 1.

    q is normalised: a float32 row sums to 1 only up to its rounding. Raises DrafterError for a q row
    that is not a law over the target's vocabulary.
    """
    row = None if draft.q is None else draft.q[node]
    if row is None or row.dim() != 1:
        raise DrafterError("a sampled draft needs one q row [V] for every node with children")
    q = row.double()  # [V]
    mass = float(q.sum())
    if not 0.0 < mass < float("inf") or float(q.amin()) < 0.0:
        raise DrafterError(f"the drafter's q row is not a law: it sums to {mass}")
    p = view.probs(node).to(q.device)  # [V]
    if p.shape != q.shape:
        raise DrafterError(f"the drafter's q has {len(q)} tokens, the target {len(p)}: pad or cut it")
    return p, q / mass


def drafted_token(draft: Draft, node: int, q: torch.Tensor) -> int:
    """The token of a drafted node; raises DrafterError if q [V] cannot have given it."""
    token = draft.tree.tokens[node]
    if token >= len(q):
        raise DrafterError(f"the drafter drew token {token}, but ids end at {len(q) - 1}")
    return token
