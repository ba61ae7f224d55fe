"""What was seen, kept as JSON lines, and a chart of it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from slipstream.core import jsontext
from slipstream.errors import ParameterError
from slipstream.watch.rates import Rates


def append(file: Path, seen: Iterable[Rates], at: float) -> None:
    """Add one line a server. at: seconds since the epoch."""
    stamp = datetime.fromtimestamp(at, timezone.utc).isoformat(timespec="seconds")
    try:
        with file.open("a+b") as kept:
            cut = kept.tell() > 0 and kept.seek(-1, os.SEEK_END) >= 0 and kept.read(1) != b"\n"
        with file.open("a", encoding="utf-8") as out:
            out.write("\n" if cut else "")  # a line that was cut off stays alone
            for rates in seen:
                out.write(json.dumps({"time": stamp, **rates.as_dict()}) + "\n")
    except OSError as error:
        raise ParameterError(f"the history {file} cannot be written ({error.strerror})") from error


def read(file: Path) -> list[dict[str, Any]]:
    """The lines of a history. Raises ParameterError with the line that is damaged."""
    found = []
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ParameterError(f"the history {file} cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ParameterError(f"the history {file} is no text ({error}): name another file") from error
    for number, line in enumerate(lines, 1):
        try:
            row = jsontext.parse(line)
            if not isinstance(row, dict):
                raise ValueError("no object")
            found.append(row)
        except ValueError as error:
            raise ParameterError(f"line {number} of {file} is damaged ({error}): remove it") from error
    return found


def chart(history: Sequence[dict[str, Any]], file: Path) -> None:
    """tau, acceptance of the first token, tokens a second and running requests over time, a line a server,
    as PNG.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ParameterError("the chart needs matplotlib: pip install 'slipstream-lm[scale]'") from None
    if not history:
        raise ParameterError("the history is empty: watch for a while first")
    wanted = {"time", *(field.name for field in fields(Rates))}
    for number, row in enumerate(history, 1):
        if not wanted <= row.keys():
            raise ParameterError(
                f"line {number} of the history is no reading of `slipstream watch`: remove it"
            )
    panels: tuple[tuple[str, Callable[[dict[str, Any]], Any]], ...] = (
        ("tau", lambda row: row["tau"]),
        (
            "first token accepted",
            lambda row: row["per_position"][0] if row["per_position"] else row["acceptance"],
        ),
        ("tokens/s", lambda row: row["tokens_per_second"]),
        ("running requests", lambda row: row["running"]),
    )
    figure = Figure(figsize=(9, 9), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(panels), 1, sharex=True)
    for url in dict.fromkeys(row["url"] for row in history):
        rows = [row for row in history if row["url"] == url]
        times = [datetime.fromisoformat(row["time"]) for row in rows]
        for axis, (name, value) in zip(axes, panels, strict=True):
            values = [float("nan") if value(row) is None else value(row) for row in rows]
            axis.plot(times, values, marker=".", label=url)
            axis.set_ylabel(name)
    axes[0].legend(loc="upper left", fontsize="small")
    figure.autofmt_xdate()
    partial = file.with_name(file.name + ".partial")
    try:
        figure.savefig(partial, format="png", dpi=110)
        partial.replace(file)
    except OSError as error:
        raise ParameterError(f"the chart {file} cannot be written ({error.strerror})") from error
