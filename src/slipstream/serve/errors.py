"""Errors as OpenAI's API has them: a status and `{"error": {message, type, param, code}}`."""

from __future__ import annotations

from typing import Any

from slipstream.errors import CapacityError, SlipstreamError


class ApiError(Exception):
    """What a client is told. param: the field at fault. retry_after: seconds, for a header."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after

    @property
    def type(self) -> str:
        kinds = {401: "authentication_error", 429: "rate_limit_error", 504: "timeout_error"}
        if self.status in kinds:
            return kinds[self.status]
        return "invalid_request_error" if self.status < 500 else "server_error"

    @property
    def headers(self) -> dict[str, str]:
        headers = {}
        if self.retry_after is not None:
            headers["Retry-After"] = str(self.retry_after)
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return headers

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


def refused(error: SlipstreamError, param: str | None = None) -> ApiError:
    """A mistake that the engine found in a request."""
    code = "context_length_exceeded" if isinstance(error, CapacityError) else "invalid_value"
    return ApiError(400, str(error), param=param, code=code)


def unsupported(name: str, why: str) -> ApiError:
    return ApiError(400, f"{name} is not supported: {why}", param=name, code="unsupported_parameter")


def failed() -> ApiError:
    """An exception inside the server: its text may hold paths of this machine, so it goes to the log only."""
    return ApiError(
        500, "the server failed while computing this request; its log says why", code="internal_error"
    )


def overloaded(seconds: int) -> ApiError:
    return ApiError(
        429,
        f"too many requests are waiting; try again in about {seconds} s",
        code="queue_full",
        retry_after=seconds,
    )


def closing() -> ApiError:
    return ApiError(503, "the server is shutting down", code="shutting_down", retry_after=5)


def timed_out(seconds: float) -> ApiError:
    return ApiError(504, f"not finished within {seconds:g} s, the limit of this server", code="timeout")
