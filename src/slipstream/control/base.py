"""The interface of what decides how much each row may draft now."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.core.draft import Budget


@dataclass(frozen=True, slots=True)
class RowState:
    """A running row before a step. position: committed tokens. remaining: tokens it may still emit.

    drafter: which one drafts for it, where there are several. fixed: what it will draft whatever the
    controller says; it is in the step all the same.
    """

    seq_id: int
    position: int
    remaining: int
    drafter: str = ""
    fixed: Budget | None = None


@dataclass(frozen=True, slots=True)
class RowOutcome:
    """A row after a step: what was drafted (depth, nodes) and accepted, and what was emitted."""

    seq_id: int
    depth: int
    nodes: int
    accepted: int
    emitted: int
    finished: bool = False


class Controller(ABC):
    """Plans budgets for all running rows of a step, and learns from the outcome."""

    name: str = ""

    @abstractmethod
    def plan(self, rows: Sequence[RowState]) -> list[Budget]:
        """One budget a row, in order. Depth 0 is a plain step."""

    def record(self, outcomes: Sequence[RowOutcome], seconds: float) -> None:  # noqa: B027
        """The step's outcomes, in the order of `plan`, and its wall-clock seconds without the reading of
        prompts."""

    def forget(self, seq_id: int) -> None:  # noqa: B027
        """The row is gone."""
