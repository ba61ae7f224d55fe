"""Decoding in modelled time: what a controller plans is accepted at random and costs what curves say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from slipstream.control import Controller, RowOutcome, RowState
from slipstream.control.goodput import Curves
from slipstream.cost.curve import DraftCurve, DraftPoint, Point, StepCurve

Rates = Callable[[int], Sequence[float]]  # conditional acceptance by position, at an emitted-token count


def fake_curves(draft: float, free: int = 8, slope: float = 0.08, longest: int = 12) -> Curves:
    """A step takes 1 second up to `free` tokens and `slope` more for each further one; drafting takes `draft`
    a token, for any number of rows."""
    points = [
        Point(rows, nodes, 0, 1.0 + slope * max(rows * nodes - free, 0))
        for rows in (1, 2, 4, 8, 16, 32, 64)
        for nodes in (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16)
    ]
    drafts = [DraftPoint(rows, d, d, d * draft) for rows in (1, 64) for d in (1, longest)]
    return Curves(StepCurve(points), DraftCurve(drafts), longest)


@dataclass
class Run:
    """What happened: modelled seconds, emitted tokens, and the drafted depth of every row in every step."""

    seconds: float
    tokens: int
    depths: list[list[int]]

    @property
    def pace(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


def simulate(
    controller: Controller,
    cost: Curves,
    rates: Sequence[Rates],
    tokens: int,
    seed: int = 0,
    first_id: int = 0,
) -> Run:
    """Rows with these acceptances until each has emitted `tokens`; all begin together.

    Whether a token is guessed right depends on the seed and where it stands, not on the controller.
    """
    luck = np.random.default_rng(seed).random((len(rates), tokens + 64))
    done = [0] * len(rates)
    run = Run(0.0, 0, [])
    while any(d < tokens for d in done):
        live = [i for i, d in enumerate(done) if d < tokens]
        states = [RowState(first_id + i, done[i], tokens - done[i]) for i in live]
        budgets = controller.plan(states)
        depths = [min(b.depth, s.remaining - 1) for b, s in zip(budgets, states, strict=True)]
        drafted, longest = sum(depths), max(depths)
        asked = sum(d > 0 for d in depths)
        seconds = float(cost.step.seconds(len(live), 1 + drafted / len(live)))
        seconds += cost.draft.draft_seconds(asked, longest, longest) if asked else 0.0
        outcomes = []
        for i, depth in zip(live, depths, strict=True):
            law, accepted = rates[i](done[i]), 0
            while accepted < depth and luck[i, done[i] + accepted] < law[min(accepted, len(law) - 1)]:
                accepted += 1
            done[i] += accepted + 1
            outcomes.append(RowOutcome(first_id + i, depth, depth, accepted, accepted + 1, done[i] >= tokens))
        controller.record(outcomes, seconds)
        for outcome in outcomes:
            if outcome.finished:
                controller.forget(outcome.seq_id)
        run.seconds += seconds
        run.tokens += sum(o.emitted for o in outcomes)
        run.depths.append(depths)
    return run
