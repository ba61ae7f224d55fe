"""`cuts_agree` finds out whether kernels mind the number of rows, and leaves everything as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from slipstream.model.cuts import _LAYERS, cuts_agree
from slipstream.model.runner import Runner
from slipstream.testing.tiny import tiny_model


class Minding(nn.Module):
    """A layer that rounds otherwise from so many rows on, as a machine with several kernels does."""

    def __init__(self, inner: nn.Module, rows: int) -> None:
        super().__init__()
        self.inner, self.rows = inner, rows

    def forward(self, x: torch.Tensor) -> Any:
        y = self.inner(x)
        return y * (1 + 2**-20) if x.shape[-2] >= self.rows else y


@pytest.mark.parametrize("rows", [5, 9, 64, 200, 512])
def test_kernels_that_mind_the_number_of_rows_are_found(rows: int) -> None:
    runner = Runner(tiny_model("llama", layers=2), pack=True)
    inner: Any = runner.model.get_decoder()
    inner.layers[0].mlp.down_proj = Minding(inner.layers[0].mlp.down_proj, rows)
    assert not cuts_agree(runner)
    inner.layers[0].mlp.down_proj.rows = 1  # always the same
    always = cuts_agree(runner)
    inner.layers[0].mlp.down_proj = inner.layers[0].mlp.down_proj.inner
    assert cuts_agree(runner) == always


@pytest.mark.parametrize("context", [40, 600])
def test_the_model_and_the_cache_are_left_as_they_were(context: int) -> None:
    runner = Runner(tiny_model("llama", layers=_LAYERS + 2, max_position_embeddings=context), pack=False)
    inner: Any = runner.model.get_decoder()
    before = list(inner.layers)
    cuts_agree(runner)
    assert list(inner.layers) == before and len(runner.cache) == 0
    inner.layers[-1].mlp = None  # not computed: one of many that are alike
    cuts_agree(runner)
    inner.layers[0].mlp = None
    with pytest.raises(TypeError):
        cuts_agree(runner)
    assert list(inner.layers) == before and len(runner.cache) == 0
