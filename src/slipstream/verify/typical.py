"""Typical acceptance (Medusa, arXiv 2401.10774): faster, and not the target's law. Off unless asked for."""

from __future__ import annotations

import math

import torch

from slipstream.core.draft import Draft
from slipstream.verify.view import TargetView, Verdict


def typical(draft: Draft, view: TargetView, epsilon: float = 0.09, delta: float = 0.3) -> Verdict:
    """Accept x if p(x) > min(epsilon, delta exp(-H(p))): whatever is not unusual for the target.

    LOSSY: the output no longer has the target's law, whatever the draft's law is. `choose_rule` gives
    this rule only with lossy=True, and what comes out of the engine is marked. H is the entropy in nats:
    where the target is unsure, less likely tokens pass. Of several accepted paths the longest wins, then
    the likelier one, then the first drafted. The next token is the target's own draw behind it.

    At temperature 0 p is a point mass, and only its token passes: greedy decoding stays what it is.
    """
    best = (0, 0.0, 0)  # depth, log-probability, last node
    waiting = [best]
    while waiting:
        depth, logp, node = waiting.pop()
        if (depth, logp) > best[:2]:
            best = (depth, logp, node)
        children = draft.tree.children(node)
        if not children:
            continue
        p = view.probs(node)  # [V]
        threshold = min(epsilon, delta * math.exp(-_entropy(p)))
        for child in reversed(children):  # the first drafted is popped first
            likelihood = float(p[draft.tree.tokens[child]])
            if likelihood > threshold:
                waiting.append((depth + 1, logp + math.log(likelihood), child))
    return Verdict(draft.tree.path(best[2]), view.token(best[2]))


def _entropy(p: torch.Tensor) -> float:
    """-sum p log p in nats; impossible tokens add nothing."""
    return -float(torch.xlogy(p, p).sum())
