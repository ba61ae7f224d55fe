"""Rules through the engine: sampled drafts of a real model, and lossy output that says so."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import slipstream
from slipstream.core.draft import Budget, Draft, Drafter, DraftRequest
from slipstream.core.params import SamplingParams
from slipstream.core.sequence import Event
from slipstream.core.tree import TokenTree
from slipstream.engine.engine import Engine
from slipstream.errors import ParameterError
from slipstream.logits.law import Law, draw_siblings
from slipstream.model.runner import Runner
from slipstream.testing.tiny import save_tiny, tiny_model

V = 48
PROMPT = [5, 6, 7, 8, 5, 6]
SHARP = {"temperature": 1.0, "max_tokens": 24}


class Sampler(Drafter):
    """Draws from a fixed law, two children of the root and one of each, or a chain of three."""

    name = "sampler"
    num_speculative_tokens = 4

    def __init__(self, law: Law, width: int) -> None:
        self._law, self._width = law, width

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [self._draft(r) for r in requests]

    def _draft(self, request: DraftRequest) -> Draft:
        tokens, parents = [request.root], [-1]
        rows: list[torch.Tensor | None] = [None]
        level = [0]
        for depth in range(min(request.budget.depth, 3 if self._width == 1 else 2)):
            below: list[int] = []
            for node in level:
                count = self._width if node == 0 else 1
                position = len(request.tokens) + depth
                drawn, rows[node] = draw_siblings(
                    self._law, count, V, request.seed, position, node, origin=request.origin
                )
                below += range(len(tokens), len(tokens) + len(drawn))
                tokens += drawn
                parents += [node] * len(drawn)
                rows += [None] * len(drawn)
            level = below
        return Draft(TokenTree(tuple(tokens), tuple(parents)), tuple(rows))


def run(drafter: Drafter | None, rule: str = "auto", lossy: bool = False, **params: float) -> list[Event]:
    wanted = SamplingParams(seed=7).with_(**{**SHARP, **params})
    with Engine(
        Runner(tiny_model(vocab_size=V, seed=3), pack=False), drafter, rule=rule, lossy=lossy
    ) as engine:  # type: ignore[arg-type]
        engine.add(PROMPT, wanted)
        return list(engine.run())


def tokens(events: Sequence[Event]) -> list[int]:
    return [token for event in events for token in event.tokens]


def likely_law() -> Law:
    """The tokens of the plain answer are likely, so that some drafts are accepted."""
    weights = torch.full((V,), 0.02, dtype=torch.float64)
    for token in tokens(run(None, temperature=0.0)):
        weights[token] += 1.0
    return Law.from_probs(weights / weights.sum())


@pytest.mark.parametrize(("width", "rule"), [(1, "rejection"), (1, "block"), (2, "auto"), (3, "block")])
def test_sampled_drafts_of_a_greedy_target_leave_its_answer_as_it_is(width: int, rule: str) -> None:
    events = run(Sampler(likely_law(), width), rule, temperature=0.0)
    assert tokens(events) == tokens(run(None, temperature=0.0))
    assert any(any(event.drafted) for event in events)
    assert not any(event.lossy for event in events)


@pytest.mark.parametrize(("width", "rule"), [(1, "rejection"), (1, "block"), (2, "auto")])
def test_a_seed_gives_the_same_sampled_answer_again(width: int, rule: str) -> None:
    drafter = Sampler(likely_law(), width)
    assert tokens(run(drafter, rule)) == tokens(run(drafter, rule))


def test_typical_acceptance_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(ParameterError, match="lossy=True"):
        slipstream.load("no-such-model", rule="typical")
    with pytest.raises(ParameterError, match="lossy=True"):
        run(None, "typical")
    with pytest.raises(ParameterError, match="rule must be one of"):
        run(None, "typicla", lossy=True)


def test_output_of_typical_acceptance_is_marked_lossy() -> None:
    events = run(Sampler(likely_law(), 2), "typical", lossy=True)
    assert events and all(event.lossy for event in events)
    assert tokens(run(Sampler(likely_law(), 2), "typical", lossy=True)) != tokens(run(None))


def test_a_cancelled_lossy_answer_is_marked_too() -> None:
    engine = Engine(Runner(tiny_model(vocab_size=V), pack=False), None, rule="typical", lossy=True)  # type: ignore[arg-type]
    with engine:
        engine.cancel(engine.add(PROMPT, SamplingParams()))
        assert [(e.finish_reason, e.lossy) for e in engine.step()] == [("cancelled", True)]


def test_the_permission_alone_changes_nothing() -> None:
    exact, allowed = (run(Sampler(likely_law(), 2), lossy=lossy) for lossy in (False, True))
    assert exact == allowed


@pytest.mark.parametrize("rule", ["auto", "typical"])
def test_a_completion_says_whether_it_is_lossy(rule: str, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model")
    with slipstream.load(str(folder), drafter="ngram", rule=rule, lossy=True) as session:
        assert session.engine.lossy is (rule == "typical")
        done = session.generate("abcabcabc", SamplingParams(max_tokens=6))
        assert done.lossy is (rule == "typical")
        streamed = list(session.stream("abcabcabc", SamplingParams(max_tokens=6)))
        assert {event.lossy for event in streamed} == {rule == "typical"}


def test_a_budget_cuts_a_sampled_tree_by_count() -> None:
    request = DraftRequest(0, [1, 2], 1, Budget(2, 4), SamplingParams(temperature=1.0), 3)
    draft = Sampler(likely_law(), 3)._draft(request).truncate(2, 2)
    assert draft.tree.num_drafted == 2 and draft.q is not None and draft.q[0] is not None
