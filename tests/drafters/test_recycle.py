"""Token recycling: the same sample, the table, the shape of the tree."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from slipstream.control import RowState
from slipstream.core.draft import Draft, Observation
from slipstream.core.params import SamplingParams
from slipstream.core.tree import TokenTree
from slipstream.drafters import build_drafter
from slipstream.drafters.base import TargetInfo
from slipstream.drafters.recycle import RANKS, RecycleConfig, RecycleDrafter, likeliest_choices
from slipstream.errors import ParameterError

INFO = TargetInfo(24, 2048)


def recycle(**options: Any) -> RecycleDrafter:
    return RecycleDrafter(RecycleConfig(**options), INFO)


def verified(tree: TokenTree, best: dict[int, int], accepted: tuple[int, ...] = ()) -> Observation:
    """The target's likeliest token at each node is best[node], then best[node] + 1, and so on."""
    logits = torch.zeros(len(tree), INFO.vocab_size)
    for node, token in best.items():
        for rank in range(4):
            logits[node, token + rank] = 10.0 - rank
    return Observation(0, 0, (tree.tokens[0],), draft=Draft(tree), accepted=accepted, node_logits=logits)


@pytest.mark.parametrize("spec", ["recycle", "recycle:k=2,choices=0+1+0.0+0.1+0.0.0"])
def test_the_sample_is_that_of_plain_decoding(bench: Any, spec: str) -> None:
    counts = bench.assert_same_sample(lambda: build_drafter(spec, INFO))
    assert counts.accepted_tokens > 0 and list(counts.sources) == ["recycle"]


def test_prompt_bigrams_seed_the_table_latest_first(bench: Any) -> None:
    drafter = recycle(choices="0+1+2+0.0", k=3)
    drafter.open(0, [1, 2, 1, 3, 1, 2, 9])
    (draft,) = drafter.propose([bench.ask([4, 1])])
    assert draft.tree.tokens == (1, 2, 3, 9) and draft.tree.parents == (-1, 0, 0, 1)


def test_every_verified_node_teaches_the_rejected_ones_too(bench: Any) -> None:
    drafter = recycle(choices="0+1+0.0", k=2)
    drafter.open(0, [5, 6])
    drafter.observe([verified(TokenTree((5, 7, 8), (-1, 0, 0)), {0: 10, 1: 12, 2: 14}, accepted=(1,))])
    for token, first in ((5, 10), (7, 12), (8, 14)):
        (draft,) = drafter.propose([bench.ask([1, token])])
        assert draft.tree.tokens[1:3] == (first, first + 1)
    drafter.open(1, [5, 6])  # a prompt does not overwrite what the target has said
    assert drafter.propose([bench.ask([1, 5])])[0].tree.tokens[1] == 10


def test_what_was_kept_counts_more_than_what_was_rejected(bench: Any) -> None:
    drafter = recycle(choices="0", k=1)
    drafter.observe([verified(TokenTree((5, 7, 7), (-1, 0, 1)), {1: 3, 2: 9}, accepted=(1,))])
    assert drafter.propose([bench.ask([7])])[0].tree.tokens == (7, 3)


def test_an_unknown_token_drafts_nothing_and_ids_of_the_padding_are_left_out(bench: Any) -> None:
    drafter = recycle()
    drafter.open(0, [1, 30, 2, 3])
    for root in (9, 1, 30):
        assert drafter.propose([bench.ask([root])])[0].tree.num_drafted == 0
    drafter.observe([verified(TokenTree.root(30), {0: 2})])
    logits = torch.zeros(1, 40)
    logits[0, 35] = 9.0
    drafter.observe([Observation(0, 0, (9,), draft=Draft(TokenTree.root(9)), node_logits=logits)])
    assert max(drafter.propose([bench.ask([9])])[0].tree.tokens) < 24


def test_the_tree_keeps_its_budget(bench: Any) -> None:
    drafter = recycle()
    drafter.observe([verified(TokenTree.root(t), {0: (t + 1) % 20}) for t in range(24)])
    for depth, nodes in ((1, 40), (2, 5), (8, 8), (31, 31)):
        (draft,) = drafter.propose([bench.ask([3], depth, nodes)])
        assert 0 < draft.tree.num_drafted <= nodes and draft.tree.depth <= depth
    assert draft.tree.num_drafted == drafter.draft_nodes == 31
    assert draft.tree.depth == drafter.num_speculative_tokens >= 4


def test_the_default_shape_is_best_first_and_nested() -> None:
    shape = likeliest_choices(60, 8)
    chances = [math.prod(RANKS[rank] for rank in path) for path in shape.paths]
    assert chances == pytest.approx(sorted(chances, reverse=True))
    assert likeliest_choices(20, 8).paths == shape.paths[:20]
    assert likeliest_choices(12, 1).depth == 12 and len(likeliest_choices(0, 8)) == 0
    assert len(likeliest_choices(40, 30)) == 40


def test_the_engine_gives_it_the_nodes_and_the_depth_of_its_shape(bench: Any) -> None:
    drafter = build_drafter("recycle:nodes=12", INFO)
    bench.engine.set_drafter(drafter)
    (budget,) = bench.engine.controller.plan([RowState(0, 1, 50)])
    assert (budget.depth, budget.nodes) == (likeliest_choices(12, 8).depth, 12)
    wide = build_drafter("recycle:choices=0+1+2+0.0", INFO)
    assert (wide.num_speculative_tokens, wide.draft_nodes) == (2, 4)


@pytest.mark.parametrize("text", ["0.0+0", "0+0", "8", "a", "0+-1", "0+"])
def test_bad_choices_are_refused(text: str) -> None:
    with pytest.raises(ParameterError, match="recycle:choices"):
        recycle(choices=text)


@pytest.mark.parametrize("options", ["k=0", "nodes=-1", "nodes=1000000000", "choices=9", "choices=0,nodes=5"])
def test_bad_options_are_refused(options: str) -> None:
    with pytest.raises(ParameterError, match="recycle"):
        build_drafter(f"recycle:{options}", INFO)


def test_the_table_is_the_only_memory(bench: Any) -> None:
    drafter = recycle(k=8)
    assert drafter.memory_bytes == 24 * (8 * 4 + 1)
    bench.generate(drafter, SamplingParams(max_tokens=8))
    assert drafter.memory_bytes == 24 * (8 * 4 + 1)
    drafter.shutdown()
    assert drafter.memory_bytes == 0
