"""A bench as `slipstream bench` would have written it, in modelled time: what it must show is known."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from slipstream.bench.bundle import (
    PLAIN,
    Answer,
    BenchBundle,
    Counts,
    Parts,
    Plan,
    PromptInfo,
    Run,
    SessionNote,
    Setting,
    Steady,
    TargetNote,
    Unit,
)
from slipstream.core.stats import DraftCounts
from slipstream.cost.bundle import MachineInfo

_TARGET = TargetNote(
    name="target", fingerprint="f", weights="w", dtype="bfloat16", hidden_size=64, num_layers=2,
    vocab_size=1000, tokenizer="t", template=None,
)  # fmt: skip


def fake_bench(
    *,
    step: Callable[[int, float], float] = lambda rows, nodes: 0.1 * max(1.0, rows * nodes / 8),
    prices: Mapping[str, float],
    rates: Mapping[str, Mapping[str, Sequence[float]]],
    lengths: Sequence[int] = (2, 4),
    batches: Sequence[int] = (1,),
    prompts: int = 4,
    rounds: int = 3,
    tokens: int = 96,
    noise: float = 0.0,
    overhead: float = 0.0005,
    slower: Callable[[Setting, str], float] = lambda setting, task: 1.0,
    seed: int = 0,
    model: str = "target",
) -> BenchBundle:
    """step: seconds by rows and tokens a row. prices: of a drafted token, by drafter. rates: conditional
    acceptance by drafter, task and position. noise: scatter of a run's seconds. slower: what a run's seconds
    are multiplied with. What is accepted depends on the prompts alone, so it is the same for every seed.
    """
    tasks = list(next(iter(rates.values())))
    asked = [
        PromptInfo(name=f"{task}/{i}", task=task, ids=[t + 1, i + 1, 7])
        for t, task in enumerate(tasks)
        for i in range(prompts)
    ]
    settings = [
        Setting(drafter=d, depth=n, nodes=n, batch=batch)
        for batch in batches
        for d, n in [(PLAIN, 0), *((d, n) for d in prices for n in lengths)]
    ]
    units = []
    for batch in batches:
        for task in tasks:
            own = [i for i, p in enumerate(asked) if p.task == task]
            filled = [own[i % len(own)] for i in range(-(-len(own) // batch) * batch)]
            units += [
                Unit(task=task, batch=batch, temperature=0.0, prompts=filled[i : i + batch])
                for i in range(0, len(filled), batch)
            ]
    modelled = {
        (s, u): _Model(
            setting,
            unit,
            rates[setting.drafter][unit.task] if setting.drafter in rates else (),
            step,
            prices.get(setting.drafter, 0.0),
            overhead,
            tokens,
        )
        for s, setting in enumerate(settings)
        for u, unit in enumerate(units)
        if setting.batch == unit.batch
    }
    rng = np.random.default_rng(seed)
    runs = []
    for round_ in range(rounds):
        for (s, u), found in modelled.items():
            factor = slower(settings[s], units[u].task) * float(np.exp(noise * rng.standard_normal()))
            runs.append(found.run(s, u, round_, factor))
    return BenchBundle(
        kind="slipstream-bench",
        version=1,
        created="2026-01-01T00:00:00+00:00",
        complete=True,
        model=model,
        target=_TARGET,
        plan=Plan(
            drafters=list(prices), lengths=list(lengths), batches=list(batches), rounds=rounds, tokens=tokens
        ),
        prompts=asked,
        settings=settings,
        units=units,
        sessions=[
            SessionNote(
                started="2026-01-01T00:00:00+00:00",
                command=["slipstream", "bench"],
                load=0.1,
                versions={"slipstream": "0"},
                machine=MachineInfo(name="a quiet box", threads=2),
            )
        ],
        runs=runs,
    )


class _Model:
    """One run in modelled time, row by row as the engine does it: a step for all rows that are not done."""

    def __init__(
        self,
        setting: Setting,
        unit: Unit,
        law: Sequence[float],
        step: Callable[[int, float], float],
        price: float,
        overhead: float,
        tokens: int,
    ) -> None:
        self._setting, self._unit, self._tokens = setting, unit, tokens
        luck = [np.random.default_rng(1000 + p).random(tokens + 64) for p in unit.prompts]
        self.counts = [DraftCounts() for _ in unit.prompts]
        self.steady = [DraftCounts() for _ in unit.prompts]
        self.parts = np.zeros(3)  # target, drafter, other
        self.steady_parts = np.zeros(3)
        self.steps = self.positions = 0
        while live := [i for i, c in enumerate(self.counts) if c.emitted < tokens]:
            left = [tokens - self.counts[i].emitted for i in live]
            depths = [min(setting.depth, rest - 1) for rest in left]
            whole = len(live) == len(luck) and all(
                self.counts[i].passes >= 2 and rest > max(setting.depth, 1)
                for i, rest in zip(live, left, strict=True)
            )
            spent = np.array(
                [step(len(live), 1 + sum(depths) / len(live)), price * max(depths, default=0), overhead]
            )
            self.parts += spent
            if whole:
                self.steady_parts += spent
                self.steps += 1
                self.positions += sum(3 + c.emitted for c in self.counts)
            for i, depth in zip(live, depths, strict=True):
                done, accepted = self.counts[i].emitted, 0
                while accepted < depth and luck[i][done + accepted] < law[min(accepted, len(law) - 1)]:
                    accepted += 1
                for counts in (self.counts[i], *((self.steady[i],) if whole else ())):
                    counts.record(depth, depth, accepted, min(accepted + 1, tokens - done))

    def run(self, setting: int, unit: int, round_: int, factor: float) -> Run:
        parts, steady = self.parts * factor, self.steady_parts * factor
        rows = len(self.counts)
        return Run(
            setting=setting,
            unit=unit,
            round=round_,
            session=0,
            seconds=float(parts.sum()) + 0.2,
            parts=_parts(parts, 0.2),
            steady=Steady(
                steps=self.steps,
                tokens=sum(c.emitted for c in self.steady),
                context=self.positions / (self.steps * rows) if self.steps else 0.0,
                seconds=_parts(steady, 0.0),
            ),
            answers=[
                Answer(
                    prompt=p,
                    ids=[(p * 31 + i) % 997 for i in range(self._tokens)],
                    counts=Counts.of(counts),
                    steady=Counts.of(own),
                )
                for p, counts, own in zip(self._unit.prompts, self.counts, self.steady, strict=True)
            ],
        )


def _parts(spent: NDArray[np.float64], prefill: float) -> Parts:
    target, drafter, other = (float(v) for v in spent)
    return Parts(target=target, drafter=drafter, other=other, prefill=prefill)
