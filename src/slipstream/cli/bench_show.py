"""A bench as tables on the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

    from slipstream.bench.report import Report


def show(report: Report) -> None:
    """The report as tables on stdout."""
    from slipstream.cli.output import stdout
    from slipstream.plan.page import counted

    console, bundle = stdout(), report.summary.bundle
    machine = bundle.sessions[-1].machine
    console.print(
        f"{bundle.model} ({bundle.target.dtype}) on {machine.name}, {counted(machine.threads, 'thread')};"
        f" {counted(len(bundle.prompts), 'prompt')}, {counted(bundle.plan.rounds, 'round')}",
        markup=False,
    )
    console.print(f"\n{report.verdict}", style="bold", markup=False)
    for note in report.notes:
        console.print(note, style="yellow", markup=False)
    for batch, temperature in report.summary.conditions:
        console.print(_condition(report, batch, temperature))
    for found in report.summary.differences[:20]:
        console.print(str(found), style="red" if found.broken else "yellow", markup=False)
    if report.comparison is not None:
        _comparison(report)
    if report.replayed:
        _replayed(report)


def _condition(report: Report, batch: int, temperature: float) -> Table:
    from rich.markup import escape

    from slipstream.bench.report import times
    from slipstream.cli.output import plain_table
    from slipstream.plan.page import per_second

    summary = report.summary
    tasks = summary.tasks if len(summary.tasks) > 1 else []
    warm = f", TEMPERATURE {temperature:g}" if temperature else ""
    heads = ["TOKENS", *(escape(t.upper()) for t in tasks), "TIMES AS FAST", "DECODING", "TOK/S", "TAU"]
    table = plain_table(f"\nBATCH {batch}{warm}", *(f"\n{h}" for h in (*heads, "DRAFT", "SAME")))
    for cell in summary.at(batch, temperature):
        setting, split = cell.setting, cell.split
        own = [summary.of(setting, t) for t in tasks]
        share = split["drafter"] / (sum(split.values()) or 1.0)
        table.add_row(
            escape(setting.drafter) if not setting.plain else "plain",
            escape(setting.how),
            *("" if c is None or setting.plain else f"{c.speedup.value:.2f}" for c in own),
            "1" if setting.plain else times(cell.speedup),
            "1" if setting.plain else f"{cell.decoding.value:.2f}",
            per_second(cell.rate),
            f"{cell.counts.tau:.2f}",
            "" if setting.plain else f"{share:.0%}",
            "" if setting.plain else f"{cell.same}/{cell.answers}",
        )
    return table


def _replayed(report: Report) -> None:
    from slipstream.cli.output import plain_table, stdout

    table = plain_table("\nREPLAYED", "\nTOKENS", "\nTASK", "\nTAU", "\nDRAFTS", "\nACCEPTED, BY POSITION")
    for one in report.replayed:
        warm = f", temperature {one.temperature:g}" if one.temperature else ""
        for i, (task, counts) in enumerate(one.counts.items()):
            rates = ["–" if a is None else f"{a:.0%}" for a in counts.conditional_acceptance]
            drafts = f"{counts.drafts / counts.passes:.0%}" if counts.passes else ""
            name = ("", "") if i else (one.drafter, one.size)
            table.add_row(*name, f"{task}{warm}", f"{counts.tau:.2f}", drafts, " ".join(rates))
    console = stdout()
    console.print(table)
    console.print("Drafts for plain decoding's answers; the target was not run, so no times.", style="dim")


def _comparison(report: Report) -> None:
    from rich.markup import escape

    from slipstream.cli.output import plain_table, stdout

    console, found = stdout(), report.comparison
    assert found is not None
    console.print(f"\nAgainst the baseline: {found.verdict}", style="bold", markup=False)
    for note in found.notes:
        console.print(note, style="dim", markup=False)
    told = found.changed
    if told:
        table = plain_table("\nCELL", "\nBEFORE", "\nNOW", "\nCHANGE", "\nINTERVAL", "")
        for c in told:
            interval = f"{c.low:+.1%} to {c.high:+.1%}"
            table.add_row(
                escape(c.name), f"{c.before:.2f}", f"{c.after:.2f}", f"{c.change:+.1%}", interval, c.verdict
            )
        console.print(table)


def show_figures(report: Report) -> None:
    """What is claimed, whether it was met, and what that is made of."""
    from slipstream.cli.output import stdout

    console = stdout()
    console.print()
    for figure in report.figures:
        console.print(f"{figure.claim}: {figure.verdict}; {figure.found}", markup=False)
        for line in figure.lines:
            console.print(f"  {line}", markup=False, style="dim")
