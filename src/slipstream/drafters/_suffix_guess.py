"""What may follow a text, by the counts of a suffix tree: the scores of suffix decoding (2411.04975)."""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from slipstream.drafters._suffix_tree import Node, SuffixTree

HUB = 256  # children; reading more of them at every step costs more than their branches give


@dataclass(frozen=True, slots=True)
class Limits:
    """What a guess may have: `depth` tokens in a row, `nodes` in all, and what its match allows (`room`).

    floor: least probability of a path. branch: a tree of the likeliest paths instead of the likeliest chain.
    """

    depth: int
    nodes: int
    factor: float = 1.0
    offset: float = 0.0
    floor: float = 0.1
    branch: bool = False
    block: int = 1

    def room(self, match: int) -> int:
        """Tokens that may follow so long a match: match * factor + offset, and as many more as make, with the
        root, whole blocks of `block` rows."""
        own = match * self.factor + self.offset
        if own >= self.nodes:  # the product may be infinite
            return self.nodes
        return min(self.nodes, (int(own) // self.block + 1) * self.block - 1) if own >= 1 else 0


@dataclass(frozen=True, slots=True)
class Guess:
    """Tokens that may follow, flat: parents[i] is 0 for the root, k for the k-th guessed token.

    probs are the probabilities of the paths; their sum, `score`, is the expected number of accepted tokens.
    match: length of the suffix they follow.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    probs: tuple[float, ...]
    score: float
    match: int


def best_guess(tree: SuffixTree, tail: array[int], limits: Limits) -> Guess | None:
    """The guess of the highest score over all suffixes of `tail`; of equals the longest match."""
    best: Guess | None = None
    for match in range(1, min(len(tail), tree.max_depth - 1) + 1):
        found = tree.find(tail, len(tail) - match)
        if found is None:
            break
        room = limits.room(match)
        if room < 1:
            continue
        guess = (_branches if limits.branch else _chain)(*found, room, limits, match)
        if guess.tokens and (best is None or guess.score >= best.score):
            best = guess
    return best


def _chain(node: Node, offset: int, room: int, limits: Limits, match: int) -> Guess:
    """Follow the highest count while the path's probability stays at the floor or above."""
    tokens: list[int] = []
    probs: list[float] = []
    prob, room = 1.0, min(room, limits.depth)
    while True:
        take = min(node.readable - offset, room - len(tokens))
        tokens += node.text[node.start + offset : node.start + offset + take]
        probs += [prob] * take
        child = node.best_child()
        if child is None or len(tokens) >= room:
            break
        prob *= child.count / node.count
        if prob < limits.floor:
            break
        node, offset = child, 0
    return Guess(tuple(tokens), tuple(range(len(tokens))), tuple(probs), sum(probs), match)


def _branches(node: Node, offset: int, room: int, limits: Limits, match: int) -> Guess:
    """The likeliest paths, best first; a node's parent has at least its probability, so it comes before."""
    tokens: list[int] = []
    parents: list[int] = []
    probs: list[float] = []
    order = 0
    heap: list[tuple[float, int, Node, int, int, int]] = []

    def push(node: Node, offset: int, prob: float, parent: int, depth: int) -> None:
        nonlocal order
        if depth > limits.depth:
            return
        if offset < node.readable:
            heapq.heappush(heap, (-prob, order, node, offset, parent, depth))
            order += 1
            return
        children: Iterable[Node] = (node.children or {}).values()
        if node.children is not None and len(node.children) > HUB:
            children = filter(None, [node.best_child()])
        least = limits.floor * node.count
        for child in children:
            if prob * child.count >= least:
                heapq.heappush(heap, (-prob * child.count / node.count, order, child, 0, parent, depth))
                order += 1

    push(node, offset, 1.0, 0, 1)
    while heap and len(tokens) < room:
        negative, _, node, offset, parent, depth = heapq.heappop(heap)
        tokens.append(node.text[node.start + offset])
        parents.append(parent)
        probs.append(-negative)
        push(node, offset + 1, -negative, len(tokens), depth + 1)
    return Guess(tuple(tokens), tuple(parents), tuple(probs), sum(probs), match)
