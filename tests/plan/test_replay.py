"""Replayed counts are those of a real run."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from slipstream.core.draft import Draft, Drafter, DraftRequest
from slipstream.core.params import SamplingParams
from slipstream.core.stats import DraftCounts
from slipstream.core.tree import TokenTree
from slipstream.drafters import build_drafter
from slipstream.drafters.base import TargetInfo
from slipstream.engine.engine import Engine
from slipstream.errors import DrafterError
from slipstream.model.runner import Runner
from slipstream.plan.replay import Recorded, replay
from slipstream.testing.tiny import tiny_model

VOCAB, EOS = 24, 23
INFO = TargetInfo(VOCAB, 2048)
PROMPTS = ((1, 2, 3, 1, 2, 3, 1, 2), (5, 6, 8, 9, 5, 6), (4,), (4, 4, 4, 11, 4, 4))


@pytest.fixture(scope="module")
def runner() -> Runner:
    return Runner(tiny_model("llama", vocab_size=VOCAB, layers=1, seed=1), pack=False)


def real(
    runner: Runner, drafter: Drafter, params: SamplingParams, controller: str | None
) -> tuple[list[Recorded], list[DraftCounts]]:
    engine = Engine(runner, drafter, max_rows=1, controller=controller, eos_ids=[EOS])
    rows = [engine.find(engine.add(p, params)) for p in PROMPTS]
    for _ in engine.run():
        pass
    records = [Recorded(r.prompt, tuple(r.output), params.max_tokens) for r in rows if r is not None]
    return records, [r.counts for r in rows if r is not None]


@pytest.mark.parametrize("controller", [None, "additive:start=3,min=1", "fixed:num_speculative_tokens=1"])
@pytest.mark.parametrize(
    "spec", ["none", "ngram:min_n=1", "ngram:min_n=1,branches=3", "suffix", "suffix:tree=true,factor=3",
             "cascade:drafters=suffix+ngram(min_n=1),mode=merge"],
)  # fmt: skip
def test_replay_counts_what_the_engine_counts(runner: Runner, spec: str, controller: str | None) -> None:
    for temperature in (0.0, 0.8):
        params = SamplingParams(max_tokens=24, temperature=temperature, seed=2)
        records, counts = real(runner, build_drafter(spec, INFO), params, controller)
        assert {len(r.output) < 24 for r in records} == {True, False}  # some end by themselves, some do not
        assert replay(build_drafter(spec, INFO), records, controller) == counts
        assert sum(c.emitted for c in counts) == sum(len(r.output) for r in records)


def test_a_part_that_reads_the_prompt_drafts_after_the_first_token(runner: Runner) -> None:
    class Reader(Repeater):
        needs = Repeater.needs.__class__(reads_prompt=True)

    params = SamplingParams(max_tokens=12)
    records, counts = real(runner, Reader(), params, None)
    assert replay(Reader(), records) == counts


class Repeater(Drafter):
    """Drafts the root again and again."""

    name = "repeater"
    num_speculative_tokens = 3

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [Draft(TokenTree.chain(r.root, [r.root] * 9)) for r in requests]


class Sampler(Repeater):
    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        law = torch.ones(VOCAB) / VOCAB
        return [Draft(TokenTree.chain(r.root, [1]), (law, None)) for r in requests]


def test_without_room_the_record_is_the_limit() -> None:
    (counts,) = replay(Repeater(), [Recorded((5,), (5,) * 9)])
    assert (counts.emitted, counts.passes, counts.draft_tokens) == (9, 3, 6)
    assert replay(Repeater(), [Recorded((5,), ())]) == [DraftCounts()]


def test_what_needs_the_target_is_refused() -> None:
    with pytest.raises(DrafterError, match="needs states or logits"):
        replay(build_drafter("recycle", INFO), [])
    with pytest.raises(DrafterError, match="drew its draft"):
        replay(Sampler(), [Recorded((5,), (1, 2, 3))])


def test_rows_are_closed_also_after_an_error() -> None:
    class Broken(Repeater):
        closed = 0

        def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
            raise RuntimeError("broken")

        def close(self, seq_id: int) -> None:
            self.closed += 1

    drafter = Broken()
    with pytest.raises(RuntimeError, match="broken"):
        replay(drafter, [Recorded((5,), (1, 2, 3))])
    assert drafter.closed == 1
