"""Getting /metrics from servers."""

from __future__ import annotations

import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

from slipstream.watch.metrics import Reading, WatchError, parse

Get = Callable[[str], str]
_LIMIT = 32_000_000
_HERE = ("localhost", "127.0.0.1", "::1", "0.0.0.0")


def metrics_url(server: str) -> str:
    """`localhost:8000` and `http://host:8000/` -> http://…/metrics; a path that is given stays."""
    url = server if "://" in server else f"http://{server}"
    try:
        parts = urlsplit(url)
        fine = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        fine = False
    if not fine or any(c.isspace() or not c.isprintable() for c in url):
        raise WatchError(f"{server!r} is no server: write it as http://host:8000")
    if "@" in parts.netloc:  # unsaid: it would be shown, and kept in the history
        raise WatchError(f"{parts.hostname}: names and passwords are not sent; watch it from inside")
    path = parts.path if parts.path.strip("/") else "/metrics"
    return parts._replace(path=path, fragment="").geturl()


def open_url(request: str | urllib.request.Request, timeout: float) -> http.client.HTTPResponse:
    """urlopen, which asks no proxy for what runs on this machine. Raises OSError, ValueError and
    HTTPException.
    """
    url = request if isinstance(request, str) else request.full_url
    local = urlsplit(url).hostname in _HERE
    proxies = urllib.request.ProxyHandler({} if local else None)
    answer: http.client.HTTPResponse = urllib.request.build_opener(proxies).open(request, timeout=timeout)
    return answer


def get(url: str, timeout: float = 5.0) -> str:
    """The text behind a URL. timeout: seconds, of a silence and of the whole. WatchError says what stands in
    the way.
    """
    until, raw = time.monotonic() + timeout, b""
    try:
        with open_url(url, timeout) as answer:
            while part := answer.read1(1 << 16):
                raw += part
                if len(raw) > _LIMIT:
                    raise ValueError(f"more than {_LIMIT} bytes")
                if time.monotonic() > until:
                    raise TimeoutError("timed out")
            if answer.length:
                raise http.client.IncompleteRead(raw, answer.length)
    except urllib.error.HTTPError as error:
        error.close()
        hint = {
            404: "the server has no metrics there; SGLang needs --enable-metrics",
            501: "start llama-server with --metrics",
        }
        raise WatchError(f"{url} answers {error.code}: {hint.get(error.code, error.reason)}") from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or str(error) or type(error).__name__
        raise WatchError(f"{url} cannot be reached ({reason}): is the server up?") from error
    return raw.decode("utf-8", errors="replace")


def read_all(urls: Sequence[str], fetch: Get = get) -> list[Reading | WatchError]:
    """One reading a server; a server that cannot be read does not hide the others."""
    found: list[Reading | WatchError] = []
    for url in urls:
        try:
            found.append(parse(fetch(url), url, time.monotonic()))
        except WatchError as error:
            found.append(error)
    return found
