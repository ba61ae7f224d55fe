"""Self-speculation: the target without some sublayers drafts in the target's own cache."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.core.draft import Budget, DraftRequest
from slipstream.core.params import SamplingParams
from slipstream.drafters import build_drafter
from slipstream.drafters._tuned import Tuned, load_tuned, save_tuned, tuned_path
from slipstream.drafters.base import TargetInfo
from slipstream.drafters.selfspec import SelfSpecDrafter
from slipstream.engine.engine import Engine
from slipstream.errors import DrafterError, ModelError, ParameterError
from slipstream.model.pack import PackRow
from slipstream.model.runner import Runner
from slipstream.model.skip import SkipSet, Thinnable, fingerprint
from slipstream.testing.record import Recorder
from slipstream.testing.tiny import tiny_model

VOCAB, LAYERS = 40, 4
TARGETS: dict[str, dict[str, Any]] = {
    "llama": {"kind": "llama"},
    "qwen2": {"kind": "qwen2", "tie": True},
    "qwen3": {"kind": "qwen3"},
    "mistral": {"kind": "mistral", "sliding_window": 6},
    "gemma3": {
        "kind": "gemma3_text",
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
}
PROMPTS = [tuple((7 * i + 3 * j * j) % VOCAB for j in range(n)) for i, n in enumerate((1, 9, 17, 5, 30))]


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path))
    return tmp_path


@lru_cache
def runner(name: str) -> Runner:
    return Runner(tiny_model(vocab_size=VOCAB, layers=LAYERS, seed=3, **TARGETS[name]), pack=False)


def build(name: str, options: str) -> SelfSpecDrafter:
    info = TargetInfo(VOCAB, 2048, model=runner(name).model, runner=runner(name))
    built = build_drafter(f"selfspec:{options}" if options else "selfspec", info)
    assert isinstance(built, SelfSpecDrafter)
    return built


def run(name: str, options: str, temperature: float, rows: int = 3) -> tuple[list[list[int]], Any, Recorder]:
    inner = build_drafter("none", TargetInfo(VOCAB, 2048)) if options == "none" else build(name, options)
    recorder = Recorder(inner)
    engine = Engine(runner(name), recorder, vocab_size=VOCAB, max_rows=rows, chunk=8)
    ids = [
        engine.add(p, SamplingParams(max_tokens=12 + 2 * i, temperature=temperature, seed=50 + i))
        for i, p in enumerate(PROMPTS)
    ]
    found = [engine.find(i) for i in ids]
    for _ in engine.run():
        pass
    assert len(engine.runner.cache) == 0
    return [row.output for row in found if row is not None], engine.counts, recorder


@lru_cache
def plain(name: str, temperature: float) -> tuple[list[list[int]], list[list[bytes]]]:
    outputs, _, recorder = run(name, "none", temperature)
    return outputs, [recorder.digests[i][: len(o)] for i, o in enumerate(outputs)]


OPTIONS = (
    "skip=a1+m2,min_confidence=0",
    "skip=2-3,min_confidence=0.3,num_speculative_tokens=6",
    "exit=2,min_confidence=0",
    "skip=m1,width=3,num_speculative_tokens=3,min_confidence=0",
)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    ("name", "options"),
    [*((n, o) for n in ("llama", "gemma3") for o in OPTIONS)]
    + [(n, OPTIONS[0]) for n in ("qwen2", "qwen3", "mistral")],
)
def test_every_way_of_skipping_gives_the_tokens_of_plain_decoding(
    name: str, options: str, temperature: float
) -> None:
    outputs, counts, recorder = run(name, options, temperature)
    expected, digests = plain(name, temperature)
    assert outputs == expected
    assert counts.draft_tokens > 0
    if "width" not in options:  # a chain: even the bits are those of plain decoding
        assert [recorder.digests[i][: len(o)] for i, o in enumerate(outputs)] == digests


def test_something_is_accepted() -> None:
    _, counts, _ = run("llama", "skip=a1,min_confidence=0", 0.0)
    assert counts.accepted_tokens > 10


@torch.inference_mode()
def thinned_logits(name: str, tokens: list[int], skip: SkipSet) -> torch.Tensor:
    """Every layer written out, with the model's own modules; no cache, no hook. [n, V]"""
    from transformers.models.llama.modeling_llama import LlamaModel

    model = tiny_model(vocab_size=VOCAB, layers=LAYERS, seed=3, **TARGETS[name])
    inner = model.model
    assert isinstance(inner, LlamaModel)
    ids = torch.tensor([tokens])
    hidden = inner.embed_tokens(ids)
    places = torch.arange(len(tokens))[None]
    rotary = inner.rotary_emb(hidden, position_ids=places)
    mask = torch.full((len(tokens), len(tokens)), float("-inf")).triu(1)[None, None]
    for i, layer in enumerate(inner.layers):
        if i not in skip.attention:
            out, _ = layer.self_attn(
                hidden_states=layer.input_layernorm(hidden), attention_mask=mask, position_embeddings=rotary
            )
            hidden = hidden + out
        if i not in skip.mlp:
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return model.lm_head(inner.norm(hidden))[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("text", ["a1", "m2", "1", "a0+m1+3", "2-3"])
def test_a_thinned_forward_is_the_model_without_these_sublayers(text: str) -> None:
    held, skip, tokens = runner("llama"), SkipSet.parse(text), [3, 1, 4, 1, 5, 9, 2]
    held.cache.open(0)
    with Thinnable(held).without(skip):
        found = held.forward([PackRow(0, tokens)]).logits
    full = held.forward([PackRow(0, tokens)]).logits
    held.cache.close(0)
    expected = thinned_logits("llama", tokens, skip)
    assert found is not None and full is not None
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(full, thinned_logits("llama", tokens, SkipSet()), rtol=1e-4, atol=1e-4)


def test_the_model_is_itself_again_after_an_error() -> None:
    held = runner("llama")
    with pytest.raises(RuntimeError), Thinnable(held).without(SkipSet.parse("a0+1-2")):
        raise RuntimeError
    assert not any("forward" in vars(m) for m in held.model.modules())


def test_a_forward_that_somebody_put_on_a_module_stays() -> None:
    """accelerate does so for models that lie on several devices."""
    held = Runner(tiny_model("llama", vocab_size=VOCAB), pack=False)
    modules = [part for layer in held.model.model.layers for part in (layer, layer.self_attn, layer.mlp)]
    for module in modules:
        module.forward = module.forward
    before = [vars(module)["forward"] for module in modules]
    with Thinnable(held).without(SkipSet.parse("a0+1")):
        pass
    assert [vars(module).get("forward") for module in modules] == before


def test_the_committed_prefix_is_read_with_the_full_models_keys() -> None:
    """The first drafted token: thinned layers for the root, true keys and values for all before it."""
    held, tokens = runner("llama"), [3, 1, 4, 1, 5, 9, 2]
    drafter = build("llama", "skip=a1+m1,min_confidence=0,num_speculative_tokens=1")
    held.cache.open(0)
    held.extend(0, tokens[:-1])
    kept = [kv[0][:, :6].clone() for kv in held.cache._slots[0].layers.values()]
    (draft,) = drafter.propose([DraftRequest(0, tokens, 3, Budget(1, 1), SamplingParams(), 1)])
    with Thinnable(held).without(drafter.skip):
        logits = held.forward([PackRow(0, tokens[-1:])], logits="last").logits
    now = [kv[0][:, :6] for kv in held.cache._slots[0].layers.values()]
    assert held.cache.length(0) == 6
    held.cache.close(0)
    assert all(torch.equal(a, b) for a, b in zip(kept, now, strict=True))
    assert logits is not None and draft.tree.tokens == (2, int(logits[0].argmax()))


def test_a_row_that_the_target_does_not_hold_is_not_drafted() -> None:
    drafter = build("llama", "exit=1")
    (draft,) = drafter.propose([DraftRequest(7, [1, 2], 1, Budget(3, 3), SamplingParams(), 1)])
    assert draft.tree.num_drafted == 0


@pytest.mark.parametrize("confidence", [0.0, 0.2, 0.5, 0.9])
def test_drafting_stops_before_a_token_it_does_not_trust(confidence: float) -> None:
    held, tokens = runner("llama"), [3, 1, 4, 1, 5, 9, 2]
    drafter = build("llama", f"skip=m1,min_confidence={confidence}")
    held.cache.open(0)
    held.extend(0, tokens[:-1])
    (draft,) = drafter.propose([DraftRequest(0, tokens, 3, Budget.chain(6), SamplingParams(), 1)])
    path = draft.tree.tokens
    with Thinnable(held).without(drafter.skip):
        logits = held.forward([PackRow(0, path)]).logits
    held.cache.close(0)
    assert logits is not None
    likely = logits.softmax(-1).amax(-1).tolist()
    assert all(p >= confidence for p in likely[:-1])
    assert len(path) == 7 or likely[-1] < confidence


def test_skip_sets_are_written_as_they_are_read() -> None:
    for text in ("a3-9+m4+12-14", "", "0", "a0+a2+m5-6", "a1-2+m3+4+6-7"):
        assert SkipSet.parse(str(SkipSet.parse(text))) == SkipSet.parse(text)
    assert SkipSet.parse("1-2+a4") == SkipSet(frozenset({1, 2, 4}), frozenset({1, 2}))
    assert str(SkipSet.exit_at(2, 4)) == "2-3"


def test_the_cost_is_the_share_of_the_weights_read() -> None:
    model = Thinnable(runner("llama"))
    assert model.cost(SkipSet()) == 1.0
    attention, mlp, head = 2 * 32 * 32 + 2 * 32 * 16, 3 * 32 * 64, 32 * VOCAB
    total = LAYERS * (attention + mlp) + head
    assert model.cost(SkipSet.parse("a1+m2+3")) == pytest.approx(1 - 2 * (attention + mlp) / total)


@pytest.mark.parametrize(
    "options",
    ["skip=x3", "skip=3-1", "skip=1,exit=2", "exit=4", "exit=-1", "skip=9", "skip=0-3", "width=0,exit=1",
     "min_confidence=2,exit=1", "num_speculative_tokens=-1,exit=1", "skip=+", "skip=1-99999999999",
     "skip=" + "9" * 5000, "nodes=4,exit=1", "width=2,nodes=1025,exit=1", "width=1025,nodes=4,exit=1",
     "width=300,num_speculative_tokens=4,exit=1"],
)  # fmt: skip
def test_bad_options_are_errors_of_one_line(options: str) -> None:
    with pytest.raises(ParameterError) as caught:
        build("llama", options)
    assert "\n" not in str(caught.value)


def test_without_a_runner_or_a_tuned_set_the_error_names_the_fix() -> None:
    with pytest.raises(DrafterError, match="needs the runner"):
        build_drafter("selfspec:exit=1", TargetInfo(VOCAB, 2048))
    with pytest.raises(DrafterError, match="slipstream tune selfspec"):
        build("llama", "")


def test_a_tuned_set_is_used_by_default_and_only_for_its_model() -> None:
    tuned = Tuned(SkipSet.parse("a1+2"), 6, 0.25, 0.8, 0.6, 1.2)
    path = save_tuned(runner("llama").model, tuned, "tiny")
    assert load_tuned(runner("llama").model) == tuned
    built = build("llama", "")
    assert (built.skip, built.num_speculative_tokens, built.min_confidence) == (tuned.skip, 6, 0.25)
    assert build("llama", "num_speculative_tokens=2,min_confidence=0").min_confidence == 0.0
    with pytest.raises(DrafterError, match="no tuned set"):
        build("qwen3", "")
    kept = json.loads(path.read_text())
    for name, value in (
        ("skip", 3),
        ("num_speculative_tokens", -1),
        ("num_speculative_tokens", float("inf")),
        ("min_confidence", float("nan")),
        ("cost", []),
    ):
        path.write_text(json.dumps({**kept, name: value}))
        with pytest.raises(DrafterError, match=r"cannot be used.*slipstream tune selfspec"):
            build("llama", "")


def test_a_fingerprint_is_of_the_weights_not_of_their_packing() -> None:
    models = [tiny_model("qwen2", seed=s) for s in (1, 1, 2)]
    Runner(models[1], pack=True, check=False)
    assert fingerprint(models[0]) == fingerprint(models[1]) != fingerprint(models[2])
    assert tuned_path(models[0]) != tuned_path(models[2])


def test_models_whose_sublayers_cannot_be_left_out_are_refused() -> None:
    held = Runner(tiny_model("llama", vocab_size=VOCAB), pack=False)
    layer = held.model.model.layers[1]
    forward = layer.forward
    layer.forward = lambda *a, **k: forward(*a, **k) * 1.5
    with pytest.raises(ModelError, match="do more than add"):
        Thinnable(held)
    del layer.forward
    layer.feed_forward = layer.mlp
    del layer.mlp
    with pytest.raises(ModelError, match="not made of self_attn and mlp"):
        Thinnable(held)
