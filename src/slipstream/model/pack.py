"""`Pack`: the rows of one forward, laid end to end.

All rows share one line of tokens [1, T], so linear layers see exactly the tokens there are, with no
padding between rows of different size; attention works row by row on each row's own slot. T is
padded to a multiple of `ROWS`: below two rows CPUs take another matrix kernel with other rounding,
from two rows on a token's result does not depend on how many others are computed beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from slipstream.model.cache import round_up

ROWS = 8


@dataclass(frozen=True, slots=True)
class PackRow:
    """Tokens to compute for one slot, behind its committed length.

    parents None: a causal run, token i follows token i-1. Otherwise the tokens are a tree, see
    `TokenTree`; several may have the parent -1, the committed tokens. behind: parents of uncommitted
    tokens that earlier forwards left behind the length. These are nodes 0 to len(behind) - 1, and the
    new tokens, which may be their children, are numbered on from there.
    """

    slot: int
    tokens: Sequence[int]
    parents: Sequence[int] | None = None
    behind: Sequence[int] = ()


@dataclass(frozen=True)
class Span:
    """Where a row lies in the pack, and what its nodes may see."""

    slot: int
    start: int
    count: int
    length: int  # committed tokens of the slot before this forward
    width: int  # key/value columns shown to attention
    parents: Sequence[int] | None  # of all nodes, those behind included; None: one chain
    depths: Sequence[int]  # of all nodes
    behind: int = 0  # uncommitted nodes written before

    @property
    def end(self) -> int:
        return self.start + self.count

    def mask(self, rows: int, window: int | None, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Additive mask [1, 1, rows, width]: a node sees the committed tokens, its ancestors and itself.

        With a window w, only positions above its own minus w (its position is length + depth). Rows
        beyond the row's nodes are padding and see what the last node sees.
        """
        allowed = torch.zeros(self.behind + self.count, self.width, dtype=torch.bool)
        if self.parents is None:
            columns = torch.arange(self.width)
            positions = self.length + torch.arange(self.behind + self.count)[:, None]  # [nodes, 1]
            allowed = columns <= positions
            if window is not None:
                allowed &= columns > positions - window
        else:
            for node, parent in enumerate(self.parents):
                position = self.length + self.depths[node]
                if parent < 0:
                    allowed[node, : self.length] = True
                else:
                    allowed[node] = allowed[parent]
                allowed[node, self.length + node] = True
                if window is not None:
                    allowed[node, : max(0, min(self.length, position - window + 1))] = False
                    ancestor = parent
                    while ancestor >= 0:
                        if position - (self.length + self.depths[ancestor]) >= window:
                            allowed[node, self.length + ancestor] = False
                        ancestor = self.parents[ancestor]
        # The most negative number, not -inf: a window may hide a whole block of keys, whose maximum
        # would be -inf and whose softmax NaN. Masked keys still get a weight of exactly 0.
        mask = torch.full((rows, self.width), torch.finfo(dtype).min, dtype=dtype)
        mask[: self.count].masked_fill_(allowed[self.behind :], 0.0)
        mask[self.count :] = mask[self.count - 1]
        return mask[None, None].to(device)


@dataclass(frozen=True)
class Pack:
    """One forward: ids and positions [1, T] (T padded to `ROWS`), and the rows' spans."""

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    spans: tuple[Span, ...]

    @property
    def count(self) -> int:
        """Tokens computed, padding not counted."""
        return self.spans[-1].end


def tree_depths(parents: Sequence[int]) -> list[int]:
    depths: list[int] = []
    for parent in parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return depths


def build_pack(rows: Sequence[tuple[PackRow, int, int]], device: torch.device) -> Pack:
    """Lay rows end to end. Each comes with its slot's committed length and its attention width."""
    ids: list[int] = []
    positions: list[int] = []
    spans: list[Span] = []
    for row, length, width in rows:
        count, behind = len(row.tokens), len(row.behind)
        nodes = behind + count
        new = range(behind - 1, nodes - 1) if row.parents is None else row.parents
        parents: list[int] | None = [*row.behind, *new]
        if parents == list(range(-1, nodes - 1)):
            parents = None
        depths: Sequence[int] = range(nodes) if parents is None else tree_depths(parents)
        spans.append(Span(row.slot, len(ids), count, length, width, parents, depths, behind))
        ids.extend(row.tokens)
        positions.extend(length + d for d in depths[behind:])
    padding = round_up(len(ids), ROWS) - len(ids)
    line = torch.tensor([ids + [0] * padding, positions + [0] * padding], device=device)  # [2, T]
    return Pack(line[:1], line[1:], tuple(spans))
