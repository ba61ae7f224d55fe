"""Block verification of a chain that was drawn from a known law (Sun et al., arXiv 2403.10444)."""

from __future__ import annotations

import torch

from slipstream.core.draft import Draft
from slipstream.verify.rejection import drafted_token, laws, residual
from slipstream.verify.view import TargetView, Verdict


def block(draft: Draft, view: TargetView) -> Verdict:
    """Accept the longest passing prefix; in expectation never fewer tokens than `rejection`, often more.

    With x_1..x_n drafted, P_i and Q_i the laws after x_1..x_i, and w_0 = 1:

        w_i = min(1, w_{i-1} P_{i-1}(x_i) / Q_{i-1}(x_i))                  the weight of the prefix
        h_i = s_i / (s_i + 1 - w_i),  s_i = sum_x max(0, w_i P_i(x) - Q_i(x)),   h_n = w_n
        t   = the largest i with u_i < h_i, else 0

    x_1..x_t are accepted, with P(t >= i | x_1..x_i) = w_i. The next token is the target's own draw if
    t = n, else drawn from norm(max(0, w_t P_t - Q_t)).

    A token that would fail alone can pass with the block, so the test does not stop at a failure: it
    looks at uniforms and drafted tokens *behind* t, which is why these must be fresh in every pass
    (`core.noise`). Raises DrafterError for a q row that is not a law over the target's vocabulary.
    """
    tree = draft.tree
    if not tree.num_drafted:
        return Verdict((), view.token(0))
    weight = 1.0
    weighed: list[tuple[float, torch.Tensor, torch.Tensor]] = []  # w_i, w_i P_i [V], Q_i [V]
    for node in range(tree.num_drafted):  # a chain: node i is x_i, node 0 the root
        p, q = laws(draft, view, node)  # [V], [V]
        weighed.append((weight, weight * p, q))
        drafted = drafted_token(draft, node + 1, q)
        weight = _shrunk(weight, float(p[drafted]), float(q[drafted]))
        if weight == 0.0:
            break  # neither this prefix nor a longer one can pass; what follows need not be looked at
    if view.uniform(tree.num_drafted - 1) < weight:
        return Verdict(tuple(range(1, len(tree))), view.token(tree.num_drafted))
    last = len(weighed) - 1
    while last > 0 and not _passes(view.uniform(last - 1), *weighed[last]):
        last -= 1
    _, p, q = weighed[last]  # [V], [V]
    return Verdict(tuple(range(1, last + 1)), view.draw(last, residual(p, q)))


def _shrunk(weight: float, p: float, q: float) -> float:
    """min(1, w p / q)."""
    return 1.0 if weight * p >= q else weight * p / q


def _passes(u: float, weight: float, p: torch.Tensor, q: torch.Tensor) -> bool:
    """u < s / (s + 1 - w) without the division; `p` [V] is w P.

    0/0 (w = 1 and P = Q there) counts as failed. It may: every longer prefix then has h = 1 until the
    laws part, or w_n = 1 at the end, so a longer one has passed before this one is asked.
    """
    s = float((p - q).clamp(min=0.0).sum())
    return u * (s + 1.0 - weight) < s
