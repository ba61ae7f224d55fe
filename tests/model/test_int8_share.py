"""int8 layers that read one input quantise it once, with the bits they have without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from slipstream.model import int8
from slipstream.model.int8 import Int8Linear, quantise_linears
from slipstream.model.int8_share import share_inputs
from slipstream.model.pack import PackRow
from slipstream.model.runner import Runner
from slipstream.testing.quantised import lacks_int8
from slipstream.testing.tiny import tiny_model

pytestmark = pytest.mark.skipif(lacks_int8(), reason="this CPU has no int8 products")
LAYERS = 3


def held(kind: str = "qwen2", **config: Any) -> Runner:
    model = tiny_model(kind, layers=LAYERS, **config)
    quantise_linears(model, smallest=0)
    return Runner(model, pack=False)


def logits(runner: Runner, tokens: list[int]) -> torch.Tensor:
    runner.cache.open(0)
    found = runner.forward([PackRow(0, tokens)]).logits
    runner.cache.close(0)
    assert found is not None
    return found


def quantised_inputs(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> int:
    """How often a forward quantises an input."""
    count, quantise = [0], int8.quantise_input

    def counting(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        count[0] += 1
        return quantise(x)

    with monkeypatch.context() as patch:
        patch.setattr(int8, "quantise_input", counting)
        logits(runner, [4, 5])
    return count[0]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral", "gemma3_text"])
def test_four_inputs_a_layer_instead_of_seven_and_the_same_bits(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, tokens = held(kind), [5, 17, 3, 200, 9, 0, 31, 5, 8]
    before = logits(runner, tokens)
    assert quantised_inputs(runner, monkeypatch) == 7 * LAYERS + 1
    assert share_inputs(runner) == 2 * LAYERS
    assert quantised_inputs(runner, monkeypatch) == 4 * LAYERS + 1
    for _ in range(2):
        assert torch.equal(logits(runner, tokens), before)


def test_nothing_is_kept_between_forwards() -> None:
    runner = held()
    share_inputs(runner)
    logits(runner, [1, 2, 3])
    for module in runner.model.modules():
        if isinstance(module, Int8Linear) and module.shared is not None:
            assert module.shared._input is None and module.shared._given is None


class Changes(nn.Module):
    """Writes into its input between two layers, or calls one of them twice: those must not share."""

    def __init__(self, inner: Any, add: float) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = inner.gate_proj, inner.up_proj, inner.down_proj
        self.add = add

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.gate_proj(x)
        if self.add:
            x += self.add  # the same object
        else:
            gate = gate + self.gate_proj(x)
        found: torch.Tensor = self.down_proj(torch.sigmoid(gate) * self.up_proj(x))
        return found


@pytest.mark.parametrize("add", [0.0, 1.0])
def test_an_input_that_is_changed_or_a_layer_that_is_called_twice_is_not_shared(add: float) -> None:
    model = tiny_model("qwen2", layers=LAYERS)
    model.model.layers[0].mlp = Changes(model.model.layers[0].mlp, add)
    quantise_linears(model, smallest=0)
    runner = Runner(model, pack=False)
    before = logits(runner, [1, 2, 3])
    assert share_inputs(runner) == 2 * LAYERS - 1
    assert model.model.layers[0].mlp.up_proj.shared is None
    assert torch.equal(logits(runner, [1, 2, 3]), before)
