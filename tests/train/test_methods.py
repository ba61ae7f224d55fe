"""The training forward is the drafter's own; gradients go where they should; planted faults are caught."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from slipstream.drafters._head_runner import HeadRunner
from slipstream.errors import DrafterError, ModelError, ParameterError
from slipstream.heads.eagle import EagleHead
from slipstream.heads.io import load_eagle, load_medusa
from slipstream.heads.medusa import MedusaConfig, MedusaHeads
from slipstream.model.pack import PackRow
from slipstream.model.parts import ModelParts
from slipstream.model.trainable import Lora, Trainable, keep_layers
from slipstream.testing.heads import memoryless_model, random_eagle, random_medusa
from slipstream.testing.tiny import tiny_model
from slipstream.train.build import new_eagle
from slipstream.train.draft_lm import DraftMethod
from slipstream.train.eagle import EagleMethod
from slipstream.train.losses import IGNORE, Teacher
from slipstream.train.medusa import MedusaMethod
from slipstream.train.method import RANKS, Method, labels
from slipstream.train.samples import Batch, Sample

from .tiny_source import TinySource, collate, quick_fit, ruled_samples

V = 24


def samples(seed: int = 0, lengths: tuple[int, ...] = (9, 6), prompt: int = 2) -> list[Sample]:
    dice = torch.Generator().manual_seed(seed)
    return [
        Sample(
            tuple(torch.randint(0, V, (n,), generator=dice).tolist()), tuple(i >= prompt for i in range(n))
        )
        for n in lengths
    ]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model(vocab_size=V)


# -- the same computation as the drafter's ------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "options"),
    [(1, {}), (1, {"num_layers": 2}), (3, {"draft_vocab_size": 7}), (3, {"num_layers": 2})],
)
def test_unrolled_steps_are_what_the_drafter_computes(
    model: PreTrainedModel, version: int, options: dict[str, Any]
) -> None:
    """Row by row: true features up to t go into the drafter's cache, then its own outputs follow."""
    head = random_eagle(model, version, **options)
    batch = collate(model, samples(3))
    steps = 3
    with torch.no_grad():
        outputs = list(EagleMethod(head, ModelParts.of(model)).unroll(batch, steps))
    head.requires_grad_(False)
    for b, length in enumerate(batch.lengths.tolist()):
        tokens = batch.tokens[b].tolist()
        features = head.features({k: v[b] for k, v in batch.features.items()})
        for t in range(length - 1 - steps):
            runner = HeadRunner(head, torch.device("cpu"))
            runner.cache.open(0)
            hidden = runner.fuse(features[: t + 1])
            (out,) = runner.forward([PackRow(0, tokens[1 : t + 2])], [hidden])
            runner.cache.commit(0, range(t + 1))
            for i in range(steps):
                torch.testing.assert_close(outputs[i][b, t], out[-1], rtol=1e-4, atol=1e-4)
                (out,) = runner.forward([PackRow(0, [tokens[t + 2 + i]])], [out[-1:]])
                runner.cache.commit(0, range(1))


def test_a_sample_does_not_depend_on_its_neighbours(model: PreTrainedModel) -> None:
    """Padding and other rows change neither loss nor ranks."""
    both = samples(5)
    dice = torch.Generator()
    for method in methods(model):
        together = method(collate(model, both), dice.manual_seed(0))["loss"]
        alone = [method(collate(model, [s]), dice.manual_seed(0))["loss"] for s in both]
        torch.testing.assert_close(together, alone[0] + alone[1], rtol=1e-4, atol=1e-4)
        ranks = method.ranks(collate(model, both))
        for b, sample in enumerate(both):
            mine = method.ranks(collate(model, [sample]))[0]
            assert torch.equal(ranks[b, : len(mine)], mine)


@pytest.mark.parametrize("version", [1, 3])
def test_texts_shorter_than_the_unrolling_are_learned_as_far_as_they_go(
    model: PreTrainedModel, version: int
) -> None:
    """As in a batch with a long text, of which nothing is a label: the same steps find padding there."""
    short, other = samples(5, (4, 30))
    long = Sample(other.tokens, (False,) * 30)
    dice = torch.Generator()
    method = EagleMethod(random_eagle(model, version), ModelParts.of(model), steps=9, noise=0.0, depth=9)
    loss = method(collate(model, [short]), dice.manual_seed(0))["loss"]
    loss.backward()
    both = method(collate(model, [short, long]), dice.manual_seed(0))["loss"]
    torch.testing.assert_close(loss, both, rtol=1e-3, atol=1e-3)
    ranks = method.ranks(collate(model, [short, long]))
    assert torch.equal(method.ranks(collate(model, [short]))[0], ranks[0, :4])


def methods(model: PreTrainedModel) -> list[Method]:
    parts = ModelParts.of(model)
    draft = Trainable(tiny_model(vocab_size=V, layers=1, seed=2), None)
    return [
        MedusaMethod(random_medusa(model), parts),
        MedusaMethod(random_medusa(model, output="target", draft_vocab_size=9), parts),
        EagleMethod(random_eagle(model, 1), parts, steps=2, noise=0.0),
        EagleMethod(random_eagle(model, 3, draft_vocab_size=9), parts, steps=3),
        DraftMethod(draft, parts, loss="forward_kl"),
    ]


# -- gradients ----------------------------------------------------------------------------------------


def test_gradients_reach_what_is_trained_and_nothing_else(model: PreTrainedModel) -> None:
    batch = collate(model, samples(1))
    for method in methods(model):
        method(batch, torch.Generator().manual_seed(0))["loss"].backward()
        silent = [n for n, p in method.trained().items() if p.grad is None or not p.grad.any()]
        assert not silent, f"{type(method).__name__}: {silent}"
        assert all(p.grad is None for p in model.parameters())


def test_adapters_are_all_that_is_trained_and_merge(model: PreTrainedModel, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    draft = Trainable(tiny_model(vocab_size=V, layers=1, seed=2), None, Lora(rank=2))
    method = DraftMethod(draft, ModelParts.of(model), loss="tv")
    names = list(method.trained())
    assert names and all("lora_" in name for name in names)
    assert not any("lm_head" in name for name in names)
    source = TinySource(model, samples(1), samples(2))
    quick_fit(method, source, tmp_path)
    frozen = [p for n, p in method.named_parameters() if "lora_" not in n]
    assert all(p.grad is None for p in frozen)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokens = torch.tensor([[1, 5, 2, 7]])
    with torch.no_grad():
        expected = draft.logits(draft.states(tokens))
        torch.testing.assert_close(merged(tokens).logits, expected, rtol=1e-4, atol=1e-4)
        with draft.original():
            assert not torch.allclose(draft.logits(draft.states(tokens)), expected, atol=1e-3)


def test_an_eagle_3_head_starts_by_passing_its_deepest_tap_on(model: PreTrainedModel) -> None:
    parts = ModelParts.of(model)
    head = new_eagle(parts, model.config.to_dict(), 3, taps=(1, 2))
    features = torch.randn(50, 2 * parts.hidden_size, generator=torch.Generator().manual_seed(0))
    passed = head.fuse(features)
    torch.testing.assert_close(passed, features[:, parts.hidden_size :], rtol=0, atol=0.2)
    assert not torch.equal(passed, features[:, parts.hidden_size :])  # the other tap is in it


# -- planted faults ------------------------------------------------------------------------------------


def test_states_of_another_row_are_caught(tmp_path: Path) -> None:
    """Heads trained on their neighbour's states are no good on their own."""
    model = memoryless_model(vocab_size=V)
    ruled = ruled_samples(model, V)
    heads = MedusaHeads(MedusaConfig(32, V, 2)).start(ModelParts.of(model).embedding)

    class Mixed(MedusaMethod):
        def forward(self, batch: Batch, generator: torch.Generator) -> dict[str, torch.Tensor]:
            return self.heads_loss(batch.features["last"].roll(1, 0), batch)

    fitted = quick_fit(Mixed(heads, ModelParts.of(model)), TinySource(model, ruled, ruled), tmp_path)
    assert fitted.acceptance.conditional[0] < 0.9


def test_only_answer_tokens_are_labels(model: PreTrainedModel) -> None:
    """The loss is that of the answer, to the token: a mask one off would see another one."""
    told_apart = 0
    for method in methods(model):
        batch = collate(model, samples(1, lengths=(10,), prompt=4))

        def loss(positions: Sequence[int], batch: Batch = batch, method: Method = method) -> float:
            mask = torch.zeros_like(batch.loss)
            mask[0, list(positions)] = True
            with torch.no_grad():
                return float(method(replace(batch, loss=mask), torch.Generator().manual_seed(0))["loss"])

        assert labels(batch) == 6
        with torch.no_grad():
            whole = float(method(batch, torch.Generator().manual_seed(0))["loss"])
        each = [loss([i]) for i in range(10)]
        assert whole == pytest.approx(sum(each[4:]), rel=1e-4)
        assert each[0] == 0 and any(each[4:])
        told_apart += abs(each[3] - each[9]) > 1e-2  # a reduced vocabulary may hold neither
    assert told_apart >= 3


def test_labels_are_the_answer_tokens_of_each_head(model: PreTrainedModel) -> None:
    batch = collate(model, samples(1, lengths=(8,), prompt=4))
    aligned = MedusaMethod(random_medusa(model, 2), ModelParts.of(model)).aligned(batch)[0]
    tokens = batch.tokens[0].tolist()
    assert aligned[:, 0].tolist() == [IGNORE] * 2 + tokens[4:] + [IGNORE] * 2
    assert aligned[:, 1].tolist() == [IGNORE] + tokens[4:] + [IGNORE] * 3


def test_tokens_outside_the_draft_vocabulary_cost_nothing(model: PreTrainedModel) -> None:
    """Medusa's labels that cannot be drafted, and EAGLE's positions whose likeliest token cannot be."""
    batch = collate(model, samples(1))
    parts = ModelParts.of(model)
    medusa = MedusaMethod(random_medusa(model, 2, draft_vocab_size=5), parts)
    ids = medusa.heads.vocab.target_ids()
    aligned = medusa.aligned(batch)
    inside = torch.isin(batch.tokens[:, 2:], ids) & batch.loss[:, 2:]
    assert torch.equal(aligned[:, :-2, 0] != IGNORE, inside)
    assert torch.equal(ids[aligned[:, :-2, 0][inside]], batch.tokens[:, 2:][inside])

    eagle = EagleMethod(random_eagle(model, 3, draft_vocab_size=5), parts, steps=1)
    chosen = eagle.head.vocab.target_ids()
    teacher = Teacher(parts, chosen)
    rows, at = batch.loss[:, 2:].nonzero(as_tuple=True)
    best = parts.lm_head(batch.features["last"][rows, at + 1]).argmax(-1)
    kept = torch.isin(best, chosen)
    assert torch.equal(teacher.drafts(batch, rows, at + 1), kept) and not kept.all()
    whole = eagle(batch, torch.Generator())["loss"]
    mask = batch.loss.clone()
    mask[rows[~kept], at[~kept] + 2] = False
    torch.testing.assert_close(eagle(replace(batch, loss=mask), torch.Generator())["loss"], whole)


def test_a_tied_head_cannot_have_a_draft_vocabulary(model: PreTrainedModel) -> None:
    with pytest.raises(DrafterError, match="LM head of its own"):
        random_eagle(model, 3, draft_vocab_size=5, own_lm_head=False)


def test_top_logits_do_as_well_as_states(model: PreTrainedModel) -> None:
    """With all of them stored the losses are the same, whole and reduced."""
    texts = samples(1)
    states, top = collate(model, texts), collate(model, texts, top=V)
    parts = ModelParts.of(model)
    draft = Trainable(tiny_model(vocab_size=V, layers=1, seed=2), None)
    for method in (
        EagleMethod(random_eagle(model, 3, draft_vocab_size=9), parts),
        EagleMethod(random_eagle(model, 3), parts),
        DraftMethod(draft, parts, loss="forward_kl"),
        DraftMethod(draft, parts, loss="tv"),
    ):
        torch.testing.assert_close(
            method(top, torch.Generator())["loss"], method(states, torch.Generator())["loss"]
        )
    with pytest.raises(ParameterError, match="whole law"):
        DraftMethod(draft, parts, loss="reverse_kl")(top, torch.Generator())
    with pytest.raises(ParameterError, match="capture them again"):
        bare = replace(states, features={})
        DraftMethod(draft, parts, loss="tv")(bare, torch.Generator())


def test_noise_is_eagle_1s_and_keyed(model: PreTrainedModel) -> None:
    batch = collate(model, samples(1))
    for version, differs in ((1, True), (3, False)):
        method = EagleMethod(random_eagle(model, version), ModelParts.of(model), steps=1)
        losses = [method(batch, torch.Generator().manual_seed(s))["loss"] for s in (0, 0, 1)]
        assert torch.equal(losses[0], losses[1])
        assert torch.equal(losses[0], losses[2]) is not differs


# -- what is written ----------------------------------------------------------------------------------


def test_written_heads_load_as_they_were(model: PreTrainedModel, tmp_path: Path) -> None:
    parts = ModelParts.of(model)
    source = TinySource(model, samples(1), samples(2))
    medusa, one, three = methods(model)[1:4]
    for name, method in (("medusa", medusa), ("one", one), ("three", three)):
        quick_fit(method, source, tmp_path / name)
    loaded = load_medusa(tmp_path / "medusa", parts)
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), medusa.heads.parameters(), strict=True))
    for name, method in (("one", one), ("three", three)):
        head: EagleHead = load_eagle(tmp_path / name, parts)
        assert all(
            torch.equal(a, b) for a, b in zip(head.parameters(), method.head.parameters(), strict=True)
        )
        assert torch.equal(head.vocab.target_ids(), method.head.vocab.target_ids())


def test_every_kth_layer_is_kept(tmp_path: Path) -> None:
    whole = tiny_model("qwen2", vocab_size=V, layers=5)
    expected = [whole.model.layers[i] for i in (0, 2, 4)]
    pruned = keep_layers(whole, 2)
    assert list(pruned.model.layers) == expected and pruned.config.num_hidden_layers == 3
    assert [layer.self_attn.layer_idx for layer in pruned.model.layers] == [0, 1, 2]
    Trainable(pruned, None).save(tmp_path, {})
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokens = torch.tensor([[1, 5, 2]])
    with torch.no_grad():
        torch.testing.assert_close(again(tokens).logits, pruned(tokens, use_cache=True).logits)


@pytest.mark.parametrize("lora", [None, Lora(rank=2)])
@pytest.mark.parametrize("tie", [True, False])
def test_tied_weights_are_stored_once_and_are_what_was_trained(
    tie: bool, lora: Lora | None, tmp_path: Path
) -> None:
    """Every weight is cast to bfloat16; the two names of a tied table must not become two tensors."""
    draft = Trainable(tiny_model(vocab_size=V, layers=1, tie=tie).to(torch.bfloat16), None, lora)
    with torch.no_grad():
        for parameter in draft.model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
    draft.save(tmp_path, {})
    stored = load_file(tmp_path / "model.safetensors")
    assert ("lm_head.weight" in stored, "model.embed_tokens.weight" in stored) == (not tie, True)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    head, table = loaded.get_output_embeddings().weight, loaded.get_input_embeddings().weight
    assert loaded.dtype == torch.bfloat16 and (head is table) == tie
    for name, weight in draft.model.state_dict().items():
        if lora is None:
            assert torch.equal(loaded.state_dict()[name], weight.to(torch.bfloat16)), name


def test_heads_are_stored_in_their_targets_dtype(tmp_path: Path) -> None:
    target = tiny_model(vocab_size=V).to(torch.bfloat16)
    parts = ModelParts.of(target)
    medusa = MedusaMethod(random_medusa(target, draft_vocab_size=7), parts)
    eagle = EagleMethod(random_eagle(target, draft_vocab_size=7), parts)
    medusa.save(tmp_path / "medusa", {})
    eagle.save(tmp_path / "eagle", {})
    for folder, file, trained in (
        ("medusa", "medusa_lm_head.safetensors", medusa.heads.heads.state_dict()),
        ("eagle", "model.safetensors", eagle.head.body.state_dict()),
    ):
        stored = load_file(tmp_path / folder / file)
        assert stored["d2t"].dtype == torch.int64 and stored["t2d"].dtype == torch.bool
        for name, weight in trained.items():
            assert weight.dtype == torch.float32 and torch.equal(stored[name], weight.bfloat16()), name
    assert load_eagle(tmp_path / "eagle", parts).body["fc"].weight.dtype == torch.bfloat16


def test_a_draft_with_unknown_logits_is_refused() -> None:
    model = tiny_model("cohere", vocab_size=V, logit_scale=0.3, use_qk_norm=False)
    with pytest.raises(ModelError, match="does more to its logits"):
        Trainable(model, None)


def test_ranks_are_those_of_the_true_tokens(model: PreTrainedModel) -> None:
    """By hand for one head and one position."""
    batch = collate(model, samples(1, lengths=(8,), prompt=2))
    method = MedusaMethod(random_medusa(model, 1), ModelParts.of(model))
    ranks = method.ranks(batch)[0, :, 0].tolist()
    order = method.heads(batch.features["last"][0])[0].argsort(-1, descending=True).tolist()
    tokens = batch.tokens[0].tolist()
    for root in range(1, 7):
        true = order[root - 1].index(tokens[root + 1])
        assert ranks[root] == min(true, RANKS)
    assert ranks[0] == ranks[7] == RANKS
