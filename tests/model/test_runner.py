"""`Runner`, its attention, taps and probe, on every tiny architecture, against the model's own forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from slipstream.core.draft import Needs
from slipstream.errors import CapacityError, ModelError
from slipstream.model import support
from slipstream.model.pack import PackRow, Span
from slipstream.model.packed import PackedLinear, pack_linears, weight_bytes
from slipstream.model.runner import Runner
from slipstream.model.support import check_declared, probe
from slipstream.testing.tiny import tiny_model

VOCAB = 50
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"tie": True},
    "qwen3": {},
    "mistral": {"sliding_window": 4},
    "gemma3_text": {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
}
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 35, 8, 9]
LAYERS = 2


def make(kind: str = "llama", **config: Any) -> Any:
    return tiny_model(kind, vocab_size=VOCAB, **{**KINDS[kind], **config})


def close(got: torch.Tensor | None, want: torch.Tensor) -> None:
    assert got is not None
    torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)


@torch.inference_mode()
def reference(model: Any, tokens: list[int], **options: Any) -> Any:
    return model(input_ids=torch.tensor([tokens]), use_cache=False, **options)


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_the_models_own_however_they_are_asked_for(kind: str, pack: bool) -> None:
    want = reference(make(kind), TOKENS).logits[0]
    runner = Runner(make(kind), pack=pack)
    for slot in (0, 1):
        runner.cache.open(slot)
    close(runner.forward([PackRow(0, TOKENS)]).logits, want)
    runner.extend(0, TOKENS[:5], chunk=2)
    runner.extend(1, TOKENS[:9])
    both = runner.forward([PackRow(0, TOKENS[5:]), PackRow(1, TOKENS[9:])]).logits
    close(both, torch.cat([want[5:], want[9:]]))
    last = runner.forward([PackRow(0, TOKENS[5:]), PackRow(1, TOKENS[9:11])], logits="last").logits
    close(last, want[[-1, 10]])
    assert runner.forward([PackRow(0, TOKENS[5:])], logits="none").logits is None
    assert (runner.cache.length(0), runner.cache.length(1)) == (5, 9)


@pytest.mark.parametrize("kind", KINDS)
def test_tapped_layers_are_those_that_transformers_shows(kind: str) -> None:
    wanted = reference(make(kind), TOKENS, output_hidden_states=True).hidden_states
    runner = Runner(make(kind), pack=False)
    runner.tap(Needs(hidden_layers=(0, 1, LAYERS), last_hidden=True))
    runner.cache.open(0)
    features = runner.forward([PackRow(0, TOKENS)]).features
    assert set(features) == {0, 1, LAYERS, "last"}
    for layer in (0, 1):
        close(features[layer], wanted[layer][0])
    close(features["last"], wanted[LAYERS][0])  # transformers gives the last one after the final norm
    norm = runner.model.get_decoder().norm
    with torch.inference_mode():
        close(norm(features[LAYERS]), wanted[LAYERS][0])
    quiet = runner.forward([PackRow(0, TOKENS)], taps=False)
    assert quiet.features == {}
    runner.tap(Needs())
    assert runner.forward([PackRow(0, TOKENS)]).features == {}
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in runner.model.modules())


def test_a_layer_that_is_not_there_cannot_be_tapped() -> None:
    runner = Runner(make(), pack=False)
    with pytest.raises(ModelError, match="after layer 3; the target has 2"):
        runner.tap(Needs(hidden_layers=(3,)))


def test_more_tokens_than_the_context_holds_are_refused() -> None:
    runner = Runner(make(max_position_embeddings=20), pack=False)
    runner.cache.open(0)
    runner.extend(0, list(range(19)))
    runner.forward([PackRow(0, [1])])
    with pytest.raises(CapacityError, match="21 tokens do not fit the model's context of 20"):
        runner.forward([PackRow(0, [1, 2])])


def test_the_attention_tells_who_holds_the_model() -> None:
    model = make()
    runner = Runner(model, pack=False)
    with pytest.raises(ModelError, match="held by a Slipstream engine"):
        reference(model, TOKENS)
    runner.close()
    reference(model, TOKENS)


# -- the probe ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_probe_accepts_what_is_right(kind: str) -> None:
    model = make(kind)
    original = model.config._attn_implementation
    assert probe(Runner(model, pack=False, check=False), original) < 1e-5


@pytest.mark.parametrize("fault", ["mask", "window", "positions"])
def test_the_probe_refuses_what_is_wrong(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("mistral" if fault == "window" else "llama")
    original = model.config._attn_implementation
    mask = Span.mask

    def causal(self: Span, rows: int, *rest: Any) -> torch.Tensor:
        flat = Span(self.slot, self.start, self.count, self.length, self.width, None, self.depths)
        return mask(flat, rows, *rest)

    def endless(self: Span, rows: int, _: int | None, *rest: Any) -> torch.Tensor:
        return mask(self, rows, None, *rest)

    if fault == "positions":
        monkeypatch.setattr("slipstream.model.pack.tree_depths", lambda parents: list(range(len(parents))))
    else:
        monkeypatch.setattr(Span, "mask", causal if fault == "mask" else endless)
    with pytest.raises(ModelError, match="other logits for a tree than for its paths"):
        Runner(model, pack=False)
    assert model.config._attn_implementation == original  # given back
    reference(model, TOKENS)


def test_the_probe_refuses_to_prove_nothing() -> None:
    model = make()
    for parameter in model.parameters():
        parameter.zero_()
    with pytest.raises(ModelError):
        Runner(model, pack=False)


def test_layers_that_escape_the_hook_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runner(make(), pack=False)
    forward = runner.forward

    def without_layer_1(*args: Any, **options: Any) -> Any:
        out = forward(*args, **options)
        runner.layers_seen = {0}
        return out

    monkeypatch.setattr(runner, "forward", without_layer_1)
    with pytest.raises(ModelError, match=r"layers \[1\]"):
        probe(runner, "sdpa")


def test_models_that_cannot_roll_back_are_refused_by_declaration() -> None:
    model = make()
    model.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(ModelError, match="linear_attention.*cannot be rolled back"):
        check_declared(model)
    model.config.layer_types = None
    model.config.is_encoder_decoder = True
    with pytest.raises(ModelError, match="encoder-decoder"):
        check_declared(model)
    assert {"full_attention", "sliding_attention"} == support.ROLLS_BACK


def test_attention_with_a_softcap_is_refused() -> None:
    with pytest.raises(ModelError, match="softcap"):
        Runner(tiny_model("gemma2", vocab_size=VOCAB), pack=False)


# -- packed weights ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 8, 19])
def test_a_packed_layer_computes_what_the_layer_computed(bias: bool, rows: int) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        linear = nn.Linear(24, 40, bias=bias).requires_grad_(False)
        x = torch.randn(1, rows, 24)
    close(PackedLinear.of(linear)(x), linear(x))


def test_every_linear_is_packed_but_a_tied_head() -> None:
    untied, tied = make(), make(tie=True)
    count = sum(type(m) is nn.Linear for m in untied.modules())
    bytes_before = weight_bytes(tied)
    assert pack_linears(untied) == count == pack_linears(tied) + 1
    assert type(tied.lm_head) is nn.Linear and tied.lm_head.weight is tied.get_input_embeddings().weight
    assert weight_bytes(tied) == bytes_before
