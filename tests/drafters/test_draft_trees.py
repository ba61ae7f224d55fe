"""draft_model with trees: the sample stays the target's, and a tree never accepts less than the chain."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch

from slipstream.control import Fixed
from slipstream.control.base import Controller, RowState
from slipstream.control.fixed import FixedConfig
from slipstream.core.draft import Budget, Draft, Drafter, DraftRequest
from slipstream.core.noise import Purpose, uniform
from slipstream.core.params import SamplingParams
from slipstream.core.spec import make_config
from slipstream.drafters._growth import DynamicGrowth
from slipstream.drafters._model_growth import Reading, grow_with
from slipstream.drafters.base import TargetInfo
from slipstream.drafters.draft_model import DraftModelConfig, ModelDrafter
from slipstream.drafters.none import NoConfig, NoDrafter
from slipstream.engine.engine import Engine
from slipstream.errors import ParameterError
from slipstream.model.pack import PackRow
from slipstream.model.runner import Runner
from slipstream.testing.tiny import tiny_model

VOCAB = 40
INFO = TargetInfo(vocab_size=VOCAB, context=2048)
TARGETS: dict[str, dict[str, Any]] = {
    "llama": {"kind": "llama"},
    "mistral": {"kind": "mistral", "sliding_window": 6},
    "gemma3": {
        "kind": "gemma3_text",
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}
PROMPTS = [tuple((7 * i + 3 * j * j) % VOCAB for j in range(n)) for i, n in enumerate((2, 9, 17, 5, 30))]


@lru_cache
def runner(name: str) -> Runner:
    return Runner(tiny_model(vocab_size=VOCAB, seed=3, **TARGETS[name]), pack=False)


@lru_cache
def draft_runner(name: str) -> Runner:
    """The target with noise on its weights: right about half the time."""
    model = tiny_model(vocab_size=VOCAB, seed=3, **TARGETS[name])
    generator = torch.Generator().manual_seed(5)
    for weight in model.parameters():
        weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.05)
    return Runner(model, pack=False)


def drafter(name: str = "llama", **options: Any) -> ModelDrafter:
    return ModelDrafter(DraftModelConfig("tiny", **options), INFO, draft_runner(name))


def run(
    name: str, using: Drafter, temperature: float, controller: Controller | None = None, rows: int = 3
) -> tuple[list[list[int]], Engine]:
    engine = Engine(runner(name), using, vocab_size=VOCAB, controller=controller, max_rows=rows, chunk=8)
    ids = [
        engine.add(p, SamplingParams(max_tokens=20 + 3 * i, temperature=temperature, seed=50 + i))
        for i, p in enumerate(PROMPTS)
    ]
    found = [engine.find(i) for i in ids]
    for _ in engine.run():
        pass
    assert len(engine.runner.cache) == 0
    return [row.output for row in found if row is not None], engine


@lru_cache
def plain(name: str, temperature: float) -> list[list[int]]:
    return run(name, NoDrafter(NoConfig(), INFO), temperature)[0]


class RandomBudgets(Controller):
    def plan(self, rows: Any) -> list[Budget]:
        def budget(row: RowState) -> Budget:
            depth = int(uniform(row.seq_id, row.position, Purpose.DRAFT) * 7)
            return Budget(depth, int(depth * (1 + 3 * uniform(row.seq_id, row.position, Purpose.ACCEPT))))

        return [budget(row) for row in rows]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize(("width", "depth"), [(2, 3), (4, 4)])
def test_trees_give_the_tokens_of_plain_decoding(
    name: str, temperature: float, width: int, depth: int
) -> None:
    using = drafter(name, width=width, num_speculative_tokens=depth)
    outputs, engine = run(name, using, temperature)
    assert outputs == plain(name, temperature)
    assert engine.counts.accepted_tokens > 0
    assert len(using.runner.cache) == 0


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("name", TARGETS)
def test_any_budgets_and_few_slots_give_the_tokens_of_plain_decoding(name: str, width: int) -> None:
    using = drafter(name, width=width, min_confidence=0.1)
    assert run(name, using, 0.8, RandomBudgets(), rows=2)[0] == plain(name, 0.8)


class Compare(Drafter):
    """Drafts a tree, and for each step the chain of equal depth as well, and keeps both."""

    def __init__(self, tree: ModelDrafter, chain: ModelDrafter) -> None:
        self.tree, self.chain = tree, chain
        self.name, self.needs = "compare", tree.needs
        self.num_speculative_tokens, self.draft_nodes = tree.num_speculative_tokens, tree.draft_nodes
        self.pairs: list[tuple[Draft, Draft]] = []

    def propose(self, requests: Any) -> list[Draft]:
        trees, chains = self.tree.propose(requests), self.chain.propose(requests)
        self.pairs += zip(trees, chains, strict=True)
        return trees

    def close(self, seq_id: int) -> None:
        self.tree.close(seq_id)
        self.chain.close(seq_id)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_tree_holds_the_chain_and_more_so_it_accepts_no_less(temperature: float) -> None:
    tree = drafter(width=3, num_speculative_tokens=4, nodes=9)
    chain = ModelDrafter(
        DraftModelConfig("tiny", 4), INFO, Runner(draft_runner("llama").model, pack=False, check=False)
    )
    using = Compare(tree, chain)
    _, engine = run("llama", using, temperature)
    for wide, thin in using.pairs:
        path = thin.tree.path_tokens(len(thin.tree) - 1)
        assert path in {wide.tree.path_tokens(n) for n in range(len(wide.tree))}
        assert wide.tree.num_drafted <= 9 and wide.tree.depth <= 4
    accepted = [
        run("llama", drafter(width=w, num_speculative_tokens=4), temperature)[1].counts for w in (1, 4)
    ]
    assert accepted[1].accepted_tokens > accepted[0].accepted_tokens
    assert accepted[1].passes < accepted[0].passes


def request(tokens: list[int], depth: int, nodes: int, temperature: float = 0.0) -> DraftRequest:
    return DraftRequest(0, tokens, 2, Budget(depth, nodes), SamplingParams(temperature=temperature), 1)


def test_tree_nodes_are_the_likeliest_children_of_their_parents() -> None:
    """Against one forward over the whole path each: nothing of the slot, the mask or the order is shared."""
    tokens = [3, 1, 4, 1, 5]
    using = drafter(width=3)
    (draft,) = using.propose([request(tokens, 3, 14)])
    using.close(0)
    tree, model = draft.tree, Runner(draft_runner("llama").model, pack=False, check=False)
    assert tree.depth == 3 and tree.num_drafted == 14
    for node in range(len(tree)):
        children = [tree.tokens[c] for c in tree.children(node)]
        model.cache.open(0)
        logits = model.forward([PackRow(0, [*tokens, *tree.path_tokens(node)])], logits="last").logits
        model.cache.close(0)
        assert logits is not None
        assert children == logits[0].topk(max(len(children), 1)).indices.tolist()[: len(children)]


@pytest.mark.parametrize("width", [1, 3])
def test_scores_are_the_path_probabilities(width: int) -> None:
    """Against one forward over each whole path; a chain tells them only if it is asked."""
    tokens = [3, 1, 4, 1, 5]
    using = drafter(width=width)
    (draft,) = using.propose([replace(request(tokens, 3, 9), scored=True)])
    (quiet,) = using.propose([request(tokens, 3, 9)])
    using.close(0)
    assert quiet.tree == draft.tree and (quiet.scores is None) == (width == 1)
    assert draft.scores is not None and draft.tree.depth == 3
    model = Runner(draft_runner("llama").model, pack=False, check=False)
    for node in range(1, len(draft.tree)):
        path = draft.tree.path_tokens(node)
        model.cache.open(0)
        logits = model.forward([PackRow(0, [*tokens, *path])]).logits
        model.cache.close(0)
        assert logits is not None
        laws = logits[len(tokens) - 1 : -1].softmax(-1)
        expected = math.prod(float(law[token]) for law, token in zip(laws, path, strict=True))
        assert draft.scores[node] == pytest.approx(expected, rel=1e-4)


def test_a_plain_chain_pays_for_no_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    using = drafter(num_speculative_tokens=4)
    monkeypatch.setattr(torch.Tensor, "log_softmax", None)
    (draft,) = using.propose([request([3, 1, 4], 4, 4)])
    assert draft.tree.num_drafted == 4
    with pytest.raises(TypeError):
        using.propose([replace(request([3, 1, 4], 4, 4), scored=True)])
    using.close(0)


def test_an_accepted_path_is_not_computed_again() -> None:
    using = drafter(width=3, num_speculative_tokens=3)
    tokens = [3, 1, 4, 1, 5]
    (draft,) = using.propose([request(tokens, 3, 9)])
    tree = draft.tree
    deepest = max((n for n in range(1, len(tree)) if tree.children(n)), key=lambda n: tree.depths[n])
    accepted = [*tree.path_tokens(deepest), 7]
    assert len(accepted) == 3
    computed: list[int] = []
    forward = using.runner.forward

    def spy(rows: Any, **options: Any) -> Any:
        computed.append(sum(len(r.tokens) for r in rows))
        return forward(rows, **options)

    using.runner.forward = spy  # type: ignore[method-assign]
    try:
        (again,) = using.propose([request([*tokens, *accepted], 3, 9)])
    finally:
        using.runner.forward = forward  # type: ignore[method-assign]
        using.close(0)
    assert computed[0] == 1  # the root alone
    fresh = drafter(width=3, num_speculative_tokens=3)
    assert fresh.propose([request([*tokens, *accepted], 3, 9)])[0].tree == again.tree
    fresh.close(0)


def test_several_rows_are_drafted_as_each_alone() -> None:
    using = drafter(width=3)
    requests = [
        DraftRequest(i, list(p), 1, Budget(2 + i % 3, 12), SamplingParams(), 1) for i, p in enumerate(PROMPTS)
    ]
    together = using.propose(requests)
    for r in requests:
        using.close(r.seq_id)
    alone = [using.propose([r])[0] for r in requests]
    for r in requests:
        using.close(r.seq_id)
    assert [d.tree for d in together] == [d.tree for d in alone]


def test_a_cache_that_grows_keeps_the_nodes() -> None:
    """The tree crosses a multiple of 512 columns between two levels."""
    tokens = [(5 * i + i * i) % VOCAB for i in range(509)]
    short = drafter(width=4)
    (crossing,) = short.propose([request(tokens, 3, 12)])
    short.close(0)
    model = draft_runner("llama")
    model.cache.open(0)
    model.cache.reserve(0, 1000)  # wide from the start
    growth = DynamicGrowth(4, 3, 12, greedy_path=True)
    grow_with(model, [Reading(0, tokens, growth)], VOCAB, after_reading=lambda _: None)
    assert model.cache.length(0) == len(tokens)
    model.cache.close(0)
    assert growth.draft(tokens[-1], "").tree == crossing.tree


def test_a_chain_budget_gives_the_chain_whatever_the_width() -> None:
    using = drafter(width=4)
    (draft,) = using.propose([request([1, 2, 3], 4, 4)])
    using.close(0)
    assert draft.tree.is_chain and draft.tree.depth == 4


def test_no_confidence_means_no_draft() -> None:
    using = drafter(width=3, min_confidence=1.0)
    (draft,) = using.propose([request([1, 2, 3], 4, 12)])
    using.close(0)
    assert draft.tree.num_drafted == 0


def test_a_tree_drafter_is_given_room_for_its_nodes() -> None:
    engine = Engine(runner("llama"), drafter(width=3, num_speculative_tokens=4), vocab_size=VOCAB)
    assert engine.controller.plan([RowState(0, 1, 50)]) == [Budget(4, 12)]
    assert Fixed(FixedConfig(4)).plan([RowState(0, 1, 50)]) == [Budget(4, 4)]


@pytest.mark.parametrize(
    "options",
    [
        {"width": "0"},
        {"nodes": "-1"},
        {"width": "2", "sampled": "true"},
        {"quantise": "int4"},
        {"nodes": "7"},  # of a chain
        {"width": "2", "nodes": "1025"},
        {"width": "1025", "nodes": "7"},
        {"width": "300"},  # times 4
    ],
)
def test_bad_options_are_errors_of_one_line(options: dict[str, str]) -> None:
    with pytest.raises(ParameterError) as caught:
        make_config(DraftModelConfig, "draft_model", {"model": "x", **options})
    assert "\n" not in str(caught.value)
