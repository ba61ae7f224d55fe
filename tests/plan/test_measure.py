"""Measuring a tiny model: what is written is complete, true to what the engine counts, and fit for advice."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import slipstream
from slipstream import SamplingParams
from slipstream.cli import main
from slipstream.cost.bundle import Bundle, read_bundle
from slipstream.engine.session import Session
from slipstream.errors import CapacityError, ParameterError
from slipstream.plan import drawing
from slipstream.plan import measure as module
from slipstream.plan.advise import advise
from slipstream.plan.measure import Plan, measure, step_seconds
from slipstream.plan.rates import bandwidth, int8_rate, matrix_rate
from slipstream.plan.setup import measured
from slipstream.prompts.rows import read_prompts
from slipstream.testing.quantised import every_size, lacks_int8
from slipstream.testing.tiny import save_tiny

PLAN = Plan(
    rows=(1, 2), nodes=(1, 3), contexts=(8,), depths=(1, 3), prefill=(16,), rounds=3, tokens=12, seed=1
)
PROMPTS = read_prompts(None)[:3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny") / "target", layers=1)


@pytest.fixture(scope="module")
def session(folder: Path) -> Iterator[Session]:
    with slipstream.load(str(folder), max_rows=2) as found:
        yield found


@pytest.fixture(scope="module")
def drafters(folder: Path) -> list[str]:
    return [f"draft_model:model={folder}", "suffix"]


@pytest.fixture(scope="module")
def bundle(session: Session, drafters: list[str]) -> Bundle:
    monkey = pytest.MonkeyPatch()
    with monkey.context() as patched:
        patched.setattr(module, "bandwidth", lambda device: bandwidth(device, 1 << 16))
        patched.setattr(module, "matrix_rate", lambda device, dtype: matrix_rate(device, dtype, 32))
        patched.setattr(module, "load_reasons", list)
        return measure(session, "tiny", drafters, PROMPTS, PLAN)


def test_everything_asked_for_is_there(bundle: Bundle, drafters: list[str]) -> None:
    assert {(s.rows, s.nodes, s.context) for s in bundle.steps} == set(PLAN.grid)
    assert all(len(s.seconds) == PLAN.rounds for s in bundle.steps)
    timed = {(d.drafter, d.rows, d.depth) for d in bundle.drafts}
    assert timed == {(name, r, d) for name in drafters for r in (1, 2) for d in (1, 3)}
    assert all(len(d.seconds) == PLAN.rounds for d in bundle.drafts)
    assert bundle.overhead and bundle.machine.bandwidth and bundle.machine.flops["float32"] > 0
    assert {p.model for p in bundle.prefill} >= {"target", drafters[0]}
    assert Bundle.model_validate_json(bundle.model_dump_json()) == bundle


def test_counts_are_those_of_the_engine(session: Session, bundle: Bundle, drafters: list[str]) -> None:
    params = SamplingParams(max_tokens=PLAN.tokens)
    for name in drafters:
        session.use(name, "fixed:num_speculative_tokens=3")
        counted = [a for a in bundle.acceptance if a.drafter == name]
        assert [a.task for a in counted] == [p.task for p in PROMPTS]
        for prompt, told in zip(PROMPTS, counted, strict=True):
            real = session.generate(list(prompt.asked), params).counts
            assert (told.passes, told.emitted) == (real.passes, real.emitted)
            assert (told.tested_at, told.accepted_at) == (real.tested_at, real.accepted_at)
    session.use("none")


def test_the_target_as_its_own_draft_is_always_accepted(bundle: Bundle, drafters: list[str]) -> None:
    own = [a for a in bundle.acceptance if a.drafter == drafters[0]]
    assert all(a.accepted_at == a.tested_at and sum(a.accepted_at) for a in own)
    info = bundle.info(drafters[0])
    assert info.memory_bytes > 0 and info.parameters == info.memory_bytes // 4 and info.kv_bytes > 0
    assert bundle.info("suffix").memory_bytes < info.memory_bytes


def test_a_drafter_that_needs_no_target_is_not_run_on_it_again(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered: list[int] = []
    real = module._answers
    monkeypatch.setattr(module, "_answers", lambda *a: answered.append(1) or real(*a))
    monkeypatch.setattr(module, "bandwidth", lambda device: 1.0)
    monkeypatch.setattr(module, "matrix_rate", lambda device, dtype: 1.0)
    small = Plan(rows=(1,), nodes=(1,), contexts=(8,), depths=(1,), prefill=(8,), rounds=3, tokens=6)
    got = measure(session, "tiny", ["ngram", "suffix", "recycle"], PROMPTS[:1], small)
    assert len(answered) == 2  # ngram for the answers, recycle for it wants logits
    assert {a.drafter for a in got.acceptance} == {"ngram", "suffix", "recycle"}


def test_trees_are_counted_at_every_depth_and_kept_as_trees(
    session: Session, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "bandwidth", lambda device: 1.0)
    monkeypatch.setattr(module, "matrix_rate", lambda device, dtype: 1.0)
    small = Plan(rows=(1,), nodes=(1, 7), contexts=(8,), depths=(1, 2), prefill=(8,), rounds=3, tokens=6)
    spec = f"draft_model:model={folder},width=3,num_speculative_tokens=2"
    got = measure(session, "tiny", [spec], PROMPTS[:2], small)
    assert {(a.depth, a.nodes) for a in got.acceptance} == {(1, 3), (2, 6)}
    assert {(d.depth, d.nodes) for d in got.drafts} == {(1, 3), (2, 6)}
    setup = measured(got, [1])
    (candidate,) = setup.candidates
    assert set(candidate.trees) == {3, 6} and candidate.longest == 0
    task = PROMPTS[0].task
    for nodes, depth in ((3, 1), (6, 2)):  # the target as its own draft: every level is accepted
        seen = candidate.trees[nodes][task].total
        assert len(seen.drafted) == depth and seen.accepted == seen.tested and seen.tested[-1] > 0
    assert advise(setup).batches[0].options[0].prediction.nodes in (1, 3, 6)


@pytest.mark.skipif(lacks_int8(), reason="this CPU has no int8 products")
def test_an_int8_target_is_measured_as_one(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bundle: Bundle
) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path))
    monkeypatch.setattr(module, "bandwidth", lambda device: 1.0)
    monkeypatch.setattr(module, "int8_rate", lambda: int8_rate(32))
    small = Plan(rows=(1,), nodes=(1, 2), contexts=(8,), depths=(1,), prefill=(8,), rounds=3, tokens=4)
    with every_size(), slipstream.load(str(folder), weights="int8") as session:
        got = measure(session, "tiny", [], [], small)
    assert got.dtype == "int8" and got.machine.flops["int8"] > 0 and len(got.machine.flops) == 1
    assert got.weight_bytes < 0.6 * bundle.weight_bytes and got.kv_bytes == bundle.kv_bytes


def test_measuring_leaves_the_session_as_it_was(session: Session, bundle: Bundle) -> None:
    assert not session.engine.has_work and len(session.engine.runner.cache) == 0
    assert session.drafter.name == "none"
    assert session.generate([1, 2, 3], SamplingParams(max_tokens=4)).tokens


def test_steps_are_computed_in_another_order_every_round(session: Session) -> None:
    seen: list[tuple[int, int]] = []
    runner = session.engine.runner
    forward = runner.forward

    def watched(rows, **options):  # type: ignore[no-untyped-def]
        seen.append((len(rows), len(rows[0].tokens)))
        return forward(rows, **options)

    runner.forward = watched  # type: ignore[method-assign]
    try:
        step_seconds(runner, [(rows, nodes, 4) for rows in (1, 2) for nodes in (1, 2, 3, 4)], 3)
    finally:
        del runner.forward  # type: ignore[method-assign]
    steps = seen[1:]  # the first read the context
    rounds = [steps[i : i + 8] for i in range(0, len(steps), 8)]
    assert (
        len(rounds) == 4 and len({tuple(r) for r in rounds}) == 4 and len({frozenset(r) for r in rounds}) == 1
    )


def test_rates_are_of_the_right_size() -> None:
    cpu = torch.device("cpu")
    assert 1e8 < bandwidth(cpu, 1 << 20) < 1e13
    assert 1e7 < matrix_rate(cpu, torch.float32, 64) < 1e14


def test_the_grid_leaves_out_what_is_too_large_but_never_a_plain_step() -> None:
    grid = Plan(rows=(1, 64), nodes=(1, 4, 8), most_tokens=32).grid
    assert (64, 1, 256) in grid and (64, 4, 256) not in grid and (1, 8, 256) in grid


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rows": ()}, "--rows must be whole numbers"),
        ({"nodes": (2, 3)}, "--nodes must hold 1"),
        ({"rounds": 2}, "--rounds must be at least 3, not 2"),
        ({"tokens": 5}, "--tokens must be at least 11, not 5"),
    ],
)
def test_plans_that_measure_nothing_are_refused(change: dict, words: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(ParameterError, match=words):
        Plan(**change)


def run(*arguments: str):  # type: ignore[no-untyped-def]
    return CliRunner().invoke(main.build_app(), list(arguments), prog_name="slipstream")


def test_measure_then_plan_then_goodput_on_the_command_line(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "bandwidth", lambda device: bandwidth(device, 1 << 16))
    monkeypatch.setattr(module, "matrix_rate", lambda device, dtype: matrix_rate(device, dtype, 32))
    out, png = tmp_path / "m.json", tmp_path / "m.png"
    grid = ["--rows", "1,2", "--nodes", "1,2,3", "--contexts", "8", "--depths", "1,2", "--rounds", "3"]
    files = ["--out", str(out), "--png", str(png)]
    got = run(
        *["measure", "--model", str(folder), "--drafter", "ngram:min_n=1", *grid, *files],
        *["--tokens", "8", "--limit", "2"],
    )
    assert got.exit_code == 0, got.stderr
    assert "PLAIN STEP" in got.stdout and "ngram:min_n=1" in got.stdout
    assert png.read_bytes().startswith(b"\x89PNG") and read_bundle(out).model == str(folder)
    advice = json.loads(run("plan", "--measured", str(out), "--batch", "1,2", "--json").stdout)
    assert [b["batch"] for b in advice["batches"]] == [1, 2] and not advice["estimate"]
    with slipstream.load(str(folder), drafter="ngram:min_n=1", controller=f"goodput:curve={out}") as found:
        adapted = found.generate([1, 2, 1, 2, 1], SamplingParams(max_tokens=20))
    with slipstream.load(str(folder)) as plain:
        assert plain.generate([1, 2, 1, 2, 1], SamplingParams(max_tokens=20)).tokens == adapted.tokens


def test_charts_that_cannot_be_drawn_are_told_before_a_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drawing, "find_spec", lambda name: None)
    for arguments in (
        ["measure", "--model", "nothing-here", "--png", str(tmp_path / "m.png")],
        ["bench", "--model", "nothing-here", "--drafter", "ngram", "--html", str(tmp_path / "b.html")],
        ["plan", "--measured", "nothing-here.json", "--html", str(tmp_path / "p.html")],
    ):
        got = run(*arguments)
        assert got.exit_code == 2 and got.stdout == ""
        assert "charts need matplotlib: pip install" in got.stderr and got.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_what_there_is_no_room_for_is_told_before_anything_is_measured(session: Session) -> None:
    room, slots = session.engine.context, session.engine.load.slots
    long = replace(read_prompts()[0], messages=({"role": "user", "content": "x" * room},))
    for plan, asked, words in (
        (Plan(rows=(slots + 1,)), [], f"{slots + 1} rows need a session of as many"),
        (Plan(rows=(1,), contexts=(room,)), [], f"does not fit the model's context of {room}"),
        (Plan(rows=(1,), contexts=(8,)), [long], "small.jsonl, line 1: the prompt has"),
        (Plan(rows=(1,), contexts=(8,)), [], "there are no prompts"),
    ):
        with pytest.raises(ParameterError, match=words):
            measure(session, "x", ["ngram"], asked, plan)
    shape = module.target_shape(session.engine.runner, "x")
    with pytest.raises(CapacityError, match="1000000000 rows of 64 tokens need .* ask for less"):
        module.require_cache(session, shape, 10**9, 64, "ask for less")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rows", "1,x"], "--rows must be whole numbers such as 1,2,4, not '1,x'"),
        (["--prompts", "none.txt"], "there is no file none.txt"),
        (["--drafter", "ngrm"], "unknown drafter 'ngrm'; did you mean 'ngram'?"),
        (["--out", "no/where.json"], "the folder of no/where.json does not exist"),
        (["--limit", "0"], "--limit must be at least 1"),
        (["--out", "."], ". cannot be written (it is a folder)"),
        (["--png", "slipstream-measure.json"], "slipstream-measure.json cannot be two files"),
        (["--drafter", " none"], "plain decoding is always measured"),
    ],
)
def test_mistakes_are_told_before_a_model_is_loaded(arguments: list[str], words: str) -> None:
    got = run("measure", "--model", "nothing-here", *arguments)
    assert got.exit_code == 2 and words in got.stderr and got.stderr.count("\n") == 1
