"""Server-sent events: one chunk a step, cut where characters end, `[DONE]` at last."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from slipstream.serve.answer import Writer
from slipstream.serve.errors import ApiError
from slipstream.serve.exchange import Exchange, as_api_error, unless_gone
from slipstream.serve.replies import Reply

HEARTBEAT_SECONDS = 15.0  # a comment now and then keeps proxies from closing a stream that waits for its turn
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class EventStream(Response):
    """Sends what a started exchange gives. ended: told once, with the error or None."""

    media_type = "text/event-stream"

    def __init__(
        self,
        exchange: Exchange,
        writer: Writer,
        *,
        include_usage: bool,
        ended: Callable[[ApiError | None], None],
    ) -> None:
        super().__init__()
        self._exchange = exchange
        self._writer = writer
        self._include_usage = include_usage
        self._ended = ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error: ApiError | None = None
        try:
            async with self._exchange:
                headers = [*_HEADERS, (b"x-request-id", self._writer.id.encode())]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                error = await unless_gone(receive, partial(self._send, send))
                await send({"type": "http.response.body", "body": b""})
        except ApiError as left:
            error = left
        except OSError:
            error = ApiError(499, "the client left")
        finally:
            self._ended(error)

    async def _send(self, send: Send) -> ApiError | None:
        """All events; gives the error that ended them early, which the client is told too."""

        async def out(data: str) -> None:
            await send({"type": "http.response.body", "body": data.encode(), "more_body": True})

        for reply in self._writer.opening():
            await out(_event(reply))
        try:
            async for numbered in self._exchange.pieces(HEARTBEAT_SECONDS):
                if numbered is None:
                    await out(": waiting\n\n")
                    continue
                chunk = self._writer.chunk(*numbered)
                if chunk is not None:
                    await out(_event(chunk))
        except Exception as error:
            told = as_api_error(error)
            await out(f"data: {json.dumps(told.body())}\n\n")
            return told
        if self._include_usage:
            await out(_event(self._writer.usage_chunk()))
        await out("data: [DONE]\n\n")
        return None


def _event(reply: Reply) -> str:
    return f"data: {reply.model_dump_json(exclude_unset=True)}\n\n"
