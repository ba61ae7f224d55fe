"""The HTTP application: routes, errors in OpenAI's shape, and what stands before them."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.staticfiles import StaticFiles

from slipstream.serve.errors import ApiError, failed
from slipstream.serve.replies import (
    Card,
    ChatReply,
    CompletionReply,
    ErrorReply,
    Models,
    Status,
    Text,
    Tokens,
    Version,
)
from slipstream.serve.schemas import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from slipstream.serve.service import Service
from slipstream.version import __version__

log = logging.getLogger("slipstream.serve")
WEB = Path(__file__).parent / "web"
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorReply} for status in (400, 401, 404, 408, 413, 421, 429, 500, 503, 504)
}


def _either(model: type[Any]) -> dict[int | str, dict[str, Any]]:
    """Whole, or as a stream of events."""
    return {200: {"model": model, "content": {"text/event-stream": {}}}, **_ERRORS}


def create_app(service: Service, *, grace: float = 10.0) -> FastAPI:
    """The application around a service; starting it starts the worker, ending it ends it within `grace`."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.worker.start()
        yield
        service.worker.begin_shutdown(grace)
        await service.encode(service.worker.join)
        service.close()

    app = FastAPI(
        title="Slipstream",
        version=__version__,
        description="OpenAI-compatible inference with exact speculative decoding.",
        lifespan=lifespan,
        docs_url=None,  # its pages come from elsewhere, and this server needs no network
        redoc_url=None,
    )
    _add_errors(app)

    @app.post("/v1/chat/completions", responses=_either(ChatReply), response_model=None)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        return await service.chat(body, request)

    @app.post("/v1/completions", responses=_either(CompletionReply), response_model=None)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await service.completion(body, request)

    @app.get("/v1/models", responses=_ERRORS)
    async def models() -> Models:
        return Models(data=service.cards())

    @app.get("/v1/models/{model:path}", responses=_ERRORS)
    async def model(model: str) -> Card:
        service.check_model(model)
        return next(card for card in service.cards() if card.id == model)

    @app.post("/tokenize", responses=_ERRORS)
    async def tokenize(body: TokenizeRequest) -> Tokens:
        service.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "give either prompt or messages", param="prompt")
        if body.messages is not None:
            ids = await service.encode(service.prompts.messages, body.messages)
        else:
            ids = await service.encode(service.prompts.plain, body.prompt, body.add_special_tokens)
        return Tokens(count=len(ids), max_model_len=service.context, tokens=ids)

    @app.post("/detokenize", responses=_ERRORS)
    async def detokenize(body: DetokenizeRequest) -> Text:
        service.check_model(body.model)
        service.check_tokens(body.tokens)
        return Text(prompt=await service.encode(service.prompts.decode, body.tokens))

    # Load balancers and container runtimes ask with HEAD.
    @app.head("/health", include_in_schema=False)
    @app.get("/health", responses=_ERRORS)
    async def health() -> Status:
        """The engine's thread is there."""
        if not service.worker.alive:
            raise ApiError(503, "the engine has stopped", code="stopped")
        return Status(status="ok")

    @app.head("/ready", include_in_schema=False)
    @app.get("/ready", responses=_ERRORS)
    async def ready() -> Status:
        """New requests are taken."""
        if not service.worker.accepting:
            raise ApiError(503, "no new requests are taken", code="shutting_down")
        return Status(status="ok")

    @app.get("/metrics", response_model=None, include_in_schema=False)
    async def metrics() -> Response:
        text, kind = service.worker.metrics.text()
        return Response(text, media_type=kind)

    @app.get("/version", responses=_ERRORS)
    async def version() -> Version:
        return Version(version=__version__)

    @app.head("/", response_model=None, include_in_schema=False)
    @app.get("/", response_model=None, include_in_schema=False)
    async def page() -> Response:
        return FileResponse(WEB / "index.html", headers=_PAGE_HEADERS)

    app.mount("/web", _Files(directory=WEB))
    return app


class _Files(StaticFiles):
    def file_response(self, *args: Any, **options: Any) -> Response:
        response = super().file_response(*args, **options)
        response.headers.update(_PAGE_HEADERS)
        return response


def _add_errors(app: FastAPI) -> None:
    async def api(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return JSONResponse(error.body(), error.status, error.headers)

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        told = describe(error.errors())
        if error.body is not None and not isinstance(error.body, dict) and not _says_json(request):
            told = ApiError(
                400, "send the body as JSON, with the header Content-Type: application/json",
                code="unsupported_content_type",
            )  # fmt: skip
        return JSONResponse(told.body(), told.status)

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        told = ApiError(error.status_code, str(error.detail), code="http_error")
        return JSONResponse(told.body(), told.status, error.headers)

    async def anything(request: Request, error: Exception) -> Response:
        log.error("a request failed", exc_info=error)
        told = failed()
        # The connection is closed after this; a client that is told opens another for its next request.
        return JSONResponse(told.body(), told.status, {"Connection": "close"})

    handlers: dict[type[Exception], Callable[[Request, Exception], Awaitable[Response]]] = {
        ApiError: api,
        RequestValidationError: invalid,
        HTTPException: http,
        Exception: anything,
    }
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)


def _says_json(request: Request) -> bool:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    return kind == "application/json" or kind.startswith("application/") and kind.endswith("+json")


def describe(errors: Any) -> ApiError:
    """The first of pydantic's findings, in words that do not repeat what was sent."""
    first = errors[0]
    # A union reports each member's objection; the one that went deepest knows most.
    deepest = max(errors, key=lambda e: len(e["loc"])) if len(errors) > 1 else first
    where = ".".join(str(part)[:80] for part in deepest["loc"] if part not in ("body", *_MEMBERS))
    name = where.partition(".")[0]
    if len(errors) > 1 and name in _SHAPES and all(name in error["loc"] for error in errors):
        return ApiError(400, f"{name} must be {_SHAPES[name]}", param=name, code="invalid_value")
    if first["type"] == "json_invalid":
        return ApiError(400, "the body is not valid JSON", code="invalid_json")
    if deepest["type"] == "extra_forbidden":
        return ApiError(400, f"{where} is not supported", param=where, code="unsupported_parameter")
    if deepest["type"] == "missing":
        what = where or "a JSON body"
        return ApiError(400, f"{what} is missing", param=where or None, code="missing_parameter")
    message = str(deepest["msg"])
    text = f"{where or 'the body'}: {message[:1].lower()}{message[1:]}"
    return ApiError(400, text, param=where or None, code="invalid_value")


# A union's members each object in their own way, which tells nobody what would be right.
_SHAPES = {"prompt": "text, token ids (whole numbers from 0), or a list of texts or of lists of token ids"}
_MEMBERS = (
    "str",
    "list[str]",
    "list[TextPart]",
    "ToolChoice",
    "literal['none','auto','required']",
)
