"""`slipstream watch`: live acceptance of running servers, and what it advises."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.errors import ParameterError

if TYPE_CHECKING:
    from rich.console import Group

    from slipstream.watch.metrics import Reading, WatchError
    from slipstream.watch.rates import Rates


def watch(
    urls: Annotated[
        list[str] | None, typer.Argument(help="Servers, as http://host:8000.", show_default=False)
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Read once: totals since the servers' start.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON, an object a reading.")] = False,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between readings.")] = 5.0,
    count: Annotated[int | None, typer.Option(min=1, help="Stop after so many.", show_default=False)] = None,
    cost: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="A drafted token's cost, as a part of a target pass. Default: 0.1, a guess.",
            show_default=False,
        ),
    ] = None,
    off_above: Annotated[
        int | None,
        typer.Option(min=1, help="Running requests above which drafting does not pay.", show_default=False),
    ] = None,
    predicted_tau: Annotated[
        float | None, typer.Option(min=1, help="What the plan predicts.", show_default=False)
    ] = None,
    history: Annotated[
        Path | None, typer.Option(help="Add what is seen to this file of JSON lines.", show_default=False)
    ] = None,
    chart: Annotated[
        Path | None, typer.Option(help="Draw --history as PNG when done.", show_default=False)
    ] = None,
    alerts: Annotated[
        str | None,
        typer.Option(
            help="Print Prometheus alert rules for vllm, sglang, llama.cpp or slipstream.", show_default=False
        ),
    ] = None,
) -> None:
    """Show tau, acceptance by position, tokens/s, load and advice for servers of vLLM, SGLang, llama.cpp or
    Slipstream.

    First since the servers' start, then since the reading before. LENGTH: drafted tokens a step. BEST: the
    length with the most tokens for what it costs. With --once the exit status is 1 if a server cannot be read
    or an advice is marked with an exclamation mark.
    """
    from slipstream.watch.alerts import alert_rules
    from slipstream.watch.fetch import metrics_url
    from slipstream.watch.rates import ASSUMED_COST

    for name, value in (("every", every), ("cost", cost), ("predicted-tau", predicted_tau)):
        if value is not None and not math.isfinite(value):
            raise ParameterError(f"--{name} is a number, not {value}")
    if alerts is not None:
        typer.echo(alert_rules(alerts, predicted_tau, off_above).rstrip("\n"))
        typer.echo("note: name the file that this is written to under rule_files in prometheus.yml", err=True)
        for option, value in (("--predicted-tau", predicted_tau), ("--off-above", off_above)):
            if value is None:
                typer.echo(f"note: {option} adds a rule", err=True)
        return
    if chart is not None and history is None:
        raise ParameterError("--chart draws a --history: name its file")
    if not urls and chart is None:
        raise ParameterError("name a server, as in `slipstream watch http://localhost:8000`")
    if not urls and history is not None and not history.is_file():
        raise ParameterError(f"there is no history {history}: watch a server with it first")
    watcher = _Watcher(
        list(dict.fromkeys(metrics_url(url) for url in urls or [])),
        ASSUMED_COST if cost is None else cost,
        off_above,
        predicted_tau,
        history,
    )
    bad = False
    try:
        if urls:
            bad = watcher.once(json_) if once else watcher.forever(json_, every, count)
    finally:
        if chart is not None and history is not None and history.is_file():
            from slipstream.watch import history as past

            past.chart(past.read(history), chart)
            typer.echo(f"chart: {chart}", err=True)
    if once and bad:
        raise typer.Exit(1)


class _Watcher:
    """Reads, keeps the last readings, prints."""

    def __init__(
        self,
        urls: list[str],
        cost: float,
        off_above: int | None,
        predicted_tau: float | None,
        history: Path | None,
    ) -> None:
        self.urls, self.cost, self.off_above = urls, cost, off_above
        self.predicted_tau, self.history = predicted_tau, history
        self.last: dict[str, Reading] = {}

    def look(self) -> list[Rates | WatchError]:
        from slipstream.watch import history as past
        from slipstream.watch.fetch import read_all
        from slipstream.watch.metrics import Reading
        from slipstream.watch.rates import rates

        seen: list[Rates | WatchError] = []
        for reading in read_all(self.urls):
            if isinstance(reading, Reading):
                seen.append(rates(reading, self.last.get(reading.url), self.cost))
                self.last[reading.url] = reading
            else:
                seen.append(reading)
        if self.history is not None:
            past.append(self.history, [r for r in seen if not isinstance(r, Exception)], time.time())
        return seen

    def once(self, json_: bool) -> bool:
        from slipstream.cli.output import print_json, stdout

        seen = self.look()
        if json_:
            print_json([self.row(url, rates) for url, rates in zip(self.urls, seen, strict=True)])
        else:
            stdout().print(self.table(seen))
        return any(
            isinstance(rates, Exception) or any(a["level"] == "act" for a in self.advice(rates))
            for rates in seen
        )

    def forever(self, json_: bool, every: float, count: int | None) -> bool:
        from rich.live import Live

        from slipstream.cli.output import stdout

        if json_:
            import json

            for _ in self._ticks(every, count):
                rows = [self.row(url, r) for url, r in zip(self.urls, self.look(), strict=True)]
                typer.echo(json.dumps(rows, ensure_ascii=False))
            return False
        console = stdout()
        if not console.is_terminal:  # there is nothing to draw over
            for _ in self._ticks(every, count):
                console.print(self.table(self.look()))
            return False
        with Live(console=console, auto_refresh=False) as live:
            for _ in self._ticks(every, count):
                live.update(self.table(self.look()), refresh=True)
        return False

    @staticmethod
    def _ticks(every: float, count: int | None) -> Any:
        made = 0
        while count is None or made < count:
            if made:
                time.sleep(every)
            made += 1
            yield made

    def advice(self, rates: Rates) -> list[dict[str, str]]:
        from slipstream.watch.advice import advise

        return [{"level": a.level, "text": a.text} for a in advise(rates, self.off_above, self.predicted_tau)]

    def row(self, url: str, seen: Rates | WatchError) -> dict[str, Any]:
        if isinstance(seen, Exception):
            return {"url": url, "error": str(seen)}
        return {**seen.as_dict(), "advice": self.advice(seen)}

    def table(self, seen: list[Rates | WatchError]) -> Group:
        """The numbers, and below them for each server what is wrong or advised: ! is to be acted on."""
        from rich.console import Group
        from rich.text import Text

        from slipstream.cli.output import plain_table

        table = plain_table(
            "\nSERVER", "\nENGINE", "\nTAU", "ACCEPTED\nBY POSITION", "\nLENGTH", "\nBEST", "\nTOKENS/S",
            "\nRUNNING", "\nWAITING",
        )  # fmt: skip
        table.padding = (0, 1, 0, 0)
        for column in table.columns[1:]:  # what is long and can be folded is the server's address
            column.no_wrap = column is not table.columns[3]
        table.columns[3].min_width = len("BY POSITION")
        told = list[Text]()
        for url, rates in zip(self.urls, seen, strict=True):
            name = url.removesuffix("/metrics").removeprefix("http://")
            if isinstance(rates, Exception):
                table.add_row(Text(name), *["-"] * 8)
                told.append(Text(f"! {rates}"))
                continue
            table.add_row(
                Text(name),
                rates.engine,
                _number(rates.tau, 2),
                " ".join(f"{p:.0%}" for p in rates.per_position) or "-",
                _number(rates.length, 1),
                "-" if rates.best_length is None else str(rates.best_length),
                _number(rates.tokens_per_second, 1),
                _number(rates.running, 0),
                _number(rates.waiting, 0),
            )
            told += [
                Text(f"{'! ' if a['level'] == 'act' else ''}{name}: {a['text']}") for a in self.advice(rates)
            ]
        return Group(table, *told)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
