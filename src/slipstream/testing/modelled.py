"""Decoding in modelled time: what a controller plans is accepted at random and costs what curves say."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from slipstream.control import Controller, RowOutcome, RowState
from slipstream.control.curves import Curves
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


@dataclass(frozen=True)
class Stairs:
    """A step time that rises by `rise` with every further block of 8 tokens begun, from 1 second for one."""

    rise: float
    block: int = 8

    def seconds(self, rows: int, nodes: ArrayLike, context: float = 0.0) -> NDArray[np.float64]:
        tokens = rows * np.asarray(nodes, dtype=np.float64)
        return np.asarray(1.0 + self.rise * (np.ceil(tokens / self.block - 1e-9) - 1.0))

    def relative_error(self, rows: int, nodes: ArrayLike, context: float = 0.0) -> NDArray[np.float64]:
        return np.zeros_like(np.asarray(nodes, dtype=np.float64))


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
    cost: Curves | Mapping[str, Curves],
    rates: Sequence[Rates],
    tokens: int,
    seed: int = 0,
    first_id: int = 0,
    *,
    at_once: int | None = None,
    reach: float = 1.0,
    drafters: Sequence[str] = (),
    stretch: Callable[[int], float] = lambda step: 1.0,
) -> Run:
    """Rows with these acceptances until each has emitted `tokens`.

    at_once: so many begin, and the others as there is room; None: all begin together. reach: share of the
    times it is asked that a drafter has a draft. drafters: of the rows, where `cost` tells several apart.
    stretch: by what the step of this number takes longer than `cost` says. Whether a token is guessed right,
    or there is a draft, depends on the seed and where it stands, not on the controller.
    """
    costs = {"": cost} if isinstance(cost, Curves) else dict(cost)
    names = drafters or [next(iter(costs))] * len(rates)
    chance = np.random.default_rng(seed)
    luck = chance.random((len(rates), tokens + 64))
    found = chance.random((len(rates), tokens + 64)) < reach
    done = [0] * len(rates)
    run = Run(0.0, 0, [])
    while any(d < tokens for d in done):
        live = [i for i, d in enumerate(done) if d < tokens][:at_once]
        states = [RowState(first_id + i, done[i], tokens - done[i], names[i]) for i in live]
        budgets = controller.plan(states)
        asked = [min(b.depth, s.remaining - 1) for b, s in zip(budgets, states, strict=True)]
        depths = [depth if found[i, done[i]] else 0 for i, depth in zip(live, asked, strict=True)]
        seconds = float(costs[names[live[0]]].step.seconds(len(live), 1 + sum(depths) / len(live)))
        for name, own in costs.items():
            theirs = [d for i, d in zip(live, asked, strict=True) if names[i] == name and d]
            seconds += own.draft.draft_seconds(len(theirs), max(theirs), max(theirs)) if theirs else 0.0
        seconds *= stretch(len(run.depths))
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
