"""What `peers.py` says of its results: tables, a chart, and whether each aim is met."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.console import Console

from common import Log, Row, by_prompt, rate, same_ids, spread
from drafters_report import Sheet, Target, times
from peer_settings import HF, LLAMACPP, SLIPSTREAM, VLLM, Setting

DISTURBED = 0.05  # of the machine's time


class PeerReport:
    """settings: in the order in which they shall be listed."""

    def __init__(self, log: Log, settings: Sequence[Setting]) -> None:
        self._log = log
        self._rows: dict[str, list[Row]] = {}
        for row in log.rows:
            self._rows.setdefault(f"{row['engine']} {row['setting']}", []).append(row)
        self.measured = [s for s in settings if s.full in self._rows]
        self.missing = {name: reason for run in log.runs for name, reason in run["missing"].items()}
        self.tasks = list(dict.fromkeys(row["task"] for row in log.rows))
        self.rounds = sorted({row["round"] for row in log.rows})

    def rows(self, setting: Setting, task: str | None = None) -> list[Row]:
        return [row for row in self._rows[setting.full] if task in (None, row["task"])]

    def rates(self, setting: Setting, task: str | None = None) -> list[float]:
        """Tokens over seconds, round by round."""
        by_round: dict[int, list[Row]] = {}
        for row in self.rows(setting, task):
            by_round.setdefault(row["round"], []).append(row)
        return [rate(rows) for _, rows in sorted(by_round.items())]

    def median(self, setting: Setting, task: str | None = None) -> float:
        found = self.rates(setting, task)
        return statistics.median(found) if found else 0.0

    def ratio(self, setting: Setting, base: Setting, task: str | None = None) -> float | None:
        """Rates over the prompts that both have answered in the same round."""
        mine, theirs = by_prompt(self.rows(setting, task)), by_prompt(self.rows(base, task))
        both = [key for key in mine if key in theirs]
        return rate([mine[k] for k in both]) / rate([theirs[k] for k in both]) if both else None

    def best(self, engine: str, weights: str | None = None) -> Setting | None:
        """The engine's one setting with the most tokens/s over all prompts, whichever build of it."""
        of = [s for s in self.measured if _family(s.engine) == engine and weights in (None, s.weights)]
        return max(of, key=self.median, default=None)

    # -- tables ---------------------------------------------------------------------------------

    def sheets(self) -> list[Sheet]:
        sheets = [
            self._totals(),
            self._tasks("median of the rounds", lambda v: f"{statistics.median(v):.2f}"),
        ]
        if len(self.rounds) > 1:
            sheets.append(self._tasks("lowest to highest round", lambda v: f"{min(v):.2f}-{max(v):.2f}"))
        return sheets

    def _totals(self) -> Sheet:
        plain = self.best_plain(HF)
        lines = []
        for setting in self.measured:
            rows = self.rows(setting)
            own = self.best_plain(setting.engine, setting.weights)
            drafted, accepted = (sum(r.get(k, 0) for r in rows) for k in ("drafted", "accepted"))
            lines.append(
                [
                    setting.full,
                    spread(self.rates(setting)),
                    times(self.ratio(setting, plain)) if plain else "-",
                    times(self.ratio(setting, own)) if own else "-",
                    f"{100 * accepted / drafted:.0f} %" if drafted else "-",
                    f"{same_ids(rows, self.rows(own))}/{len(by_prompt(rows))}" if own else "-",
                    f"{100 * statistics.median(r['others'] for r in rows):.0f} %",
                ]
            )
        head = ["setting", "tokens/s: median (min-max)", "x transformers", "x own plain"]
        return Sheet(
            "all tasks together", [*head, "accepted of drafted", "as own plain", "others' load"], lines
        )

    def _tasks(self, title: str, shown: Any) -> Sheet:
        lines = [
            [
                s.full,
                *(shown(v) if (v := self.rates(s, t)) else "-" for t in self.tasks),
                shown(self.rates(s)),
            ]
            for s in self.measured
        ]
        return Sheet(f"tokens/s of whole requests, {title}", ["setting", *self.tasks, "all"], lines)

    def best_plain(self, engine: str, weights: str | None = None) -> Setting | None:
        """The engine's own decoding without drafts."""
        for setting in self.measured:
            if (
                setting.engine == engine
                and weights in (None, setting.weights)
                and setting.method in ("plain", "none")
            ):
                return setting
        return None

    # -- what follows from them -----------------------------------------------------------------

    def targets(self) -> list[Target]:
        ours, bf16 = self.best(SLIPSTREAM), self.best(SLIPSTREAM, "bf16")
        llama, vllm, plain = self.best(LLAMACPP), self.best(VLLM), self.best_plain(HF)
        return [
            self._at_least(ours, llama, 1.5, "best Slipstream at least 1.5 times llama.cpp's best in total"),
            self._every_task(ours, llama),
            self._at_least(bf16, vllm, 1.8, "best bf16 Slipstream at least 1.8 times vLLM's best"),
            self._at_least(
                bf16, plain, 3.5, "best bf16 Slipstream at least 3.5 times transformers' generate"
            ),
            *self._own_exactness(),
        ]

    def _at_least(self, ours: Setting | None, theirs: Setting | None, least: float, aim: str) -> Target:
        ratio = self.ratio(ours, theirs) if ours and theirs else None
        if ratio is None or ours is None or theirs is None:
            return Target(aim, None)
        return Target(aim, ratio >= least, f"{ours.full} against {theirs.full}: {times(ratio)}")

    def _every_task(self, ours: Setting | None, theirs: Setting | None) -> Target:
        """Against the one best setting of theirs; told besides: against their best of each task."""
        aim = "best Slipstream at least as fast as llama.cpp's best on every task"
        if ours is None or theirs is None:
            return Target(aim, None)
        found = {task: self.ratio(ours, theirs, task) for task in self.tasks}
        if any(ratio is None for ratio in found.values()):
            return Target(aim, None)
        picked = {}
        for task in self.tasks:
            of = [s for s in self.measured if _family(s.engine) == LLAMACPP and self.rates(s, task)]
            picked[task] = self.ratio(ours, max(of, key=lambda s, t=task: self.median(s, t)), task)
        told = ", ".join(f"{task} {times(r)} ({times(picked[task])})" for task, r in found.items())
        met = all(ratio is not None and ratio >= 1.0 for ratio in found.values())
        return Target(aim, met, f"{told}; in brackets against llama.cpp's best setting of that task")

    def _own_exactness(self) -> list[Target]:
        found = []
        for weights in dict.fromkeys(s.weights for s in self.measured if s.engine == SLIPSTREAM):
            plain = self.best_plain(SLIPSTREAM, weights)
            drafting = [s for s in self.measured if s.engine == SLIPSTREAM and s.weights == weights]
            drafting = [s for s in drafting if s is not plain]
            if plain and drafting:
                wrong = {
                    s.method: len(by_prompt(rows).keys() & by_prompt(base).keys()) - same_ids(rows, base)
                    for s in drafting
                    if (rows := self.rows(s)) and (base := self.rows(plain))
                }
                told = ", ".join(f"{name} differs on {n}" for name, n in wrong.items() if n)
                aim = f"Slipstream {weights}: every drafter gives plain decoding's tokens"
                found.append(Target(aim, not told, told))
        return found

    def remarks(self) -> list[str]:
        told = [
            f"{s.full}: {s.source}{' (learns; each round begins without memory)' if s.learns else ''}"
            for s in self.measured
        ]
        for name, reason in self.missing.items():
            told.append(f"{name} {'broke off' if name in self._rows else 'is not measured'}: {reason}")
        for setting in self.measured:
            rows = self.rows(setting)
            disturbed = sum(r["others"] > DISTURBED for r in rows)
            if disturbed:
                told.append(
                    f"{setting.full}: others took more than {100 * DISTURBED:.0f} % of the machine during"
                    f" {disturbed} of {len(rows)} answers"
                )
            forgot = sum(r["forgot"] for r in rows)
            if forgot:
                told.append(
                    f"{setting.full}: {forgot} answers came after a break and began with an empty memory"
                )
        return told

    def provenance(self) -> list[str]:
        first = self._log.runs[0]
        where = " / ".join(dict.fromkeys(f"{r['machine']}; {r['versions']}" for r in self._log.runs))
        prompts = len({row["prompt"] for row in self._log.rows})
        return [
            where,
            f"{first['target']}, draft {first['draft']}, greedy, {first['max_tokens']} tokens at most,"
            f" {prompts} prompts of {len(self.tasks)} tasks, {len(self.rounds)} round(s)",
            "Everybody gets the same prompt ids (the model's chat template); tokens are the ids generated"
            " after the prompt, the end token included; seconds are of the whole request, prompt reading"
            " included; nobody keeps a prompt's cache for the next request.",
        ]

    def show(self, console: Console, markdown: bool) -> None:
        lines = [*self.remarks(), *map(str, self.targets())]
        if markdown:
            console.print("\n\n".join(self.provenance()), "\n", soft_wrap=True, markup=False)
            for sheet in self.sheets():
                console.print(sheet.markdown(), soft_wrap=True, markup=False)
            console.print("\n".join(f"- {line}" for line in lines), soft_wrap=True, markup=False)
            return
        console.print("\n".join(self.provenance()), "\n", markup=False)
        for sheet in self.sheets():
            console.print(sheet.rich(), "\n")
        console.print("\n".join(lines), markup=False)

    @cached_property
    def record_rows(self) -> list[dict[str, Any]]:
        """engine, setting, task, tokens, seconds, tokens_per_second: one a setting and task, of all rounds
        together; and the rate round by round."""
        told = []
        for setting in self.measured:
            for task in self.tasks:
                rows = self.rows(setting, task)
                if rows:
                    told.append(
                        {
                            "engine": setting.engine,
                            "setting": setting.name,
                            "task": task,
                            "tokens": sum(r["tokens"] for r in rows),
                            "seconds": sum(r["seconds"] for r in rows),
                            "tokens_per_second": rate(rows),
                            "by_round": self.rates(setting, task),
                        }
                    )
        return told

    def record(self) -> dict[str, Any]:
        return {
            "rows": self.record_rows,
            "targets": [vars(target) for target in self.targets()],
            "sources": {s.full: s.source for s in self.measured},
            "missing": self.missing,
            "provenance": self.provenance(),
            "runs": self._log.runs,
            "answers": self._log.rows,
        }

    def chart(self, path: Path) -> None:
        """Bars: tokens/s of every setting over all tasks, with the range of the rounds; and task by task of
        each engine's best setting."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        from slipstream.plan.drawing import COLOURS

        engines = list(dict.fromkeys(s.engine for s in self.measured))
        colour = {engine: COLOURS[i % len(COLOURS)] for i, engine in enumerate(engines)}
        best = [b for e in dict.fromkeys(map(_family, engines)) if (b := self.best(e))]
        with matplotlib.rc_context({"svg.fonttype": "none", "font.size": 9, "svg.hashsalt": "slipstream"}):
            height = 0.6 + 0.24 * len(self.measured)
            figure, (all_, by_task) = pyplot.subplots(
                2, 1, figsize=(8, height + 3.2), height_ratios=(height, 2.6), layout="constrained"
            )
            shown = sorted(self.measured, key=self.median)
            middle = [self.median(s) for s in shown]
            ends = [(min(r), max(r)) for r in map(self.rates, shown)]
            all_.barh(
                [s.full for s in shown],
                middle,
                color=[colour[s.engine] for s in shown],
                xerr=[[m - e[0] for m, e in zip(middle, ends, strict=True)]]
                + [[e[1] - m for m, e in zip(middle, ends, strict=True)]],
                error_kw={"linewidth": 0.8, "capsize": 2},
            )
            for i, value in enumerate(middle):
                all_.annotate(
                    f"{value:.1f}", (ends[i][1], i), (4, 0), textcoords="offset points", va="center"
                )
            all_.set_xlabel(
                "tokens/s, whole requests, all tasks (median of the rounds; line: lowest to highest)"
            )
            width = 0.8 / max(1, len(best))
            for i, setting in enumerate(best):
                at = [x + (i - (len(best) - 1) / 2) * width for x in range(len(self.tasks))]
                by_task.bar(
                    at,
                    [self.median(setting, task) for task in self.tasks],
                    width,
                    color=colour[setting.engine],
                    label=setting.full,
                )
            by_task.set_xticks(range(len(self.tasks)), [t.replace("_", "\n") for t in self.tasks])
            by_task.set_ylabel("tokens/s")
            by_task.set_title("each engine's best setting, task by task", fontsize=9)
            by_task.legend(frameon=False, fontsize=8, ncols=2)
            for axes in (all_, by_task):
                axes.spines[["top", "right"]].set_visible(False)
            path.parent.mkdir(parents=True, exist_ok=True)
            for suffix in (".png", ".svg"):
                figure.savefig(path.with_suffix(suffix), dpi=150)
            pyplot.close(figure)


def _family(engine: str) -> str:
    """Whose build it is: vllm of vllm-zen."""
    return engine.partition("-")[0]
