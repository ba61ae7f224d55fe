"""Drafters that put every part of the loop to work on any target, whatever the user's own drafter does.

A drafter that is seldom right, or never wrong, or never branches, leaves parts of the loop untried. These
draft what is known to come and what is likely to come instead, as chains and trees, as point masses and drawn
from a q.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import torch

from slipstream.core.draft import Draft, Drafter, DraftRequest
from slipstream.core.noise import Purpose
from slipstream.core.tree import TokenTree
from slipstream.drafters.base import empty_draft
from slipstream.logits.law import Law, draw_siblings
from slipstream.proof.exact import Prefix, ShortLaw

Coming = Sequence[tuple[int, int]]  # each token that will come, and the likeliest other one


class _Probe(Drafter):
    """Drafts each request by itself."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [self.draft(r) if r.budget.depth > 0 else empty_draft(r) for r in requests]

    def draft(self, request: DraftRequest) -> Draft:
        raise NotImplementedError


def _output(request: DraftRequest) -> Prefix:
    return tuple(request.tokens[request.prompt_length :])


class Replay(_Probe):
    """Drafts what plain decoding said for the same seed, as point masses.

    As a chain it turns wrong at a random place, to the token that was likeliest beside the right one, and
    goes on as if it had not. As a tree it has both at every level, and one node below the wrong one.
    """

    num_speculative_tokens = 4

    def __init__(self, known: Mapping[int, Coming], *, tree: bool) -> None:
        self.name = "replayed tree" if tree else "replayed chain"
        self._known = known
        self._tree = tree
        if tree:
            self.draft_nodes = 3 * self.num_speculative_tokens

    def draft(self, request: DraftRequest) -> Draft:
        done = len(_output(request))
        coming = self._known[request.seed][done : done + request.budget.depth]
        chance = random.Random(f"{request.seed} {done}")
        if not self._tree:
            turn = chance.randint(0, len(coming))
            chain = [other if i == turn else right for i, (right, other) in enumerate(coming)]
            return Draft(TokenTree.chain(request.root, chain))
        paths: list[list[int]] = []
        trunk: list[int] = []
        for right, other in coming:
            pair = [[*trunk, other, right], [*trunk, right]]
            paths += pair if chance.random() < 0.75 else pair[::-1]
            trunk.append(right)
        return Draft(TokenTree.from_paths(request.root, paths))


class Likeliest(_Probe):
    """A tree of the target's likeliest tokens, as point masses: three, and one behind each."""

    name = "likeliest tree"
    num_speculative_tokens = 2
    draft_nodes = 6

    def __init__(self, law: ShortLaw) -> None:
        self._law = law
        self._best: dict[tuple[Prefix, int], list[int]] = {}

    def draft(self, request: DraftRequest) -> Draft:
        before, paths = _output(request), list[list[int]]()
        level: list[list[int]] = [[]]
        for depth in range(request.budget.depth):
            level = [[*p, t] for p in level for t in self._likeliest((*before, *p), 1 if depth else 3)]
            paths += level
        return Draft(TokenTree.from_paths(request.root, paths))

    def _likeliest(self, prefix: Prefix, count: int) -> list[int]:
        law = self._law.laws.get(prefix)
        if law is None:
            return []
        key = (prefix, count)
        if key not in self._best:
            best = law.topk(min(count, len(law)))
            pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
            self._best[key] = [token for token, p in pairs if p > 0.0]
        return self._best[key]


class Drawn(_Probe):
    """Draws from a law q that is near the target's, and hands q over: a chain, or a tree drawn without
    replacement (three tokens, and one behind each).

    q is flatter than the target's law, has a taste of its own, and gives some mass to tokens that the
    target's filters forbid. Where the target's law is not known it drafts nothing more.
    """

    num_speculative_tokens = 2
    _FORBIDDEN = 4  # tokens of probability 0 that may be drafted, those of the lowest ids

    def __init__(self, law: ShortLaw, *, tree: bool) -> None:
        self.name = "drawn tree" if tree else "drawn chain"
        self._law = law
        self._tree = tree
        self._q: dict[Prefix, Law] = {}
        self._vocab = len(law.laws[()])
        generator = torch.Generator().manual_seed(len(law.prompt))
        self._taste = 3 * torch.rand(self._vocab, generator=generator, dtype=torch.float64)  # [V]
        if tree:
            self.draft_nodes = 6

    def draft(self, request: DraftRequest) -> Draft:
        before, start = _output(request), len(request.tokens)
        tokens, parents = [request.root], [-1]
        rows: list[torch.Tensor | None] = [None]
        paths: list[Prefix] = [()]
        level = [0]
        for depth in range(request.budget.depth):
            below: list[int] = []
            for node in level:
                q = self._law_behind((*before, *paths[node]))
                if q is None:
                    continue
                if self._tree:
                    drawn, rows[node] = draw_siblings(
                        q,
                        1 if depth else 3,
                        self._vocab,
                        request.seed,
                        start + depth,
                        node,
                        origin=request.origin,
                    )
                else:
                    token = q.draw(request.seed, start + depth, Purpose.DRAFT, origin=request.origin)
                    drawn, rows[node] = [token], q.dense(self._vocab)
                for token in drawn:
                    below.append(len(tokens))
                    tokens.append(token)
                    parents.append(node)
                    rows.append(None)
                    paths.append((*paths[node], token))
            level = below
        if len(tokens) == 1:
            return empty_draft(request)
        return Draft(TokenTree(tuple(tokens), tuple(parents)), tuple(rows))

    def _law_behind(self, prefix: Prefix) -> Law | None:
        if prefix not in self._q:
            p = self._law.laws.get(prefix)
            if p is None:
                return None
            scores = 0.7 * p.log() + self._taste  # [V]
            forbidden = (p == 0.0).nonzero().flatten()[: self._FORBIDDEN]
            scores[forbidden] = float(scores.max()) - 3.0
            ids = scores.isfinite().nonzero().flatten()  # [k]
            self._q[prefix] = Law.from_scores(ids, scores[ids])
        return self._q[prefix]
