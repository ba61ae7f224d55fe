"""One drafter to the engine, several to the requests: every row drafts with the one it was assigned.

Drafting never changes what is said, so rows of one batch can be drafted in different ways. A row may also
fix its draft length; the others follow the controller of their drafter.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from slipstream.control import Controller, RowOutcome, RowState
from slipstream.core.ask import Later, ask, ask_drafts, ask_plan, shut_down
from slipstream.core.draft import Budget, Draft, Drafter, DraftRequest, Needs, Observation
from slipstream.drafters.base import empty_draft
from slipstream.errors import ParameterError, met_by

PLAIN = "none"


@dataclass(frozen=True)
class Step:
    """One verification: the draft's tree, and which of its nodes were accepted."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    accepted: tuple[int, ...]
    source: str


@dataclass
class Route:
    """How one row drafts. length: a fixed number of tokens, None is up to the controller.

    steps: its latest verifications, where they are asked for. opened: when it got its slot.
    """

    name: str
    length: int | None = None
    traced: bool = False
    opened: float | None = None
    steps: list[Step] = field(default_factory=list)


class Router(Drafter):
    """Drafters by the name that requests use; `default` serves rows that were not assigned."""

    name = "router"

    def __init__(
        self, parts: Mapping[str, Drafter], default: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if default not in parts:
            raise ParameterError(f"the default drafter {default!r} is not one of {', '.join(parts)}")
        self.parts = dict(parts)
        self.default = default
        self._clock = clock
        self._routes: dict[int, Route] = {}
        self.num_speculative_tokens = self.parts[default].num_speculative_tokens
        self.draft_nodes = self.parts[default].draft_nodes
        self.learns = any(part.learns for part in self.parts.values())
        self.needs = Needs.union(part.needs for part in self.parts.values())

    def assign(self, seq_id: int, name: str, length: int | None = None, traced: bool = False) -> Route:
        """How a row drafts, told before its first step."""
        self.require(name)
        self._routes[seq_id] = Route(name, length, traced)
        return self._routes[seq_id]

    def require(self, name: str) -> None:
        """ParameterError for a drafter that is not offered."""
        if name not in self.parts:
            raise ParameterError(f"there is no drafter {name!r} here; there are {', '.join(self.parts)}")

    def route(self, seq_id: int) -> Route:
        return self._routes.setdefault(seq_id, Route(self.default))

    def needs_of(self, seq_id: int) -> Needs:
        return self.parts[self.route(seq_id).name].needs_of(seq_id)

    def fixed(self, seq_id: int) -> Budget | None:
        """What a row drafts that has fixed its length itself."""
        route = self.route(seq_id)
        if route.length is None:
            return None
        nodes = self.parts[route.name].draft_nodes
        return Budget(route.length, max(route.length, nodes) if route.length else 0)

    def open(self, seq_id: int, prompt: Sequence[int]) -> None:
        route = self.route(seq_id)
        route.opened = self._clock()
        part = self.parts[route.name]
        ask(part, part.open, seq_id, prompt)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        drafts: dict[int, Draft] = {}
        for name, part in self.parts.items():
            asked = [r for r in requests if self.route(r.seq_id).name == name]
            if part.needs.reads_prompt:  # the first token must not wait until the prompt is read
                asked = [r for r in asked if len(r.tokens) > r.prompt_length]
            if asked:
                with met_by(*(r.seq_id for r in asked)):
                    given = ask_drafts(part, asked)
                for request, draft in zip(asked, given, strict=True):
                    drafts[request.seq_id] = replace(draft, source=draft.source or name)
        return [drafts.get(r.seq_id) or empty_draft(r) for r in requests]

    def observe(self, observations: Sequence[Observation]) -> None:
        for seen in observations:
            route = self.route(seen.seq_id)
            if route.traced and seen.draft is not None:
                tree = seen.draft.tree
                route.steps.append(Step(tree.tokens, tree.parents, seen.accepted, seen.draft.source))
        later = Later()
        for name, part in self.parts.items():
            theirs = [o.only(part.needs) for o in observations if self.route(o.seq_id).name == name]
            if theirs:
                with later, met_by(*(o.seq_id for o in theirs)):
                    ask(part, part.observe, theirs)
        later.tell()

    def close(self, seq_id: int) -> None:
        route = self._routes.pop(seq_id, None)
        if route is not None:
            part = self.parts[route.name]
            with met_by(seq_id):
                ask(part, part.close, seq_id)

    def keep_prefixes(self, tokens: int) -> None:
        part = self.parts[self.default]  # the memory of a token was measured with its caches
        with met_by(*(seq_id for seq_id, route in self._routes.items() if route.name == self.default)):
            ask(part, part.keep_prefixes, tokens)

    @property
    def memory_bytes(self) -> int:
        return sum(part.memory_bytes for part in self.parts.values())

    def shutdown(self) -> None:
        shut_down(self.parts.values())


class RoutedController(Controller):
    """Budgets by the controller of each row's drafter, unless the row fixed its length."""

    name = "routed"

    def __init__(self, router: Router, controllers: Mapping[str, Controller]) -> None:
        self._router = router
        self._controllers = dict(controllers)

    def plan(self, rows: Sequence[RowState]) -> list[Budget]:
        budgets: dict[int, Budget] = {}
        for row in rows:
            fixed = self._router.fixed(row.seq_id)
            if fixed is not None:
                budgets[row.seq_id] = fixed
        for name, controller in self._controllers.items():
            own = [r for r in rows if r.seq_id not in budgets and self._router.route(r.seq_id).name == name]
            if own:
                budgets |= dict(zip((r.seq_id for r in own), ask_plan(controller, own), strict=True))
        return [budgets.get(row.seq_id) or Budget() for row in rows]

    def record(self, outcomes: Sequence[RowOutcome], seconds: float) -> None:
        later = Later()
        for name, controller in self._controllers.items():
            routes = ((o, self._router.route(o.seq_id)) for o in outcomes)
            own = [o for o, route in routes if route.length is None and route.name == name]
            if own:
                with later, met_by(*(o.seq_id for o in own)):
                    ask(controller, controller.record, own, seconds)
        later.tell()

    def forget(self, seq_id: int) -> None:
        later = Later()
        for controller in self._controllers.values():
            with later:
                ask(controller, controller.forget, seq_id)
        later.tell()


class JointController(Controller):
    """One controller for the rows of all drafters: it sees the whole step, and what it takes.

    It must tell rows apart by `RowState.drafter` and leave those alone that are `fixed`, as `Goodput` does.
    """

    name = "joint"

    def __init__(self, router: Router, controller: Controller) -> None:
        self._router = router
        self._controller = controller

    def plan(self, rows: Sequence[RowState]) -> list[Budget]:
        router = self._router
        told = [replace(r, drafter=router.route(r.seq_id).name, fixed=router.fixed(r.seq_id)) for r in rows]
        return ask_plan(self._controller, told)

    def record(self, outcomes: Sequence[RowOutcome], seconds: float) -> None:
        ask(self._controller, self._controller.record, outcomes, seconds)

    def forget(self, seq_id: int) -> None:
        ask(self._controller, self._controller.forget, seq_id)
