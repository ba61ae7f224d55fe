"""Where a server listens, and for whom."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from slipstream.errors import ParameterError

LOOPBACK = ("127.0.0.1", "localhost", "[::1]", "::1")
HOST, PORT = "127.0.0.1", 8000


@dataclass(frozen=True)
class Binding:
    """Where and for whom. grace: seconds that running requests get when the server is told to stop."""

    host: str = HOST
    port: int = PORT
    api_keys: tuple[str, ...] = ()
    guard_metrics: bool = False
    cors_origins: tuple[str, ...] = ()
    grace: float = 10.0


def listen(host: str, port: int) -> socket.socket:
    """A bound socket; ParameterError if the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((host.strip("[]"), port))
    except (OSError, OverflowError) as error:
        made.close()
        raise _refused(host, port, error) from error
    return made


def claim(bound: socket.socket) -> None:
    """Queue connections from now on; ParameterError if a server that was started together with this one, and
    so could bind the same address, was faster."""
    try:
        bound.listen()
    except OSError as error:
        host, port = bound.getsockname()[:2]
        raise _refused(host, port, error) from error


def _refused(host: str, port: int, error: Exception) -> ParameterError:
    why = getattr(error, "strerror", None) or error
    return ParameterError(f"cannot listen on {host}:{port}: {why}; choose another --host or --port")
