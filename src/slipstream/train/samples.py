"""What a training step is given, and by whom.

`data` makes samples, `capture` turns them into batches with the target's states (stored or online), and
`fit` and the methods see nothing but the `Source`. Beyond the two splits a source tells how many samples
it has, so that a run knows its length before it starts, and can begin in the middle of an epoch, so that
resuming costs no target passes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

Split = Literal["train", "heldout"]


@dataclass(frozen=True)
class Sample:
    """One tokenised conversation.

    tokens: prompt and answer, as the target sees them. loss: True where the token was produced by the
    assistant; the token itself is a label (so loss[t] speaks about predicting tokens[t], not about what
    follows it).
    """

    tokens: tuple[int, ...]
    loss: tuple[bool, ...]

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.loss):
            raise ValueError(f"{len(self.loss)} loss flags for {len(self.tokens)} tokens")


@dataclass(frozen=True)
class Batch:
    """Samples padded on the right, with what the target computed for them.

    tokens [B, T] int64. loss [B, T] bool, False in padding. lengths [B] int64.
    features: the layers asked for, keyed as `core.draft.Needs` names them (layer number k = the
    residual stream after k layers, "last" = the state entering the LM head), each [B, T, H]; the row at
    position t is the target's state after reading tokens[:t + 1]. logits: the top k values and ids of
    the target's logits, [B, T, k] each, best first, the row at t speaking about token t + 1; or None.
    """

    tokens: torch.Tensor
    loss: torch.Tensor
    lengths: torch.Tensor
    features: Mapping[int | str, torch.Tensor]
    logits: tuple[torch.Tensor, torch.Tensor] | None = None


class Source(Protocol):
    """Batches of a captured data set; both the stored shards and the online target give one.

    manifest: what the data came from (target hash, tokenizer hash, layers, k, counts), as JSON values; it
    goes into the provenance of every drafter trained on it.
    """

    @property
    def manifest(self) -> Mapping[str, Any]: ...

    def size(self, split: Split) -> int:
        """How many samples the split has."""
        ...

    def batches(
        self, split: Split, *, epoch: int, batch_size: int, seed: int, skip: int = 0
    ) -> Iterator[Batch]:
        """The split once, in batches of `batch_size` samples, the last one maybe smaller.

        The order of "train" is a function of (seed, epoch) alone; "heldout" always has the same order.
        skip: leave out the first `skip` batches without computing them.
        """
        ...
