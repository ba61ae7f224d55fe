"""What every request passes before the application sees it: whose it is, for which host, and how large."""

from __future__ import annotations

import hmac
from collections.abc import Sequence

import anyio
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slipstream.serve.binding import LOOPBACK
from slipstream.serve.errors import ApiError

OPEN = ("/health", "/ready", "/")
BODY_SECONDS = 60.0


class Guard:
    """api_keys: none means that anybody may ask. guard_metrics: /metrics needs a key too.

    loopback_only: refuse other Host headers, so that no web page can reach a local server through a name
    of its own (DNS rebinding). Bodies are read whole, within `body_bytes` and `body_seconds`.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        api_keys: Sequence[str] = (),
        guard_metrics: bool = False,
        loopback_only: bool = False,
        body_bytes: int = 4 << 20,
        body_seconds: float = BODY_SECONDS,
    ) -> None:
        self._app = app
        self._keys = [key.encode() for key in api_keys]
        self._open = OPEN if guard_metrics else (*OPEN, "/metrics")
        self._loopback_only = loopback_only
        self._body_bytes = body_bytes
        self._body_seconds = body_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            headers = Headers(scope=scope)
            self._check_host(headers)
            self._check_key(scope["path"], headers)
            body = await self._body(headers, receive)
        except ApiError as error:
            response = JSONResponse(error.body(), error.status, {**error.headers, "Connection": "close"})
            await response(scope, receive, send)
            return
        if body is not None:
            await self._app(scope, _replay(body, receive), send)

    def _check_host(self, headers: Headers) -> None:
        if not self._loopback_only:
            return
        host = headers.get("host", "").lower()
        name = host if host.endswith("]") or host == "::1" else host.rsplit(":", 1)[0]
        if name not in LOOPBACK:
            raise ApiError(421, "this server answers to localhost only", code="wrong_host")

    def _check_key(self, path: str, headers: Headers) -> None:
        if not self._keys or path in self._open or path.startswith("/web/"):
            return
        kind, _, given = headers.get("authorization", "").partition(" ")
        key = given.strip().encode("utf-8", "replace") if kind.lower() == "bearer" else b""
        # Every key is compared, so the time tells nothing about which one was nearly right.
        if not sum(hmac.compare_digest(key, known) for known in self._keys):
            raise ApiError(401, "an API key is needed: Authorization: Bearer KEY", code="invalid_api_key")

    async def _body(self, headers: Headers, receive: Receive) -> bytes | None:
        """The whole body; None if the client left while it sent."""
        told = headers.get("content-length", "")
        if told.isdigit() and (len(told) > 15 or int(told) > self._body_bytes):
            raise self._too_large()
        parts: list[bytes] = []
        size = 0
        try:
            with anyio.fail_after(self._body_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > self._body_bytes:
                        raise self._too_large()
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            raise ApiError(408, "the request body did not arrive in time", code="body_timeout") from None

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the request is larger than {self._body_bytes} bytes", code="request_too_large")


def _replay(body: bytes, receive: Receive) -> Receive:
    """The body in one message, then whatever comes (the disconnect)."""
    given = False

    async def again() -> Message:
        nonlocal given
        if not given:
            given = True
            return {"type": "http.request", "body": body, "more_body": False}
        return await receive()

    return again
