"""A measurement as `slipstream measure` would have written it, made from a law that is known."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from slipstream.core.stats import DraftCounts
from slipstream.cost.bundle import (
    AcceptanceCounts,
    Bundle,
    DrafterInfo,
    DraftSeconds,
    MachineInfo,
    PrefillSeconds,
    StepSeconds,
)


def fake_bundle(
    *,
    step: Callable[[int, int], float] = lambda rows, nodes: 0.1 * max(1.0, rows * nodes / 8),
    prices: Mapping[str, float] | None = None,
    rates: Mapping[str, Mapping[str, Sequence[float]]] | None = None,
    rows: Sequence[int] = (1, 2, 4, 8),
    nodes: Sequence[int] = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16),
    depth: int = 8,
    prompts: int = 6,
    steps: int = 60,
    noise: float = 0.01,
    seed: int = 0,
) -> Bundle:
    """step: seconds by rows and tokens a row. prices: seconds of a drafted token. rates: conditional
    acceptance by drafter, task and position, counted over `prompts` × `steps` drafts. noise: their scatter.
    """
    prices = prices or {"ngram": 0.0001, "draft_model:model=small": 0.015}
    rates = rates or {
        "ngram": {"code": (0.2, 0.4), "edit": (0.9, 0.95)},
        "draft_model:model=small": {"code": (0.85, 0.8, 0.75), "edit": (0.8, 0.75)},
    }
    rng = np.random.default_rng(seed)

    def repeats(seconds: float) -> list[float]:
        return [seconds * float(f) for f in 1 + noise * np.abs(rng.standard_normal(9))]

    return Bundle(
        kind="slipstream-measure",
        version=1,
        created="2026-01-01T00:00:00+00:00",
        model="target",
        dtype="bfloat16",
        parameters=1_500_000_000,
        weight_bytes=3_000_000_000,
        kv_bytes=28672,
        machine=MachineInfo(
            name="a quiet box", threads=2, memory_bytes=16 << 30, bandwidth=2e10, flops={"bfloat16": 4e11}
        ),
        versions={"slipstream": "0"},
        busy=False,
        steps=[
            StepSeconds(rows=r, nodes=n, context=256, seconds=repeats(step(r, n)))
            for r in rows
            for n in nodes
        ],
        drafts=[
            DraftSeconds(drafter=name, rows=r, depth=d, nodes=d, seconds=repeats(d * price))
            for name, price in prices.items()
            for r in rows
            for d in (1, 4, depth)
        ],
        acceptance=[
            _counted(rng, name, task, f"{task} {i}", law, depth, steps)
            for name, tasks in rates.items()
            for task, law in tasks.items()
            for i in range(prompts)
        ],
        prefill=[PrefillSeconds(model="target", tokens=512, seconds=repeats(1.5))],
        drafters=[
            DrafterInfo(drafter="ngram", same_vocabulary=True),
            DrafterInfo(
                drafter="draft_model:model=small",
                parameters=500_000_000,
                memory_bytes=1_000_000_000,
                kv_bytes=12288,
                same_vocabulary=True,
            ),
        ],
        overhead=repeats(0.0005),
    )


def _counted(
    rng: np.random.Generator, name: str, task: str, prompt: str, law: Sequence[float], depth: int, steps: int
) -> AcceptanceCounts:
    counts = DraftCounts()
    for _ in range(steps):
        accepted = 0
        while accepted < depth and rng.random() < law[min(accepted, len(law) - 1)]:
            accepted += 1
        counts.record(depth, depth, accepted, accepted + 1)
    return AcceptanceCounts.of(counts, drafter=name, task=task, prompt=prompt, depth=depth)
