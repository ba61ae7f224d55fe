"""What Medusa and EAGLE heads have in common: NaN starts and reduced draft vocabularies."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

from slipstream.errors import DrafterError

M = TypeVar("M", bound=nn.Module)


def build_with_nan(build: Callable[[], M], dtype: torch.dtype) -> M:
    """A module whose weights are all NaN: one that is never set cannot be missed."""
    with torch.device("meta"):
        module = build()
    module = module.to_empty(device="cpu")
    for parameter in module.parameters():
        parameter.data = torch.full(parameter.shape, float("nan"), dtype=dtype)
    return module


class DraftVocab(nn.Module):
    """Which of the target's `vocab_size` tokens can be drafted; with `size` None all of them.

    d2t [size] int64 are offsets: draft id i is target id i + d2t[i]. t2d [V] bool says which target
    tokens are in (EAGLE-3's names and meaning).
    """

    d2t: torch.Tensor | None
    t2d: torch.Tensor | None

    def __init__(self, vocab_size: int, size: int | None = None) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.reduced = size is not None and size != vocab_size
        self.size = size if size is not None else vocab_size
        if self.size > vocab_size:
            raise DrafterError(f"a draft vocabulary of {self.size} exceeds the target's {vocab_size}")
        self.register_buffer("d2t", torch.full((self.size,), -(1 << 62)) if self.reduced else None)
        self.register_buffer("t2d", torch.zeros(vocab_size, dtype=torch.bool) if self.reduced else None)

    def set_ids(self, ids: torch.Tensor) -> None:
        """The target ids [size] that can be drafted, distinct."""
        if not self.reduced:
            raise DrafterError("the draft vocabulary is the target's; there are no ids to choose")
        ids = ids.to(torch.int64).cpu()
        if ids.shape != (self.size,):
            raise DrafterError(f"the draft vocabulary has {self.size} tokens, not {list(ids.shape)}")
        if int(ids.amin()) < 0 or int(ids.amax()) >= self.vocab_size:
            raise DrafterError(f"d2t points outside the target's vocabulary of {self.vocab_size} tokens")
        if len(set(ids.tolist())) != self.size:
            raise DrafterError("d2t maps two draft tokens to the same target token")
        self.d2t = ids - torch.arange(self.size)
        self.t2d = torch.zeros(self.vocab_size, dtype=torch.bool).index_fill(0, ids, True)

    def target_ids(self) -> torch.Tensor:
        """The target id of every draft id, int64 [size]."""
        every = torch.arange(self.size, device=None if self.d2t is None else self.d2t.device)
        return self.to_target(every)

    def to_target(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Target ids of draft ids, any shape."""
        return draft_ids if self.d2t is None else draft_ids + self.d2t[draft_ids]
