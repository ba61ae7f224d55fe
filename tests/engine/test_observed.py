"""What drafters are told: every committed token, in order, the last one of an answer too."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from slipstream.core.draft import Draft, DraftRequest, Observation
from slipstream.core.params import SamplingParams
from slipstream.core.tree import TokenTree
from slipstream.engine.engine import Engine
from slipstream.model.runner import Runner
from slipstream.plan.replay import Recorded, replay
from slipstream.testing.adversaries import FunctionDrafter, RandomBudgets, upcoming
from slipstream.testing.oracle import Request, plain_decode
from slipstream.testing.tiny import tiny_model

VOCAB = 60
PROMPTS = ((9, 8, 7, 1, 2, 3, 4), (5,), (6, 6))
PARAMS = SamplingParams(max_tokens=17, temperature=1.5)


class Listener(FunctionDrafter):
    """Right now and then; keeps what it is told, by row, until the row is closed."""

    def __init__(self, known: dict[int, list[int]]) -> None:
        def draft(request: DraftRequest) -> Draft:
            future = upcoming(known, request)[: request.budget.depth]
            right = len(request.tokens) % 4
            tokens = [(t + (i >= right)) % VOCAB for i, t in enumerate(future)]
            return Draft(TokenTree.chain(request.root, tokens))

        super().__init__(draft)
        self.told: dict[int, list[int]] = {}
        self.closed: dict[int, list[int]] = {}

    def open(self, seq_id: int, prompt: Sequence[int]) -> None:
        self.told[seq_id] = list(prompt[:1])

    def observe(self, observations: Sequence[Observation]) -> None:
        for seen in observations:
            told = self.told[seen.seq_id]
            if seen.start >= len(told):  # the prompt of a row that shares another's was not computed again
                assert seen.start == len(told) + len(PROMPTS[0]) - 2
                told += PROMPTS[0][1:]
            assert tuple(told[seen.start :]) == seen.tokens[:1], "what was told next is what was computed"
            assert seen.next_token is not None
            told += [*seen.tokens[1:], seen.next_token]

    def close(self, seq_id: int) -> None:
        if seq_id in self.told:
            self.closed[seq_id] = self.told.pop(seq_id)


@pytest.mark.parametrize("chunk", [2, 512])
def test_a_closed_row_was_told_every_token_it_committed(chunk: int) -> None:
    """Ended by an end token inside a draft, by the limit, by the caller; prompts in pieces, and shared."""
    model = tiny_model("llama", vocab_size=VOCAB, layers=1, seed=3)
    known = {s: plain_decode(model, Request(PROMPTS[s % 3], PARAMS, s), vocab_size=VOCAB) for s in range(4)}
    listener = Listener(known)
    ends = frozenset({known[1][9]})
    with Engine(
        Runner(model, pack=False), listener, controller=RandomBudgets(), eos_ids=ends, chunk=chunk
    ) as engine:
        ids = [engine.add(PROMPTS[s % 3], PARAMS, seed=s, group=0 if s in (0, 3) else None) for s in range(4)]
        rows = [row for i in ids if (row := engine.find(i)) is not None]
        while engine.has_work:
            engine.step()
            if rows[2].num_output > 3:
                engine.cancel(ids[2])
        assert {row.finish_reason for row in rows} == {"stop", "length", "cancelled"}
        assert engine.counts.accepted_tokens > 0
        assert listener.closed == {row.id: row.tokens for row in rows} and not listener.told


def test_a_replay_tells_the_same() -> None:
    known = {0: [3, 1, 4, 1, 5, 9, 2, 6], 1: [2, 7, 1, 8]}
    listener = Listener(known)
    for seed, output in known.items():
        record = Recorded(PROMPTS[seed], tuple(output))
        (counts,) = replay(listener, [record], params=SamplingParams(seed=seed))
        assert listener.closed[0] == [*PROMPTS[seed], *output]
    assert counts.passes > 0
