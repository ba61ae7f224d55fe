"""The EAGLE drafter: the same logits as a whole-text forward, trees, the same sample as plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.control import Controller
from slipstream.core.draft import Budget, Draft, DraftRequest, Observation
from slipstream.core.params import SamplingParams
from slipstream.drafters import build_drafter
from slipstream.drafters._growth import ROOT, Level
from slipstream.drafters.base import TargetInfo
from slipstream.drafters.eagle import EAGER, EagleDrafter, EagleDrafterConfig, _Growing
from slipstream.engine.engine import Engine
from slipstream.errors import ParameterError
from slipstream.heads.eagle import EagleHead, attend_masked
from slipstream.heads.io import save_eagle
from slipstream.model.runner import Runner
from slipstream.model.taps import decoder
from slipstream.testing.heads import greedy_next, memoryless_model, perfect_eagle, random_eagle
from slipstream.testing.tiny import tiny_model

KINDS = ["llama", "qwen2", "qwen3", "mistral", "gemma3_text"]
PROMPTS = [[5, 17, 3, 9, 11, 2], [7], [4, 4], list(range(20))]
Info = Callable[[Any], TargetInfo]


def drafter_of(model: Any, info: Info, head: EagleHead, **options: Any) -> EagleDrafter:
    return EagleDrafter(EagleDrafterConfig(heads="", **options), info(model), head)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_random_heads_do_not_change_the_tokens(kind: str, temperature: float, run: Any, info: Info) -> None:
    model = tiny_model(kind, vocab_size=24)
    params = SamplingParams(temperature=temperature, max_tokens=12)
    expected = run(model, None, PROMPTS, params)
    for version in (1, 3):
        found = run(model, drafter_of(model, info, random_eagle(model, version)), PROMPTS, params)
        assert found.tokens == expected.tokens
        assert found.counts.draft_tokens > 0


@pytest.mark.parametrize("kind", KINDS)
def test_perfect_heads_are_always_accepted(kind: str, run: Any, info: Info) -> None:
    """Proves the offsets: the tokens after the root, one for each step of the head."""
    model = memoryless_model(kind)
    params = SamplingParams(max_tokens=16)
    after = greedy_next(model).tolist()
    prompts = [[x, after[x], after[after[x]]] for x in (3, 8)]
    expected = run(model, None, prompts, params)
    assert all(len(set(tokens)) == len(tokens) for tokens in expected.tokens)
    for version, depth in ((1, 3), (3, 1)):
        drafter = drafter_of(
            model, info, perfect_eagle(model, version), num_speculative_tokens=depth, top_k=1
        )
        found = run(model, drafter, prompts, params)
        assert found.tokens == expected.tokens
        per_row = 16 - 16 // (depth + 1)
        assert found.counts.accepted_tokens == found.counts.draft_tokens == 2 * per_row
        sampled = SamplingParams(temperature=0.8, max_tokens=16)
        found = run(model, drafter_of(model, info, perfect_eagle(model, version)), PROMPTS, sampled)
        assert found.tokens == run(model, None, PROMPTS, sampled).tokens and found.counts.accepted_tokens > 0


class Watched(EagleDrafter):
    """Keeps every scored output: (row, tokens up to the root, drafted path, logits [draft V])."""

    seen: list[tuple[int, int, tuple[int, ...], torch.Tensor]]

    def _expand(self, live: Sequence[_Growing], width: int, scored: bool) -> Level:
        level = super()._expand(live, width, scored)
        for g in live:
            for node, out in zip(g.growth.frontier, g.outputs, strict=True):
                path: list[int] = []
                while node != ROOT:
                    path.append(g.growth.tokens[node])
                    node = g.growth.parents[node]
                logits = self.runner.head.logits(out)
                self.seen.append((g.request.seq_id, len(g.request.tokens), tuple(path[::-1]), logits))
        return level


@torch.inference_mode()
def unrolled(head: EagleHead, model: Any, tokens: Sequence[int], path: Sequence[int]) -> torch.Tensor:
    """The head's logits after tokens and path, as training computes them: whole texts, no cache.

    The head reads true features up to the root, then its own outputs.
    """
    out = decoder(model)(input_ids=torch.tensor([tokens[:-1]]), use_cache=False, output_hidden_states=True)
    states: dict[int | str, torch.Tensor] = dict(enumerate(out.hidden_states))
    states["last"] = out.last_hidden_state
    hidden = head.fuse(head.features(states))  # [1, T, H]
    ids = list(tokens[1:])
    for token in (*path, None):
        positions = torch.arange(len(ids))[None]
        outputs = head(torch.tensor([ids]), hidden, positions, attend_masked())
        if token is not None:
            ids.append(token)
            hidden = torch.cat((hidden, outputs[:, -1:]), 1)
    return head.logits(outputs[0, -1])


@pytest.mark.parametrize(
    ("version", "kind", "options", "chunk"),
    [
        (1, "llama", {}, 512),
        (1, "gemma3_text", {"fc_bias": True, "num_layers": 2}, 4),
        (3, "qwen3", {"draft_vocab_size": 11, "norm_before_residual": True}, 4),
        (3, "mistral", {"num_layers": 2, "own_embedding": True, "attention_bias": True}, 512),
    ],
)
def test_drafting_logits_are_those_of_training(
    version: int, kind: str, options: Any, chunk: int, info: Info, plain_now_and_then: Controller
) -> None:
    """At every position and depth: accepted, rejected and plain steps, several rows, one cancelled."""
    model = tiny_model(kind, vocab_size=24, layers=3)  # transformers gives the last stream only normed
    head = random_eagle(model, version, scale=0.15, **options)
    drafter = Watched(EagleDrafterConfig(heads="", top_k=8), info(model), head)
    drafter.seen = []
    settings: Any = {"max_rows": 2, "chunk": chunk, "controller": plain_now_and_then}
    with Engine(Runner(model, pack=False), drafter, **settings) as engine:
        plain_now_and_then.depth = 3  # type: ignore[attr-defined]
        rows = [
            engine.find(engine.add(p, SamplingParams(temperature=1.5, max_tokens=n), seed=i))
            for i, (p, n) in enumerate([(PROMPTS[0], 30), (PROMPTS[1], 9), (PROMPTS[3], 12)])
        ]
        for step in range(40):
            if step == 6:
                engine.cancel(0)
            engine.step()
        assert not engine.has_work and engine.counts.accepted_tokens > 0
    assert {seq for seq, *_ in drafter.seen} == {0, 1, 2}
    assert {len(path) for _, _, path, _ in drafter.seen} == {0, 1, 2}
    for seq_id, length, path, logits in drafter.seen[:: 1 + len(drafter.seen) // 200]:
        expected = unrolled(head, model, rows[seq_id].tokens[:length], path)  # type: ignore[union-attr]
        scale = float(expected.abs().max())
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5 * scale)


def test_long_prompts_are_read_as_they_come(run: Any, info: Info) -> None:
    model = tiny_model(vocab_size=24)
    head = random_eagle(model)
    drafter = drafter_of(model, info, head)
    prompt = [i % 24 for i in range(3 * EAGER)]
    states = torch.randn(len(prompt) - 1, 32)
    features: dict[int | str, torch.Tensor] = {k: states for k in (0, 1, 2)}
    drafter.observe([Observation(0, 0, tuple(prompt[:-1]), features)])
    assert drafter.runner.cache.length(0) == len(prompt) - 2  # all but the one whose next token is the root
    request = DraftRequest(0, prompt, len(prompt), Budget(2, 4), SamplingParams(), 0)
    (once,) = drafter.propose([request])
    assert drafter.runner.cache.length(0) == len(prompt) - 1
    assert drafter.propose([request]) == [once]  # nothing of a draft stays behind
    lazy = drafter_of(model, info, head)
    for start in range(0, len(prompt) - 1, 10):
        part = tuple(prompt[start : min(start + 10, len(prompt) - 1)])
        piece = {k: v[start : start + 10] for k, v in features.items()}
        lazy.observe([Observation(0, start, part, piece)])
    (other,) = lazy.propose([request])
    assert other.tree == once.tree


def test_features_that_were_never_seen_start_the_row_anew(info: Info) -> None:
    model = tiny_model(vocab_size=24)
    drafter = drafter_of(model, info, random_eagle(model))
    states: dict[int | str, torch.Tensor] = {k: torch.randn(3, 32) for k in (0, 1, 2)}
    request = DraftRequest(0, list(range(9)), 9, Budget(2, 4), SamplingParams(), 0)
    assert drafter.propose([request])[0].tree.num_drafted == 0  # no features at all
    drafter.observe([Observation(0, 0, (0, 1, 2), states)])
    assert drafter.propose([request])[0].tree.num_drafted == 0  # they end before the root
    drafter.observe([Observation(0, 5, (5, 6, 7), states)])
    assert drafter.propose([request])[0].tree.num_drafted > 0
    assert drafter.runner.cache.length(0) == 3


def test_reduced_vocabulary_maps_to_target_ids(run: Any, info: Info) -> None:
    model = tiny_model(vocab_size=40)
    head = random_eagle(model, draft_vocab_size=9)
    inside = set(head.vocab.target_ids().tolist())
    drafter = drafter_of(model, info, head)
    drafted: set[int] = set()

    class Spy(EagleDrafter):
        def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
            drafts = super().propose(requests)
            drafted.update(t for d in drafts for t in d.tree.tokens[1:])
            return drafts

    drafter.__class__ = Spy
    params = SamplingParams(max_tokens=10)
    assert run(model, drafter, PROMPTS, params).tokens == run(model, None, PROMPTS, params).tokens
    assert drafted and drafted <= inside


def test_a_wider_tree_accepts_no_shorter_path(run: Any, info: Info) -> None:
    """For the same noise: every chain is in its tree, so the tree never takes more passes."""
    model = memoryless_model()
    params = SamplingParams(temperature=1.2, max_tokens=40)
    passes = []
    for top_k, nodes in ((1, 4), (4, 30), (8, 200)):
        head = perfect_eagle(model, 1)
        drafter = drafter_of(model, info, head, top_k=top_k, nodes=nodes, num_speculative_tokens=4)
        passes.append(run(model, drafter, [[3, 5]], params).counts.passes)
    assert passes[0] >= passes[1] >= passes[2] and passes[0] > passes[2]


def test_a_small_tree_holds_the_whole_chain_however_flat_the_scores(info: Info) -> None:
    """A head that is sure of nothing scores breadth above depth; its argmax may be right all the same."""
    model = tiny_model(vocab_size=24)
    head = random_eagle(model, scale=0.02)
    states: dict[int | str, torch.Tensor] = {k: torch.randn(3, 32) for k in (0, 1, 2)}
    request = DraftRequest(0, [1, 2, 3, 4], 4, Budget(4, 9), SamplingParams(), 0)
    trees = []
    for top_k in (1, 4):
        drafter = drafter_of(model, info, head, top_k=top_k)
        drafter.observe([Observation(0, 0, (1, 2, 3), states)])
        trees.append(drafter.propose([request])[0].tree)
    chain, tree = trees
    assert chain.is_chain and chain.depth == tree.depth == 4 and tree.num_drafted == 9
    paths = [tree.path_tokens(node) for node in range(1, len(tree))]
    assert paths[:4] == [chain.tokens[1 : end + 1] for end in range(1, 5)]
    assert sum(len(path) == 1 for path in paths[4:]) == 3  # the rest is as broad as it may be


def test_heads_and_trees_by_path(tmp_path: Path, run: Any, info: Info) -> None:
    model = tiny_model(vocab_size=24)
    params = SamplingParams(temperature=0.8, max_tokens=8)
    expected = run(model, None, PROMPTS, params)
    (tmp_path / "tree.json").write_text("[[0], [0, 0], [1], [0, 0, 1], [30]]")
    for version in (1, 3):
        save_eagle(random_eagle(model, version), tmp_path / f"v{version}")
        for options in (f",choices={tmp_path / 'tree.json'}", ",min_confidence=0.2"):
            built = build_drafter(f"eagle:heads={tmp_path / f'v{version}'}{options}", info(model))
            assert run(model, built, PROMPTS, params).tokens == expected.tokens
    assert built.num_speculative_tokens == 5 and built.draft_nodes == 15
    cascade = build_drafter(f"cascade:drafters=ngram+eagle(heads={tmp_path / 'v3'})", info(model))
    assert (cascade.num_speculative_tokens, cascade.draft_nodes) == (7, 15)
    assert run(model, cascade, PROMPTS, params).tokens == expected.tokens
    with pytest.raises(ParameterError, match="top_k"):
        EagleDrafterConfig("x", top_k=0)
    with pytest.raises(ParameterError, match="leave out top_k and nodes"):
        EagleDrafterConfig("x", choices="0+1", top_k=2, nodes=7)
    with pytest.raises(ParameterError, match="leave out nodes"):
        EagleDrafterConfig("x", top_k=1, nodes=7)
    assert EagleDrafterConfig("x", top_k=1, num_speculative_tokens=3, nodes=3).nodes == 3  # which a chain has
    for options in ({"nodes": 1025}, {"top_k": 1025}):
        with pytest.raises(ParameterError, match="must be from 0 to 1024"):
            EagleDrafterConfig("x", **options)


def test_rows_leave_nothing_behind(run: Any, info: Info) -> None:
    model = tiny_model(vocab_size=24)
    drafter = drafter_of(model, info, random_eagle(model))
    alone = drafter.memory_bytes
    run(model, drafter, PROMPTS, SamplingParams(max_tokens=6), cancel={0: 2})
    assert not drafter._rows and len(drafter.runner.cache) == 0 and drafter.memory_bytes == alone
    drafter.close(99)
