"""What the load bench makes of its runs: the same prompts for all settings, a table, the aims, a chart."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import serve_load
from slipstream.plan.drawing import png


def run(setting: str, concurrency: int, round_: int, seconds: float, drafted: float = 0.0) -> dict[str, Any]:
    return {
        "setting": setting,
        "concurrency": concurrency,
        "round": round_,
        "seconds": seconds,
        "tokens": 100,
        "first": [0.1, 0.2],
        "each": [0.01],
        "texts": ["a", "b"],
        "drafted": [10.0, 10 * drafted],
    }


RUNS = [
    run(name, concurrency, round_, seconds, drafted)
    for concurrency, faster in ((1, 2.0), (8, 0.99))
    for round_ in (0, 1)
    for name, seconds, drafted in (("plain", 10.0, 0.0), ("speculative", 10.0 / faster, 4 * (faster > 1)))
]


def test_the_levels_are_told_with_their_ratio_and_what_was_drafted() -> None:
    lines = serve_load.table(serve_load.levels_of(RUNS))
    assert len(lines) == 2 + 4
    assert "| 1 | speculative | 20.00 (20.00-20.00) | 2.00 (2.00-2.00) | 4.00 |" in lines[3]
    assert "| 8 | speculative | 9.90 (9.90-9.90) | 0.99 (0.99-0.99) | 0.00 |" in lines[5]


def test_the_aims_are_met_or_not() -> None:
    assert [": met" in line for line in serve_load.verdict(serve_load.levels_of(RUNS))] == [True, True]
    slow = [r if r["concurrency"] == 1 else {**r, "seconds": 10 + (r["setting"] != "plain")} for r in RUNS]
    assert "NOT MET" in serve_load.verdict(serve_load.levels_of(slow))[0]


def test_the_chart_is_drawn_with_and_without_a_peer() -> None:
    peer = [run("vllm", 1, 0, 9.0)]
    for runs in (RUNS, [*RUNS, *peer]):
        levels = serve_load.levels_of(runs)
        assert png(lambda levels=levels: serve_load.figure(levels)).startswith(b"\x89PNG")  # type: ignore[misc]


def test_every_level_asks_every_prompt_and_nothing_is_asked_twice(tmp_path: Path) -> None:
    loads = serve_load.plan([1, 4, 16], rounds=2, requests=3, prompts=5)
    assert [(c, n) for _, c, n, _ in loads[:3]] == [(1, 3), (4, 8), (16, 32)]
    asked = [(c, i) for _, c, n, first in loads for i in range(first, first + n)]
    assert len({i for _, i in asked}) == len(asked)
    assert {i % 5 for c, i in asked if c == 1} == {0, 1, 2, 3, 4}
    file = tmp_path / "p.jsonl"
    file.write_text("\n".join(f'{{"id": "{i}", "task": "qa", "prompt": "p{i}"}}' for i in range(5)))
    args = argparse.Namespace(prompts=file, max_tokens=8, temperature=0.0)
    texts = [b["messages"][0]["content"] for b in serve_load.bodies_of(args, 12, 0)]
    assert len(set(texts)) == 12 and texts[0] == "p0" and texts[5].startswith("p0\n")
    assert serve_load.different(RUNS, "speculative", "plain") == 0
