"""`PromptReader`: what of a prompt is computed already is copied, the rest is read.

Other running sequences and the prefix cache are looked through whenever a sequence may read on. What is found
has, bit for bit, the keys that reading it would give; `_known` says how that is made sure.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from functools import partial

from slipstream.core.ask import ask_needs
from slipstream.core.draft import Drafter, Needs, Observation
from slipstream.core.sequence import Sequence
from slipstream.core.stats import PrefixCounts
from slipstream.engine.scheduler import Piece, Scheduler
from slipstream.model.cache import columns
from slipstream.model.cuts import cuts_agree
from slipstream.model.pack import PackRow
from slipstream.model.prefix import BLOCK, PrefixCache
from slipstream.model.runner import Runner


class PromptReader:
    """Reads the prompts of the scheduler's sequences into their slots, and takes the slots back.

    keep_elsewhere: is told how many tokens whoever else has caches may keep of sequences that ended.
    """

    def __init__(self, runner: Runner, scheduler: Scheduler, keep_elsewhere: Callable[[int], None]) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._keep_elsewhere = keep_elsewhere
        self._prefixes = PrefixCache()
        self._any_cut: bool | None = None  # see `cuts_agree`; None was not asked yet
        self.counts = PrefixCounts()

    def limit(self, tokens: int) -> None:
        """Keep up to so many tokens of sequences that ended, and share among those that run; 0: neither."""
        if tokens and self._any_cut is None:
            self._any_cut = cuts_agree(self._runner)
        self._prefixes.resize(tokens, BLOCK if self._any_cut else self._scheduler.chunk)

    @property
    def parked(self) -> int:
        """Tokens kept of sequences that ended."""
        return self._prefixes.tokens

    @property
    def memory_bytes(self) -> int:
        return self._prefixes.memory_bytes

    def open(self, sequence: Sequence) -> None:
        self._runner.cache.open(sequence.id)
        if self._prefixes.limit:
            self.counts.queries += len(sequence.prompt)

    def close(self, sequence: Sequence) -> None:
        """Free the slot of a sequence that the scheduler has let go. What others may begin with is kept."""
        if sequence.id in self._runner.cache:
            tokens = sequence.tokens[: self._known(sequence)]
            self._prefixes.keep(self._runner.cache, sequence.id, tokens, self._room())

    def step(self, drafter: Drafter) -> list[Observation]:
        """One chunk's worth of prompts. Drafters are told of what was computed, not of what was found."""
        due = self._scheduler.chunks(partial(self._found, drafter))
        self.make_room()
        for sequence, start, end in due:
            if start == end:
                self._scheduler.read(sequence, end)
        pieces = [piece for piece in due if piece[1] < piece[2]]
        if not pieces:
            return []
        rows = [PackRow(sequence.id, sequence.prompt[start:end]) for sequence, start, end in pieces]
        output = self._runner.forward(rows, logits="none")
        observations = []
        for (sequence, start, end), span in zip(pieces, output.pack.spans, strict=True):
            self._runner.cache.commit(sequence.id, range(end - start))
            self._scheduler.read(sequence, end)
            features = {k: v[span.start : span.end] for k, v in output.features.items()}
            tokens, after = sequence.prompt[start:end], sequence.prompt[end]
            observations.append(Observation(sequence.id, start, tokens, features, next_token=after))
        return observations

    def make_room(self) -> None:
        """Nothing is kept, here or elsewhere, that the sequences need."""
        room = self._room()
        self._prefixes.shrink(room)
        self._keep_elsewhere(max(min(self._prefixes.limit, room), 0))

    def _found(self, drafter: Drafter, sequence: Sequence, start: int, pieces: Items[Piece]) -> int | None:
        """How much of a prompt is there, `start` of it by itself; None if more will be after this step."""
        limit = self._limit(sequence, ask_needs(drafter, sequence.id))
        if start >= limit or (sequence.group is None and not self._prefixes.limit):
            return start
        blocks = self._prefixes.find(sequence.prompt, limit)
        found, source = len(blocks) * self._prefixes.block, None
        for other in self._scheduler.admitted:
            if other is not sequence:
                shared = self._shared(sequence, other, min(limit, self._known(other)))
                if shared > found:
                    found, source = shared, other
        soon = max((self._shared(sequence, other, min(limit, end)) for other, _, end in pieces), default=0)
        if soon > max(found, start):
            return None
        if found <= start:
            return start
        if source is None:
            self._prefixes.fill(self._runner.cache, sequence.id, blocks)
        else:
            self._runner.cache.copy_prefix(source.id, sequence.id, found)
        sequence.cached_tokens += found - start
        if self._prefixes.limit:
            self.counts.hits += found - start
        return found

    def _limit(self, sequence: Sequence, needs: Needs) -> int:
        """Tokens of a prompt that need not be computed: hidden states are not kept, so a drafter that is fed
        those of all tokens must see them computed, or the last one."""
        whole = len(sequence.prompt) - 1
        if not needs.features:
            return whole
        if not needs.last_only:
            return 0
        return whole - 1 if self._any_cut else (whole - 1) // self._scheduler.chunk * self._scheduler.chunk

    def _shared(self, one: Sequence, other: Sequence, limit: int) -> int:
        """Tokens that both begin with, `limit` at most; in whole blocks unless both have the same prompt."""
        if one.group is not None and one.group == other.group:
            return limit
        if not self._prefixes.limit:
            return 0
        size, at = self._prefixes.block, 0
        while at + size <= limit and one.tokens[at : at + size] == other.tokens[at : at + size]:
            at += size
        return at

    def _known(self, sequence: Sequence) -> int:
        """Tokens of a sequence whose keys in its slot are those of a prompt that has been read.

        Where it matters how a prompt is cut, only a prompt's own are, and of these `block` makes it whole
        chunks, each of which is always computed alone and in one piece. Where it does not, the answer's
        are as well, up to the first token that a tree had elsewhere.
        """
        known = self._runner.cache.in_order(sequence.id)
        return known if self._any_cut else min(known, len(sequence.prompt) - 1)

    def _room(self) -> int:
        """Cached tokens that no sequence holds or can come to hold in the next step."""
        total = self._scheduler.cache_tokens
        if total is None:
            return self._prefixes.limit
        grows = columns(self._scheduler.chunk)
        cache = self._runner.cache
        need, admitted = self._scheduler.need, self._scheduler.admitted
        return total - cache.held([min(need(s), cache.capacity(s.id) + grows) for s in admitted])
