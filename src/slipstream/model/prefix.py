"""`PrefixCache`: keys and values of sequences that have ended, for prompts that begin with the same tokens.

They are kept in blocks of so many tokens, each behind the block before it, so a beginning that many share is
held once. A block is found by its tokens themselves and by the very block it stands behind, never by a hash
alone. Blocks are copies that nobody writes to: a sequence gets copies in turn.

What was not used for longest goes first, and of what was used together the end goes first, so no block
outlives the one it stands behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from slipstream.model.cache import Columns, SlotCache, cut

BLOCK = 32  # tokens, where any cut will do: on average half of them are computed again
_Key = tuple[int, tuple[int, ...]]  # number of the block before (0: none), and this one's tokens


@dataclass(frozen=True, eq=False)
class Block:
    """Keys and values of one block's tokens. No two blocks ever have the same number."""

    number: int
    key: _Key
    columns: Columns


class PrefixCache:
    """At most `tokens` tokens in blocks of `block`; none to begin with."""

    def __init__(self) -> None:
        self._blocks: dict[_Key, Block] = {}  # least recently used first
        self._numbers = count(1)
        self.resize(0, 1)

    def resize(self, tokens: int, block: int) -> None:
        """Keep at most so many tokens from now on, in blocks of `block`; other blocks are forgotten."""
        self.limit, self.block = tokens, block
        self._blocks = {key: b for key, b in self._blocks.items() if len(key[1]) == block}
        self.shrink(tokens)

    @property
    def tokens(self) -> int:
        """Tokens whose keys and values are kept."""
        return len(self._blocks) * self.block

    @property
    def memory_bytes(self) -> int:
        one = next(iter(self._blocks.values()), None)  # all are of one size
        each = 0 if one is None else sum(t.nbytes for pair in one.columns.values() for t in pair)
        return len(self._blocks) * each

    def find(self, tokens: Sequence[int], limit: int) -> list[Block]:
        """The blocks that `tokens` begin with, `limit` tokens at most; they count as used."""
        found: list[Block] = []
        before, size = 0, self.block
        for start in range(0, min(len(tokens), limit) - size + 1 if self._blocks else 0, size):
            block = self._blocks.get((before, tuple(tokens[start : start + size])))
            if block is None:
                break
            found.append(block)
            before = block.number
        self._use(found)
        return found

    def fill(self, cache: SlotCache, slot: int, blocks: Sequence[Block]) -> None:
        """Make the tokens of these blocks the slot's, which may have some of them."""
        parts = []
        for i, block in enumerate(blocks):
            have = max(cache.length(slot) - i * self.block, 0)
            if have < self.block:
                parts.append(cut(block.columns, have, self.block))
        cache.append(slot, parts)

    def keep(self, cache: SlotCache, slot: int, tokens: Sequence[int], room: int) -> None:
        """Close the slot, which begins with `tokens`; whole blocks of them are kept, as far as there is room
        for in all `room` tokens."""
        most = max(min(self.limit, room), 0) // self.block
        blocks = self.find(tokens, len(tokens))
        new = range(len(blocks), min(len(tokens) // self.block, most))
        self.shrink((most - len(new)) * self.block)  # never those found: they were used last
        if not new:
            return cache.close(slot)
        starts = [i * self.block for i in new]
        parts = cache.release(slot, [range(start, start + self.block) for start in starts])
        for start, columns in zip(starts, parts, strict=True):
            key = (blocks[-1].number if blocks else 0, tuple(tokens[start : start + self.block]))
            self._blocks[key] = Block(next(self._numbers), key, columns)
            blocks.append(self._blocks[key])
        self._use(blocks)

    def shrink(self, tokens: int) -> None:
        """Forget what was not used for longest until at most so many tokens are left."""
        while self._blocks and self.tokens > tokens:
            del self._blocks[next(iter(self._blocks))]

    def _use(self, blocks: Sequence[Block]) -> None:
        """The first one last: it must outlive those behind it."""
        for block in reversed(blocks):
            self._blocks[block.key] = self._blocks.pop(block.key)
