"""Always the same draft length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.control.base import Controller, RowState
from slipstream.core.draft import Budget, Drafter
from slipstream.errors import ParameterError


@dataclass(frozen=True, slots=True)
class FixedConfig:
    """num_speculative_tokens: longest drafted path, 0 is plain decoding. nodes: drafted tokens of a tree.

    With nodes 0 there are as many as the path is long.
    """

    num_speculative_tokens: int = 5
    nodes: int = 0

    def __post_init__(self) -> None:
        if self.num_speculative_tokens < 0:
            raise ParameterError(
                f"fixed needs num_speculative_tokens of 0 or more, not {self.num_speculative_tokens}"
            )
        if self.nodes < 0:
            raise ParameterError(f"fixed needs nodes of 0 or more, not {self.nodes}")


class Fixed(Controller):
    name = "fixed"
    Config = FixedConfig

    def __init__(self, config: FixedConfig) -> None:
        length = config.num_speculative_tokens
        self._budget = Budget(length, config.nodes or length)

    def plan(self, rows: Sequence[RowState]) -> list[Budget]:
        return [self._budget for _ in rows]


def tree_nodes(drafter: Drafter, depth: int) -> int:
    """Drafted tokens of a draft so deep: as many a level as the drafter's own trees have; a chain has one."""
    return max(depth, round(depth * drafter.draft_nodes / max(drafter.num_speculative_tokens, 1)))


def fixed_spec(depth: int, nodes: int) -> str:
    """The controller for drafts of `depth` tokens, as trees of `nodes`."""
    return f"{Fixed.name}:num_speculative_tokens={depth},nodes={nodes}"
