"""A running server: the application behind its guard, in uvicorn."""

from __future__ import annotations

import json
import logging
import signal
import time
from collections.abc import Sequence
from types import FrameType
from typing import TextIO

import uvicorn
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from slipstream.core import jsontext
from slipstream.serve.app import create_app
from slipstream.serve.binding import LOOPBACK, Binding
from slipstream.serve.guard import Guard
from slipstream.serve.protocol import BoundedHead
from slipstream.serve.service import Service


def guarded(service: Service, binding: Binding) -> ASGIApp:
    """The whole application."""
    app: ASGIApp = Guard(
        create_app(service, grace=binding.grace),
        api_keys=binding.api_keys,
        guard_metrics=binding.guard_metrics,
        loopback_only=binding.host in LOOPBACK,
        body_bytes=service.limits.body_bytes,
    )
    if binding.cors_origins:  # before the guard: a browser asks for leave without the key
        app = CORSMiddleware(
            app,
            allow_origins=list(binding.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type"],
        )
    return app


class Server(uvicorn.Server):
    """Told to stop, it takes no new requests at once, and ends within the grace and one step."""

    def __init__(self, service: Service, binding: Binding) -> None:
        self.service = service
        self.binding = binding
        self._told = False
        super().__init__(
            uvicorn.Config(
                guarded(service, binding),
                host=binding.host,
                port=binding.port,
                http=BoundedHead,
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=30,
                # The worker ends what runs; this is for connections that do not notice.
                timeout_graceful_shutdown=int(binding.grace) + 30,
                h11_max_incomplete_event_size=64 << 10,
            )
        )

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        again, self._told = self._told, True
        self.service.worker.begin_shutdown(0.0 if again else self.binding.grace)
        if again:
            self.force_exit = sig == signal.SIGINT
            self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        """It listens while something still runs, so that whoever comes is told 503 and not refused."""
        if self._told and not self.service.worker.alive:
            self.should_exit = True
        return await super().on_tick(counter)


class JsonLines(logging.Formatter):
    """One JSON object a line: time, level, logger, and the message (its fields, where it is an object)."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        facts: dict[str, object] = {"time": stamp, "level": record.levelname.lower(), "logger": record.name}
        text = record.getMessage()
        try:
            value = jsontext.parse(text)
        except ValueError:
            value = None
        facts |= value if isinstance(value, dict) else {"message": text}
        if record.exc_info:
            facts["exception"] = self.formatException(record.exc_info)
        return json.dumps(facts)


def log_to(stream: TextIO, loggers: Sequence[str] = ("slipstream.serve", "uvicorn.error")) -> None:
    """Write the server's log as JSON lines."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines())
    for name in loggers:
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.setLevel(logging.INFO)
        logger.propagate = False
