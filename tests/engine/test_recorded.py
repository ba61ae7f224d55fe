"""What a controller is told of a step: its rows, and the seconds that they took, not those of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.control import Controller, RowOutcome, RowState
from slipstream.core.draft import Budget
from slipstream.core.params import SamplingParams
from slipstream.drafters.base import TargetInfo
from slipstream.drafters.none import NoConfig, NoDrafter
from slipstream.engine import engine as module
from slipstream.engine.engine import Engine
from slipstream.model.runner import Runner
from slipstream.testing.tiny import tiny_model


class Listening(Controller):
    """Plans nothing and keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[int, float]] = []

    def plan(self, rows: Sequence[RowState]) -> list[Budget]:
        return [Budget() for _ in rows]

    def record(self, outcomes: Sequence[RowOutcome], seconds: float) -> None:
        self.told.append((len(outcomes), seconds))


def test_reading_a_prompt_beside_the_running_rows_is_not_counted_as_their_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    runner = Runner(tiny_model("llama", vocab_size=48, layers=1), pack=False)
    forward = runner.forward

    def slow(rows: Any, **options: Any) -> Any:
        now[0] += 100.0 if options.get("logits") == "none" else float(len(rows))
        return forward(rows, **options)

    monkeypatch.setattr(runner, "forward", slow)
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    controller = Listening()
    plain = NoDrafter(NoConfig(), TargetInfo(48, 2048))
    with Engine(runner, plain, controller=controller, max_rows=2) as engine:
        engine.add((1, 2, 3), SamplingParams(max_tokens=6, ignore_eos=True))
        for step in range(8):
            if step == 3:
                engine.add(tuple(range(40)), SamplingParams(max_tokens=2, ignore_eos=True))
            engine.step()
    assert controller.told == [(1, 1.0)] * 3 + [(2, 2.0)] * 2 + [(1, 1.0)]
    assert now[0] == 200.0 + 3 + 4 + 1
