"""The cache of a model that drafts with a vocabulary and a cache of its own.

Its length is the only state: before drafting a row it rolls back to where cached and committed tokens part
and reads what is missing. Drafted tokens that were accepted are there already, behind the length, so nobody
else may compute in these slots between two drafts.

What a closed row held may be kept for rows that begin alike: up to what a tree had moved, so that drafts stay
what they were.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from slipstream.drafters._growth import Growth
from slipstream.drafters._model_growth import Reading
from slipstream.model.prefix import BLOCK, PrefixCache
from slipstream.model.runner import CHUNK, Runner


def tokens_held(context: int, depth: int, width: int = 1) -> int:
    """The most a slot holds at once: the row of up to `context` tokens, all but those that `depth` levels
    below it may still become, and the nodes of all levels but the last, which is not computed."""
    return context - 1 - depth + width * (depth - 1) if depth else 0


@dataclass
class _Row:
    """Tokens committed to the slot, and the last draft, whose computed nodes lie behind them."""

    cached: list[int] = field(default_factory=list)
    growth: Growth | None = None


class OwnCache:
    """Slots of `runner`, one a row, in step with what was committed."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self._rows: dict[int, _Row] = {}
        self._prefixes = PrefixCache()

    def keep_prefixes(self, tokens: int) -> None:
        """Keep at most so many tokens of closed rows."""
        if tokens != self._prefixes.limit:
            self._prefixes.resize(tokens, BLOCK)

    @property
    def kept_bytes(self) -> int:
        """Memory of what is kept of closed rows."""
        return self._prefixes.memory_bytes

    def catch_up(self, slot: int, tokens: Sequence[int]) -> list[int]:
        """Roll back to a prefix of `tokens` and read on; gives the last piece, the last token included."""
        cache = self.runner.cache
        if slot not in self._rows:
            cache.close(slot)  # of an earlier owner that did not clean up
            cache.open(slot)
            blocks = self._prefixes.find(tokens, len(tokens) - 1)
            self._prefixes.fill(cache, slot, blocks)
            self._rows[slot] = _Row(list(tokens[: cache.length(slot)]))
        row = self._rows[slot]
        same, limit = 0, min(len(row.cached), len(tokens) - 1)
        while same < limit and row.cached[same] == tokens[same]:
            same += 1
        growth, row.growth = row.growth, None
        if same < cache.length(slot):  # tokens of another text, or of a reading that failed half-way
            cache.rollback(slot, same)
            del row.cached[same:]
        elif growth is not None:
            accepted = growth.placed_path(tokens[same:-1])
            cache.commit(slot, accepted)
            row.cached.extend(tokens[same : same + len(accepted)])
            same += len(accepted)
        missing = list(tokens[same:])
        ready = (len(missing) - 1) // CHUNK * CHUNK
        if ready:
            self.runner.extend(slot, missing[:ready])
            row.cached.extend(missing[:ready])
        return missing[ready:]

    def after_reading(self, reading: Reading) -> None:
        """What `catch_up` gave is in the slot; what is drafted from here on is remembered."""
        row = self._rows[reading.slot]
        row.cached.extend(reading.read)
        row.growth = reading.growth

    def close(self, slot: int) -> None:
        row, cache = self._rows.pop(slot, None), self.runner.cache
        if row is not None and slot in cache:
            self._prefixes.keep(cache, slot, row.cached[: cache.in_order(slot)], self._prefixes.limit)
        cache.close(slot)

    def clear(self) -> None:
        self._rows.clear()
        self.keep_prefixes(0)
        self.runner.close()
