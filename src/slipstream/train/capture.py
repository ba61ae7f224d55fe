"""What the target computes on training text, through the taps of serving: kept on disk, or made per batch.

Every sample is computed alone, in the pieces a prompt is read in when serving, so its numbers depend on the
sample and the target only: a resumed run, a stored batch and an online batch are equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from slipstream.core.draft import Needs
from slipstream.errors import ParameterError
from slipstream.model.identity import LAYERS
from slipstream.model.pack import PackRow
from slipstream.model.runner import CHUNK, Runner
from slipstream.train.samples import Batch, Sample

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class Captured:
    """What is captured of every token: the residual streams after these layers, the state that enters the
    LM head, and the top_k best logits (0: none)."""

    hidden_layers: tuple[int, ...] = ()
    last_hidden: bool = False
    top_k: int = 0

    def __post_init__(self) -> None:
        if len(set(self.hidden_layers)) != len(self.hidden_layers) or min(self.hidden_layers, default=0) < 0:
            raise ParameterError(f"layers must be distinct numbers from 0, not {list(self.hidden_layers)}")
        if self.top_k < 0:
            raise ParameterError(f"top_k must be 0 (no logits) or more, not {self.top_k}")

    def __bool__(self) -> bool:
        return bool(self.hidden_layers or self.last_hidden or self.top_k)

    @property
    def needs(self) -> Needs:
        return Needs(self.hidden_layers, self.last_hidden)

    @property
    def keys(self) -> tuple[int | str, ...]:
        """The keys of `Batch.features`."""
        return (*self.hidden_layers, "last") if self.last_hidden else self.hidden_layers

    def bytes_per_token(self, hidden_size: int, width: int) -> int:
        """On disk and in memory, with `width` bytes a number."""
        return 5 + len(self.keys) * hidden_size * width + self.top_k * (width + 4)

    def to_json(self) -> dict[str, Any]:
        return {
            "hidden_layers": list(self.hidden_layers),
            "last_hidden": self.last_hidden,
            "top_k": self.top_k,
            "layer_convention": LAYERS,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Captured:
        return cls(tuple(value["hidden_layers"]), value["last_hidden"], value["top_k"])


@dataclass(frozen=True)
class States:
    """One sample's states. features [T, H] each; logits (values, ids) [T, k], ids int32, best first."""

    features: Mapping[int | str, torch.Tensor]
    logits: tuple[torch.Tensor, torch.Tensor] | None = None


@dataclass
class Captor:
    """Runs the target over samples. vocab_size: ids that exist (a head's padding is beyond them).

    The runner must have no other use while this is open; `close` gives its taps back.
    """

    runner: Runner
    vocab_size: int
    captured: Captured
    _before: Needs = field(init=False)

    def __post_init__(self) -> None:
        if self.captured.top_k > self.vocab_size:
            raise ParameterError(
                f"top_k is {self.captured.top_k}, the vocabulary has {self.vocab_size} tokens"
            )
        self._before = self.runner.needs
        self.runner.tap(self.captured.needs)

    def close(self) -> None:
        self.runner.tap(self._before)

    def __call__(self, sample: Sample) -> States:
        """Compute one sample; gives tensors on the CPU, in the target's dtype, free for autograd."""
        if len(sample.tokens) > self.runner.context:
            raise ParameterError(
                f"a sample has {len(sample.tokens)} tokens, the target's context is {self.runner.context}:"
                " lower --max-length"
            )
        slot = self._free_slot()
        self.runner.cache.open(slot)
        try:
            pieces = [
                self._piece(slot, sample.tokens[at : at + CHUNK])
                for at in range(0, len(sample.tokens), CHUNK)
            ]
        finally:
            self.runner.cache.close(slot)
        features = {key: torch.cat([p.features[key] for p in pieces]) for key in self.captured.keys}  # [T, H]
        if not self.captured.top_k:
            return States(features)
        values, ids = zip(*(p.logits for p in pieces if p.logits is not None), strict=True)
        return States(features, (torch.cat(values), torch.cat(ids)))

    def _free_slot(self) -> int:
        slot = -1
        while slot in self.runner.cache:
            slot -= 1
        return slot

    def _piece(self, slot: int, tokens: Sequence[int]) -> States:
        out = self.runner.forward([PackRow(slot, tokens)], logits="all" if self.captured.top_k else "none")
        self.runner.cache.commit(slot, range(len(tokens)))
        features = {key: _owned(out.features[key]) for key in self.captured.keys}
        if out.logits is None:
            return States(features)
        best = torch.topk(out.logits[:, : self.vocab_size], self.captured.top_k, dim=-1)  # [n, k]
        return States(features, (_owned(best.values), _owned(best.indices.to(torch.int32))))


def _owned(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the CPU that is no inference tensor: those cannot enter a loss."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype)
    copy.copy_(tensor)
    return copy


def collate(samples: Sequence[Sample], states: Sequence[States], captured: Captured) -> Batch:
    """Samples and their states as one batch, padded on the right with zeros."""
    lengths = torch.tensor([len(s.tokens) for s in samples])  # [B]
    size, longest = len(samples), int(lengths.max())
    tokens = torch.zeros(size, longest, dtype=torch.int64)  # [B, T]
    loss = torch.zeros(size, longest, dtype=torch.bool)
    for b, sample in enumerate(samples):
        tokens[b, : len(sample.tokens)] = torch.tensor(sample.tokens)
        loss[b, : len(sample.loss)] = torch.tensor(sample.loss)
    features = {key: _padded([s.features[key] for s in states], longest) for key in captured.keys}
    if not captured.top_k:
        return Batch(tokens, loss, lengths, features)
    pairs = [s.logits for s in states if s.logits is not None]
    values = _padded([v for v, _ in pairs], longest)  # [B, T, k]
    ids = _padded([i for _, i in pairs], longest).to(torch.int64)
    return Batch(tokens, loss, lengths, features, (values, ids))


def _padded(rows: Sequence[torch.Tensor], longest: int) -> torch.Tensor:
    out = torch.zeros(len(rows), longest, *rows[0].shape[1:], dtype=rows[0].dtype)
    for b, row in enumerate(rows):
        out[b, : len(row)] = row
    return out
