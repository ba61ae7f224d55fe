"""A counted, depth-limited, path-compressed suffix tree over token texts.

The count of a node is how often the string that leads to it occurs, so count(child) / count(node) is the
share of occurrences that went on with the child: the estimate of suffix decoding (Oliaro et al.,
2411.04975). Two ways to fill one: `SuffixTree.add` and `remove` for many whole texts, `GrowingTree.extend`
for one text that is still being written.

Texts enter by Ukkonen's rule, without suffix links: the longest suffix that has occurred before stays
implicit until it meets a token that is new there, then it gets a leaf and the next shorter suffix is looked
up from the root. A text of n tokens has n look-ups in all, each at most `max_depth` nodes deep.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Sequence

# What CPython 3.11 allocates, as tracemalloc tells in the tests. Node: the object, its position and its key.
# Inner: a dict of few children. Token: an entry of the text's array.
NODE_BYTES, INNER_BYTES, TOKEN_BYTES = 144, 240, 4
_EXPECTED = 260  # a token of 2,000 to 32,000 of English or code, 152k ids: 234 to 289 (tracemalloc)


def expected_bytes(tokens: int) -> int:
    """What the tree of a text of so many tokens takes, the text included."""
    return tokens * _EXPECTED


class Node:
    """The edge that leads to a node, and the node at its end.

    The label is text[start : start + length], and text[start - depth : start] is the path that leads there,
    where depth is the length of that path: so an edge can be joined with the one above by moving `start`.
    The last edge of a growing text reaches beyond what is written; what is readable ends with the text.
    best: the child of the highest count, the latest of equals; None if not known (ask `best_child`).
    """

    __slots__ = ("best", "children", "count", "length", "start", "text")

    def __init__(self, text: array[int], start: int, length: int, count: int) -> None:
        self.text = text
        self.start = start
        self.length = length
        self.count = count
        self.children: dict[int, Node] | None = None
        self.best: Node | None = None

    def best_child(self) -> Node | None:
        """The child that occurs most."""
        if self.best is None and self.children:
            self.best = max(self.children.values(), key=lambda child: child.count)
        return self.best

    @property
    def readable(self) -> int:
        """Tokens of the label that are written."""
        return min(self.length, len(self.text) - self.start)


class SuffixTree:
    """Counts of all strings of up to `max_depth` tokens in the texts added."""

    def __init__(self, max_depth: int = 24) -> None:
        if max_depth < 2:
            raise ValueError(f"max_depth must be at least 2, not {max_depth}")
        self.max_depth = max_depth
        self.root = Node(array("i"), 0, 0, 0)
        self.num_nodes = 0
        self.num_inner = 0  # nodes with children, the root not counted

    # -- texts ----------------------------------------------------------------------------------

    def add(self, tokens: Sequence[int]) -> array[int]:
        """Count every string of the text; gives what `remove` takes."""
        text = array("i", tokens)
        writer = _Writer(self, text)
        for n in range(len(text)):
            writer.take(n)
        for start in range(writer.counted, len(text)):  # what is still implicit ends with the text
            self._count(text, start, len(text) - start, 0)
        return text

    def remove(self, text: array[int]) -> None:
        """Undo an `add`: the tree is as if the text had never been there."""
        for start in range(len(text)):
            self._uncount(text, start, min(self.max_depth, len(text) - start))

    def _count(self, text: array[int], start: int, known: int, rest: int) -> None:
        """Count the suffix at `start`: `known` tokens are in the tree, `rest` more become a leaf."""
        node, depth = self.root, 0
        node.count += 1
        while depth < known:
            parent, token = node, text[start + depth]
            assert parent.children is not None
            node = parent.children[token]
            if node.length > known - depth:
                node = self._split(parent, token, known - depth)
            node.count += 1
            if parent.best is not None and node.count >= parent.best.count:
                parent.best = node
            depth += node.length
        if rest:
            leaf = Node(text, start + known, rest, 1)
            if node.children is None:
                node.children, node.best = {}, leaf
                self.num_inner += node is not self.root
            elif node.best is not None and node.best.count == 1:
                node.best = leaf
            node.children[text[start + known]] = leaf
            self.num_nodes += 1

    def _split(self, parent: Node, token: int, at: int) -> Node:
        """Put a node `at` tokens into the edge to the child under `token`; gives it."""
        assert parent.children is not None
        lower = parent.children[token]
        upper = Node(lower.text, lower.start, at, lower.count)
        lower.start += at
        lower.length -= at
        upper.children = {lower.text[lower.start]: lower}
        upper.best = lower
        parent.children[token] = upper
        if parent.best is lower:
            parent.best = upper
        self.num_nodes += 1
        self.num_inner += 1
        return upper

    def _uncount(self, text: array[int], start: int, length: int) -> None:
        node, depth = self.root, 0
        node.count -= 1
        path = [(node, 0)]  # nodes that stay, and the depth where their edge begins
        while depth < length:
            parent, token = node, text[start + depth]
            assert parent.children is not None
            node = parent.children[token]
            node.count -= 1
            if parent.best is node:
                parent.best = None  # another child may be ahead now
            if not node.count:  # only this suffix went there, so it is a leaf
                del parent.children[token]
                self.num_nodes -= 1
                if not parent.children:
                    parent.children = None
                    self.num_inner -= parent is not self.root
                break
            path.append((node, depth))
            depth += node.length
        copy: array[int] | None = None
        for i in range(len(path) - 1, 0, -1):
            node, depth = path[i]
            if node.text is text:  # others came this way too: keep their tokens, let go of the text
                copy = text[start : start + depth + node.length] if copy is None else copy
                node.text, node.start = copy, depth
            self._join(path[i - 1][0], node)

    def _join(self, parent: Node, node: Node) -> None:
        """Take a node out where nothing branches or ends any more."""
        if node.children is None or len(node.children) > 1:
            return
        (only,) = node.children.values()
        if only.count < node.count:
            return
        only.start -= node.length
        only.length += node.length
        assert parent.children is not None
        parent.children[node.text[node.start]] = only
        if parent.best is node:
            parent.best = only
        self.num_nodes -= 1
        self.num_inner -= 1

    # -- look-ups -------------------------------------------------------------------------------

    def _known(self, text: array[int], start: int, end: int) -> tuple[Node, int]:
        """Where text[start:end], which is in the tree, ends: a node and how far into its edge."""
        node, depth, length = self.root, 0, end - start
        while depth < length:
            assert node.children is not None
            node = node.children[text[start + depth]]
            depth += node.length
        return node, node.length - (depth - length)

    def find(self, tokens: array[int], start: int = 0) -> tuple[Node, int] | None:
        """Where tokens[start:] ends in the tree, if it occurs."""
        node, at, end = self.root, start, len(tokens)
        offset = 0
        while at < end:
            child = node.children.get(tokens[at]) if node.children else None
            if child is None:
                return None
            offset = min(child.readable, end - at)
            if child.text[child.start : child.start + offset] != tokens[at : at + offset]:
                return None
            at += offset
            node = child
        return node, offset

    def occurrences(self, tokens: Sequence[int]) -> int:
        """How often the string was counted."""
        found = self.find(array("i", tokens))
        return found[0].count if found else 0

    # -- upkeep ---------------------------------------------------------------------------------

    @property
    def memory_bytes(self) -> int:
        """An estimate from the number of nodes; the texts come on top, `TOKEN_BYTES` a token."""
        first = sys.getsizeof(self.root.children) if self.root.children else 0
        return self.num_nodes * NODE_BYTES + self.num_inner * INNER_BYTES + first

    def walk(self) -> Iterator[tuple[tuple[int, ...], Node]]:
        """Every node but the root, with its readable path."""
        stack: list[tuple[tuple[int, ...], Node]] = [((), self.root)]
        while stack:
            path, node = stack.pop()
            for child in (node.children or {}).values():
                below = (*path, *child.text[child.start : child.start + child.readable])
                yield below, child
                stack.append((below, child))

    def check(self) -> None:
        """Raise AssertionError unless every invariant holds; for tests, it reads the whole tree."""
        nodes = list(self.walk())
        assert len(nodes) == self.num_nodes, f"{len(nodes)} nodes, {self.num_nodes} counted"
        assert sum(n.children is not None for _, n in nodes) == self.num_inner, "inner nodes miscounted"
        for path, node in [((), self.root), *nodes]:
            children = node.children or {}
            total = sum(c.count for c in children.values())
            assert total <= node.count, f"{path}: {node.count} occurrences, {total} continuations"
            assert node.children is None or children, f"{path}: empty children"
            assert len(path) <= self.max_depth, f"{path}: too deep"
            for token, child in children.items():
                assert child.readable > 0 and child.text[child.start] == token, f"{path}: wrong key {token}"
            if node.best is not None:
                assert any(node.best is c for c in children.values()), f"{path}: best is no child"
                assert node.best.count == max(c.count for c in children.values()), f"{path}: best is not best"
            if node is not self.root:
                assert node.count > 0, f"{path}: a node that nothing counts"
                assert len(children) != 1 or total < node.count, f"{path}: not compressed"
                above = node.start + node.readable - len(path)
                assert above >= 0 and tuple(node.text[above : above + len(path)]) == path, f"{path}: label"


class _Writer:
    """Puts one text into a tree: text[:counted] are counted starts, the rest is implicit.

    (node, offset) is where the implicit suffix ends. Nothing else may change the tree meanwhile.
    """

    __slots__ = ("counted", "node", "offset", "open", "text", "tree")

    def __init__(self, tree: SuffixTree, text: array[int], grows: bool = False) -> None:
        self.tree = tree
        self.text = text
        self.open = grows
        self.counted = 0
        self.node, self.offset = tree.root, 0

    def take(self, n: int) -> None:
        """Go on with text[n]."""
        tree, text, token = self.tree, self.text, self.text[n]
        while True:
            node = self.node
            if self.offset < node.length:
                if node.text[node.start + self.offset] == token:
                    self.offset += 1
                    break
            elif node.children is not None and token in node.children:
                self.node, self.offset = node.children[token], 1
                break
            known = n - self.counted
            rest = tree.max_depth - known
            tree._count(text, self.counted, known, rest if self.open else min(rest, len(text) - n))
            self.counted += 1
            if self.counted > n:
                self.node, self.offset = tree.root, 0
                return
            self.node, self.offset = tree._known(text, self.counted, n)
        if n + 1 - self.counted == tree.max_depth:  # as long as strings get: it occurred once more
            tree._count(text, self.counted, tree.max_depth, 0)
            self.counted += 1
            self.node, self.offset = tree._known(text, self.counted, n + 1)


class GrowingTree(SuffixTree):
    """The tree of one text that grows.

    Counted are the starts up to the longest suffix that has occurred before: the present is not among
    the occurrences of itself, so it does not dilute the shares of what followed in the past.
    """

    def __init__(self, max_depth: int = 24) -> None:
        super().__init__(max_depth)
        self.text = array("i")
        self._writer = _Writer(self, self.text, grows=True)

    @property
    def counted(self) -> int:
        """Starts below this are counted."""
        return self._writer.counted

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.text.append(token)
            self._writer.take(len(self.text) - 1)

    def repeated(self) -> array[int]:
        """The longest end of the text that has occurred before."""
        return self.text[self.counted :]

    def tail(self) -> array[int]:
        """The end of the text, as much as a match in another tree can have."""
        return self.text[-(self.max_depth - 1) :]

    @property
    def memory_bytes(self) -> int:
        return super().memory_bytes + len(self.text) * TOKEN_BYTES
