"""The worker: what comes in goes out as the offline path says it, and nothing that breaks stays."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from slipstream import SamplingParams, Session
from slipstream.core.draft import Draft, DraftRequest
from slipstream.serve.errors import ApiError
from slipstream.serve.limits import Limits
from slipstream.serve.worker import Done, Failed, Job, Message, Piece, Started, Ticket, Worker
from slipstream.testing.adversaries import FunctionDrafter, nothing

MakeWorker = Callable[..., Worker]
LONG = SamplingParams(max_tokens=1500, ignore_eos=True)


class Client:
    """Collects the messages of one ticket."""

    def __init__(self, worker: Worker, text: str, params: SamplingParams, **job: Any) -> None:
        self.messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.worker = worker
        self.ticket: Ticket = worker.submit([Job(list(text.encode()), params, **job)], [self.messages.put])[0]
        self.pieces: list[Piece] = []

    def next(self) -> Message:
        message = self.messages.get(timeout=30)
        if isinstance(message, Piece):
            self.pieces.append(message)
        return message

    def wait_for(self, kind: type[Any]) -> Any:
        while True:
            message = self.next()
            if isinstance(message, kind):
                return message
            assert not isinstance(message, (Done, Failed)), message

    def text(self, index: int = 0) -> str:
        return "".join(p.event.text for p in self.pieces if p.index == index)

    def tokens(self, index: int = 0) -> list[int]:
        return [t for p in self.pieces if p.index == index for t in p.event.tokens]


def offline(session: Session, text: str, params: SamplingParams) -> Any:
    """What the same session says when nobody serves it."""
    return session.generate(list(text.encode()), params)


def held(session: Session) -> int:
    return len(session.engine.runner.cache)


def params_of(i: int) -> SamplingParams:
    return SamplingParams(max_tokens=6 + i % 7, temperature=(0.0, 0.8, 1.3)[i % 3], seed=i, top_k=i % 5)


def test_many_at_once_get_what_each_gets_offline(session: Session, make_worker: MakeWorker) -> None:
    asked = [(f"request {i} {'ab' * i}", params_of(i)) for i in range(12)]
    expected = [offline(session, *one) for one in asked]
    worker = make_worker()
    drafters = ("ngram", "none", None)
    clients = [
        Client(worker, *one, drafter=drafters[i % 3], length=(None, 2)[i % 2]) for i, one in enumerate(asked)
    ]
    for client, want in zip(clients, expected, strict=True):
        assert isinstance(client.next(), Started)
        client.wait_for(Done)
        assert client.tokens() == list(want.tokens) and client.text() == want.text
        assert client.pieces[-1].event.finish_reason == want.finish_reason
    assert held(session) == 0


def test_n_answers_are_those_of_the_seeds_in_a_row(session: Session, make_worker: MakeWorker) -> None:
    params = SamplingParams(max_tokens=9, temperature=1.0, seed=11, n=3)
    expected = offline(session, "abcabc", params)
    client = Client(make_worker(), "abcabc", params)
    client.wait_for(Done)
    assert [client.tokens(i) for i in range(3)] == [list(e.tokens) for e in expected]


def test_a_full_queue_refuses_all_or_nothing_and_says_when_to_come_back(make_worker: MakeWorker) -> None:
    worker = make_worker(Limits(waiting=2))
    clients = [Client(worker, "abc", LONG) for _ in range(4)]
    jobs = [Job([1], LONG)] * 2
    with pytest.raises(ApiError) as refusal:
        worker.submit(jobs, [lambda m: None] * 2)
    assert refusal.value.status == 429 and refusal.value.retry_after is not None
    assert refusal.value.headers["Retry-After"] == str(refusal.value.retry_after)
    clients.append(Client(worker, "abc", SamplingParams(max_tokens=2)))  # there is room for one
    with pytest.raises(ApiError, match="waiting"):
        Client(worker, "abc", LONG)
    for client in clients[:4]:
        worker.leave(client.ticket)
    clients[4].wait_for(Done)
    assert b"request_refused_total" in worker.metrics.text()[0]


def test_more_answers_than_places_are_a_mistake_not_an_overload(make_worker: MakeWorker) -> None:
    worker = make_worker(Limits(waiting=1))
    with pytest.raises(ApiError) as refusal:
        Client(worker, "abc", SamplingParams(max_tokens=2, n=5))
    assert refusal.value.status == 400


def test_who_leaves_is_gone_within_a_step_wherever_he_was(session: Session, make_worker: MakeWorker) -> None:
    worker = make_worker()
    running = [Client(worker, "abc", LONG) for _ in range(3)]
    waiting = Client(worker, "abc", LONG)
    waiting.wait_for(Started)
    for client in running:
        client.wait_for(Piece)
    for client in (running[0], waiting):
        worker.leave(client.ticket)
    steps = session.engine.counts.passes
    for client in (running[0], waiting):
        while not isinstance(client.next(), Failed):
            pass
    assert session.engine.counts.passes - steps <= 4 * 3
    short = Client(worker, "abc", SamplingParams(max_tokens=3))
    short.wait_for(Done)  # the slot is free again
    for client in running[1:]:
        worker.leave(client.ticket)


def test_a_request_that_takes_too_long_is_ended(session: Session, make_worker: MakeWorker) -> None:
    worker = make_worker(Limits(seconds=0.3))
    clients = [Client(worker, "abc", LONG) for _ in range(5)]
    for client in clients:
        while not isinstance(message := client.next(), (Done, Failed)):
            pass
        assert isinstance(message, Failed) and message.error.status == 504
    assert held(session) == 0


class Breaking(FunctionDrafter):
    """Raises on a certain prompt."""

    def __init__(self) -> None:
        super().__init__(self._draft)

    def _draft(self, request: DraftRequest) -> Draft:
        from slipstream.core.tree import TokenTree

        if bytes(request.tokens[:4]) == b"boom":
            raise RuntimeError("/secret/path/of/this/machine")
        return Draft(TokenTree.root(request.root))


def test_a_step_that_raises_fails_what_was_in_it_and_the_server_goes_on(
    session: Session, make_worker: MakeWorker, caplog: pytest.LogCaptureFixture
) -> None:
    worker = make_worker(drafters={"breaking": Breaking()})
    expected = offline(session, "waits", params_of(1))
    companions = [Client(worker, "abc", LONG, drafter="breaking") for _ in range(2)]
    for client in companions:
        client.wait_for(Piece)
    boom = Client(worker, "boom", LONG, drafter="breaking")
    waits = Client(worker, "waits", params_of(1))
    for client in (*companions, boom):
        while not isinstance(message := client.next(), (Done, Failed)):
            pass
        assert isinstance(message, Failed) and message.error.status == 500
        assert "secret" not in message.error.message
    waits.wait_for(Done)
    assert waits.tokens() == list(expected.tokens)
    assert any("secret" in str(record.exc_info) for record in caplog.records)
    assert held(session) == 0


class Forgetful(FunctionDrafter):
    """Drafts nothing, and raises in one method when that is called for the `at`-th time."""

    def __init__(self, where: str, at: int) -> None:
        super().__init__(nothing)
        self.where, self.left = where, at

    def _called(self, where: str) -> None:
        self.left -= where == self.where
        if not self.left and where == self.where:
            raise RuntimeError("/secret/path/of/this/machine")

    def open(self, seq_id: int, prompt: Sequence[int]) -> None:
        self._called("open")

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        self._called("propose")
        return super().propose(requests)

    def observe(self, observations: Any) -> None:
        self._called("observe")


@pytest.mark.parametrize(("where", "at", "got"), [("open", 1, 0), ("propose", 3, 2), ("observe", 4, 3)])
def test_a_drafter_that_breaks_ends_its_own_requests_alone_and_after_their_tokens(
    session: Session, make_worker: MakeWorker, where: str, at: int, got: int
) -> None:
    """It observes the prompt, then each verification; what a verification gave is told before the error."""
    params = SamplingParams(max_tokens=60, temperature=0.7, seed=5, ignore_eos=True)
    expected, whole = offline(session, "abc", params), offline(session, "xyz", params)
    worker = make_worker(drafters={"forgetful": Forgetful(where, at)})
    companion = Client(worker, "abc", params)
    broken = Client(worker, "xyz", params, drafter="forgetful")
    while not isinstance(message := broken.next(), (Done, Failed)):
        pass
    assert isinstance(message, Failed) and message.error.status == 500
    assert "secret" not in message.error.message
    assert broken.tokens() == list(whole.tokens[:got])
    companion.wait_for(Done)
    assert companion.tokens() == list(expected.tokens)
    again = Client(worker, "xyz", params, drafter="forgetful")
    again.wait_for(Done)
    assert again.tokens() == list(whole.tokens) and held(session) == 0


def test_a_request_whose_own_rules_contradict_each_other_fails_alone(
    session: Session, make_worker: MakeWorker
) -> None:
    hopeless = SamplingParams(max_tokens=5, bad_words=tuple((t,) for t in range(258)))
    params = SamplingParams(max_tokens=40, temperature=0.9, seed=4)
    expected = offline(session, "abc", params)
    worker = make_worker()
    good = [Client(worker, "abc", params) for _ in range(2)]
    bad = Client(worker, "abc", hopeless)
    while not isinstance(message := bad.next(), (Done, Failed)):
        pass
    assert isinstance(message, Failed) and message.error.status == 400
    assert "forbid every token" in message.error.message
    for client in good:
        client.wait_for(Done)
        assert client.tokens() == list(expected.tokens)


def test_what_cannot_be_queued_is_told_and_holds_nothing(session: Session, make_worker: MakeWorker) -> None:
    worker = make_worker(Limits(waiting=1))
    for job in (
        Job([1] * 5000, SamplingParams()),
        Job([999], SamplingParams()),
        Job([1], SamplingParams(), drafter="nobody"),
    ):
        messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        for _ in range(5):  # more often than there are places
            worker.submit([job], [messages.put])
            message = messages.get(timeout=30)
            assert isinstance(message, Failed) and message.error.status == 400
    assert not session.engine.has_work


def test_shutting_down_finishes_what_it_can_and_takes_nothing_more(
    session: Session, make_worker: MakeWorker
) -> None:
    worker = make_worker()
    short = Client(worker, "abc", SamplingParams(max_tokens=30))
    short.wait_for(Started)
    worker.shutdown(30.0)
    short.wait_for(Done)
    assert len(short.tokens()) == 30 and not worker.alive and not worker.accepting
    with pytest.raises(ApiError) as refusal:
        Client(worker, "abc", LONG)
    assert refusal.value.status == 503


def test_shutting_down_takes_bounded_time(session: Session, make_worker: MakeWorker) -> None:
    worker = make_worker()
    clients = [Client(worker, "abc", LONG) for _ in range(5)]
    clients[0].wait_for(Piece)
    began = time.monotonic()
    worker.shutdown(0.0)
    assert not worker.alive and time.monotonic() - began < 20
    for client in clients:
        while not isinstance(message := client.next(), (Done, Failed)):
            pass
        assert isinstance(message, Failed) and message.error.status == 503
    assert held(session) == 0


def test_a_listener_that_raises_harms_nobody_else(session: Session, make_worker: MakeWorker) -> None:
    worker = make_worker()

    def broken(message: Message) -> None:
        raise RuntimeError("the event loop is closed")

    worker.submit([Job([1, 2], LONG)], [broken])
    other = Client(worker, "abc", SamplingParams(max_tokens=5))
    other.wait_for(Done)
    idle = threading.Event()
    for _ in range(100):
        if not session.engine.has_work:
            idle.set()
            break
        time.sleep(0.02)
    assert idle.is_set()


def test_a_fault_of_the_worker_itself_leaves_nobody_waiting(
    session: Session, make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = make_worker()

    def broken(*_: object) -> None:
        raise RuntimeError("no such label")

    with monkeypatch.context() as patched:
        patched.setattr(worker.metrics, "emitted", broken)
        clients = [Client(worker, "abc", LONG) for _ in range(3)]
        for client in clients:
            while not isinstance(message := client.next(), Failed):
                pass
            assert message.error.status == 500
        patched.setattr(worker.metrics, "finished", broken)
        client = Client(worker, "abc", LONG)
        while not isinstance(client.next(), Failed):
            pass
    again = Client(worker, "abc", SamplingParams(max_tokens=5))
    again.wait_for(Done)
    assert worker.alive and held(session) == 0


def test_traces_tell_the_tree_of_every_step(make_worker: MakeWorker) -> None:
    client = Client(make_worker(), "abababab", SamplingParams(max_tokens=24), traced=True)
    client.wait_for(Done)
    steps = [p.step for p in client.pieces]
    assert all(step is not None for step in steps)
    accepted: list[Sequence[int]] = [s.accepted for s in steps if s is not None]
    assert sum(map(len, accepted)) == sum(sum(p.event.drafted) for p in client.pieces)
    for piece in client.pieces:
        assert piece.step is not None
        kept = [piece.step.tokens[n] for n in piece.step.accepted]
        assert list(piece.event.tokens[: len(kept)]) == kept
