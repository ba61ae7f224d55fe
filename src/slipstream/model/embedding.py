"""Tables of input embeddings: int8 ones, and the rows of any that fingerprints are made of."""

from __future__ import annotations

import torch
from torch import nn

_SAMPLED = 64
_FIRST = 8
_SCALE_BYTES = 4


def sampled_ids(count: int) -> torch.Tensor:
    """Rows spread evenly over a table of so many, int64."""
    return torch.linspace(0, count - 1, _SAMPLED).long()


def first_ids(count: int) -> torch.Tensor:
    """A table's first rows, int64."""
    return torch.arange(min(count, _FIRST))


class Int8Embedding(nn.Module):
    """Looks up rows of an int8 table and scales them back: row i is table[i] · scales[i].

    The table may be mapped from a file, and then only the rows that were looked up are in memory. `inner`
    is the embedding it stands for, which may do more than look up (Gemma's scales what it gives); it is run
    on the rows that are asked for and loses its own weight.
    """

    table: torch.Tensor
    scales: torch.Tensor

    def __init__(self, table: torch.Tensor, scales: torch.Tensor, inner: nn.Embedding) -> None:
        """table int8 [V, H], scales float32 [V]."""
        super().__init__()
        weight = inner.weight.detach()
        self.num_embeddings, self.embedding_dim = weight.shape
        self.dtype, self.device = weight.dtype, weight.device
        chosen = torch.cat((sampled_ids(len(weight)), first_ids(len(weight))))
        self._kept = torch.tensor(sorted(set(chosen.tolist())))
        self._originals = weight[self._kept].clone()  # [kept, H]
        self.register_buffer("table", table, persistent=False)
        self.register_buffer("scales", scales, persistent=False)
        del inner.weight
        inner.weight = weight.new_empty(0, weight.shape[1])  # type: ignore[assignment]  # no parameter
        inner.padding_idx = None  # which only gradients ask for; it names a row of the whole table
        self.inner = inner

    @staticmethod
    def bytes_of(rows: int, width: int) -> int:
        """What the table and its scales take."""
        return rows * (width + _SCALE_BYTES)

    @property
    def shape(self) -> torch.Size:
        return self.table.shape

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """The table's rows for ids of any shape, [..., H] in the model's dtype."""
        return (self.table[ids].float() * self.scales[ids][..., None]).to(self.dtype)

    def originals(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows [n, H] as the checkpoint has them, of `sampled_ids` and `first_ids` only."""
        return self._originals[torch.searchsorted(self._kept, ids)]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        flat = ids.reshape(-1)
        self.inner.weight = self.rows(flat)  # type: ignore[assignment]
        found: torch.Tensor = self.inner(torch.arange(len(flat)).view(ids.shape))  # [..., H]
        return found


def original_rows(embedding: torch.Tensor | Int8Embedding, ids: torch.Tensor) -> torch.Tensor:
    """Rows [n, H] of a table as the checkpoint has them; ids of `sampled_ids` or `first_ids`."""
    if isinstance(embedding, Int8Embedding):
        return embedding.originals(ids)
    return embedding.detach()[ids.to(embedding.device)]


def input_table(model: nn.Module) -> torch.Tensor | Int8Embedding:
    """A model's own table of input embeddings [V, H]."""
    module = model.get_input_embeddings()  # type: ignore[operator]
    return module if isinstance(module, Int8Embedding) else module.weight  # type: ignore[no-any-return]
