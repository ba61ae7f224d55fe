"""Drafting with a model level by level: a chain or a tree a row, all rows and all nodes of a level in one
forward.

A computed node stays in its slot while the levels below it are computed; in the end the slot is rolled back
and the nodes lie behind its length. Of the children of a level the `width` with the best cumulative
log-probability are computed further; of *all* children that were ever seen the best `nodes` are submitted,
which maximises the expected number of accepted tokens under the draft's law (EAGLE-2, 2406.16858). That is
exact because the tokens are point masses chosen without the target's noise. The greedy path is always
computed and always submitted, so a tree never accepts less than the chain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from slipstream.core.draft import Draft
from slipstream.core.tree import TokenTree
from slipstream.model.pack import PackRow
from slipstream.model.runner import Runner

ROOT = -1

Draw = Callable[["Beam", torch.Tensor], int]
"""A sampled token from one row of draft logits [V]; must append its law to `beam.laws`."""


@dataclass
class Beam:
    """One row being drafted. Candidates are numbered as they appear, so parents come before children.

    read: the tokens to compute first, the root last. depth, nodes, width: limits, in drafted tokens.
    computed: the parents, by column, of all nodes computed, in order. columns[i]: the column of candidate i,
    None if it was not computed. scores[i]: log-probability of the path that ends in i.
    """

    slot: int
    read: Sequence[int]
    depth: int
    nodes: int
    width: int = 1
    stop_below: float = 0.0
    computed: list[int] = field(default_factory=list)
    root_column: int = -1
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    columns: list[int | None] = field(default_factory=list)
    greedy: list[int] = field(default_factory=list)  # the greedy path
    laws: list[torch.Tensor] = field(default_factory=list)
    frontier: list[int] = field(default_factory=lambda: [ROOT])  # what the running forward computes

    def __post_init__(self) -> None:
        self.depth = min(self.depth, self.nodes)
        if self.nodes <= self.depth:
            self.width = 1  # the greedy path takes all there is

    def add(self, parent: int, token: int, score: float) -> None:
        """A child of candidate `parent`; the first child of the greedy path's end goes on with it."""
        if parent == (self.greedy[-1] if self.greedy else ROOT):
            self.greedy.append(len(self.tokens))
        self.tokens.append(token)
        self.parents.append(parent)
        self.scores.append(score)
        self.columns.append(None)

    def next_level(self, seen_before: int) -> PackRow | None:
        """The best of the candidates since number `seen_before` to compute next; None: the row is done."""
        new = range(seen_before, len(self.tokens))
        if not new or self._levels == self.depth:
            return None
        kept = self._best(new, self.width)
        for candidate in kept:
            parent = self.parents[candidate]
            column = self.root_column if parent == ROOT else self.columns[parent]
            assert column is not None
            self.columns[candidate] = len(self.computed)
            self.computed.append(column)
        self.frontier = kept
        return PackRow(self.slot, [self.tokens[c] for c in kept], tuple(self.computed))

    @property
    def _levels(self) -> int:
        """Depth of the newest candidate."""
        at, depth = len(self.tokens) - 1, 0
        while at != ROOT:
            at, depth = self.parents[at], depth + 1
        return depth

    def _best(self, candidates: Sequence[int], count: int) -> list[int]:
        """`count` candidates, ascending: the greedy path is taken first, then by score, then by age."""
        greedy = set(self.greedy)
        ranked = sorted(candidates, key=lambda c: (c not in greedy, -self.scores[c], c))
        return sorted(ranked[:count])

    def computed_path(self, tokens: Sequence[int]) -> list[int]:
        """Columns of the longest computed path from the root that spells a beginning of `tokens`."""
        columns: list[int] = []
        at = ROOT
        children = {
            (parent, token): i
            for i, (parent, token) in enumerate(zip(self.parents, self.tokens, strict=True))
            if self.columns[i] is not None
        }
        for token in tokens:
            at = children.get((at, token), ROOT)
            column = self.columns[at] if at != ROOT else None
            if column is None:
                break
            columns.append(column)
        return columns

    def draft(self, root: int, source: str) -> Draft:
        """The best `nodes` candidates. A parent scores no less than its child, so they are a tree."""
        chosen = self._best(range(len(self.tokens)), self.nodes)
        number = {ROOT: 0} | {c: i for i, c in enumerate(chosen, start=1)}
        tree = TokenTree(
            (root, *(self.tokens[c] for c in chosen)), (-1, *(number[self.parents[c]] for c in chosen))
        )
        return Draft(tree, (*self.laws, None) if self.laws else None, source=source)


def grow(
    runner: Runner,
    beams: Sequence[Beam],
    vocab: int,
    *,
    banned: torch.Tensor | None = None,
    after_reading: Callable[[Beam], None] | None = None,
    draw: Callable[[Beam], Draw | None] = lambda _: None,
) -> None:
    """Fill the beams. vocab: ids that may be drafted. banned: of these, which may not, bool [vocab].

    after_reading: called once for each row when its `read` tokens are in the slot, which then keeps them;
    without it the slot is left with the length it had. draw: how the tokens of a row are sampled, None for
    greedy ones.
    """
    cache = runner.cache
    active = [(beam, PackRow(beam.slot, beam.read)) for beam in beams if beam.depth > 0]
    lengths = {beam.slot: cache.length(beam.slot) for beam, _ in active}
    asked, first = "last", True
    try:
        while active:
            output = runner.forward([row for _, row in active], logits=asked, taps=False)
            assert output.logits is not None
            for beam, row in active:
                cache.commit(beam.slot, range(len(row.tokens)))
                if first and after_reading is not None:
                    lengths[beam.slot] += len(row.tokens)
                    after_reading(beam)
                elif first:
                    beam.computed = list(range(-1, len(row.tokens) - 1))
                    beam.root_column = len(row.tokens) - 1
            seen = [len(beam.tokens) for beam, _ in active]
            logits = output.logits[:, :vocab]  # [nodes, vocab]
            if banned is not None:
                logits = logits.masked_fill(banned, float("-inf"))
            _expand([beam for beam, _ in active], logits, draw)
            following = ((beam, beam.next_level(n)) for (beam, _), n in zip(active, seen, strict=True))
            active = [(beam, row) for beam, row in following if row is not None]
            asked, first = "all", False
    finally:
        for slot, length in lengths.items():
            cache.rollback(slot, length)


def _expand(beams: Sequence[Beam], logits: torch.Tensor, draw: Callable[[Beam], Draw | None]) -> None:
    """Children of every frontier node. logits [nodes, V], in the order of the beams and their frontiers.

    A node whose best child is less likely than `stop_below` gets none. The test comes before a token
    is drawn and looks at none, so what is drawn keeps its law.
    """
    scores = logits.float()  # [nodes, V]
    best = scores.argmax(-1, keepdim=True)  # [nodes, 1]
    width = min(max(beam.width for beam in beams), scores.shape[-1])
    if width > 1 or any(beam.stop_below for beam in beams):
        logp = scores.log_softmax(-1)  # [nodes, V]
        # The argmax goes in front whatever topk makes of ties, so that width 1 is the greedy chain.
        ranks = logp.scatter(-1, best, float("inf"))  # [nodes, V]
        children = ranks.topk(width, -1).indices  # [nodes, width]
        likely = logp.gather(-1, children).tolist()
        tokens = children.tolist()
    else:
        tokens, likely = best.tolist(), [[0.0]] * len(best)
    node = 0
    for beam in beams:
        sample = draw(beam)
        for parent in beam.frontier:
            row, node = node, node + 1
            if beam.stop_below and likely[row][0] < math.log(beam.stop_below):
                continue
            if sample is not None:
                beam.add(parent, sample(beam, logits[row]), 0.0)
                continue
            base = 0.0 if parent == ROOT else beam.scores[parent]
            for token, logp_ in zip(tokens[row][: beam.width], likely[row], strict=False):
                beam.add(parent, token, base + logp_)
