"""What is derived from a bench: comparisons beyond noise, predictions beside measurements, the figures."""

from __future__ import annotations

import json
import math
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

from slipstream.bench.bundle import BenchBundle, Run, Setting, read_bench
from slipstream.bench.compare import compare
from slipstream.bench.figures import figures
from slipstream.bench.predict import Predictor
from slipstream.bench.report import make_report, to_html, to_json
from slipstream.bench.summary import Ratio, Summary, decoding, ratio, whole
from slipstream.cost.bundle import Bundle, DraftSeconds, StepSeconds
from slipstream.errors import ParameterError
from slipstream.testing.benched import fake_bench
from slipstream.testing.measured import fake_bundle

DRAFT = "draft_model:model=small"
PRICES = {"ngram": 0.0001, DRAFT: 0.015}
RATES = {
    "ngram": {"code": (0.2, 0.4), "edit": (0.9, 0.95)},
    DRAFT: {"code": (0.85, 0.8, 0.75), "edit": (0.8, 0.75)},
}


def fake(**options: Any) -> BenchBundle:
    return fake_bench(**{"prices": PRICES, "rates": RATES, "noise": 0.02, **options})


@pytest.fixture(scope="module")
def before() -> BenchBundle:
    return fake(seed=1)


def slowed(factor: float, drafter: str = DRAFT, task: str = "code") -> BenchBundle:
    def slower(setting: Setting, on: str) -> float:
        return factor if (setting.drafter, setting.depth, on) == (drafter, 4, task) else 1.0

    return fake(seed=2, slower=slower)


# -- what changed -----------------------------------------------------------------------------------


def test_a_planted_slowdown_is_found_and_nothing_else(before: BenchBundle) -> None:
    found = compare(slowed(1.2), before)
    (change,) = found.changed
    assert (change.setting.drafter, change.setting.depth, change.task) == (DRAFT, 4, "code")
    assert change.verdict == "slower" and change.low < 1 / 1.2 - 1 < change.high < 0
    assert found.verdict.startswith("1 of 8 cells are slower against plain decoding.")
    (change,) = compare(slowed(1 / 1.2), before).changed
    assert change.verdict == "faster"


def test_noise_alone_is_no_change() -> None:
    alarms = 0
    for seed in range(20):
        found = compare(fake(seed=100 + seed, noise=0.04), fake(seed=200 + seed, noise=0.04))
        assert found.noise[1] is not None and 0.03 < found.noise[1] < 0.09  # plain decoding's is in there
        alarms += bool(found.changed)
    assert alarms <= 3  # 1 in 20 is expected


def test_a_machine_that_is_slower_changes_plain_decoding_alone(before: BenchBundle) -> None:
    found = compare(fake(seed=2, slower=lambda setting, task: 1.25), before)
    assert {c.setting.plain for c in found.changed} == {True} and len(found.changed) == 2
    assert all(abs(c.change + 0.2) < 0.05 for c in found.changed)
    assert "No speed-up changed beyond noise. Plain decoding itself changed by -" in found.verdict


def test_on_a_busy_machine_nothing_is_claimed(before: BenchBundle) -> None:
    found = compare(fake(seed=3, noise=0.6), before)
    drafting = [c for c in found.changes if not c.setting.plain]
    assert not found.changed and all(c.verdict == "unclear" for c in drafting)
    assert "busy machine" in found.verdict
    assert any("rounds of plain decoding differ by" in note for note in found.notes)


def test_without_repeats_the_noise_is_not_known() -> None:
    options: dict[str, Any] = {"rounds": 1, "prompts": 1}
    found = compare(fake(seed=1, **options), fake(seed=2, slower=lambda s, t: 1.5, **options))
    assert {c.verdict for c in found.changes} == {"unclear"} and found.noise == {1: None}
    assert "too few rounds or prompts for the noise there is" in found.verdict
    told = to_json(make_report(fake(seed=1, **options), None, fake(seed=2, **options)))
    assert json.loads(json.dumps(told, allow_nan=False))["comparison"]["changes"][0]["high"] is None


def test_what_is_accepted_is_compared_without_a_clock(before: BenchBundle) -> None:
    worse = {**RATES, "ngram": {"code": (0.2, 0.4), "edit": (0.6, 0.7)}}
    found = compare(fake(seed=2, rates=worse), before)
    assert {(c.setting.drafter, c.task) for c in found.changes if c.drafts_changed} == {("ngram", "edit")}
    assert "What is accepted changed in 2 cells." in found.verdict
    assert not any(c.other_tokens for c in found.changes)


def test_an_interval_holds_the_truth_of_unequal_rounds(before: BenchBundle) -> None:
    found = compare(fake(seed=4, rounds=1), before)  # 3 rounds before, 1 now
    assert not found.changed
    for change in found.changes:
        assert change.low < 0 < change.high


def test_other_models_and_other_benches_are_refused(before: BenchBundle) -> None:
    other = before.model_copy(update={"target": before.target.model_copy(update={"weights": "x"})})
    with pytest.raises(ParameterError, match="the baseline is of another model .*weights x"):
        compare(before, other)
    with pytest.raises(ParameterError, match="no cell in common"):
        compare(before, fake(lengths=(9,), rates={k: {"qa": (0.5,)} for k in RATES}))


def test_what_is_not_alike_is_told(before: BenchBundle) -> None:
    note = before.sessions[0]
    moved = note.model_copy(update={"machine": note.machine.model_copy(update={"threads": 4})})
    found = compare(before.model_copy(update={"sessions": [moved]}), before)
    assert "threads: 2 before, 4 now" in found.notes


# -- ratios -----------------------------------------------------------------------------------------


def test_ratios_are_of_all_tokens_over_the_seconds_of_middle_rounds(before: BenchBundle) -> None:
    summary = Summary(before)
    cell = next(c for c in summary.cells if c.setting.depth == 4 and c.task == "edit")

    def pace(runs: list[Run]) -> float:
        units = {r.unit: [x for x in runs if x.unit == r.unit] for r in runs}
        return sum(u[0].tokens for u in units.values()) / sum(
            statistics.median(r.seconds for r in unit) for unit in units.values()
        )

    by_hand = pace([run for run, _ in cell.pairs]) / pace([plain for _, plain in cell.pairs])
    assert cell.speedup.value == pytest.approx(by_hand) and len(cell.pairs) == 12
    assert cell.speedup.low < cell.speedup.value < cell.speedup.high
    assert cell.decoding.value > cell.speedup.value > 1  # plain decoding reads the prompts too
    assert all(run.unit == plain.unit and run.round == plain.round for run, plain in cell.pairs)
    one = ratio(cell.pairs[:1], whole)
    assert one == Ratio(one.value, one.value, one.value) and not one.certain
    assert ratio([], whole) is None


@pytest.mark.parametrize("plain", [True, False])
def test_what_holds_up_one_run_of_three_changes_nothing(before: BenchBundle, plain: bool) -> None:
    def slower(run: Run) -> Run:
        setting = before.of(run)
        if run.round != 1 or setting.plain != plain:
            return run
        return run.model_copy(update={"seconds": 1.5 * run.seconds})

    assert before.plan.rounds == 3
    summary = Summary(before)
    held_up = Summary(before.model_copy(update={"runs": [slower(run) for run in before.runs]}))
    for cell, other in zip(summary.cells, held_up.cells, strict=True):
        if cell.setting.fixed:
            assert other.speedup.value == pytest.approx(cell.speedup.value, rel=0.03)


def test_rounds_that_are_missing_leave_the_others(before: BenchBundle) -> None:
    runs = [r for r in before.runs if r.round == 0 or r.unit % 2]
    summary, whole_one = Summary(before.model_copy(update={"runs": runs})), Summary(before)
    for cell, other in zip(summary.cells, whole_one.cells, strict=True):
        assert cell.speedup.value == pytest.approx(other.speedup.value, rel=0.05)
        assert cell.speedup.low <= cell.speedup.value <= cell.speedup.high


def test_a_total_is_of_all_tasks(before: BenchBundle) -> None:
    summary = Summary(before)
    total = next(c for c in summary.totals if c.setting.drafter == "ngram" and c.setting.depth == 4)
    parts = [summary.of(total.setting, task) for task in summary.tasks]
    assert total.answers == sum(c.answers for c in parts if c) == 24 and total.same == 24
    assert total.counts.emitted == sum(c.counts.emitted for c in parts if c)
    assert sum(total.split.values()) == pytest.approx(
        sum(r.parts.total for r, _ in total.pairs) / total.counts.emitted
    )


# -- predictions ------------------------------------------------------------------------------------


def curve(**options: Any) -> Bundle:
    return fake_bundle(**{"noise": 0.0, "prices": PRICES, "rates": RATES, **options})


def test_a_prediction_is_what_one_gets_by_hand() -> None:
    """E[L] = 1 + 0.8 + 0.8 · 0.5 = 2.2; a step of 3 tokens takes 0.12 s, of one 0.1 s, two drafted 0.02 s."""
    bundle = fake(
        prices={"ngram": 0.01}, rates={"ngram": {"code": (1.0,)}}, lengths=(2,), prompts=1, rounds=1
    )
    plain, drafted = bundle.runs

    def steady(run, steps, tokens, seconds, counts):  # type: ignore[no-untyped-def]
        parts = run.parts.model_copy(update={"target": seconds, "drafter": 0.0, "prefill": 0.0, "other": 0.0})
        answer = run.answers[0].model_copy(update={"steady": run.answers[0].steady.model_copy(update=counts)})
        told = run.steady.model_copy(update={"steps": steps, "tokens": tokens, "seconds": parts})
        return run.model_copy(update={"steady": told, "answers": [answer]})

    counts = {"passes": 100, "emitted": 220, "drafted_at": [100, 100]}
    counts |= {"tested_at": [100, 80], "accepted_at": [80, 40]}  # type: ignore[dict-item]
    measurement = curve(prices={"ngram": 0.01}).model_copy(
        update={
            "overhead": [],
            "steps": [
                StepSeconds(rows=1, nodes=n, context=256, seconds=[s, s]) for n, s in ((1, 0.1), (3, 0.12))
            ],
            "drafts": [DraftSeconds(drafter="ngram", rows=1, depth=2, nodes=2, seconds=[0.02, 0.02])],
        }
    )
    for seconds, error, close in ((14.7, 0.05, True), (16.8, 0.2, False), (13.3, -0.05, True)):
        runs = [steady(plain, 100, 100, 10.0, {}), steady(drafted, 100, 220, seconds, counts)]
        summary = Summary(bundle.model_copy(update={"runs": runs}))
        (found,) = Predictor(summary, measurement).cells()
        assert found.predicted is not None and found.predicted.tau == pytest.approx(2.2)
        assert found.predicted.speedup == pytest.approx(2.2 * 0.1 / 0.14)
        assert found.measured == pytest.approx(220 / seconds / 10)
        assert found.error == pytest.approx(2.2 * 0.1 / 0.14 / (22 / seconds) - 1)
        assert (
            found.error == pytest.approx(error, abs=1e-3)
            and found.close is (abs(found.error) <= 0.1) is close
        )


def test_modelled_time_is_predicted_from_the_same_curves() -> None:
    bundle = fake(noise=0.0, lengths=(1, 2, 4, 7), batches=(1, 4), prompts=8, tokens=160)
    cells = Predictor(Summary(bundle), curve()).cells()
    assert len(cells) == 2 * 4 * 2 * 2
    assert all(c.error is not None and abs(c.error) < 0.1 for c in cells)
    assert sum(abs(c.error or 1) for c in cells) / len(cells) < 0.04


def test_a_shorter_chain_is_predicted_from_the_longest() -> None:
    bundle = fake(noise=0.0, lengths=(2, 6))
    predictor = Predictor(Summary(bundle), curve())
    found = predictor.predict(Setting(drafter=DRAFT, depth=2, nodes=2), "code")
    longest = [
        a.steady.counts
        for run in bundle.runs
        if bundle.of(run) == Setting(drafter=DRAFT, depth=6, nodes=6) and run.round == 0
        for a in run.answers
        if bundle.prompts[a.prompt].task == "code"
    ]
    tested, accepted = (
        [sum(getattr(c, name)[i] for c in longest) for i in (0, 1)] for name in ("tested_at", "accepted_at")
    )
    first, second = accepted[0] / tested[0], accepted[1] / tested[1]
    assert found.tau == pytest.approx(1 + first + first * second)


def test_what_cannot_be_predicted_says_why() -> None:
    bundle = fake(batches=(1, 16), prompts=1)
    few = curve(prices={"ngram": 0.0001}, rates={"ngram": RATES["ngram"]})
    why = {
        (c.cell.setting.drafter, c.cell.setting.batch): c.why
        for c in Predictor(Summary(bundle), few).cells()
        if c.predicted is None
    }
    assert "was not measured; measured are ngram" in why[DRAFT, 1]
    assert why["ngram", 16] == "batch 16 was not measured, the most is 8 rows"
    short = Summary(fake(tokens=3, lengths=(4,)))
    cell = next(c for c in Predictor(short, few).cells() if c.cell.setting.drafter == "ngram")
    assert cell.measured is None and cell.close is None
    with pytest.raises(ParameterError, match="the measurement is of model other"):
        Predictor(Summary(bundle), few.model_copy(update={"model": "other"}))


def test_replay_counts_what_the_bundle_has_not() -> None:
    """ngram was never run here, and its drafts for plain decoding's answers are known all the same."""
    bundle = fake(prices={DRAFT: 0.015}, rates={DRAFT: RATES[DRAFT]}, tokens=60)
    answers = [a.model_copy(update={"ids": [5, 6, 7, 8] * 15}) for a in bundle.runs[0].answers]
    plain = [
        run.model_copy(
            update={"answers": [answers[0].model_copy(update={"prompt": a.prompt}) for a in run.answers]}
        )
        if bundle.of(run).plain
        else run
        for run in bundle.runs
    ]
    predictor = Predictor(Summary(bundle.model_copy(update={"runs": plain})), curve())
    found = predictor.predict(Setting(drafter="ngram", depth=3, nodes=3), "code")
    assert 2.5 < found.tau < 4  # the text repeats itself after a first time


# -- figures ----------------------------------------------------------------------------------------


def test_the_figures_of_a_modelled_sweep() -> None:
    bundle = fake(noise=0.0, lengths=(1, 2, 4, 6, 7), batches=(1, 4), prompts=8, tokens=120)
    summary = Summary(bundle)
    found = {f.claim.split(" ")[0]: f for f in figures(summary, Predictor(summary, curve()))}
    close = found["predicted"]
    assert close.met is True and "of 40 cells" in close.found and close.lines[0].startswith("batch 1: ")
    planned = next(f for f in figures(summary, Predictor(summary, curve())) if "planned" in f.claim)
    assert planned.met is True and len(planned.lines) == 2 and "best" in planned.lines[0]
    assert found["goodput"].met is None and found["with"].met is None


def test_what_is_predicted_to_be_slower_is_held_to_it() -> None:
    bad = {"ngram": {"code": (0.0,), "edit": (0.0,)}}
    bundle = fake(noise=0.0, prices={"ngram": 0.01}, rates=bad)
    summary = Summary(bundle)
    measurement = curve(prices={"ngram": 0.01}, rates=bad)
    (slower,) = [f for f in figures(summary, Predictor(summary, measurement)) if "slower" in f.claim]
    assert slower.met is True and slower.found == "2 of 2 settings"
    planned = [f for f in figures(summary, Predictor(summary, measurement)) if "planned" in f.claim][0]
    assert planned.met is True and "planned plain" in planned.lines[0]


def with_controller(bundle: BenchBundle, drafter: str, factor: float) -> BenchBundle:
    """The bundle with goodput settings that are `factor` times as fast as the drafter's 4 tokens."""
    settings = list(bundle.settings)
    runs = list(bundle.runs)
    for place, setting in enumerate(bundle.settings):
        if (setting.drafter, setting.depth) == (drafter, 4):
            settings.append(
                Setting(drafter=setting.drafter, controller="goodput:curve=m.json", batch=setting.batch)
            )
            runs += [
                r.model_copy(
                    update={
                        "setting": len(settings) - 1,
                        "seconds": r.parts.prefill + r.decoding / factor,
                    }
                )
                for r in bundle.runs
                if r.setting == place
            ]
    return bundle.model_copy(update={"settings": settings, "runs": runs})


def test_goodput_is_held_against_the_best_fixed_length() -> None:
    even = {d: {"code": (0.8,), "edit": (0.8,)} for d in PRICES}
    bundle = fake(noise=0.0, lengths=(4,), rates=even, prices=PRICES)
    for factor, by_task, mixed in ((0.98, True, False), (0.9, False, False), (1.06, True, True)):
        found = figures(Summary(with_controller(bundle, DRAFT, factor)), None)
        assert [f.met for f in found[:2]] == [by_task, mixed]
        assert found[0].found.startswith(f"{factor:.1%} at least") and len(found[0].lines) == 2


def test_a_useless_drafter_may_cost_little() -> None:
    useless = "slipstream.testing.useless:UselessDrafter:num_speculative_tokens=4"
    bundle = fake(
        noise=0.0, lengths=(4,), prices={useless: 0.0}, rates={useless: {"code": (0.0,), "edit": (0.0,)}},
        step=lambda rows, nodes: 0.1 + 0.01 * (nodes - 1),
    )  # fmt: skip
    # four drafted tokens cost 0.04 s of 0.1 s, and what is left after a factor is what goodput loses
    plain = next(c for c in Summary(bundle).totals if c.setting.drafter == useless).decoding.value
    assert plain < 0.75
    for loss, met in ((0.02, True), (0.05, False)):
        found = figures(Summary(with_controller(bundle, useless, (1 - loss) / plain)), None)[-1]
        assert found.met is met and found.lines == (f"batch 1: {-loss:+.1%}",)
    assert figures(Summary(bundle), None)[-1].met is None


# -- files and reports ------------------------------------------------------------------------------


def test_a_bundle_is_the_same_after_a_file(before: BenchBundle, tmp_path: Path) -> None:
    path = tmp_path / "b.json"
    path.write_text(before.model_dump_json())
    assert read_bench(path) == before


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda v: v.pop("runs"), "is not a bench bundle of version 1: runs: Field required"),
        (lambda v: v["runs"][3].pop("seconds"), "runs.3.seconds: Field required"),
        (lambda v: v["runs"][0].update(nonsense=1), "runs.0.nonsense: Extra inputs are not permitted"),
        (lambda v: v.update(kind="slipstream-measure"), "kind: Input should be 'slipstream-bench'"),
        (lambda v: v["runs"][2].update(setting=99), "runs.2: there is no setting 99"),
        (lambda v: v["runs"][2]["answers"][0].update(prompt=5), "runs.2: its answers are not to the prompts"),
        (lambda v: v["units"][0].update(prompts=[77]), "there is no prompt 77"),
        (lambda v: v["runs"][1].update(seconds=-1), "runs.1.seconds: Input should be greater than 0"),
        (
            lambda v: v["runs"][9]["answers"][0]["counts"].update(accepted_at=[10**6] * 2),
            "runs.9: acceptance counts at position 1 must hold",
        ),
        (lambda v: v["runs"].append(v["runs"][0]), "runs: one of them is there twice"),
        (lambda v: v.update(runs=[r for r in v["runs"] if r["setting"]]), "plain decoding is not among them"),
    ],
)
def test_damaged_bundles_are_refused_with_their_place(
    before: BenchBundle, tmp_path: Path, change: Any, words: str
) -> None:
    value = before.model_dump(mode="json")
    change(value)
    path = tmp_path / "b.json"
    path.write_text(json.dumps(value))
    with pytest.raises(ParameterError) as error:
        read_bench(path)
    assert words in str(error.value) and str(path) in str(error.value)


def test_the_report_shows_it_all(before: BenchBundle) -> None:
    bundle = with_controller(before, DRAFT, 1.1)
    report = make_report(bundle, curve(), slowed(1.3))
    told = json.loads(json.dumps(to_json(report), allow_nan=False))
    cell = next(c for c in told["cells"] if (c["drafter"], c["depth"], c["task"]) == (DRAFT, 4, "code"))
    assert cell["predicted"]["speedup"] > 1 and 0 < cell["seconds_per_token"]["drafter"] < 1
    assert cell["conditional_acceptance"][0] == pytest.approx(cell["accepted_at"][0] / cell["tested_at"][0])
    assert told["exact"] and told["comparison"]["changes"]
    page = to_html(report)
    assert page.startswith("<!doctype html>") and page.count("<svg") == len(page.split("<figure")) - 1 == 5
    for words in ("Against the baseline", "Predicted and measured", "What is accepted", "Batch 1", "goodput"):
        assert words in page
    assert "http" not in page.replace("http://www.w3.org", "") and "<script" not in page
    assert "faster" in page and not re.search(r"\bnan\b", page)
    assert told["figures"] == [] and "What is claimed" not in page, (
        "the project's claims are the sweep's matter"
    )
    claimed = make_report(bundle, curve(), claims=True)
    assert len(to_json(claimed)["figures"]) == 6 and "What is claimed" in to_html(claimed)


def test_other_tokens_are_told_and_make_it_broken(before: BenchBundle) -> None:
    place = next(i for i, r in enumerate(before.runs) if not before.of(r).plain)
    run = before.runs[place]

    def changed(**counts: Any) -> Summary:
        answer = run.answers[0]
        other = answer.model_copy(
            update={
                "ids": [*answer.ids[:7], 998, *answer.ids[8:]],
                "counts": answer.counts.model_copy(update=counts),
            }
        )
        runs = [*before.runs[:place], run.model_copy(update={"answers": [other]}), *before.runs[place + 1 :]]
        return Summary(before.model_copy(update={"runs": runs}))

    (found,) = changed().broken
    assert found.at == 7 and "on code/0 from token 7; the same tokens were promised" in str(found)
    assert "BROKEN: 1 answers" in make_report(changed().bundle).verdict
    trees = changed(draft_tokens=10**4)
    assert not trees.broken and "near-ties" in str(trees.differences[0])
    drawn = changed(sampled_drafts=1)
    assert not drawn.broken and "drawn at random" in str(drawn.differences[0])
    assert not Summary(before).differences


def test_plain_decoding_must_repeat_itself(before: BenchBundle) -> None:
    runs = [
        r.model_copy(update={"answers": [r.answers[0].model_copy(update={"ids": [1, 2]})]})
        if before.of(r).plain and r.round == 1 and r.unit == 0
        else r
        for r in before.runs
    ]
    broken = Summary(before.model_copy(update={"runs": runs})).broken
    assert any(d.setting.plain and d.round == 1 for d in broken)


def test_clocks(before: BenchBundle) -> None:
    run = before.runs[0]
    assert whole(run) == (96.0, run.seconds)
    assert decoding(run)[1] == pytest.approx(run.seconds - 0.2)
    assert math.isclose(run.parts.total, run.seconds)
