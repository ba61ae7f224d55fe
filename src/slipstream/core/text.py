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
        self._longest = max((len(s) for s in stop), default=0)
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
        if check_stop and self._stop:
            return self._cut(max(0, old - self._longest + 1))
        return False

    def _cut(self, start: int) -> bool:
        """Cut at the stop string that is complete first; of those, the one that starts first."""
        found = [(at + len(s), at) for s in self._stop if (at := self.text.find(s, start)) >= 0]
        if not found:
            return False
        _, at = min(found)
        self.text = self.text[:at]
        self.stopped = True
        return True

    def finish(self) -> None:
        """No more tokens: what is held back becomes final, broken characters included."""
        if not self.stopped:
            before = self._decode(self._tokens[self._window : self._read])
            now = self._decode(self._tokens[self._window :])
            self.text += now[len(before) :]
            self._window, self._read = self._read, len(self._tokens)
        self._longest = 0

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
