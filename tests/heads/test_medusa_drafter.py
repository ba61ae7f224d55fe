"""The Medusa drafter: offsets, trees, the same sample as plain decoding."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.control import Controller
from slipstream.core.draft import Budget, Draft, DraftRequest, Observation
from slipstream.core.params import SamplingParams
from slipstream.drafters import build_drafter
from slipstream.drafters.base import TargetInfo
from slipstream.drafters.medusa import MedusaDrafter, MedusaDrafterConfig, prior_accuracies
from slipstream.engine.engine import Engine
from slipstream.errors import ParameterError
from slipstream.heads.io import save_medusa
from slipstream.model.runner import Runner
from slipstream.model.taps import decoder
from slipstream.testing.heads import greedy_next, memoryless_model, perfect_medusa, random_medusa
from slipstream.testing.tiny import tiny_model

KINDS = ["llama", "qwen2", "qwen3", "mistral", "gemma3_text"]
PROMPTS = [[5, 17, 3, 9, 11, 2], [7], [4, 4], list(range(20))]
Info = Callable[[Any], TargetInfo]


def drafter_of(model: Any, info: Info, heads: Any, **options: Any) -> MedusaDrafter:
    return MedusaDrafter(MedusaDrafterConfig(heads="", **options), info(model), heads)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_random_heads_do_not_change_the_tokens(kind: str, temperature: float, run: Any, info: Info) -> None:
    model = tiny_model(kind, vocab_size=24)
    params = SamplingParams(temperature=temperature, max_tokens=16)
    expected = run(model, None, PROMPTS, params)
    found = run(model, drafter_of(model, info, random_medusa(model), nodes=20), PROMPTS, params)
    assert found.tokens == expected.tokens
    assert found.counts.draft_tokens > 0


@pytest.mark.parametrize("kind", KINDS)
def test_perfect_heads_are_always_accepted(kind: str, run: Any, info: Info) -> None:
    """Proves the offset: head 0 at the state before the root is the token after the root."""
    model = memoryless_model(kind)
    params = SamplingParams(max_tokens=16)
    after = greedy_next(model).tolist()
    prompts = [[x, after[x], after[after[x]]] for x in (3, 8)]  # as the model itself would have gone on
    expected = run(model, None, prompts, params)
    assert all(len(set(tokens)) == len(tokens) for tokens in expected.tokens)
    found = run(model, drafter_of(model, info, perfect_medusa(model), topk="1x1x1"), prompts, params)
    assert found.tokens == expected.tokens
    counts = found.counts
    assert counts.accepted_tokens == counts.draft_tokens == 2 * 12  # 16 tokens in 4 passes of 4
    sampled = SamplingParams(temperature=0.8, max_tokens=16)
    expected = run(model, None, PROMPTS, sampled)
    found = run(model, drafter_of(model, info, perfect_medusa(model), topk="3x2x1"), PROMPTS, sampled)
    assert found.tokens == expected.tokens and found.counts.accepted_tokens > 0


class Watched(MedusaDrafter):
    """Keeps what every draft was made from: (row, position of the root, logits [K, V])."""

    seen: list[tuple[int, int, torch.Tensor]]

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        for r in requests:
            if r.seq_id in self._states:
                logits = self._heads(self._states[r.seq_id].hidden, self._lm_head)
                self.seen.append((r.seq_id, len(r.tokens) - 1, logits))
        return super().propose(requests)


@pytest.mark.parametrize("chunk", [4, 512])
@pytest.mark.parametrize("output", ["own", "target"])
def test_drafting_logits_are_those_of_training(
    output: str, chunk: int, info: Info, plain_now_and_then: Controller
) -> None:
    """At every step of every row, with accepted, rejected and plain steps, and a row that is cancelled."""
    model = memoryless_model()
    wild = tiny_model(vocab_size=24)
    for target, heads in ((model, perfect_medusa(model)), (wild, random_medusa(wild, 3, output=output))):
        drafter = Watched(MedusaDrafterConfig(heads="", nodes=12), info(target), heads)
        drafter.seen = []
        options: Any = {"max_rows": 2, "chunk": chunk, "controller": plain_now_and_then}
        with Engine(Runner(target, pack=False), drafter, **options) as engine:
            rows = [
                engine.find(engine.add(p, SamplingParams(temperature=0.8, max_tokens=n), seed=i))
                for i, (p, n) in enumerate([(PROMPTS[0], 18), (PROMPTS[1], 9), (PROMPTS[3], 18)])
            ]
            for step in range(60):
                if step == 6:
                    engine.cancel(0)
                engine.step()
            assert not engine.has_work
        assert {seq for seq, _, _ in drafter.seen} == {0, 1, 2}
        lm_head = target.get_output_embeddings()
        with torch.inference_mode():
            for seq_id, root, logits in drafter.seen:
                tokens = torch.tensor([rows[seq_id].tokens])  # type: ignore[union-attr]
                hidden = decoder(target)(input_ids=tokens, use_cache=False).last_hidden_state[0]
                expected = heads(hidden, lm_head)[:, root - 1]  # [K, V]
                scale = float(expected.abs().max())
                torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5 * scale)


def test_reduced_vocabulary_maps_to_target_ids(run: Any, info: Info) -> None:
    model = tiny_model(vocab_size=40)
    for output in ("own", "target"):
        heads = random_medusa(model, output=output, draft_vocab_size=7)
        inside = set(heads.vocab.target_ids().tolist())
        drafter = drafter_of(model, info, heads, nodes=15)
        hidden = torch.randn(1, 32)
        (ranked,) = drafter.ranked(hidden, 3, 4)[0].tolist()
        assert all(set(row) <= inside and len(set(row)) == len(row) for row in ranked)
        if output == "target":  # the rows of the target's head, and no others
            full = model.get_output_embeddings()(heads.heads[0](hidden))[0]
            best = max(inside, key=lambda t: float(full[t]))
            assert ranked[0][0] == best
        params = SamplingParams(max_tokens=10)
        expected = run(model, None, PROMPTS, params)
        drafter = drafter_of(model, info, heads, nodes=15)
        assert run(model, drafter, PROMPTS, params).tokens == expected.tokens


def test_a_wider_tree_accepts_no_shorter_path(run: Any, info: Info) -> None:
    """For the same noise, a tree is accepted at least as far as any chain in it: fewer passes."""
    model = memoryless_model()
    heads = perfect_medusa(model)
    params = SamplingParams(temperature=1.2, max_tokens=40)
    passes = []
    for topk in ("1x1x1", "3x2x1", "6x5x2"):
        drafter = drafter_of(model, info, heads, topk=topk)
        passes.append(run(model, drafter, [[3, 5]], params).counts.passes)
    assert passes[0] >= passes[1] >= passes[2] and passes[0] > passes[2]


def first_draft(drafter: MedusaDrafter, hidden: torch.Tensor, budget: Budget, scored: bool = False) -> Draft:
    """What is drafted after two tokens, the first of which has this state [H]."""
    drafter.observe([Observation(0, 0, (3,), {"last": hidden[None]})])
    (draft,) = drafter.propose([DraftRequest(0, [3, 5], 2, budget, SamplingParams(), 0, scored)])
    drafter.close(0)
    return draft


@pytest.mark.parametrize("reduced", [None, 9])
def test_scores_are_the_heads_own_path_probabilities(info: Info, reduced: int | None) -> None:
    model = tiny_model(vocab_size=24)
    heads = random_medusa(model, draft_vocab_size=reduced)
    drafter = drafter_of(model, info, heads, topk="3x2x2")
    hidden = torch.randn(32, generator=torch.Generator().manual_seed(4))
    laws = heads(hidden[None])[:, 0].softmax(-1)  # [3, draft V]
    place = {token: i for i, token in enumerate(heads.vocab.target_ids().tolist())}
    draft = first_draft(drafter, hidden, Budget(9, 99), scored=True)
    assert draft.tree.num_drafted == 3 + 6 + 12 and draft.scores is not None
    for node in range(len(draft.tree)):
        path = draft.tree.path_tokens(node)
        expected = math.prod(float(laws[k][place[t]]) for k, t in enumerate(path))
        assert draft.scores[node] == pytest.approx(expected, rel=1e-5)
    assert draft.tree == (silent := first_draft(drafter, hidden, Budget(9, 99))).tree
    assert silent.scores is None  # nobody asked, so no softmax was computed


def test_what_the_heads_trust_too_little_is_left_out_with_all_below(info: Info) -> None:
    model = tiny_model(vocab_size=24)
    heads = random_medusa(model)
    hidden = torch.randn(32, generator=torch.Generator().manual_seed(4))
    laws = heads(hidden[None])[:, 0].softmax(-1)  # [3, V]
    floor = float(laws[0].topk(2).values.mean())  # between the first head's best and its second
    for options, budget in (
        ({}, Budget(9, 99, stop_below=floor)),
        ({"min_confidence": floor}, Budget(9, 99)),
    ):
        drafter = drafter_of(model, info, heads, topk="4x4x4", **options)
        tree = first_draft(drafter, hidden, budget).tree
        kept = {tree.path_tokens(n) for n in range(1, len(tree))}
        likely = [[t for t in law.topk(4).indices.tolist() if float(law[t]) >= floor] for law in laws]
        every = (p for d in (1, 2, 3) for p in itertools.product(*likely[:d]))
        assert kept == set(every) and len(likely[0]) == 1
    assert first_draft(drafter, hidden, Budget(9, 99, stop_below=1.0)).tree.num_drafted == 0


def test_heads_and_trees_by_path(tmp_path: Path, run: Any, info: Info) -> None:
    model = tiny_model(vocab_size=24)
    save_medusa(random_medusa(model), tmp_path / "heads")
    table = [[0.5, 0.1], [0.4, 0.3]]
    (tmp_path / "heads" / "accuracies.json").write_text(json.dumps({"accuracies": table}))
    (tmp_path / "tree.json").write_text("[[0], [0, 0], [1], [0, 0, 1]]")
    built = build_drafter(f"medusa:heads={tmp_path / 'heads'},nodes=3", info(model))
    assert isinstance(built, MedusaDrafter) and built.choices.paths == ((0,), (0, 0), (0, 1))
    built = build_drafter(f"medusa:heads={tmp_path / 'heads'},choices={tmp_path / 'tree.json'}", info(model))
    assert (built.num_speculative_tokens, built.draft_nodes) == (3, 4)
    expected = run(model, None, PROMPTS, SamplingParams(max_tokens=8))
    assert run(model, built, PROMPTS, SamplingParams(max_tokens=8)).tokens == expected.tokens
    with pytest.raises(ParameterError, match="4 deep and there are 3"):
        build_drafter(f"medusa:heads={tmp_path / 'heads'},topk=1x1x1x1", info(model))
    with pytest.raises(ParameterError, match="one of topk"):
        MedusaDrafterConfig("x", topk="1", choices="y")
    with pytest.raises(ParameterError, match="min_confidence"):
        MedusaDrafterConfig("x", min_confidence=2.0)
    for given in ({"topk": "1"}, {"choices": "y"}):
        with pytest.raises(ParameterError, match="gives the whole tree: leave out nodes"):
            MedusaDrafterConfig("x", nodes=7, **given)
    for options in ({"nodes": 1025}, {"topk": "50x50x50"}):
        with pytest.raises(ParameterError, match="must be from 0 to 1024"):
            drafter_of(model, info, random_medusa(model), **options)
    with pytest.raises(ParameterError, match="4x3x2"):
        drafter_of(model, info, random_medusa(model), topk="4,3")


def test_rows_leave_nothing_behind(run: Any, info: Info) -> None:
    model = tiny_model(vocab_size=24)
    drafter = drafter_of(model, info, random_medusa(model))
    run(model, drafter, PROMPTS, SamplingParams(max_tokens=6), cancel={0: 2})
    assert not drafter._states
    drafter.close(99)


def test_prior_is_a_distribution_a_level() -> None:
    assert all(sum(row) < 1 and row == sorted(row, reverse=True) for row in prior_accuracies(5))
