"""Draft length that grows by one while drafts are accepted and shrinks by one while they are not.

Each row keeps the acceptance (accepted / drafted tokens) of its last `history` verifications. Their
mean above `raise_above` lengthens the next draft by one token, below `lower_below` shortens it.
Knows nothing of cost: it can draft where drafting does not pay.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from slipstream.control.base import Controller, RowOutcome, RowState
from slipstream.core.draft import Budget
from slipstream.errors import ParameterError


@dataclass(frozen=True, slots=True)
class AdditiveConfig:
    """start, min, max: drafted tokens. history: verifications remembered a row. raise_above: mean acceptance
    above which the next draft is longer. lower_below: mean acceptance below which it is shorter."""

    start: int = 5
    min: int = 2
    max: int = 8
    history: int = 100
    raise_above: float = 0.85
    lower_below: float = 0.65

    def __post_init__(self) -> None:
        if not 0 <= self.min <= self.start <= self.max:
            raise ParameterError(
                "additive needs 0 <= min <= start <= max, not"
                f" min={self.min}, start={self.start}, max={self.max}"
            )
        if self.history < 1:
            raise ParameterError(f"additive needs history of at least 1, not {self.history}")
        if not 0 <= self.lower_below <= self.raise_above <= 1:
            raise ParameterError(
                "additive needs 0 <= lower_below <= raise_above <= 1, not"
                f" lower_below={self.lower_below}, raise_above={self.raise_above}"
            )


@dataclass
class _Row:
    length: int
    rates: deque[float] = field(default_factory=deque)


class Additive(Controller):
    name = "additive"
    Config = AdditiveConfig

    def __init__(self, config: AdditiveConfig) -> None:
        self._config = config
        self._rows: dict[int, _Row] = {}

    def _row(self, seq_id: int) -> _Row:
        if seq_id not in self._rows:
            self._rows[seq_id] = _Row(self._config.start, deque(maxlen=self._config.history))
        return self._rows[seq_id]

    def plan(self, rows: Sequence[RowState]) -> list[Budget]:
        return [Budget.chain(self._row(row.seq_id).length) for row in rows]

    def record(self, outcomes: Sequence[RowOutcome], seconds: float) -> None:
        for outcome in outcomes:
            if not outcome.depth:
                continue
            row = self._row(outcome.seq_id)
            row.rates.append(outcome.accepted / outcome.depth)
            mean = sum(row.rates) / len(row.rates)
            if mean > self._config.raise_above:
                row.length = min(row.length + 1, self._config.max)
            elif mean < self._config.lower_below:
                row.length = max(row.length - 1, self._config.min)

    def forget(self, seq_id: int) -> None:
        self._rows.pop(seq_id, None)
