"""`Choices`: the shape of a draft tree, before it has tokens.

A path (1, 0) is the likeliest continuation (rank 0) of the second likeliest first token (rank 1). Which
shape drafts best follows from how often a guess of each rank is right at each depth (Medusa, arXiv
2401.10774, section 2.3.3: a node is worth the product of the accuracies on its path, and the
expected tokens a pass are 1 + the sum over the nodes).
"""

from __future__ import annotations

import heapq
import itertools
import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from slipstream.core import jsontext
from slipstream.core.places import expanded
from slipstream.errors import ParameterError

# A node is a row of the step, with a mask as wide as the cache: far larger trees than any that pays would
# take minutes and all memory before somebody could see it.
MOST_NODES = 1024

Path_ = tuple[int, ...]
Accuracies = Sequence[Sequence[float]]  # [depth][rank]: how often that guess is the right one


@dataclass(frozen=True)
class Choices:
    """Rank paths below the root: parents before children, best first, so that any front part is a tree."""

    paths: tuple[Path_, ...]

    def __post_init__(self) -> None:
        check_nodes("a tree's choices", len(self.paths))
        seen: set[Path_] = {()}
        for path in self.paths:
            if not path or min(path) < 0:
                raise ParameterError(f"a choice is a list of ranks from 0 on, not {list(path)}")
            if path in seen:
                raise ParameterError(f"the choice {list(path)} is there twice")
            if path[:-1] not in seen:
                raise ParameterError(f"the choice {list(path)} needs {list(path[:-1])} before it")
            seen.add(path)

    def __len__(self) -> int:
        """Drafted nodes; the root is not one."""
        return len(self.paths)

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """How many ranks are wanted at each depth."""
        widths = [0] * max(map(len, self.paths), default=0)
        for path in self.paths:
            widths[len(path) - 1] = max(widths[len(path) - 1], path[-1] + 1)
        return tuple(widths)

    @property
    def depth(self) -> int:
        return len(self.widths)

    @cached_property
    def inner(self) -> frozenset[Path_]:
        """Paths that have children."""
        return frozenset(path[:-1] for path in self.paths)

    def cut(self, depth: int, nodes: int) -> Choices:
        """The first `nodes` paths of at most `depth`."""
        if depth >= self.depth and nodes >= len(self):
            return self
        return Choices(tuple(p for p in self.paths if len(p) <= depth)[:nodes])

    def expected_tau(self, accuracies: Accuracies) -> float:
        """Tokens a pass, bonus included: 1 + the sum over nodes of the product along the path."""
        return 1.0 + sum(_value(path, accuracies) for path in self.paths)


def check_nodes(what: str, nodes: int) -> None:
    """ParameterError for a number of drafted tokens that no tree can have."""
    if not 0 <= nodes <= MOST_NODES:
        raise ParameterError(f"{what} must be from 0 to {MOST_NODES} drafted tokens, not {nodes}")


def _value(path: Path_, accuracies: Accuracies) -> float:
    value = 1.0
    for depth, rank in enumerate(path):
        known = depth < len(accuracies) and rank < len(accuracies[depth])
        value *= accuracies[depth][rank] if known else 0.0
    return value


def best_tree(accuracies: Accuracies, nodes: int, depth: int | None = None) -> Choices:
    """The tree of `nodes` drafted nodes with the largest expected tau, best node first.

    A node is never worth more than its parent, so taking the best remaining one each time is optimal.
    Equal ones: the shallower, then the smaller ranks. Nodes that are worth nothing are left out.
    """
    for row in accuracies:
        if not all(0.0 <= a <= 1.0 for a in row):
            raise ParameterError(f"accuracies are fractions from 0 to 1, not {list(row)}")
    levels = accuracies if depth is None else accuracies[:depth]
    # Measured accuracies need not fall with the rank, so ranks are taken in the order of their worth.
    order = [sorted(range(len(row)), key=lambda r, row=row: -row[r]) for row in levels]  # type: ignore[misc]
    heap: list[tuple[float, int, Path_, int]] = []  # (-value, length, path, place in order)

    def push(parent: Path_, place: int) -> None:
        level = len(parent)
        if level < len(order) and place < len(order[level]):
            path = (*parent, order[level][place])
            heapq.heappush(heap, (-_value(path, levels), len(path), path, place))

    push((), 0)
    chosen: list[Path_] = []
    while heap and len(chosen) < nodes:
        negative, _, path, place = heapq.heappop(heap)
        if negative == 0.0:
            break
        chosen.append(path)
        push(path[:-1], place + 1)
        push(path, 0)
    return Choices(tuple(chosen))


def full_tree(widths: Sequence[int]) -> Choices:
    """widths[d] children for every node of depth d, level by level."""
    if any(w < 1 for w in widths):
        raise ParameterError(f"a full tree needs at least 1 child a node at every depth, not {list(widths)}")
    nodes = sum(itertools.accumulate(widths, operator.mul))
    check_nodes(f"a full tree of {'x'.join(map(str, widths))}", nodes)
    levels = (itertools.product(*map(range, widths[: d + 1])) for d in range(len(widths)))
    return Choices(tuple(path for level in levels for path in level))


def choices_of(text: str) -> Choices:
    """A shape as an option gives it: paths of ranks, `0+1+0.0+0.1`, or the JSON file that holds them."""
    if not re.fullmatch(r"[\d.+]+", text):
        return read_choices(expanded(text))
    try:
        paths = tuple(tuple(map(int, path.split("."))) for path in text.split("+"))
    except ValueError:
        raise ParameterError(f"the choices {text!r} must be ranks, as in 0+1+0.0+0.1, or a file") from None
    return Choices(paths)


def read_choices(file: Path) -> Choices:
    """From a JSON list of rank paths, `[[0], [1], [0, 0]]`; a path may come before its parent."""
    paths = _read(file, "choices")
    if not isinstance(paths, list) or not all(
        isinstance(p, list) and all(type(rank) is int for rank in p) for p in paths
    ):
        raise ParameterError(f"{file} must hold a JSON list of rank paths such as [[0], [1], [0, 0]]")
    found = [tuple(p) for p in paths]
    try:
        check_nodes("a tree's choices", len(found))
        if any(p[:-1] and p[:-1] not in found[:i] for i, p in enumerate(found)):
            found.sort(key=len)
        return Choices(tuple(found))
    except ParameterError as error:
        raise ParameterError(f"{file}: {error}") from None


def read_accuracies(file: Path) -> list[list[float]]:
    """From JSON `{"accuracies": [[rank 0, rank 1, …] for every depth]}`, or the bare list."""
    rows = _read(file, "accuracies")
    if not isinstance(rows, list) or not all(
        isinstance(row, list) and all(isinstance(a, (int, float)) and 0 <= a <= 1 for a in row)
        for row in rows
    ):
        raise ParameterError(f"{file} must hold, for every depth, a list of fractions from 0 to 1")
    return [[float(a) for a in row] for row in rows]


def _read(file: Path, key: str) -> Any:
    try:
        found = jsontext.parse(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ParameterError(f"{file} cannot be read ({error.strerror}): check the path") from error
    except ValueError as error:
        raise ParameterError(f"{file} is not JSON ({error})") from error
    return found.get(key) if isinstance(found, dict) else found
