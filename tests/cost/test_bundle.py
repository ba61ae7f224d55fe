"""The measurement file: what is written is read back, and what is wrong is told in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slipstream.core.stats import DraftCounts
from slipstream.cost.bundle import AcceptanceCounts, Bundle, busy_reasons, merge, read_bundle, read_bundles
from slipstream.errors import ParameterError


def raw(**changes: Any) -> dict[str, Any]:
    value: dict[str, Any] = {
        "kind": "slipstream-measure",
        "version": 1,
        "created": "2026-01-01T00:00:00+00:00",
        "model": "target",
        "dtype": "bfloat16",
        "parameters": 1000,
        "weight_bytes": 2000,
        "kv_bytes": 4,
        "machine": {"name": "box", "threads": 2, "memory_bytes": 1 << 30},
        "versions": {"torch": "2"},
        "busy": False,
        "steps": [{"rows": 1, "nodes": n, "context": 0, "seconds": [1.0, 1.1, 1.0]} for n in (1, 5, 9)],
        "drafts": [{"drafter": "d", "rows": 1, "depth": 2, "nodes": 2, "seconds": [0.2, 0.3, 0.2]}],
        "acceptance": [counts(3, "a"), counts(4, "b", depth=4), counts(4, "c", depth=4)],
    }
    return {**value, **changes}


def counts(passes: int, prompt: str, depth: int = 2, nodes: int = 0) -> dict[str, Any]:
    counted = DraftCounts()
    for i in range(passes):
        counted.record(depth, max(nodes, depth), i % (depth + 1), i % (depth + 1) + 1)
    made = AcceptanceCounts.of(counted, drafter="d", task="code", prompt=prompt, depth=depth, nodes=nodes)
    return made.model_dump()


def written(tmp_path: Path, value: Any, name: str = "m.json") -> Path:
    path = tmp_path / name
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def test_round_trip_and_what_is_derived(tmp_path: Path) -> None:
    bundle = read_bundle(written(tmp_path, raw(overhead=[0.3, 0.1, 0.2])))
    assert Bundle.model_validate_json(bundle.model_dump_json()) == bundle
    assert float(bundle.step_curve.seconds(1, 5)) == 1.0
    assert bundle.draft_curve("d").draft_seconds(1, 2, 2) == pytest.approx(0.2)
    assert bundle.overhead_seconds == 0.2 and bundle.drafter_names == ["d"]
    assert bundle.info("d").memory_bytes == 0 and bundle.prefill_seconds("target", 10) is None
    with pytest.raises(ParameterError, match="drafter 'x' was not measured; measured are d"):
        bundle.draft_curve("x")


def test_levels_that_were_asked_for_and_never_drafted_are_known_not_to_be() -> None:
    counted = DraftCounts()
    for _ in range(200):
        counted.record(2, 2, 2, 3)
    told = AcceptanceCounts.of(counted, drafter="d", task="t", depth=4).acceptance
    assert told.expected_tokens(4) == pytest.approx(3.0, abs=0.1)  # not 5, though all was accepted
    assert told.lengths(4).tolist() == [0, 0, 1, 0, 0]


def test_the_longest_chains_count_and_trees_are_kept_apart() -> None:
    bundle = Bundle.model_validate(raw(acceptance=[*raw()["acceptance"], counts(5, "a", 2, 7)]))
    samples = bundle.samples("d")
    assert set(samples) == {("code", 0), ("code", 7)}
    assert len(samples["code", 0].prompts) == 2 and samples["code", 0].total.passes == 8


def test_prompt_reading_is_in_proportion_between_what_was_measured() -> None:
    points = [{"model": "target", "tokens": t, "seconds": [s]} for t, s in ((100, 1.0), (300, 2.0))]
    bundle = Bundle.model_validate(raw(prefill=points))
    assert [bundle.prefill_seconds("target", t) for t in (50, 100, 200, 600)] == [0.5, 1.0, 1.5, 4.0]


def test_a_scattered_measurement_says_so() -> None:
    assert busy_reasons(Bundle.model_validate(raw())) == []
    steps = [{"rows": 1, "nodes": 1, "context": 0, "seconds": [1.0, 2.0, 3.0, 1.0]}]
    (reason,) = busy_reasons(Bundle.model_validate(raw(steps=steps)))
    assert "repeats of a step differ by" in reason
    told = Bundle.model_validate(raw(busy=True, busy_because=["load 4.0 on 2 cores"]))
    assert busy_reasons(told) == ["load 4.0 on 2 cores"]


def test_several_files_are_one(tmp_path: Path) -> None:
    counted = [raw(), raw(acceptance=[counts(3, "a"), counts(5, "a")])]
    paths = [written(tmp_path, value, f"{i}.json") for i, value in enumerate(counted)]
    both = read_bundles(paths)
    # what is counted of the same answer again tells nothing new
    assert both.steps[0].seconds == [1.0, 1.1, 1.0] * 2 and [a.passes for a in both.acceptance] == [
        3,
        4,
        4,
        5,
    ]
    with pytest.raises(ParameterError, match="0.json is given twice"):
        read_bundles([paths[0], *paths])
    assert both.drafts[0].seconds == [0.2, 0.3, 0.2] * 2
    other = Bundle.model_validate(raw(machine={"name": "other box", "threads": 2}))
    with pytest.raises(ParameterError, match="differ in machine.name: box and other box"):
        merge([both, other])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 2}, "version: Input should be 1"),
        ({"steps": []}, "steps: List should have at least 1 item"),
        ({"steps": [{"rows": 1, "nodes": 1, "context": 0}]}, r"steps.0.seconds: Field required"),
        ({"steps": [{"rows": 1, "nodes": 1, "context": 0, "seconds": [-1]}]}, "steps.0.seconds.0: .*greater"),
        ({"stepps": []}, "stepps: Extra inputs are not permitted"),
        ({"machine": {}}, "machine.name: Field required"),
        ({"busy": None, "model": None}, r"\(and 1 more\)"),
    ],
)  # fmt: skip
def test_what_is_missing_or_wrong_is_named(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    with pytest.raises(ParameterError, match=words) as told:
        read_bundle(written(tmp_path, raw(**change)))
    assert "m.json" in str(told.value) and "\n" not in str(told.value)


def test_files_that_are_no_measurement_at_all(tmp_path: Path) -> None:
    for text in ("", "{", "[]", "null"):
        with pytest.raises(ParameterError, match="m.json is not a measurement"):
            read_bundle(written(tmp_path, text))
    with pytest.raises(ParameterError, match="cannot be read"):
        read_bundle(tmp_path / "none.json")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ParameterError, match="it is not text"):
        read_bundle(tmp_path / "bytes.json")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"steps": [{"rows": 1, "nodes": 1, "context": 0, "seconds": [1.0]}] * 2}, "is there twice"),
        (
            {"drafts": [{"drafter": "d", "rows": 1, "depth": 1, "nodes": 1, "seconds": [1.0]}] * 2},
            "is there t",
        ),
        (
            {"drafts": [{"drafter": "d", "rows": 1, "depth": 3, "nodes": 2, "seconds": [1.0]}]},
            "depth <= nodes",
        ),
    ],
)
def test_what_makes_no_curve_is_told_when_the_file_is_read(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    with pytest.raises(ParameterError, match=f"m.json: .*{words}"):
        read_bundle(written(tmp_path, raw(**change)))


def test_counts_that_contradict_each_other_are_told(tmp_path: Path) -> None:
    bad = {**counts(3, "a"), "accepted_at": [9, 9]}
    with pytest.raises(ParameterError, match="m.json: acceptance counts at position 1"):
        read_bundle(written(tmp_path, raw(acceptance=[bad])))
