"""One drafter to the engine, several to the requests: every row drafts with the one it was assigned.

Drafting never changes what is said, so rows of one batch can be drafted in different ways. A row may also
fix its draft length; the others follow the controller of their drafter.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from slipstream.control import Controller, RowOutcome, RowState
from slipstream.core.draft import Budget, Draft, Drafter, DraftRequest, Needs, Observation
from slipstream.drafters.base import empty_draft
from slipstream.errors import ParameterError

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

    def open(self, seq_id: int, prompt: Sequence[int]) -> None:
        route = self.route(seq_id)
        route.opened = self._clock()
        self.parts[route.name].open(seq_id, prompt)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        drafts: dict[int, Draft] = {}
        for name, part in self.parts.items():
            asked = [r for r in requests if self.route(r.seq_id).name == name]
            if part.needs.reads_prompt:  # the first token must not wait until the prompt is read
                asked = [r for r in asked if len(r.tokens) > r.prompt_length]
            if asked:
                for request, draft in zip(asked, part.propose(asked), strict=True):
                    drafts[request.seq_id] = replace(draft, source=draft.source or name)
        return [drafts.get(r.seq_id) or empty_draft(r) for r in requests]

    def observe(self, observations: Sequence[Observation]) -> None:
        for seen in observations:
            route = self.route(seen.seq_id)
            if route.traced and seen.draft is not None:
                tree = seen.draft.tree
                route.steps.append(Step(tree.tokens, tree.parents, seen.accepted, seen.draft.source))
        for name, part in self.parts.items():
            theirs = [o.only(part.needs) for o in observations if self.route(o.seq_id).name == name]
            if theirs:
                part.observe(theirs)

    def close(self, seq_id: int) -> None:
        route = self._routes.pop(seq_id, None)
        if route is not None:
            self.parts[route.name].close(seq_id)

    def keep_prefixes(self, tokens: int) -> None:
        self.parts[self.default].keep_prefixes(tokens)  # the memory of a token was measured with its caches

    @property
    def memory_bytes(self) -> int:
        return sum(part.memory_bytes for part in self.parts.values())

    def shutdown(self) -> None:
        for part in self.parts.values():
            part.shutdown()


class RoutedController(Controller):
    """Budgets by the controller of each row's drafter, unless the row fixed its length."""

    name = "routed"

    def __init__(self, router: Router, controllers: Mapping[str, Controller]) -> None:
        self._router = router
        self._controllers = dict(controllers)

    def plan(self, rows: Sequence[RowState]) -> list[Budget]:
        budgets: dict[int, Budget] = {}
        for row in rows:
            route = self._router.route(row.seq_id)
            if route.length is not None:
                nodes = self._router.parts[route.name].draft_nodes
                budgets[row.seq_id] = Budget(route.length, max(route.length, nodes) if route.length else 0)
        for name, controller in self._controllers.items():
            own = [r for r in rows if r.seq_id not in budgets and self._router.route(r.seq_id).name == name]
            if own:
                budgets |= dict(zip((r.seq_id for r in own), controller.plan(own), strict=True))
        return [budgets.get(row.seq_id) or Budget() for row in rows]

    def record(self, outcomes: Sequence[RowOutcome], seconds: float) -> None:
        for name, controller in self._controllers.items():
            routes = ((o, self._router.route(o.seq_id)) for o in outcomes)
            own = [o for o, route in routes if route.length is None and route.name == name]
            if own:
                controller.record(own, seconds)

    def forget(self, seq_id: int) -> None:
        for controller in self._controllers.values():
            controller.forget(seq_id)
