"""Between two tokenizers: the same text in the other's tokens, and the tokens that both have.

Nothing here has to be right for the output to be exact: a drafted token is checked like any other. It has
to be right for drafts to be accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_UNFINISHED = "\ufffd"
_LOOK_BEHIND = (16, 8, 4, 2, 1)


class Translator:
    """Committed target tokens into draft tokens, drafted text back into target tokens."""

    def __init__(self, target: Any, draft: Any) -> None:
        self._target, self._draft = target, draft
        self._special = special_tokens(target)
        self._draft_special = special_tokens(draft)
        # Special tokens that both know stay; the others, whose names would only confuse, are left out.
        shared = set(self._draft_special.values()) - {target.bos_token}
        self._kept = {token: name for token, name in self._special.items() if name in shared}
        start = _encode(draft, "", special=True)[:1]
        self._start = start if start == [draft.bos_token_id] else []

    def to_draft(self, tokens: Sequence[int]) -> list[int]:
        """The draft's own tokens of the committed text, less a character that is not complete yet.

        The target's special tokens are kept where the draft has one of the same name. The draft's own
        start token is put in front.
        """
        pieces: list[str] = []
        run: list[int] = []
        for token in tokens:
            if token in self._special:
                pieces += [_decode(self._target, run), self._kept.get(token, "")]
                run = []
            else:
                run.append(token)
        pieces.append(_decode(self._target, run))
        return self._start + _encode(self._draft, _finished("".join(pieces)))

    def drafted_text(self, before: Sequence[int], drafted: Sequence[int]) -> str:
        """What drafted tokens add to the text of those before; up to the first special token."""
        end = next((i for i, t in enumerate(drafted) if t in self._draft_special), len(drafted))
        behind = [t for t in before[-_LOOK_BEHIND[0] :] if t not in self._draft_special]
        old = _decode(self._draft, behind)
        new = _decode(self._draft, [*behind, *drafted[:end]])
        return _finished(new[len(old) :]) if new.startswith(old) else ""

    def to_target(self, tokens: Sequence[int], text: str) -> list[int]:
        """Target tokens of a text that follows committed tokens.

        The text is tokenised together with the tokens before it, since a word may go on. If that would
        change a committed token (the text melts with it), or if these tokens are not how the tokenizer
        writes their text, fewer are looked at, and in the end there is no draft.
        """
        if not text:
            return []
        for size in _LOOK_BEHIND:
            behind = list(tokens[-size:])
            joined = _encode(self._target, _finished(_decode(self._target, behind)) + text)
            if joined[: len(behind)] == behind:
                return joined[len(behind) :]
        return []


def special_tokens(tokenizer: Any) -> dict[int, str]:
    """Ids and names of all tokens that are no text, not only those with a role like eos."""
    added = {i: str(t) for i, t in tokenizer.added_tokens_decoder.items() if t.special}
    return added | dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))


def _finished(text: str) -> str:
    """Without the beginning of a character whose other bytes are still to come."""
    return text.rstrip(_UNFINISHED)


def _encode(tokenizer: Any, text: str, special: bool = False) -> list[int]:
    return list(tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])


def _decode(tokenizer: Any, tokens: Sequence[int]) -> str:
    text: str = tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text


def shared_tokens(
    target: Any, draft: Any, target_size: int, draft_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids of the tokens that stand for the same bytes in both, in pairs: target ids [n], draft ids [n].

    No id appears twice. Special tokens are left out.
    """
    theirs: dict[bytes, int] = {}
    for token, value in enumerate(token_bytes(draft, draft_size)):
        if value:
            theirs.setdefault(value, token)
    pairs: dict[int, int] = {}
    for token, value in enumerate(token_bytes(target, target_size)):
        if value and value in theirs:
            pairs.setdefault(theirs.pop(value), token)
    return torch.tensor(list(pairs.values()), dtype=torch.int64), torch.tensor(list(pairs), dtype=torch.int64)


def token_bytes(tokenizer: Any, size: int) -> list[bytes | None]:
    """The bytes each of the first `size` ids stands for; None for special tokens and unused ids.

    How a tokenizer writes a space tells how it writes all: `Ġ` is the alphabet of byte-level BPE, one
    character a byte; `▁` is SentencePiece, plain text with bytes as `<0xNN>`; else the text is plain.
    """
    count = min(size, len(tokenizer))
    names: list[str | None] = tokenizer.convert_ids_to_tokens(list(range(count)))
    special = special_tokens(tokenizer)
    written = "".join(tokenizer.tokenize("a a"))
    alphabet = byte_alphabet() if "Ġ" in written else None
    space = "▁" if "▁" in written else None
    values: list[bytes | None] = []
    for token, name in enumerate(names):
        if name is None or token in special:
            values.append(None)
        elif alphabet is not None and all(c in alphabet for c in name):
            values.append(bytes(alphabet[c] for c in name))
        elif space is not None and len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
            values.append(bytes([int(name[3:5], 16)]))
        else:
            values.append((name.replace(space, " ") if space else name).encode())
    return values


def byte_alphabet() -> dict[str, int]:
    """Character -> byte of GPT-2's alphabet: printable Latin-1 is itself, the others are U+0100 and on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
