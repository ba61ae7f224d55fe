"""What the tests of trained drafters share: a target, a drafter, and the outputs of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import settings
from transformers import PreTrainedModel

from slipstream.control import Controller, RowState
from slipstream.core.draft import Budget, Drafter
from slipstream.core.params import SamplingParams
from slipstream.core.stats import DraftCounts
from slipstream.drafters.base import TargetInfo
from slipstream.engine.engine import Engine
from slipstream.model.runner import Runner

settings.register_profile("slipstream", deadline=None, derandomize=True)
settings.load_profile("slipstream")


@dataclass(frozen=True)
class Ran:
    """Every row's prompt and output, and the counters of all."""

    tokens: list[list[int]]
    counts: DraftCounts


Run = Callable[..., Ran]


class PlainNowAndThen(Controller):
    """Every third step of a row is plain; the others draft as much as may be."""

    def __init__(self) -> None:
        self.steps = 0
        self.depth = 9

    def plan(self, rows: Sequence[RowState]) -> list[Budget]:
        self.steps += 1
        return [Budget() if (self.steps + row.seq_id) % 3 == 0 else Budget(self.depth, 99) for row in rows]


@pytest.fixture
def plain_now_and_then() -> Controller:
    return PlainNowAndThen()


def target_info(model: PreTrainedModel) -> TargetInfo:
    return TargetInfo(vocab_size=int(model.config.vocab_size), context=2048, dtype="float32", model=model)


@pytest.fixture
def info() -> Callable[[PreTrainedModel], TargetInfo]:
    return target_info


@pytest.fixture
def run() -> Run:
    """run(model, drafter or None, prompts, params, cancel={row: step}) -> Ran."""

    def _run(
        model: PreTrainedModel,
        drafter: Drafter | None,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        cancel: dict[int, int] | None = None,
        **options: Any,
    ) -> Ran:
        with Engine(Runner(model, pack=False), drafter, **options) as engine:  # type: ignore[arg-type]
            rows = []
            for i, prompt in enumerate(prompts):
                seq_id = engine.add(prompt, params, seed=i)
                rows.append(engine.find(seq_id))
            step = 0
            while engine.has_work:
                for row, when in (cancel or {}).items():
                    if when == step:
                        engine.cancel(row)
                engine.step()
                step += 1
            return Ran([list(r.tokens) for r in rows if r is not None], engine.counts)

    return _run
