"""What is known of one row: how much of its drafts was accepted of late, and how often it had one."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from slipstream.control.base import RowOutcome

Floats = NDArray[np.float64]
FIRST = 2.0  # a prior of which nothing is known counts as so many tested tokens
_LEAN = 6.0  # a position leans on the one before it as on so many tested tokens
_STEADY = 8.0  # steady evidence lives so many times as long as fresh
_CHANGE = 2.5  # standard deviations between them that chance does not explain
_KEPT = 4.0  # evidence that waiting alone does not take away


class _Counts:
    """Tested and accepted tokens by position, [2, max_depth], forgotten by half in `half_life` steps."""

    def __init__(self, size: int, prior: float, weight: float, half_life: float) -> None:
        self.at = np.zeros((2, size))
        self.at[:, 0] = weight, weight * prior
        self._half_life = half_life

    def fade(self, steps: int) -> None:
        """Waiting alone leaves a little."""
        self.at *= max(0.5 ** (steps / self._half_life), min(1.0, _KEPT / self.at[0, 0]))

    def rates(self) -> Floats:
        """Conditional acceptance; a thinly tested position leans on the one before it."""
        rates = np.empty(self.at.shape[1])
        before, lean = 0.0, 0.0
        for i, (tested, accepted) in enumerate(self.at.T.tolist()):
            before = (accepted + lean * before) / (tested + lean)
            rates[i], lean = before, _LEAN
        return rates


class Evidence:
    """A row's acceptance, and how often it drafted when asked to.

    Kept twice: the steady counts are precise, the fresh ones follow. Where these contradict those, the text
    has changed its kind, and the steady counts begin again from the fresh ones. prior and reach: what is
    expected of a row of which nothing is known; weight: of how many tested tokens.
    """

    def __init__(self, size: int, prior: float, reach: float, weight: float, half_life: float) -> None:
        self.fresh = _Counts(size, prior, weight, half_life)
        self.steady = _Counts(size, prior, weight, _STEADY * half_life)
        self.asked, self.answered = FIRST, FIRST * reach
        self.waited = 0  # steps since anything was learned
        self.seen = 0  # steps in which it was asked
        self.budget = 0  # what it was given this step
        self._half_life = half_life
        self._values: Floats | None = None  # until something is learned

    @property
    def reach(self) -> float:
        """Share of the times it was asked that it drafted."""
        return self.answered / self.asked

    def values(self) -> Floats:
        """Expected tokens that each further drafted token adds, [max_depth]."""
        if self._values is None:
            self._values = np.asarray(np.cumprod(self.steady.rates()) * self.reach)
        return self._values

    def learn(self, outcome: RowOutcome) -> None:
        kept = max(0.5 ** (self.waited / self._half_life), min(1.0, _KEPT / self.asked))
        self.asked = self.asked * kept + 1
        self.answered = self.answered * kept + (outcome.depth > 0)
        for counts in (self.fresh, self.steady):
            counts.fade(self.waited)
            for i in range(min(outcome.depth, counts.at.shape[1])):
                counts.at[0, i] += outcome.accepted >= i and outcome.emitted > i
                counts.at[1, i] += outcome.accepted > i
        self.waited, self._values = 0, None
        if self._changed():
            self.steady.at = self.fresh.at.copy()

    def _changed(self) -> bool:
        """Whether the fresh rate of some position is too far from the steady one to be chance."""
        tested, accepted = self.fresh.at
        steady = np.clip(self.steady.rates(), 0.05, 0.95)
        off = accepted - steady * tested
        return bool(np.any(off * off > _CHANGE**2 * tested * steady * (1 - steady)))
