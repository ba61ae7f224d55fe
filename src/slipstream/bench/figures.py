"""What a sweep shows of the planner and of `goodput`, and whether it is what the project claims."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.bench.predict import CLOSE, Compared, Predictor
from slipstream.bench.summary import Cell, Summary
from slipstream.control.goodput import Goodput
from slipstream.core.spec import parse_spec
from slipstream.errors import ParameterError
from slipstream.plan.setup import ALL

USELESS = "slipstream.testing.useless:UselessDrafter"

CELLS, SHARE = 40, 0.90  # predictions within `CLOSE`: of at least so many cells, this share
PLANNED = 0.95  # of the best setting's speed
GOODPUT, MIXED = 0.97, 1.05  # of the best fixed length's: of each task, over all tasks
LOSS = 0.03  # most that a useless drafter may cost


@dataclass(frozen=True)
class Figure:
    """One claim. met: None where it was not measured. lines: what it is made of."""

    claim: str
    met: bool | None
    found: str
    lines: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        return {True: "met", False: "NOT MET", None: "not measured"}[self.met]


def figures(summary: Summary, predictor: Predictor | None) -> list[Figure]:
    """All of them, in the order of the claims."""
    found = [_goodput_by_task(summary), _goodput_mixed(summary), _useless(summary)]
    if predictor is not None:
        found = [_close(predictor.cells()), _planned(summary, predictor), _slower(summary, predictor), *found]
    return found


def _close(compared: Sequence[Compared]) -> Figure:
    claim = f"predicted within {CLOSE:.0%} of measured for {SHARE:.0%} of at least {CELLS} cells"
    compared = [c for c in compared if not _is_useless(c.cell)]  # of which all is known beforehand
    known = [c for c in compared if c.close is not None]
    if not known:
        why = next((c.why for c in compared if c.why), "no cell has steady steps")
        return Figure(claim, None, why)
    lines = []
    for batch in sorted({c.cell.setting.batch for c in known}):
        here = [c for c in known if c.cell.setting.batch == batch]
        lines.append(f"batch {batch}: {_share(here)}")
    missing = len(compared) - len(known)
    if missing:
        reasons = dict.fromkeys(c.why or "too few steady steps" for c in compared if c.close is None)
        lines.append(f"{missing} cells cannot be compared: {'; '.join(reasons)}")
    share = sum(bool(c.close) for c in known) / len(known)
    enough = len(known) >= CELLS
    return Figure(claim, share >= SHARE if enough else None, _share(known), tuple(lines))


def _share(compared: Sequence[Compared]) -> str:
    close = sum(bool(c.close) for c in compared)
    errors = sorted(abs(c.error) for c in compared if c.error is not None)
    middle = errors[len(errors) // 2]
    told = f"{close} of {len(compared)} cells ({close / len(compared):.0%}) within {CLOSE:.0%}"
    return f"{told}; off by {middle:.1%} in the middle, by {errors[-1]:.1%} at most"


def _planned(summary: Summary, predictor: Predictor) -> Figure:
    claim = f"the planned setting reaches {PLANNED:.0%} of the sweep's best at every batch size"
    reached, lines = [], []
    for batch, temperature in summary.conditions:
        cells = [c for c in summary.at(batch, temperature) if not c.setting.controller]
        drafting = [c for c in cells if not _is_useless(c)]
        planned: list[tuple[float, Cell]] = []
        for cell in drafting:
            try:
                planned.append((predictor.planned(cell.setting).speedup, cell))
            except ParameterError as error:
                lines.append(f"{cell.setting.label} ({cell.setting.where}): {error}")
        if len(planned) < 2:
            continue
        said, chosen = max(planned, key=lambda pair: pair[0])
        best = max(drafting, key=lambda c: c.decoding.value)
        reached.append(chosen.decoding.value / best.decoding.value)
        lines.append(
            f"{chosen.setting.where}: planned {chosen.setting.label} ({said:.2f} predicted,"
            f" {chosen.decoding.value:.2f} measured), best {best.setting.label} ({best.decoding.value:.2f}):"
            f" {reached[-1]:.1%}"
        )
    if not reached:
        return Figure(claim, None, "nothing could be planned", tuple(lines))
    return Figure(claim, min(reached) >= PLANNED, f"{min(reached):.1%} at least", tuple(lines))


def _slower(summary: Summary, predictor: Predictor) -> Figure:
    claim = "what is predicted to be slower than plain decoding is slower"
    lines, held, asked = [], 0, 0
    for cell in summary.totals:
        if not cell.setting.fixed:
            continue
        compared = predictor.compare(cell)
        if compared.predicted is None or compared.predicted.high >= 1 or compared.measured is None:
            continue
        asked += 1
        held += compared.measured < 1
        lines.append(
            f"{cell.setting.label} ({cell.setting.where}): {compared.predicted.speedup:.2f} predicted,"
            f" {compared.measured:.2f} measured"
        )
    if not asked:
        return Figure(claim, None, "nothing was predicted to be certainly slower")
    return Figure(claim, held == asked, f"{held} of {asked} settings", tuple(lines))


def _controlled(summary: Summary, useless: bool) -> list[Cell]:
    """Totals of goodput, of the useless drafter or of all others."""
    return [
        c
        for c in summary.totals
        if c.setting.controller
        and parse_spec(c.setting.controller)[0] == Goodput.name
        and _is_useless(c) == useless
    ]


def _is_useless(cell: Cell) -> bool:
    return parse_spec(cell.setting.drafter)[0] == USELESS


def _fixed_beside(summary: Summary, cell: Cell, task: str) -> list[Cell]:
    """Every fixed length of the same drafter under the same condition, plain decoding (none) included."""
    alike = [
        c.setting
        for c in summary.at(cell.setting.batch, cell.setting.temperature)
        if not c.setting.controller and (c.setting.plain or c.setting.drafter == cell.setting.drafter)
    ]
    found = [summary.of(setting, task) for setting in alike]
    return [c for c in found if c is not None]


def _goodput_by_task(summary: Summary) -> Figure:
    claim = f"goodput reaches {GOODPUT:.0%} of the best fixed length of each task"
    return _against_fixed(summary, claim, GOODPUT, summary.tasks)


def _goodput_mixed(summary: Summary) -> Figure:
    claim = f"goodput reaches {MIXED:g} times the best single fixed length over all tasks"
    if len(summary.tasks) < 2:
        return Figure(claim, None, "there is only one task")
    return _against_fixed(summary, claim, MIXED, [ALL])


def _against_fixed(summary: Summary, claim: str, wanted: float, tasks: Sequence[str]) -> Figure:
    reached, lines = [], []
    for total in _controlled(summary, useless=False):
        for task in tasks:
            cell, beside = summary.of(total.setting, task), _fixed_beside(summary, total, task)
            if cell is None or not any(c.setting.fixed for c in beside):
                continue
            best = max(beside, key=lambda c: c.decoding.value)
            reached.append(cell.decoding.value / best.decoding.value)
            name = f"{total.setting.drafter} ({total.setting.where}), {task}"
            how = best.setting.how or "plain"
            lines.append(
                f"{name}: {cell.decoding.value:.2f} against {best.decoding.value:.2f} with {how}:"
                f" {reached[-1]:.1%}"
            )
    if not reached:
        return Figure(claim, None, "needs --controller goodput beside fixed lengths")
    held = sum(r >= wanted for r in reached)
    found = f"{min(reached):.1%} at least, {held} of {len(reached)} reach it"
    return Figure(claim, held == len(reached), found, tuple(lines))


def _useless(summary: Summary) -> Figure:
    claim = f"with a useless drafter goodput costs at most {LOSS:.0%} against plain decoding"
    cells = _controlled(summary, useless=True)
    if not cells:
        return Figure(claim, None, f"needs --drafter {USELESS} and --controller goodput")
    lines = [f"{c.setting.where}: {c.decoding.value - 1:+.1%}" for c in cells]
    worst = min(c.decoding.value for c in cells)
    return Figure(claim, worst >= 1 - LOSS, f"{worst - 1:+.1%} at worst", tuple(lines))
