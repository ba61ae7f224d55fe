"""Reports as one HTML page that needs nothing from outside: styles and charts are inline, there is no script.

`page.html.j2` is the frame of all of them; a report's own template extends it.
"""

from __future__ import annotations

from importlib import resources
from typing import Any

from slipstream.version import __version__

FRAME = "page.html.j2"


def render(package: str, template: str, **values: Any) -> str:
    """The page of a template that lies in `package`, with these values in it."""
    from jinja2 import DictLoader, Environment, StrictUndefined

    places = {FRAME: "slipstream.plan", template: package}
    texts = {
        name: resources.files(where).joinpath(name).read_text(encoding="utf-8")
        for name, where in places.items()
    }
    environment = Environment(
        loader=DictLoader(texts),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "ms": milliseconds,
        "gb": gigabytes,
        "usd": usd,
        "pct": lambda v: f"{v:+.0%}",
        "per": per_second,
    }
    return environment.get_template(template).render(version=__version__, **values)


def counted(number: int, noun: str) -> str:
    """As in 1 row, 2 rows."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def drafted(depth: int, nodes: int) -> str:
    """How much is drafted: a chain's tokens, or a tree's depth and nodes."""
    return f"{depth} of {nodes}" if nodes > depth else str(depth)


def milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return "not measured"
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def gigabytes(amount: float) -> str:
    return f"{amount / 1e9:.3g} GB" if amount >= 1e9 else f"{amount / 1e6:.3g} MB"


def usd(amount: float | None) -> str:
    return "–" if amount is None else f"{amount:.3g}"


def per_second(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"
