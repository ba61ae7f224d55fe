"""`TokenTree`: the root and the tokens drafted after it.

Node 0 is the *root*: the last committed token, the only one that is not in the target's cache.
Nodes are flat, parents come before children, so a tree is two integer tuples. Plain decoding is a
tree with one node and a chain is a tree of width 1; no code treats them specially.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class TokenTree:
    """A root and drafted tokens. `parents[0] == -1` and `parents[i] < i` for every other node.

    Two children of one node may carry the same token only if `allow_duplicates`: candidates drawn
    independently and identically may repeat, every other way of drafting must merge them.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    allow_duplicates: bool = False

    def __post_init__(self) -> None:
        if not self.tokens or len(self.tokens) != len(self.parents):
            raise ValueError(f"a tree needs a root and one parent a node: {self.tokens=} {self.parents=}")
        if self.parents[0] != -1:
            raise ValueError(f"node 0 is the root, its parent must be -1, not {self.parents[0]}")
        seen: set[tuple[int, int]] = set()
        for node, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True)):
            if node and not 0 <= parent < node:
                raise ValueError(f"node {node} has parent {parent}: parents must come before children")
            if node and (parent, token) in seen and not self.allow_duplicates:
                raise ValueError(f"node {node} repeats token {token} under parent {parent}")
            seen.add((parent, token))

    # -- constructors ---------------------------------------------------------------------------

    @classmethod
    def root(cls, token: int) -> TokenTree:
        """The tree of plain decoding: nothing drafted."""
        return cls((token,), (-1,))

    @classmethod
    def chain(cls, root: int, tokens: Iterable[int]) -> TokenTree:
        """Each token follows the one before it."""
        drafted = tuple(tokens)
        return cls((root, *drafted), tuple(range(-1, len(drafted))))

    @classmethod
    def from_paths(cls, root: int, paths: Iterable[Sequence[int]]) -> TokenTree:
        """The union (trie) of token paths below the root, in order of first appearance."""
        tokens, parents = [root], [-1]
        child_of: dict[tuple[int, int], int] = {}
        for path in paths:
            node = 0
            for token in path:
                key = (node, token)
                if key not in child_of:
                    child_of[key] = len(tokens)
                    tokens.append(token)
                    parents.append(node)
                node = child_of[key]
        return cls(tuple(tokens), tuple(parents))

    # -- queries --------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Number of nodes, root included."""
        return len(self.tokens)

    @property
    def num_drafted(self) -> int:
        """Number of drafted tokens: the root is not one (vLLM counts the same way)."""
        return len(self.tokens) - 1

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Distance of every node from the root."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @property
    def depth(self) -> int:
        """Length of the longest drafted path."""
        return max(self.depths)

    @cached_property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(-1, len(self.tokens) - 1))

    @cached_property
    def _children(self) -> tuple[tuple[int, ...], ...]:
        children: list[list[int]] = [[] for _ in self.tokens]
        for node, parent in enumerate(self.parents[1:], start=1):
            children[parent].append(node)
        return tuple(tuple(c) for c in children)

    def children(self, node: int) -> tuple[int, ...]:
        """Child nodes in the order they were drafted."""
        return self._children[node]

    def find_child(self, node: int, token: int) -> int | None:
        """The first child of `node` that carries `token`."""
        for child in self._children[node]:
            if self.tokens[child] == token:
                return child
        return None

    def path(self, node: int) -> tuple[int, ...]:
        """Nodes from just below the root down to `node`; empty for the root."""
        nodes: list[int] = []
        while node > 0:
            nodes.append(node)
            node = self.parents[node]
        return tuple(reversed(nodes))

    def path_tokens(self, node: int) -> tuple[int, ...]:
        """Drafted tokens on the way to `node`, its own included, the root's not."""
        return tuple(self.tokens[n] for n in self.path(node))

    # -- transforms -----------------------------------------------------------------------------

    def keep(self, nodes: Iterable[int]) -> tuple[TokenTree, tuple[int, ...]]:
        """The tree of `nodes` (root added) and, for each new node, its old number.

        A node whose parent is not kept is dropped with it, so the result is always a tree.
        """
        wanted = set(nodes) | {0}
        order: list[int] = []
        new_of: dict[int, int] = {-1: -1}
        for node, parent in enumerate(self.parents):
            if node in wanted and parent in new_of:
                new_of[node] = len(order)
                order.append(node)
        tree = TokenTree(
            tuple(self.tokens[n] for n in order),
            tuple(new_of[self.parents[n]] for n in order),
            self.allow_duplicates,
        )
        return tree, tuple(order)

    def merge(self, other: TokenTree) -> TokenTree:
        """The union of both trees, which must share the root token."""
        if self.tokens[0] != other.tokens[0]:
            raise ValueError(f"the trees have different roots: {self.tokens[0]} and {other.tokens[0]}")
        paths = [t.path_tokens(n) for t in (self, other) for n in range(1, len(t))]
        return TokenTree.from_paths(self.tokens[0], paths)
