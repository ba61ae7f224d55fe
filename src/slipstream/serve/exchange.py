"""Between the event loop and the worker: one HTTP request's prompts, their pieces, and its disconnect."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from starlette.types import Receive

from slipstream.serve.errors import ApiError, failed
from slipstream.serve.worker import Done, Failed, Job, Message, Piece, Started, Ticket, Worker


class Exchange:
    """Submits jobs and iterates over (answer number, piece) until all are done. A context: leaving ends all.

    Raises ApiError from `start` for what is refused, from the iteration for what fails later.
    """

    def __init__(self, worker: Worker, jobs: Sequence[Job]) -> None:
        self._worker = worker
        self._jobs = list(jobs)
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[int, Message]] = asyncio.Queue()
        self._open = set(range(len(self._jobs)))
        self._early: list[tuple[int, Piece]] = []
        counts = [job.params.n for job in self._jobs]
        self._first = [sum(counts[:i]) for i in range(len(counts))]  # answer number of each prompt's first
        self.tickets: list[Ticket] = []

    async def start(self) -> None:
        """Until the engine has taken every prompt."""
        listeners = [partial(self._listen, i) for i in range(len(self._jobs))]
        self.tickets = self._worker.submit(self._jobs, listeners)
        pending = len(self._jobs)
        while pending:
            number, message = await self._queue.get()
            if isinstance(message, Started):
                pending -= 1
            else:
                self._early += self._pieces(number, message)

    def _listen(self, number: int, message: Message) -> None:
        self._loop.call_soon_threadsafe(self._queue.put_nowait, (number, message))

    def _pieces(self, number: int, message: Message) -> list[tuple[int, Piece]]:
        if isinstance(message, Failed):
            self._open.discard(number)
            raise message.error
        if isinstance(message, Done):
            self._open.discard(number)
        return [(self._first[number] + message.index, message)] if isinstance(message, Piece) else []

    async def pieces(self, heartbeat: float | None = None) -> AsyncIterator[tuple[int, Piece] | None]:
        """None whenever nothing came for `heartbeat` seconds."""
        while True:
            while self._early:
                yield self._early.pop(0)
            if not self._open:
                return
            try:
                self._early += self._pieces(*await asyncio.wait_for(self._queue.get(), heartbeat))
            except asyncio.TimeoutError:
                yield None

    async def __aenter__(self) -> Exchange:
        return self

    async def __aexit__(self, *_: Any) -> None:
        for number in self._open:
            if number < len(self.tickets):
                self._worker.leave(self.tickets[number])


async def gone(receive: Receive) -> None:
    """Until the client disconnects; the body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(receive: Receive, work: Callable[[], Awaitable[Any]]) -> Any:
    """The result of `work`, which is cancelled if the client disconnects; ApiError 499 then."""
    watching = asyncio.ensure_future(gone(receive))
    working = asyncio.ensure_future(work())
    try:
        await asyncio.wait({watching, working}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ApiError(499, "the client left")
        return working.result()
    finally:
        for task in (watching, working):
            task.cancel()
        await asyncio.gather(watching, working, return_exceptions=True)


def as_api_error(error: BaseException) -> ApiError:
    return error if isinstance(error, ApiError) else failed()
