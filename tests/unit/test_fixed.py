"""The fixed controller: budgets of chains and of trees."""

from __future__ import annotations

from slipstream.control import RowState, build_controller
from slipstream.core.draft import Budget


def test_budgets_are_the_drafters_own_unless_given() -> None:
    def budget(spec: str | None, length: int, nodes: int) -> Budget:
        return build_controller(spec, length, nodes).plan([RowState(0, 9, 9)])[0]

    assert budget(None, 4, 0) == Budget(4, 4)
    assert budget(None, 4, 15) == Budget(4, 15)
    assert budget("fixed:num_speculative_tokens=2", 4, 15) == Budget(2, 15)
    assert budget("fixed:nodes=6", 4, 15) == Budget(4, 6)
    assert budget("fixed:num_speculative_tokens=0", 4, 15).depth == 0
