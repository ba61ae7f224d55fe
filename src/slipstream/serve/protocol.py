"""HTTP/1.1 that does not wait for ever for a request to begin."""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 30.0


class BoundedHead(H11Protocol):
    """uvicorn's, which closes a connection that is idle after an answer, but keeps one that says nothing, or
    half of its headers, for as long as it likes: each holds a file descriptor.

    Here a request's headers must be whole `HEAD_SECONDS` after the connection, or after their first byte.
    """

    _waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._wait_no_more()
        elif self._waiting is None:
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait_no_more()
        super().connection_lost(exc)

    def _wait(self) -> None:
        self._waiting = self.loop.call_later(HEAD_SECONDS, self._late)

    def _wait_no_more(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _late(self) -> None:
        self._waiting = None
        if self.conn.their_state is h11.IDLE:
            self.timeout_keep_alive_handler()
