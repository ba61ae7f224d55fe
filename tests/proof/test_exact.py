"""Short laws are exact, their cells divide all outputs, and the probes draft truthfully from them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
import torch

from slipstream.core.draft import Budget, DraftRequest
from slipstream.core.params import SamplingParams
from slipstream.engine.session import Session
from slipstream.logits.pipeline import LogitsPipeline
from slipstream.proof.exact import REST, ShortLaw, enumerate_law, evenness
from slipstream.proof.probes import Drawn, Likeliest, Replay
from slipstream.proof.reference import Reference
from slipstream.testing.tiny import tiny_model

PROMPT = (5, 6, 7, 5, 6)
PARAMS = SamplingParams(temperature=0.6, top_k=30, repetition_penalty=1.3)


@pytest.fixture
def reference(session: Session) -> Iterator[Reference]:
    made = Reference(session.engine)
    yield made
    made.close()


@pytest.fixture
def law(reference: Reference) -> ShortLaw:
    return enumerate_law(reference, PROMPT, PARAMS, 3)


@torch.inference_mode()
def test_the_law_is_that_of_the_model_itself(law: ShortLaw) -> None:
    """Against transformers' own attention, without a cache."""
    twin = tiny_model("qwen2", seed=1)
    pipeline = LogitsPipeline(PARAMS, twin.config.vocab_size, frozenset(), len(PROMPT))
    assert {len(prefix) for prefix in law.laws} == {0, 1, 2} and len(law.laws) > 20
    for prefix, found in law.laws.items():
        tokens = (*PROMPT, *prefix)
        row = twin(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]
        torch.testing.assert_close(found, pipeline.probs(row, tokens), atol=1e-6, rtol=1e-4)


def test_rows_do_not_depend_on_how_they_are_computed(reference: Reference) -> None:
    output = (9, 8, 7, 6)
    along = reference.along(PROMPT, output)
    for end in range(len(output) + 1):
        torch.testing.assert_close(reference.behind(PROMPT, [output[:end], (1,)])[0], along[end])
        torch.testing.assert_close(reference.stepwise(PROMPT, output[:end]), along[end])


@pytest.mark.parametrize("least", [0.2, 0.02, 0.002])
def test_cells_divide_every_output(law: ShortLaw, least: float) -> None:
    cells = law.cells(least)
    assert sum(cells.values()) == pytest.approx(1.0)
    assert all(mass >= least or cell[-1] == REST for cell, mass in cells.items())
    some = [int(t) for t in law.laws[()].topk(4).indices]
    found = {law.cell_of(cells, output) for output in itertools.product((*some, 0), repeat=3)}
    assert found <= set(cells)
    for cell in cells:
        if cell[-1:] != (REST,):
            output = (*cell, *(0,) * (3 - len(cell)))
            assert law.cell_of(cells, output) == cell


def test_what_can_never_be_said_is_seen(law: ShortLaw) -> None:
    best = int(law.laws[()].argmax())
    never = int((law.laws[()] == 0.0).nonzero()[0])
    below = int((law.laws[best,] == 0.0).nonzero()[0])
    assert law.impossible((never, best, best)) == ((), never)
    assert law.impossible((best, below, never)) == ((best,), below)
    assert law.impossible((best, int(law.laws[best,].argmax()))) is None


def test_evenness_is_the_entropy_of_the_cells() -> None:
    rows = torch.stack([torch.zeros(8), torch.tensor([0.0] + [-1e9] * 7), torch.tensor([3.0] + [0.0] * 7)])
    assert evenness(rows[:2], 1.0, 0.1).tolist() == pytest.approx([math.log(8), 0.0])
    p = math.exp(1.5) / (math.exp(1.5) + 7)  # at temperature 2; the seven others are one cell
    two = -p * math.log(p) - (1 - p) * math.log(1 - p)
    assert evenness(rows, 2.0, 0.2).tolist() == pytest.approx([0.0, 0.0, two])


def request(tokens: list[int], seed: int, depth: int, nodes: int) -> DraftRequest:
    return DraftRequest(0, tokens, len(PROMPT), Budget(depth, nodes), PARAMS, seed)


@pytest.mark.parametrize("tree", [False, True])
def test_drawn_drafts_come_from_the_law_they_hand_over(law: ShortLaw, tree: bool) -> None:
    probe = Drawn(law, tree=tree)
    first, depths = [0] * len(law.laws[()]), set()
    for seed in range(1500):
        draft = probe.draft(request([*PROMPT], seed, 2, 9))
        assert draft.q is not None and draft.q[0] is not None
        first[draft.tree.tokens[1]] += 1
        depths.add(draft.tree.depth)
        for node in range(1, len(draft.tree)):
            row = draft.q[draft.tree.parents[node]]
            assert row is not None and float(row[draft.tree.tokens[node]]) > 0.0
    q = draft.q[0]
    seen = torch.tensor(first, dtype=torch.float64)
    likely = q * 1500 >= 10
    spread = (1500 * q * (1 - q)).sqrt()
    assert bool(((seen - 1500 * q).abs() < 4.5 * spread)[likely].all()) and int(likely.sum()) > 5
    assert depths == {1, 2} or depths == {2}
    assert float(q[law.laws[()] == 0.0].sum()) > 0.0  # some of it the target forbids


def test_where_the_law_is_not_known_nothing_is_drafted(law: ShortLaw) -> None:
    unlikely = int(law.laws[()].argmin())
    for probe in (Drawn(law, tree=False), Drawn(law, tree=True), Likeliest(law)):
        assert probe.draft(request([*PROMPT, unlikely, unlikely], 3, 2, 9)).tree.num_drafted == 0


def test_the_likeliest_tree_has_the_likeliest_tokens(law: ShortLaw) -> None:
    tree = Likeliest(law).draft(request([*PROMPT], 0, 2, 9)).tree
    best = law.laws[()].topk(3).indices.tolist()
    assert [tree.tokens[n] for n in tree.children(0)] == best and tree.depth == 2


def test_a_replay_is_right_until_it_turns(law: ShortLaw) -> None:
    known = {1: [(10, 20), (11, 21), (12, 22), (13, 23), (14, 24)]}
    turns = set()
    for done in range(5):
        tokens = [*PROMPT, *(t for t, _ in known[1][:done])]
        chain = Replay(known, tree=False).draft(request(tokens, 1, 4, 4)).tree
        right = [10, 11, 12, 13, 14][done : done + 4]
        wrong = [i for i, (a, b) in enumerate(zip(chain.tokens[1:], right, strict=True)) if a != b]
        assert len(wrong) <= 1
        turns.add(tuple(wrong))
        tree = Replay(known, tree=True).draft(request(tokens, 1, 4, 12)).tree
        assert max(tree.depths) >= len(right)
        node = 0
        for token, (_, other) in zip(right, known[1][done:], strict=False):
            assert {tree.tokens[n] for n in tree.children(node)} >= {token, other}
            child = tree.find_child(node, token)
            assert child is not None
            node = child
    assert len(turns) > 1
