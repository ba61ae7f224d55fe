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
    `TokenTree`, or several trees side by side (more than one -1). A tree may be computed level by
    level: behind holds the parents of the nodes that earlier forwards left, uncommitted, behind the
    length. They are numbered first, the new tokens after them.
    """

    slot: int
    tokens: Sequence[int]
    parents: Sequence[int] | None = None
    behind: Sequence[int] = ()

    @property
    def columns(self) -> int:
        """Columns behind the committed length that are in use after the forward."""
        return len(self.behind) + len(self.tokens)


@dataclass(frozen=True)
class Span:
    """Where a row lies in the pack, and what its nodes may see."""

    slot: int
    start: int
    count: int
    length: int  # committed tokens of the slot before this forward
    width: int  # key/value columns shown to attention
    parents: Sequence[int] | None  # of all nodes, those behind included; None: one chain
    depths: Sequence[int]  # likewise
    behind: int = 0  # nodes written before, uncommitted

    @property
    def end(self) -> int:
        return self.start + self.count

    def mask(self, rows: int, window: int | None, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Additive mask [1, 1, rows, width]: a node sees the committed tokens, its ancestors and itself.

        With a window w, only positions above its own minus w (its position is length + depth). Rows
        beyond the row's nodes are padding and see what the last node sees.
        """
        if self.parents is None:
            columns = torch.arange(self.width)
            positions = self.length + self.behind + torch.arange(self.count)[:, None]  # [count, 1]
            allowed = columns <= positions
            if window is not None:
                allowed &= columns > positions - window
        else:
            allowed = torch.zeros(len(self.parents), self.width, dtype=torch.bool)
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
            allowed = allowed[self.behind :]
        # The most negative number, not -inf: a window may hide a whole block of keys, whose maximum
        # would be -inf and whose softmax NaN. Masked keys still get a weight of exactly 0.
        mask = torch.full((rows, self.width), torch.finfo(dtype).min, dtype=dtype)
        mask[: self.count].masked_fill_(allowed, 0.0)
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


def pad_rows(x: torch.Tensor) -> torch.Tensor:
    """x [n, …] with its first row repeated up to a multiple of `ROWS`; results do not depend on n then."""
    missing = round_up(len(x), ROWS) - len(x)
    return torch.cat((x, x[:1].expand(missing, *x.shape[1:]))) if missing else x


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
        behind, nodes, parents = len(row.behind), row.columns, row.parents
        if behind:
            parents = [*row.behind, *(range(behind - 1, nodes - 1) if parents is None else parents)]
        if parents is not None and list(parents) == list(range(-1, nodes - 1)):
            parents = None
        depths: Sequence[int] = range(nodes) if parents is None else tree_depths(parents)
        spans.append(Span(row.slot, len(ids), len(row.tokens), length, width, parents, depths, behind))
        ids.extend(row.tokens)
        positions.extend(length + d for d in depths[behind:])
    padding = round_up(len(ids), ROWS) - len(ids)
    line = torch.tensor([ids + [0] * padding, positions + [0] * padding], device=device)  # [2, T]
    return Pack(line[:1], line[1:], tuple(spans))
