"""The search for sublayers to leave out measures what the drafter will do, and finds what is planted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import slipstream
from slipstream.cli.main import build_app
from slipstream.core.draft import Budget, DraftRequest
from slipstream.core.params import SamplingParams
from slipstream.drafters._skip_search import Measure, Step, Text, best_plan, predict, search
from slipstream.drafters._tuned import Tuned
from slipstream.drafters.base import TargetInfo
from slipstream.drafters.none import NoConfig, NoDrafter
from slipstream.drafters.selfspec import SelfSpecConfig, SelfSpecDrafter
from slipstream.engine.engine import Engine
from slipstream.engine.inputs import question_ids
from slipstream.model.runner import Runner
from slipstream.model.skip import SkipSet
from slipstream.prompts.rows import read_rows
from slipstream.testing.tiny import EOS_ID, save_tiny, tiny_model, tiny_tokenizer

VOCAB, DEPTH = 40, 4
IDLE = SkipSet.parse("a1+m2")


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture(scope="module")
def runner() -> Runner:
    """A model in which two of eight sublayers hardly do anything."""
    model = tiny_model("llama", vocab_size=VOCAB, layers=4, seed=4)
    for layer in IDLE.attention:
        model.model.layers[layer].self_attn.o_proj.weight.mul_(1e-3)
    for layer in IDLE.mlp:
        model.model.layers[layer].mlp.down_proj.weight.mul_(1e-3)
    return Runner(model, pack=False)


@pytest.fixture(scope="module")
def texts(runner: Runner) -> list[Text]:
    prompts = [tuple((5 * i + j * j) % VOCAB for j in range(3 + i)) for i in range(4)]
    engine = Engine(runner, NoDrafter(NoConfig(), TargetInfo(VOCAB, 2048)), vocab_size=VOCAB)
    ids = [engine.add(p, SamplingParams(max_tokens=18)) for p in prompts]
    rows = [engine.find(i) for i in ids]
    list(engine.run())
    return [Text(p, tuple(r.output)) for p, r in zip(prompts, rows, strict=True) if r is not None]


@pytest.mark.parametrize("skip", ["a0", "m1+a2", "2-3"])
def test_windows_are_what_the_drafter_would_draft(runner: Runner, texts: list[Text], skip: str) -> None:
    """The same tokens up to the first wrong one, the same confidences, the same stop."""
    measure = Measure(runner, texts, DEPTH)
    windows = iter(measure.windows(SkipSet.parse(skip)))
    info = TargetInfo(VOCAB, 2048, runner=runner)
    drafter = SelfSpecDrafter(SelfSpecConfig(skip=skip, min_confidence=0.0), info)
    count = right = 0
    for text in texts:
        tokens = [*text.prompt, *text.answer]
        for start in range(0, len(text.answer) - DEPTH + 1, DEPTH):
            committed = tokens[: len(text.prompt) + start]
            runner.cache.open(0)
            runner.extend(0, committed[:-1])
            request = DraftRequest(0, committed, 1, Budget.chain(DEPTH), SamplingParams(), 1)
            drafted = drafter.propose([request])[0].tree.tokens[1:]
            runner.cache.close(0)
            window = next(windows)
            wanted = text.answer[start : start + DEPTH]
            accepted = next((i for i in range(DEPTH) if drafted[i] != wanted[i]), DEPTH)
            assert accepted == next((i for i in range(DEPTH) if not window[i].right), DEPTH)
            count, right = count + 1, right + accepted
    assert next(windows, None) is None and len(measure) == count
    assert 0 < right < count * DEPTH
    measure.close()
    assert len(runner.cache) == 0


def test_leaving_out_nothing_is_always_right(runner: Runner, texts: list[Text]) -> None:
    measure = Measure(runner, texts, DEPTH)
    assert all(step.right for window in measure.windows(SkipSet()) for step in window)
    measure.close()


def test_the_prediction_counts_every_pass() -> None:
    sure, wrong, unsure = Step(True, 0.9), Step(False, 0.9), Step(True, 0.1)
    windows = [(sure, sure, wrong), (sure, unsure, sure), (wrong, sure, sure)]
    speedup, acceptance = predict(windows, 0.5, 3, 0.0)
    assert speedup == pytest.approx((3 + 4 + 1) / (3 + 0.5 * 9)) and acceptance == pytest.approx(5 / 9)
    speedup, acceptance = predict(windows, 0.5, 3, 0.5)  # the second stops at its second token
    assert speedup == pytest.approx((3 + 2 + 1) / (3 + 0.5 * 8)) and acceptance == pytest.approx(3 / 7)
    assert predict(windows, 0.5, 1, 0.0)[0] == pytest.approx((2 + 2 + 1) / (3 + 0.5 * 3))
    plan = best_plan(windows, 0.5, SkipSet())
    assert plan.speedup == max(predict(windows, 0.5, d, c)[0] for d in (1, 2, 3) for c in (0.0, 0.5, 0.9))


def test_the_search_finds_the_idle_sublayers_and_is_repeatable(runner: Runner, texts: list[Text]) -> None:
    measure = Measure(runner, texts, DEPTH)
    told: list[tuple[int, Tuned]] = []
    found = search(measure, 40, seed=1, report=lambda n, best: told.append((n, best)))
    assert IDLE.attention <= found.skip.attention and IDLE.mlp <= found.skip.mlp
    assert found.acceptance > 0.5 and found.speedup > 1.0
    assert [n for n, _ in told] == list(range(1, len(told) + 1)) and len(told) <= 40
    assert [b.speedup for _, b in told] == sorted(b.speedup for _, b in told)
    assert search(measure, 40, seed=1) == found
    for trials in (2, 5):
        assert search(measure, trials).speedup > 0
    measure.close()


def test_the_command_keeps_what_selfspec_then_uses(cache_folder: Path) -> None:
    model = save_tiny(cache_folder / "model", kind="qwen2", layers=3, seed=2, dtype=torch.bfloat16)
    prompts = cache_folder / "prompts.jsonl"
    prompts.write_text('{"prompt": "one"}\n{"messages": [{"role": "user", "content": "two"}]}\n')
    options = ["tune", "selfspec", "--model", str(model), "--prompts", str(prompts), "--json"]
    options += ["--tokens", "12", "--depth", "3", "--trials", "12"]
    done = CliRunner().invoke(build_app(), options)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert json.loads(Path(found["path"]).read_text())["skip"] == found["skip"]
    with slipstream.load(str(model), drafter="selfspec") as session:
        drafter = session.drafter
        assert isinstance(drafter, SelfSpecDrafter) and str(drafter.skip) == found["skip"]
        assert drafter.num_speculative_tokens == found["num_speculative_tokens"]
        params = SamplingParams(max_tokens=16, temperature=0.8, seed=3)
        fast = session.generate("three", params)
        session.use("none")
        assert session.generate("three", params).tokens == fast.tokens


def test_a_cache_that_cannot_be_written_is_told_before_the_search(
    cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_tiny(cache_folder / "model", kind="qwen2", layers=1)
    (cache_folder / "file").write_text("")
    (cache_folder / "prompts.txt").write_text("one\n")
    options = ["tune", "selfspec", "--model", str(model), "--prompts", str(cache_folder / "prompts.txt")]
    for place in (cache_folder / "file", Path("/proc/none")):
        monkeypatch.setenv("SLIPSTREAM_CACHE", str(place))
        done = CliRunner().invoke(build_app(), options)
        assert done.exit_code == 2 and f"error: {place}" in done.stderr
        assert "cannot be used" in done.stderr and "answering" not in done.stderr


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["selfspec", "--depth", "0"], "--depth must be at least 1"),
        (["selfspec", "--tokens", "4"], "--tokens must be at least 8"),
        (["selfspec"], "there is no file"),
    ],
)
def test_mistakes_are_one_line(options: list[str], reason: str) -> None:
    done = CliRunner().invoke(build_app(), ["tune", *options, "--model", "x", "--prompts", "/nowhere.txt"])
    assert done.exit_code == 2
    assert reason in done.stderr and done.stderr.strip().count("\n") == 0


def test_what_cannot_be_tuned_is_refused() -> None:
    done = CliRunner().invoke(build_app(), ["tune", "ngram"])
    assert done.exit_code == 2 and "No such command 'ngram'" in done.stderr


def test_a_row_is_asked_as_serving_would(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    path.write_text('{"prompt": "a"}\n' + json.dumps({"messages": turns}))
    tokenizer = tiny_tokenizer()
    asked = [question_ids(tokenizer, row.asked) for row in read_rows([str(path)])]
    assert asked[0] == asked[1] == list(b"<user>a") + [EOS_ID] + list(b"<assistant>")
    tokenizer.chat_template = None
    assert question_ids(tokenizer, read_rows([str(path)])[0].asked) == list(b"a")
