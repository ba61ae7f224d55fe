"""Text that grows token by token, cut at stop strings, never inside a character.

Decoding is done on a short window of tokens, since a tokenizer may join a token's text to the one
before it (a word's leading space, a character split over tokens).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

_UNFINISHED = "\ufffd"


class TextStream:
    """Turns committed tokens into text. `text` is final; what may still change is held back."""

    def __init__(self, decode: Decode, stop: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stop = tuple(stop)
        self._longest = max((len(s) for s in self._stop), default=0)
        self._tokens: list[int] = []
        self._window = 0  # first token of the decoding window
        self._read = 0  # tokens whose text is already in `text`
        self._given = 0  # characters handed out by `take`
        self.text = ""
        self.stopped = False

    def push(self, token: int, check_stop: bool = True) -> bool:
        """Add a token; True if its text completes a stop string, which is then cut off."""
        self._tokens.append(token)
        before = self._decode(self._tokens[self._window : self._read])
        now = self._decode(self._tokens[self._window :])
        if len(now) <= len(before) or now.endswith(_UNFINISHED):
            return False
        old = len(self.text)
        self.text += now[len(before) :]
        self._window, self._read = self._read, len(self._tokens)
        return check_stop and self._cut(old)

    def _cut(self, old: int) -> bool:
        """Cut at the stop string that ends first beyond `old`; of those, at the one that starts first."""
        starts = [(s, max(0, old - len(s) + 1)) for s in self._stop]
        found = [(at + len(s), at) for s, start in starts if (at := self.text.find(s, start)) >= 0]
        if not found:
            return False
        _, at = min(found)
        self.text = self.text[:at]
        self.stopped = True
        return True

    def finish(self) -> bool:
        """No more tokens: what is held back becomes final, broken characters included.

        True if a stop string was in it, which is then cut off.
        """
        self._longest = 0
        if self.stopped:
            return False
        before = self._decode(self._tokens[self._window : self._read])
        now = self._decode(self._tokens[self._window :])
        old = len(self.text)
        self.text += now[len(before) :]
        self._window, self._read = self._read, len(self._tokens)
        return self._cut(old)

    def take(self) -> str:
        """Text not given out yet, less a tail that could still turn out to be part of a stop string."""
        end = len(self.text)
        if self._longest and not self.stopped:
            end -= self._possible_stop_prefix()
        piece = self.text[self._given : end]
        self._given = max(self._given, end)
        return piece

    def _possible_stop_prefix(self) -> int:
        for n in range(min(self._longest - 1, len(self.text)), 0, -1):
            tail = self.text[-n:]
            if any(s.startswith(tail) for s in self._stop):
                return n
        return 0
