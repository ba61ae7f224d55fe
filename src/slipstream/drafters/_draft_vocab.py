"""Which tokens a draft model drafts: the commonest ones, or a list.

Of what a small draft model reads a step the LM head is a good part, and most of its rows are of tokens that
hardly ever come (FR-Spec, arXiv 2502.14856). How common a token is, the target's own tokenizer tells on text
that every installation has (`prompts.corpus`). It is counted once and kept in the cache folder.
"""

from __future__ import annotations

import json
import os.path
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slipstream.core import jsontext
from slipstream.core.places import expanded
from slipstream.errors import DrafterError, ParameterError
from slipstream.model.identity import tokenizer_hash
from slipstream.model.quiet import quiet
from slipstream.model.store import Store, reading_errors, write_atomic
from slipstream.prompts.corpus import corpus

FORMAT = 1
FIX = "give a number of tokens, or a file that `slipstream train vocab` wrote"
Counts = Mapping[str, list[int]]  # ids, and how often each came: counts


@dataclass(frozen=True, slots=True)
class DraftVocabulary:
    """size: so many of the commonest tokens, where there is no file of ids."""

    size: int
    file: Path | None = None

    @classmethod
    def parse(cls, text: str) -> DraftVocabulary | None:
        """A number or a file; None is all tokens. Raises ParameterError."""
        if not text:
            return None
        try:
            size = int(text)
        except ValueError:
            file = expanded(text)
            if not os.path.isfile(file):  # False, too, for what can be no file's name
                raise ParameterError(f"draft_vocab: there is no file {text}: {FIX}") from None
            return cls(0, file)
        if size < 1:
            raise ParameterError(f"draft_vocab must be 1 or more tokens, not {size}: leave it out for all")
        return cls(size)

    def ids(self, tokenizer: Any, vocab: int, ends: Iterable[int]) -> torch.Tensor | None:
        """The tokens [n] of the first `vocab` that may be drafted, ascending; None where these are all.

        ends: tokens that end an answer, which are always among them. Tokens that never came in the text
        follow those that did, small ids first: a tokenizer's merges are in the order of their use. Raises
        ParameterError for a file of another tokenizer, DrafterError where there is none to count with.
        """
        inside = sorted({i for i in ends if i < vocab})
        if self.file is not None:
            listed = read_ids(self.file, tokenizer)
            return _but_all(torch.tensor(sorted({i for i in listed if i < vocab}.union(inside))), vocab)
        size = max(self.size, len(inside))
        if size >= vocab:
            return None  # and nothing is counted
        scores = token_shares(tokenizer, vocab)
        scores[torch.tensor(inside, dtype=torch.int64)] = float("inf")
        return _but_all(scores.sort(descending=True, stable=True).indices[:size].sort().values, vocab)

    def stand_in(self, vocab: int, ends: Iterable[int]) -> torch.Tensor | None:
        """As many ids as `ids` would give, without counting or comparing anything."""
        inside = {i for i in ends if i < vocab}
        if self.file is not None:
            return _but_all(torch.arange(len({i for i in read_ids(self.file) if i < vocab} | inside)), vocab)
        return _but_all(torch.arange(min(max(self.size, len(inside)), vocab)), vocab)


def _but_all(ids: torch.Tensor, vocab: int) -> torch.Tensor | None:
    if not len(ids):
        raise ParameterError(f"draft_vocab lists no token that the draft model could draft: {FIX}")
    return ids if len(ids) < vocab else None


def read_ids(path: Path, tokenizer: Any = None) -> frozenset[int]:
    """The ids of a JSON file: a list, or what `slipstream train vocab` writes, which names its tokenizer.
    Raises ParameterError."""
    try:
        value = jsontext.parse(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ParameterError(f"draft_vocab: {path} cannot be read as JSON ({error}): {FIX}") from error
    told: Mapping[str, Any] = value if isinstance(value, dict) else {"ids": value}
    ids = told.get("ids")
    if not isinstance(ids, list) or not ids or not all(type(i) is int and i >= 0 for i in ids):
        raise ParameterError(f"draft_vocab: {path} must hold a list of token ids: {FIX}")
    made_with = told.get("tokenizer")
    if tokenizer is not None and made_with is not None and made_with != tokenizer_hash(tokenizer):
        raise ParameterError(
            f"draft_vocab: the ids in {path} are those of another tokenizer than the target's: {FIX} for"
            " this target"
        )
    return frozenset(ids)


def token_shares(tokenizer: Any, vocab: int) -> torch.Tensor:
    """How much of the corpus each token is, float64 [vocab]: the sum of its shares of code and of prose, so
    that neither drowns the other."""
    if tokenizer is None:
        raise DrafterError(
            "draft_vocab counts with the target's tokenizer, and it has none: give a file of ids"
        )
    shares = torch.zeros(vocab, dtype=torch.float64)
    for counts in _counts(tokenizer).values():
        ids, often = torch.tensor(counts["ids"]), torch.tensor(counts["counts"], dtype=torch.float64)
        known = ids < vocab
        shares[ids[known]] += (often / often.sum())[known]
    return shares


def _counts(tokenizer: Any) -> Mapping[str, Counts]:
    """By kind of text. From the cache folder, or counted now."""
    path = Store.default().root / "frequency" / f"{tokenizer_hash(tokenizer)}.json"
    kept = _read_counts(path)
    if kept is None:
        kept = {kind: _count(tokenizer, texts) for kind, texts in corpus().items()}
        with reading_errors(path):
            write_atomic(path, json.dumps({"format": FORMAT, "kinds": kept}))
    return kept


def _read_counts(path: Path) -> Mapping[str, Counts] | None:
    """None where they are missing or damaged."""
    try:
        value = jsontext.parse(path.read_bytes())
        kinds: Mapping[str, Counts] = value["kinds"]
        whole = value["format"] == FORMAT and len(kinds) > 0
        for counts in kinds.values():
            ids, often = torch.tensor(counts["ids"]), torch.tensor(counts["counts"])
            whole = whole and len(ids) == len(often) > 0 and int(ids.amin()) >= 0 and int(often.amin()) > 0
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError):
        return None
    return kinds if whole else None


def _count(tokenizer: Any, texts: Iterable[str]) -> Counts:
    counts: Counter[int] = Counter()
    with quiet():  # of texts that are longer than the model's context
        for text in texts:
            counts.update(tokenizer(text, add_special_tokens=False)["input_ids"])
    ranked = counts.most_common()
    return {"ids": [token for token, _ in ranked], "counts": [count for _, count in ranked]}
