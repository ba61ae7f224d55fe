"""Calls to drafters and controllers, which anybody may have written.

What they raise is told as one error that names them, and what they give is looked at before it is used: types
and small numbers, never a tensor's values, so it takes no time. What is rejected has changed nothing.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Sequence
from numbers import Integral, Real
from pathlib import Path
from types import TracebackType
from typing import ParamSpec, Protocol, TypeVar

from slipstream.core.draft import Budget, Draft, Drafter, DraftRequest, Needs
from slipstream.core.tree import TokenTree
from slipstream.errors import DrafterError, SlipstreamError

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R", contravariant=True)


class Planner(Protocol[R]):
    """What `ask_plan` needs of a `slipstream.control.Controller`."""

    def plan(self, rows: Sequence[R]) -> list[Budget]: ...


def label(actor: object) -> str:
    """How messages name a drafter or controller: what people type, and the class that it is."""
    kind, name = "drafter" if isinstance(actor, Drafter) else "controller", getattr(actor, "name", "")
    return f"{kind} {name!r} ({type(actor).__name__})" if name else f"{kind} {type(actor).__name__}"


def ask(actor: object, method: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """What the drafter's or controller's method gives. Whatever it raises that is no SlipstreamError becomes
    a DrafterError that says who, where and what."""
    try:
        return method(*args, **options)
    except SlipstreamError:
        raise
    except Exception as error:  # whatever a stranger's code raises
        at = traceback.extract_tb(error.__traceback__)[-1]
        what = getattr(method, "__name__", "a call").lstrip("_")
        raise DrafterError(
            f"{label(actor)} failed in {what}: {type(error).__name__}: {error}"
            f" ({Path(at.filename).name}, line {at.lineno})"
        ) from error


def check_drafter(drafter: object) -> None:
    """That it is a drafter, and what it declares makes sense; DrafterError else."""
    if not isinstance(drafter, Drafter):
        raise DrafterError(f"{type(drafter).__name__} is not derived from slipstream.core.draft.Drafter")
    if not isinstance(drafter.needs, Needs):
        raise DrafterError(f"{label(drafter)} has needs of type {type(drafter.needs).__name__}, not Needs")
    for name in ("num_speculative_tokens", "draft_nodes"):
        if not _count(value := getattr(drafter, name)):
            raise DrafterError(
                f"{label(drafter)} has {name}={value!r}: it must be a whole number of 0 or more"
            )


def ask_needs(drafter: Drafter, seq_id: int) -> Needs:
    """`Drafter.needs_of`; DrafterError for anything else."""
    needs: object = ask(drafter, drafter.needs_of, seq_id)
    if not isinstance(needs, Needs):
        raise DrafterError(f"{label(drafter)} gave needs of type {type(needs).__name__}, not Needs")
    return needs


def ask_drafts(drafter: Drafter, requests: Sequence[DraftRequest]) -> list[Draft]:
    """One draft a request, in order. DrafterError for anything else."""
    drafts: object = ask(drafter, drafter.propose, requests)
    if not isinstance(drafts, (list, tuple)):
        raise DrafterError(f"{label(drafter)} must give a list of drafts, not {type(drafts).__name__}")
    if len(drafts) != len(requests):
        raise DrafterError(f"{label(drafter)} gave {len(drafts)} drafts for {len(requests)} requests")
    for draft in drafts:
        wrong = _wrong_with(draft)
        if wrong:
            raise DrafterError(f"{label(drafter)} gave {wrong}")
    return list(drafts)


def _wrong_with(draft: object) -> str | None:
    if not isinstance(draft, Draft):
        return f"{type(draft).__name__} where a Draft belongs"
    tree = draft.tree
    if not isinstance(tree, TokenTree):
        return f"a draft whose tree is {type(tree).__name__}, not a TokenTree"
    if {*map(type, tree.tokens), *map(type, tree.parents)} != {int}:
        bad = next(v for v in (*tree.tokens, *tree.parents) if type(v) is not int)
        return f"a tree that holds {bad!r} ({type(bad).__name__}): token ids and parents are of type int"
    if draft.scores is not None and not all(isinstance(score, Real) for score in draft.scores):
        return f"scores that are not numbers: {draft.scores!r}"
    if not isinstance(draft.source, str) or not all(map(_are_names, draft.sources or ())):
        return f"a draft whose sources are not names: {draft.sources or draft.source!r}"
    return None


def _are_names(values: object) -> bool:
    return isinstance(values, tuple) and all(isinstance(value, str) for value in values)


def ask_plan(controller: Planner[R], rows: Sequence[R]) -> list[Budget]:
    """One budget a row, in order. DrafterError for anything else."""
    plan: object = ask(controller, controller.plan, rows)
    if not isinstance(plan, (list, tuple)):
        raise DrafterError(f"{label(controller)} must give a list of budgets, not {type(plan).__name__}")
    if len(plan) != len(rows):
        raise DrafterError(f"{label(controller)} gave {len(plan)} budgets for {len(rows)} rows")
    for budget in plan:
        if not isinstance(budget, Budget):
            raise DrafterError(f"{label(controller)} gave {type(budget).__name__} where a Budget belongs")
        if not (_count(budget.depth) and _count(budget.nodes) and isinstance(budget.stop_below, Real)):
            raise DrafterError(
                f"{label(controller)} gave {budget!r}: depth and nodes must be whole numbers of 0 or more,"
                " stop_below a number"
            )
    return list(plan)


def _count(value: object) -> bool:
    return isinstance(value, Integral) and int(value) >= 0


def held_bytes(drafter: Drafter) -> int:
    """`Drafter.memory_bytes`."""
    return ask(drafter, _memory_bytes, drafter)


def _memory_bytes(drafter: Drafter) -> int:
    return int(drafter.memory_bytes)


class Later:
    """Errors that must not keep from happening what follows them: `with later:` holds them back, and `tell`
    raises the first."""

    def __init__(self) -> None:
        self._first: SlipstreamError | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, SlipstreamError):
            return False
        self._first = self._first or error
        return True

    def tell(self) -> None:
        first, self._first = self._first, None
        if first is not None:
            raise first


def shut_down(drafters: Iterable[Drafter]) -> None:
    """All of them, whatever one of them raises."""
    later = Later()
    for drafter in drafters:
        with later:
            ask(drafter, drafter.shutdown)
    later.tell()
