"""Getting /metrics from servers."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence

from slipstream.watch.metrics import Reading, WatchError, parse

Get = Callable[[str], str]
_LIMIT = 32_000_000


def metrics_url(server: str) -> str:
    """`localhost:8000` and `http://host:8000/` -> http://…/metrics; a path that is given stays."""
    url = server if "://" in server else f"http://{server}"
    scheme, _, rest = url.partition("://")
    if scheme not in ("http", "https") or not rest.strip("/"):
        raise WatchError(f"{server!r} is no server: write it as http://host:8000")
    host, slash, path = rest.partition("/")
    return f"{scheme}://{host}/{path}" if slash and path else f"{scheme}://{host}/metrics"


def get(url: str, timeout: float = 5.0) -> str:
    """The text behind a URL. WatchError says what stands in the way."""
    try:
        with urllib.request.urlopen(url, timeout=timeout) as answer:
            raw: bytes = answer.read(_LIMIT)
    except urllib.error.HTTPError as error:
        error.close()
        hint = {
            404: "the server has no metrics there; SGLang needs --enable-metrics",
            501: "start llama-server with --metrics",
        }
        raise WatchError(f"{url} answers {error.code}: {hint.get(error.code, error.reason)}") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
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
