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
from slipstream.model.transfer import put

# Packed products of 4 rows take less time than of 8 (`bench/int8_layers.py`), and give the same bits.
ROWS = 4
NODES = 64  # of a tree whose ancestors fit the bits of one number, see `Span.ancestors`


@dataclass(frozen=True, slots=True)
class PackRow:
    """Tokens to compute for one slot, behind its committed length.

    parents None: a causal run, token i follows token i-1. Otherwise the tokens are a tree, see
    `TokenTree`, or several trees side by side (more than one -1). A tree may be computed level by
    level: parents then tells of all its nodes, tokens holds the last ones, and the nodes in front of
    them are the last of the slot's committed ones.
    """

    slot: int
    tokens: Sequence[int]
    parents: Sequence[int] | None = None


@dataclass(frozen=True)
class Span:
    """Where a row lies in the pack, and what its nodes may see."""

    slot: int
    start: int
    count: int
    length: int  # committed tokens of the slot before this forward
    width: int  # key/value columns shown to attention
    parents: Sequence[int] | None
    depths: Sequence[int]
    earlier: int = 0  # of the slot's committed tokens, the last ones that are nodes of this tree

    @property
    def end(self) -> int:
        return self.start + self.count

    def mask(self, rows: int, window: int | None, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Additive mask [1, 1, rows, width]: a node sees the committed tokens, its ancestors and itself.

        With a window w, only positions above its own minus w (its position is length + depth). Rows
        beyond the row's nodes are padding and see what the last node sees.
        """
        if self.parents is None:
            columns = torch.arange(self.width, device=device)
            positions = self.length + torch.arange(self.count, device=device)[:, None]  # [count, 1]
            allowed = columns <= positions
            if window is not None:
                allowed &= columns > positions - window
        else:
            allowed = torch.zeros(len(self.parents), self.width, dtype=torch.bool)
            trunk = self.trunk
            for node, parent in enumerate(self.parents):
                position = trunk + self.depths[node]
                if parent < 0:
                    allowed[node, :trunk] = True
                else:
                    allowed[node] = allowed[parent]
                allowed[node, trunk + node] = True
                if window is not None:
                    allowed[node, : max(0, min(trunk, position - window + 1))] = False
                    ancestor = parent
                    while ancestor >= 0:
                        if position - (trunk + self.depths[ancestor]) >= window:
                            allowed[node, trunk + ancestor] = False
                        ancestor = self.parents[ancestor]
            allowed = put(allowed[self.earlier :], device)
        # The most negative number, not -inf: a window may hide a whole block of keys, whose maximum
        # would be -inf and whose softmax NaN. Masked keys still get a weight of exactly 0.
        mask = torch.full((rows, self.width), torch.finfo(dtype).min, dtype=dtype, device=device)
        mask[: self.count].masked_fill_(allowed, 0.0)
        mask[self.count :] = mask[self.count - 1]
        return mask[None, None]

    @property
    def trunk(self) -> int:
        """Committed tokens in front of the tree."""
        return self.length - self.earlier

    def ancestors(self) -> list[int]:
        """Of each node, which nodes of the tree it sees, itself included: bit i is node i. At most `NODES`.

        Signed 64-bit numbers: with node 63 they are negative.
        """
        seen: list[int] = []
        for node in range(self.earlier + self.count):
            parent = node - 1 if self.parents is None else self.parents[node]
            seen.append((1 << node) | (seen[parent] if parent >= 0 else 0))
        return [bits - (1 << NODES) if bits >> (NODES - 1) else bits for bits in seen[self.earlier :]]


@dataclass(frozen=True)
class Pack:
    """One forward: ids and positions [1, T] (T padded to `ROWS` or another block), and the rows' spans."""

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


def build_pack(rows: Sequence[tuple[PackRow, int, int]], device: torch.device, block: int = ROWS) -> Pack:
    """Lay rows end to end. Each comes with its slot's committed length and its attention width. block: padded
    to a multiple of so many tokens."""
    ids: list[int] = []
    positions: list[int] = []
    spans: list[Span] = []
    for row, length, width in rows:
        count = len(row.tokens)
        chain = row.parents is None or list(row.parents) == list(range(-1, len(row.parents) - 1))
        parents = None if chain else row.parents
        depths: Sequence[int] = range(count) if parents is None else tree_depths(parents)
        earlier = len(depths) - count
        spans.append(Span(row.slot, len(ids), count, length, width, parents, depths, earlier))
        ids.extend(row.tokens)
        positions.extend(length - earlier + d for d in depths[earlier:])
    padding = round_up(len(ids), block) - len(ids)
    line = put(torch.tensor([ids + [0] * padding, positions + [0] * padding]), device)  # [2, T]
    return Pack(line[:1], line[1:], tuple(spans))
