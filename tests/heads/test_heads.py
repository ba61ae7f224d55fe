"""The heads as modules: shapes, starts, offsets, NaN until set, packing, gradients."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from slipstream.errors import DrafterError
from slipstream.heads.base import DraftVocab
from slipstream.heads.eagle import EagleConfig, EagleHead, attend_masked
from slipstream.heads.medusa import MedusaConfig, MedusaHeads
from slipstream.model.packed import PackedLinear, can_pack, pack_linears
from slipstream.model.parts import ModelParts
from slipstream.model.rope import rope_frequencies, rope_parameters
from slipstream.model.runner import Runner
from slipstream.testing.heads import random_eagle, random_medusa
from slipstream.testing.tiny import tiny_model

H, V = 32, 24
ROPE_KINDS: list[dict[str, Any]] = [
    {"rope_theta": 5e5},
    {"rope_scaling": {"type": "linear", "factor": 4.0}},
    {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4,
                         "original_max_position_embeddings": 64}},
    {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                                         "high_freq_factor": 4.0, "original_max_position_embeddings": 64}},
]  # fmt: skip


def eagle_config(version: int, **options: Any) -> EagleConfig:
    taps = {"aux_layers": (0, 1, 2)} if version == 3 else {}
    return EagleConfig(3 if version == 3 else 1, H, 48, 4, 2, 8, V, H, **{**taps, **options})


def test_weights_are_nan_until_set() -> None:
    modules = [MedusaHeads(MedusaConfig(H, V)), EagleHead(eagle_config(1)), EagleHead(eagle_config(3))]
    for module in modules:
        assert all(bool(p.isnan().all()) for p in module.parameters())
        module.start(torch.zeros(V, H)) if isinstance(module, MedusaHeads) else module.start()
        assert not any(bool(p.isnan().any()) for p in module.parameters())


def test_medusa_starts_as_the_lm_head() -> None:
    """Blocks are the identity, own outputs the target's: every head says what the target says."""
    model = tiny_model(vocab_size=V)
    weight = model.get_output_embeddings().weight
    hidden = torch.randn(5, 3, H)
    heads = MedusaHeads(MedusaConfig(H, V, num_heads=2, num_layers=3)).start(weight)
    torch.testing.assert_close(heads(hidden), (hidden @ weight.T).expand(2, 5, 3, V))
    reduced = MedusaHeads(MedusaConfig(H, V, num_heads=2, draft_vocab_size=3))
    reduced.vocab.set_ids(torch.tensor([1, 5, 20]))
    assert torch.equal(reduced.start(weight).heads[0][-1].weight, weight[[1, 5, 20]])  # type: ignore[index]
    with pytest.raises(DrafterError, match="LM head"):
        MedusaHeads(MedusaConfig(H, V)).start()


def test_medusa_shapes_and_no_shared_blocks() -> None:
    model = tiny_model(vocab_size=V)
    heads = random_medusa(model, 3, num_layers=2)
    assert heads(torch.randn(2, 5, H)).shape == (3, 2, 5, V)
    assert heads(torch.randn(5, H), count=2).shape == (2, 5, V)
    storages = [p.data_ptr() for p in heads.parameters()]
    assert len(storages) == len(set(storages)) == 3 * (2 * 2 + 1)
    shared = random_medusa(model, 3, output="target")
    assert shared(torch.randn(5, H), model.get_output_embeddings()).shape == (3, 5, V)
    with pytest.raises(DrafterError, match="pass it"):
        shared(torch.randn(5, H))


@pytest.mark.parametrize("packed", [False, True])
def test_rows_of_the_targets_lm_head(packed: bool) -> None:
    model = tiny_model(vocab_size=V)
    weight = model.get_output_embeddings().weight.clone()
    ids = torch.tensor([3, 4, 20])
    runner = Runner(model, pack=packed)
    small = ModelParts.of(model).lm_head_rows(ids)
    assert torch.equal(small.weight, weight[ids]) and not small.weight.requires_grad
    runner.close()


def test_draft_vocabulary() -> None:
    vocab = DraftVocab(V, 4)
    vocab.set_ids(torch.tensor([0, 3, 4, 20]))
    assert vocab.d2t is not None and vocab.d2t.tolist() == [0, 2, 2, 17]
    assert vocab.t2d is not None and vocab.t2d.nonzero().flatten().tolist() == [0, 3, 4, 20]
    assert vocab.to_target(torch.tensor([[3, 0], [1, 1]])).tolist() == [[20, 0], [3, 3]]
    full = DraftVocab(V, V)
    assert not full.reduced and full.target_ids().tolist() == list(range(V)) and not full.state_dict()


@pytest.mark.parametrize(
    ("version", "options"),
    [
        (1, {}),
        (1, {"num_layers": 2, "own_embedding": True, "fc_bias": True}),
        (3, {"draft_vocab_size": 7, "norm_before_residual": True}),
        (3, {"num_layers": 2, "attention_bias": True, "mlp_bias": True, "own_lm_head": False}),
    ],
)
def test_eagle_shapes_causality_and_gradients(version: int, options: Any) -> None:
    model = tiny_model(vocab_size=V)
    head = random_eagle(model, version, **options)
    head.requires_grad_(True)
    taps = 3 if version == 3 else 1
    features = {k: torch.randn(2, 6, H) for k in (0, 1, 2, "last")}
    joined = head.features(features)  # type: ignore[arg-type]
    assert joined.shape == (2, 6, taps * H)
    ids, positions = torch.randint(0, V, (2, 6)), torch.arange(6).expand(2, 6)
    out = head(ids, head.fuse(joined), positions, attend_masked())
    logits = head.logits(out)
    assert out.shape == (2, 6, H) and logits.shape == (2, 6, options.get("draft_vocab_size", V))
    causal = torch.ones(6, 6, dtype=torch.bool).tril()[None, None]
    masked = head(ids, head.fuse(joined), positions, attend_masked(causal))
    torch.testing.assert_close(out, masked)
    shifted = head(ids, head.fuse(joined), positions + 100, attend_masked())
    torch.testing.assert_close(out, shifted, rtol=1e-3, atol=1e-3)  # only distances count
    changed = ids.clone()
    changed[:, 4] = (changed[:, 4] + 1) % V
    other = head(changed, head.fuse(joined), positions, attend_masked())
    assert torch.equal(other[:, :4], out[:, :4]) and not torch.equal(other[:, 4:], out[:, 4:])
    logits.sum().backward()  # type: ignore[no-untyped-call]
    unused = [n for n, p in head.named_parameters() if p.grad is None]
    assert not unused


def test_eagle_heads_that_cannot_be() -> None:
    for options, match in (
        ({"version": 1, "aux_layers": (1,)}, "neither"),
        ({"version": 3, "aux_layers": ()}, "need the target layers"),
        ({"version": 1, "target_hidden_size": 8}, "hidden size"),
    ):
        settings = {**eagle_config(1).__dict__, **options}
        with pytest.raises(DrafterError, match=match):
            EagleConfig(**settings)
    head = EagleHead(eagle_config(3)).start()
    with pytest.raises(DrafterError, match="set head.target"):
        head.embed(torch.tensor([1]))


def test_an_embedding_that_is_the_targets_is_kept_once() -> None:
    model = tiny_model(vocab_size=V)
    copied, other = (random_eagle(model, own_embedding=True, seed=s) for s in (0, 1))
    copied.body["embed_tokens"].weight.data.copy_(model.get_input_embeddings().weight)  # type: ignore[union-attr]
    expected = copied.embed(torch.tensor([3, 5]))
    for head in (copied, other):
        head.share_embedding()
    assert "embed_tokens" not in copied.body and "embed_tokens" in other.body
    assert torch.equal(copied.embed(torch.tensor([3, 5])), expected)


def test_heads_can_be_packed() -> None:
    model = tiny_model(vocab_size=V)
    if not can_pack(model):
        pytest.skip("no packed kernels here")
    head, heads = random_eagle(model), random_medusa(model)
    hidden, ids = torch.randn(1, 8, H), torch.arange(8)[None]
    before = head(ids, hidden, ids, attend_masked()), heads(hidden)
    assert pack_linears(head) == 1 + 7 + 1 and pack_linears(heads) == 6
    assert isinstance(head.body["fc"], PackedLinear)
    torch.testing.assert_close(head(ids, hidden, ids, attend_masked()), before[0])
    torch.testing.assert_close(heads(hidden), before[1])


@pytest.mark.parametrize("config", ROPE_KINDS)
def test_rotary_is_that_of_transformers(config: dict[str, Any]) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    full = LlamaConfig(hidden_size=64, num_attention_heads=4, max_position_embeddings=512, **config)
    theirs = LlamaRotaryEmbedding(full)
    frequencies, factor = rope_frequencies(rope_parameters(config), 16, 512)
    torch.testing.assert_close(frequencies, theirs.inv_freq, rtol=1e-6, atol=0)
    assert factor == pytest.approx(theirs.attention_scaling)


def test_unrolled_own_features_differ_from_true_ones() -> None:
    """The tests of drafting would prove nothing if feeding back made no difference."""
    model = tiny_model(vocab_size=V)
    for version, (a, b) in itertools.product((1, 3), ((0, 1), (2, 3))):
        head = random_eagle(model, version, seed=a + 7 * b)
        ids, positions = torch.tensor([[a, b]]), torch.arange(2)[None]
        hidden = torch.randn(1, 2, H)
        out = head(ids, hidden, positions, attend_masked())
        fed = head(ids, torch.cat((hidden[:, :1], out[:, :1]), 1), positions, attend_masked())
        assert torch.equal(fed[:, 0], out[:, 0]) and not torch.allclose(fed[:, 1], out[:, 1], rtol=0.1)
