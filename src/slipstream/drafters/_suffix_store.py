"""Earlier outputs in one suffix tree: bounded, shared by rows, engines and threads, kept on disk if asked.

The file is a line that names the format, a line of JSON, and the tokens of all texts, oldest first. It is
written beside the old one and then put in its place, so a process that dies in the middle leaves the old one.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import sys
import threading
import zlib
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import filelock

from slipstream.core import jsontext
from slipstream.core.places import expanded
from slipstream.drafters._suffix_guess import Guess, Limits, best_guess
from slipstream.drafters._suffix_tree import TOKEN_BYTES, SuffixTree
from slipstream.errors import DrafterError
from slipstream.model.store import try_writing

MAGIC = b"slipstream suffix store 1\n"
SAVE_EVERY = 64  # texts; a process that is killed forgets at most so many


def vocabulary_digest(tokenizer: Any) -> str:
    """Names a tokenizer's vocabulary; empty without a tokenizer."""
    if tokenizer is None:
        return ""
    text = json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


class SuffixStore:
    """The last `max_requests` texts, `max_tokens` in all; the oldest go first.

    vocab_size and vocabulary (`vocabulary_digest`) say what the ids mean; a file of another vocabulary is
    refused. With `path` the store begins with what the file holds and `save` writes it. Processes that
    share a file do not see each other's texts, and the last one to save wins. Any thread may call.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        max_requests: int = 10_000,
        max_tokens: int = 200_000,
        max_depth: int = 24,
        path: str | Path | None = None,
        vocabulary: str = "",
    ) -> None:
        self.vocab_size = vocab_size
        self.max_depth = max_depth
        self.path = expanded(path) if path else None
        self._vocabulary = vocabulary
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._lock = threading.RLock()
        self._tree = SuffixTree(max_depth)
        self._texts: deque[array[int]] = deque()
        self._tokens = 0
        self._unsaved = 0
        if self.path is not None:
            for text in _read(self.path, vocab_size, vocabulary) if self._check_place() else ():
                self._add(text)

    def add(self, tokens: Sequence[int]) -> None:
        """Remember a text. Of one that is longer than the bound, the end is kept."""
        with self._lock:
            self._add(tokens)
            self._unsaved += 1
            if self._unsaved % SAVE_EVERY == 0:
                with suppress(DrafterError):  # a full disk must not end a request; the last save tells
                    self.save()

    def _add(self, tokens: Sequence[int]) -> None:
        kept = tokens[-self._max_tokens :] if self._max_tokens else []
        if len(kept) < 2 or not self._max_requests:
            return  # nothing follows anything in it
        self._texts.append(self._tree.add(kept))
        self._tokens += len(kept)
        while len(self._texts) > self._max_requests or self._tokens > self._max_tokens:
            oldest = self._texts.popleft()
            self._tree.remove(oldest)
            self._tokens -= len(oldest)

    def best(self, tail: array[int], limits: Limits) -> Guess | None:
        """What may follow a text that ends with `tail`."""
        with self._lock:
            return best_guess(self._tree, tail, limits)

    def save(self) -> None:
        """Write the file, whole or not at all. Nothing without a path, or if nothing is new."""
        with self._lock:
            if self.path is None or not self._unsaved:
                return
            raw = _write(self._texts, self.vocab_size, self._vocabulary)
            partial = self.path.with_name(f".{self.path.name}.partial")
            try:
                # One name for all processes, so that one that was killed leaves no pile of partial files.
                with filelock.FileLock(self.path.with_name(f".{self.path.name}.lock")):
                    with partial.open("wb") as file:
                        file.write(raw)
                        file.flush()
                        os.fsync(file.fileno())
                    os.replace(partial, self.path)
            except OSError as error:
                raise self._unwritable(error) from error
            self._unsaved = 0

    def _check_place(self) -> bool:
        """Whether there is a file. A place where none can be is found before anything is generated."""
        assert self.path is not None
        try:
            try:
                mode: int | None = self.path.stat().st_mode
            except FileNotFoundError:
                mode = None
            if mode is not None and not stat.S_ISREG(mode):  # reading a device or a pipe may never end
                raise DrafterError(f"the suffix store {self.path} is not a file; give another store=FILE")
            try_writing(self.path.parent)
        except (OSError, ValueError) as error:  # a name with a zero byte is a ValueError
            raise self._unwritable(error) from error
        return mode is not None

    def _unwritable(self, error: OSError | ValueError) -> DrafterError:
        why = getattr(error, "strerror", None) or error
        return DrafterError(
            f"the suffix store {self.path} cannot be written ({why}); give another store=FILE, or none"
        )

    def check(self) -> None:
        """Raise AssertionError unless the tree and the bounds hold; for tests."""
        with self._lock:
            self._tree.check()
            assert self._tokens == sum(map(len, self._texts)) <= self._max_tokens
            assert len(self._texts) <= self._max_requests

    def __len__(self) -> int:
        """Texts held now."""
        return len(self._texts)

    @property
    def num_tokens(self) -> int:
        return self._tokens

    @property
    def memory_bytes(self) -> int:
        return self._tree.memory_bytes + self._tokens * TOKEN_BYTES


def _write(texts: Iterable[array[int]], vocab_size: int, vocabulary: str) -> bytes:
    lengths, body = [], array("i")
    for text in texts:
        lengths.append(len(text))
        body.extend(text)
    raw = _little(body).tobytes()
    header = {
        "vocab_size": vocab_size,
        "vocabulary": vocabulary,
        "lengths": lengths,
        "crc32": zlib.crc32(raw),
    }
    return MAGIC + json.dumps(header).encode() + b"\n" + raw


def _read(path: Path, vocab_size: int, vocabulary: str) -> list[array[int]]:
    mend = "delete it, or give another store=FILE"
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise DrafterError(
            f"the suffix store {path} cannot be read ({error.strerror or error}); {mend}"
        ) from None
    if not raw.startswith(MAGIC):
        raise DrafterError(f"{path} is not a suffix store of this version; {mend}")
    try:
        line, _, body = raw[len(MAGIC) :].partition(b"\n")
        header = jsontext.parse(line)
        of = (header["vocab_size"], header["vocabulary"])
        lengths = [int(n) for n in header["lengths"]]
        if zlib.crc32(body) != header["crc32"] or any(n < 0 for n in lengths):
            raise ValueError("its checksum is wrong")
        tokens = array("i")
        tokens.frombytes(body)
        tokens = _little(tokens)
        if sum(lengths) != len(tokens):
            raise ValueError("its lengths do not add up")
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise DrafterError(f"the suffix store {path} is damaged ({error}); {mend}") from None
    if of != (vocab_size, vocabulary):
        raise DrafterError(
            f"the suffix store {path} is of another tokenizer ({of[0]} ids, here {vocab_size});"
            " give each model its own store=FILE"
        )
    texts, start = [], 0
    for length in lengths:
        texts.append(tokens[start : start + length])
        start += length
    if any(not 0 <= t < vocab_size for t in tokens):
        raise DrafterError(f"the suffix store {path} is damaged (ids outside the vocabulary); {mend}")
    return texts


def _little(tokens: array[int]) -> array[int]:
    """Between the machine's byte order and the file's."""
    if sys.byteorder == "big":
        tokens = tokens[:]
        tokens.byteswap()
    return tokens
