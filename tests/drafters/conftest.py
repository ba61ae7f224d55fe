"""Settings of the property tests, and `Bench`: a drafter in the real engine on a tiny model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import settings

from slipstream.control import Controller, RowState
from slipstream.core.draft import Budget, Drafter, DraftRequest
from slipstream.core.params import SamplingParams
from slipstream.core.stats import DraftCounts
from slipstream.drafters import build_drafter
from slipstream.drafters.base import TargetInfo
from slipstream.engine.engine import Engine
from slipstream.model.runner import Runner
from slipstream.testing.tiny import tiny_model

# No deadlines (machines differ) and no chance (a run that passes passes again).
settings.register_profile("slipstream", deadline=None, derandomize=True)
settings.load_profile("slipstream")

PROMPTS = ([1, 2, 3, 1, 2, 3, 1, 2], [5, 6, 7, 8, 9, 5, 6], [4, 4, 4, 11, 4, 4], [7])
RUNS = (SamplingParams(max_tokens=20, seed=3), SamplingParams(max_tokens=20, temperature=0.8, seed=5))
BUDGETS = ((1, 1), (7, 7), (3, 10), (16, 40))


class Always(Controller):
    """One budget for every row."""

    def __init__(self, depth: int, nodes: int) -> None:
        self._budget = Budget(depth, nodes)

    def plan(self, rows: Sequence[RowState]) -> list[Budget]:
        return [self._budget for _ in rows]


class Bench:
    """Few tokens, so that random text repeats itself."""

    vocab = 24
    prompts = PROMPTS

    def __init__(self) -> None:
        self.info = TargetInfo(self.vocab, 2048)
        model = tiny_model("llama", vocab_size=self.vocab, layers=1, seed=1)
        none = build_drafter("none", self.info)
        self.engine = Engine(Runner(model, pack=False), none, max_rows=3)
        self.plain = {p.temperature: self.generate(none, p)[0] for p in RUNS}

    def generate(
        self,
        drafter: Drafter,
        params: SamplingParams,
        controller: Controller | None = None,
        prompts: Sequence[Sequence[int]] = PROMPTS,
    ) -> tuple[list[list[int]], DraftCounts]:
        """Outputs of all prompts, and the counts of all. The drafter is not shut down."""
        engine, total = self.engine, DraftCounts()
        engine.set_drafter(drafter, controller)
        ids = [engine.add(p, params, seed=(params.seed or 0) + i) for i, p in enumerate(prompts)]
        rows = [row for i in ids if (row := engine.find(i)) is not None]
        try:
            for _ in engine.run():
                pass
        finally:
            for i in ids:  # what failed must not be in the way of the next test
                engine.cancel(i)
            engine.apply_cancels()
        for row in rows:
            total.add(row.counts)
        return [row.output for row in rows], total

    def assert_same_sample(self, build: Callable[[], Drafter]) -> DraftCounts:
        """The output is that of plain decoding for every run and budget; gives the counts of all."""
        total = DraftCounts()
        for params in RUNS:
            for depth, nodes in BUDGETS:
                drafter = build()
                for _ in range(1 + (nodes == 40)):  # the second time with what was remembered of the first
                    outputs, counts = self.generate(drafter, params, Always(depth, nodes))
                    assert outputs == self.plain[params.temperature], (params.temperature, depth, nodes)
                    total.add(counts)
                drafter.shutdown()
        return total

    @staticmethod
    def ask(
        tokens: Sequence[int], depth: int = 8, nodes: int | None = None, seq_id: int = 0, prompt: int = 1
    ) -> DraftRequest:
        budget = Budget(depth, depth if nodes is None else nodes)
        return DraftRequest(seq_id, tokens, prompt, budget, SamplingParams(), 0)


@pytest.fixture(scope="session")
def bench() -> Bench:
    return Bench()
