"""What `slipstream plan --json` prints is a deployment: its drafter, its lengths by load, its prediction."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slipstream.errors import ParameterError
from slipstream.export.config import settings
from slipstream.export.deploy_plan import DeployPlan, read_plan
from slipstream.export.from_plan import engine_name

DRAFT = "draft_model:model=org/small"
Options = dict[str, tuple[int, float]]  # length (below 0: it does not pay) and tau by drafter


def advice(
    batches: dict[int, Options], off_from: int | None = None, *, nodes: int = 0, **changes: Any
) -> dict[str, Any]:
    """As the plan prints it, as far as it is read."""

    def option(name: str, length: int, tau: float) -> dict[str, Any]:
        depth = abs(length)
        return {
            "drafter": name,
            "num_speculative_tokens": depth,
            "nodes": nodes or depth,
            "tau": tau,
            "pays": length > 0,
        }

    rows = []
    for batch, by_name in batches.items():
        options = [option(name, *told) for name, told in by_name.items()]
        best = options[0] if options[0]["pays"] else None
        rows.append({"batch": batch, "speculate": best is not None, "best": best, "options": options})
    return {
        "schema": "slipstream-plan/1",
        "estimate": True,
        "verdict": "Speculation pays.",
        "model": {"name": "org/big"},
        "machine": {"name": "H100"},
        "off_from_batch": off_from,
        "batches": rows,
        **changes,
    }


@pytest.fixture
def read(tmp_path: Path) -> Any:
    def call(values: Any, **changes: Any) -> DeployPlan:
        file = tmp_path / "plan.json"
        file.write_text(json.dumps(values))
        return read_plan(file, **changes)

    return call


@pytest.mark.parametrize(
    ("batches", "off_from", "rows"),
    [
        ({1: 4}, None, None),
        ({1: 4, 8: 4}, None, None),
        ({1: 4}, 9, [(1, 8, 4), (9, 9, 0)]),
        ({1: 9, 8: 9, 64: 3, 512: -1}, 351, [(1, 8, 9), (9, 350, 3), (351, 512, 0)]),
        ({1: 4, 8: 2}, None, [(1, 1, 4), (2, 8, 2)]),
        ({1: 4, 8: -1, 16: 2}, None, [(1, 1, 4), (2, 8, 0), (9, 16, 2)]),
        ({1: -1, 8: 3}, 20, [(1, 1, 0), (2, 19, 3), (20, 20, 0)]),
        ({4: 2, 64: -1}, 5, [(1, 4, 2), (5, 64, 0)]),
        ({1: 2, 64: -1}, None, [(1, 1, 2), (2, 64, 0)]),
    ],
)
def test_lengths_by_load(
    read: Any, batches: dict[int, int], off_from: int | None, rows: list[tuple[int, int, int]] | None
) -> None:
    plan = read(advice({b: {DRAFT: (length, 2.5)} for b, length in batches.items()}, off_from))
    assert plan.lengths == rows
    assert plan.num_speculative_tokens == max(batches.values())
    assert (plan.drafter, plan.model, plan.target) == ("draft_model", "org/small", "org/big")
    first = next(iter(batches.values()))
    assert plan.predicted_tau == (2.5 if first > 0 else None)
    assert settings(plan).speculative is not None, "vLLM's linter takes it"


def test_a_length_that_reaches_far_is_said(read: Any) -> None:
    far = read(advice({1: {DRAFT: (4, 2.0)}}, 100))
    assert any("for batch 1 is taken up to batch 99" in note for note in settings(far).notes)
    near = read(advice({1: {DRAFT: (4, 2.0)}, 64: {DRAFT: (2, 1.8)}}, 100))
    assert not any("is taken up to" in note for note in near.notes)


def test_options_win(read: Any) -> None:
    whole = advice({1: {DRAFT: (4, 2.0), "ngram": (2, 1.5)}, 8: {DRAFT: (2, 2.0), "ngram": (-1, 1.2)}}, 9)
    one = read(whole, num_speculative_tokens=3)
    assert one.lengths is None and one.num_speculative_tokens == 3 and one.predicted_tau is None
    assert read(whole, off_above=5).lengths == [(1, 5, 4), (6, 6, 0)]
    other = read(whole, drafter="ngram")
    assert other.model is None and other.lengths == [(1, 1, 2), (2, 8, 0)] and other.predicted_tau == 1.5
    assert read(whole, target="t", model="m").model == "m"
    plain = read(whole, drafter="none")
    assert plain.drafter == "none" and settings(plain).speculative is None


def test_what_does_not_pay_is_not_drafted(read: Any) -> None:
    plan = read(advice({1: {DRAFT: (-1, 1.1)}}, 1))
    assert plan.drafter == "none" and plan.predicted_tau is None and plan.notes


def test_gpus_of_the_plan_are_its_parallelism(read: Any) -> None:
    values = advice({1: {DRAFT: (4, 2.0)}}, machine={"name": "4 × H100"})
    assert read(values).tensor_parallel == 4 and read(values, tensor_parallel=2).tensor_parallel == 2


def test_a_trees_tau_is_not_promised(read: Any) -> None:
    plan = read(advice({1: {"eagle:heads=h": (4, 3.0)}}, nodes=16), drafter="eagle", model="org/head")
    assert plan.predicted_tau is None and any("trees" in note for note in plan.notes)


def test_a_draft_of_another_vocabulary(read: Any) -> None:
    plan = read(advice({1: {"crossvocab:model=org/other,mode=text": (3, 2.0)}}))
    assert plan.drafter == "draft_model" and plan.model == "org/other" and plan.heterogeneous_vocab


def test_heads_are_exported_first(read: Any, checkpoints: dict[str, str]) -> None:
    values = advice({1: {"eagle:heads=./raw": (3, 2.0)}})
    with pytest.raises(ParameterError, match="slipstream export.*--model"):
        read(values)
    for kind in ("eagle1", "eagle3"):
        plan = read(values, model=checkpoints[kind])
        assert plan.drafter == kind.removesuffix("1") and plan.num_speculative_tokens == 3
    with pytest.raises(ParameterError, match="--drafter eagle or eagle3"):
        read(values, model="org/not-here")


@pytest.mark.parametrize(
    ("values", "changes", "message"),
    [
        (advice({1: {"ngram": (3, 2.0)}}, model={"name": "70b"}), {}, "calls the target '70b'.*--target"),
        (advice({1: {"draft_model:model=1b": (3, 2.0)}}), {}, "calls the draft '1b'.*--model"),
        (advice({1: {"draft_model": (3, 2.0)}}), {}, "slipstream export.*--model"),
        (advice({1: {"selfspec": (3, 2.0), "ngram": (1, 1.2)}}), {}, "engines do not have; of the others.* ngram"),  # noqa: E501
        (advice({1: {"ngram": (3, 2.0)}}), {"drafter": "medusa", "model": "m"}, "says nothing about medusa"),
        ({**advice({1: {"ngram": (3, 2.0)}}), "batches": 3}, {}, "make it again"),
        (advice({1: {DRAFT: (-3, 1.0)}}), {"model": "m"}, "Leave --model out"),
        ({"kind": "slipstream-measure", "version": 1}, {}, "slipstream plan --measured"),
    ],
)  # fmt: skip
def test_refusals(read: Any, values: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message) as caught:
        read(values, **changes)
    assert str(caught.value).startswith("the plan ") and "plan.json cannot be used: " in str(caught.value)


def test_names_that_only_slipstream_knows() -> None:
    assert engine_name("qwen2.5-coder-1.5b") == "Qwen/Qwen2.5-Coder-1.5B-Instruct"
    assert (Path(engine_name("tiny")) / "config.json").is_file()
    assert engine_name("org/other") == "org/other"
