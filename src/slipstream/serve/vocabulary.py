"""Single tokens as text and bytes, for log-probabilities and traces."""

from __future__ import annotations

from functools import lru_cache
from typing import Any


class Vocabulary:
    """table: llguidance's view of the tokenizer, which knows the bytes of every token; None without one."""

    def __init__(self, tokenizer: Any, table: Any | None) -> None:
        self._tokenizer = tokenizer
        self._table = table
        self.raw = lru_cache(maxsize=1 << 16)(self._raw)

    def _raw(self, token: int) -> bytes:
        if self._table is not None and token < self._table.vocab_size:
            return bytes(self._table.decode_bytes([token]))
        return str(self._tokenizer.decode([token])).encode("utf-8", "replace")

    def text(self, token: int) -> str:
        """Half a character becomes a replacement character; the bytes tell what it is."""
        return self.raw(token).decode("utf-8", "replace")
