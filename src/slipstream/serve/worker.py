"""`Worker`: one thread that owns the engine; requests come in from other threads, pieces go out.

Between two steps it takes new requests, drops those whose client left or whose time is up, and hands out what
the step gave. What one request breaks ends that request alone where the engine knows whose it was, else
those that were in the step; those that wait never notice.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from slipstream.control import Controller, build_controller
from slipstream.core.draft import Drafter
from slipstream.core.params import SamplingParams
from slipstream.core.sequence import Event
from slipstream.core.sequence import Sequence as Row
from slipstream.engine.session import Session
from slipstream.errors import DrafterError, SlipstreamError
from slipstream.serve.errors import ApiError, closing, failed, overloaded, refused, timed_out
from slipstream.serve.limits import Limits
from slipstream.serve.metrics import Metrics
from slipstream.serve.routing import JointController, Route, RoutedController, Router, Step

log = logging.getLogger("slipstream.serve")


@dataclass(frozen=True)
class Job:
    """One prompt. drafter: None is the server's own. length: fixed draft length. traced: tell the trees."""

    prompt: Sequence[int]
    params: SamplingParams
    drafter: str | None = None
    length: int | None = None
    traced: bool = False


@dataclass(frozen=True)
class Started:
    """The engine took the request."""


@dataclass(frozen=True)
class Piece:
    """What a step added to answer `index`. step: the verification it came from, if traced."""

    index: int
    event: Event
    step: Step | None = None


@dataclass(frozen=True)
class Done:
    """All answers are finished. The request's rows and times are on its ticket."""


@dataclass(frozen=True)
class Failed:
    """The request ended without all of its answers."""

    error: ApiError


Message = Started | Piece | Done | Failed
Listener = Callable[[Message], None]


@dataclass
class Answer:
    """One answer of a request: its live row and when things happened to it (monotonic seconds)."""

    row: Row
    route: Route
    first_at: float | None = None
    first_tokens: int = 0
    last_at: float | None = None
    ended: bool = False  # its last piece was given; its row may have ended earlier in the same step


@dataclass
class Ticket:
    """A request between submission and its last message."""

    job: Job
    listener: Listener
    arrived: float
    expires: float
    answers: list[Answer] = field(default_factory=list)
    left: bool = False  # its client is gone

    def tell(self, message: Message) -> None:
        try:
            self.listener(message)
        except Exception:  # a listener that is gone is a client that is gone
            self.left = True


class Worker:
    """Runs `session` until `shutdown`. drafters: what requests may choose, by name; the rest get `default`.

    controller: one that is built plans the rows of all drafters (see `JointController`); a spec is that of
    the default drafter, and the others draft their own length. All public methods are for any thread.
    clock: monotonic seconds.
    """

    def __init__(
        self,
        session: Session,
        limits: Limits,
        metrics: Metrics,
        *,
        drafters: dict[str, Drafter],
        default: str,
        controller: Controller | str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits
        self.metrics = metrics
        self._clock = clock
        self._session = session
        self._engine = session.engine
        self.router = Router(drafters, default, clock)
        session.use(self.router, _controller(self.router, controller))
        self.max_rows = session.engine.load.slots
        self._condition = threading.Condition()
        self._inbox: deque[Ticket] = deque()
        self._tickets: list[Ticket] = []
        self._live = 0  # sequences in the house: running, reading, waiting, or not yet seen by the thread
        self._closing = False
        self._give_up_at: float | None = None
        self._service_seconds = 1.0  # a recent mean of a slot's time, for Retry-After
        self._thread = threading.Thread(target=self._run, name="slipstream-engine", daemon=True)

    # -- for any thread -------------------------------------------------------------------------

    def start(self) -> None:
        self.metrics.starts(self._engine)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def accepting(self) -> bool:
        return self.alive and not self._closing

    def submit(self, jobs: Sequence[Job], listeners: Sequence[Listener]) -> list[Ticket]:
        """Queue the prompts of one request, all or none. Raises ApiError: overloaded, or shutting down."""
        now = self._clock()
        tickets = [
            Ticket(job, listener, now, now + self.limits.seconds)
            for job, listener in zip(jobs, listeners, strict=True)
        ]
        count = sum(job.params.n for job in jobs)
        room = self.max_rows + self.limits.waiting
        if count > room:
            raise ApiError(
                400, f"{count} answers at once are more than this server's {room} places", param="n"
            )
        with self._condition:
            if not self.accepting:
                raise closing()
            if self._live + count > room:
                self.metrics.refused()
                raise overloaded(self._retry_after())
            self._live += count
            self._inbox.extend(tickets)
            self._condition.notify()
        return tickets

    def leave(self, ticket: Ticket) -> None:
        """The client is gone: the request ends within a step, and its caches are freed."""
        with self._condition:
            ticket.left = True
            self._condition.notify()

    def begin_shutdown(self, grace: float) -> None:
        """Take nothing more, finish what there is within `grace` seconds, fail the rest. May be called again
        for less grace."""
        with self._condition:
            self._closing = True
            end = self._clock() + grace
            self._give_up_at = end if self._give_up_at is None else min(self._give_up_at, end)
            self._condition.notify()

    def join(self) -> None:
        """Until the thread has ended after `begin_shutdown`: one step later than its grace, at most."""
        if self._thread.ident is not None:
            self._thread.join()

    def shutdown(self, grace: float) -> None:
        """Both."""
        self.begin_shutdown(grace)
        self.join()

    def _retry_after(self) -> int:
        """Seconds until the queue has probably moved by one request a slot."""
        ahead = max(self._live - self.max_rows, 1)
        return int(min(max(self._service_seconds * ahead / self.max_rows, 1.0), 120.0))

    # -- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        going = True
        while going:
            try:
                going = self._turn()
            except Exception:  # of this class, not of a request: nobody may wait for ever for that
                log.exception("the worker stumbled")
                for ticket in list(self._tickets):
                    try:
                        self._end(ticket, Failed(failed()))
                    except Exception:
                        log.exception("a request could not be ended in order")

    def _turn(self) -> bool:
        """What has arrived, who has gone, one step; False when there will be nothing more to do."""
        with self._condition:
            while not (self._inbox or self._tickets or self._closing):
                self._condition.wait()
            arrived = list(self._inbox)
            self._inbox.clear()
            self._tickets += arrived
        for ticket in arrived:
            self._begin(ticket)
        self._drop_the_late_and_the_gone()
        if self._closing and not self._tickets:
            with self._condition:
                if not self._inbox:
                    return False
        if self._engine.has_work:
            self._step()
        return True

    def _begin(self, ticket: Ticket) -> None:
        if ticket.left:
            return  # dropped with the others that are gone
        job = ticket.job
        name = job.drafter or self.router.default
        try:
            self.router.require(name)
            for row in self._session.submit(list(job.prompt), job.params):
                route = self.router.assign(row.id, name, job.length, job.traced)
                ticket.answers.append(Answer(row, route))
        except SlipstreamError as error:
            self._end(ticket, Failed(refused(error)))
        except Exception:
            log.exception("a request could not be queued")
            self._end(ticket, Failed(failed()))
        else:
            self.metrics.took(len(job.prompt))
            ticket.tell(Started())

    def _drop_the_late_and_the_gone(self) -> None:
        now = self._clock()
        shut = self._give_up_at is not None and now >= self._give_up_at
        for ticket in list(self._tickets):
            if ticket.left:
                self._end(ticket, Failed(ApiError(499, "the client left")))
            elif shut:
                self._end(ticket, Failed(closing()))
            elif now >= ticket.expires:
                self._end(ticket, Failed(timed_out(self.limits.seconds)))

    def _step(self) -> None:
        began = self._clock()
        failure: Exception | None = None
        try:
            events = self._engine.step()
        except Exception as error:
            events, failure = self._engine.untold(), error
        now = self._clock()
        if failure is None or events:
            self.metrics.stepped(self._engine, now - began)
        owners = {a.row.id: (t, i) for t in self._tickets for i, a in enumerate(t.answers)}
        for event in events:
            if event.seq_id in owners:
                self._deliver(*owners[event.seq_id], event, now)
        if failure is not None:
            self._fail(failure)

    def _deliver(self, ticket: Ticket, index: int, event: Event, now: float) -> None:
        answer = ticket.answers[index]
        if event.tokens:
            self.metrics.emitted(len(event.tokens), now - ticket.arrived, _gap(answer, now))
            if answer.first_at is None:
                answer.first_at, answer.first_tokens = now, len(event.tokens)
            answer.last_at = now
        step = answer.route.steps.pop(0) if answer.route.steps else None
        ticket.tell(Piece(index, event, step))
        if event.finish_reason is not None:
            opened = now if answer.route.opened is None else answer.route.opened
            self._service_seconds += 0.2 * (now - opened - self._service_seconds)
            answer.ended = True
            if all(a.ended for a in ticket.answers):
                self._end(ticket, Done())

    def _fail(self, error: Exception) -> None:
        """End the requests a step stumbled over, or all that were in the step; what they got is theirs."""
        broken = error.seq_ids if isinstance(error, SlipstreamError) else None
        if isinstance(error, SlipstreamError) and broken and not isinstance(error, DrafterError):
            reason = refused(error)
        else:  # a mistake of the server's, not of a request
            log.error("a step failed", exc_info=error)
            reason = failed()
        if broken is None:
            broken = frozenset(self._engine.load.admitted)
        for ticket in list(self._tickets):
            if any(a.row.id in broken for a in ticket.answers):
                self._end(ticket, Failed(reason))

    def _end(self, ticket: Ticket, message: Message) -> None:
        """The last message of a request; whatever it still holds is freed first."""
        self._tickets.remove(ticket)
        for answer in ticket.answers:
            try:
                self._engine.abandon([answer.row.id])
            except Exception:  # a drafter that breaks while it lets go must not take the thread along
                log.exception("freeing a request failed")
        with self._condition:
            self._live -= ticket.job.params.n
        why = _ENDS.get(message.error.status, "error") if isinstance(message, Failed) else None
        opened = ticket.answers[0].route.opened if ticket.answers else None
        try:
            self.metrics.finished(
                [why or a.row.finish_reason or "error" for a in ticket.answers],
                self._clock() - ticket.arrived,
                None if opened is None else opened - ticket.arrived,
            )
            self.metrics.holds(self._engine)
        finally:
            ticket.tell(message)


def _controller(router: Router, given: Controller | str | None) -> Controller:
    if isinstance(given, Controller):
        return JointController(router, given)
    return RoutedController(
        router,
        {
            name: build_controller(
                given if name == router.default else None, part.num_speculative_tokens, part.draft_nodes
            )
            for name, part in router.parts.items()
        },
    )


_ENDS = {499: "abort", 504: "timeout"}


def _gap(answer: Answer, now: float) -> float | None:
    """Seconds since the answer's last piece; None for its first."""
    return None if answer.last_at is None else now - answer.last_at
