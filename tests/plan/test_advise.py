"""Advice: it is the best there is, it says when nothing pays, and every rule's miss has its price."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from slipstream.cost.accept import Acceptance, Sample
from slipstream.cost.bundle import Bundle
from slipstream.cost.machines import MACHINES
from slipstream.cost.model import Costs, best_length, expect, expected_tokens, predict
from slipstream.cost.shape import shape_of
from slipstream.errors import ParameterError
from slipstream.plan.advise import WORTH, Advice, advise, batch_grid
from slipstream.plan.report import to_html, to_json
from slipstream.plan.setup import described, measured
from slipstream.testing.measured import fake_bundle

SMALL = "draft_model:model=small"
LLAMA = {
    "model_type": "llama", "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64,
    "num_key_value_heads": 8, "intermediate_size": 28672, "vocab_size": 128256,
}  # fmt: skip
TINY = {
    **LLAMA,
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "intermediate_size": 8192,
}
TARGET, DRAFT = shape_of(LLAMA, "big"), shape_of(TINY, "tiny")
FOUR = MACHINES["h100-sxm"].times(4)


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return fake_bundle()


@pytest.fixture(scope="module")
def advice(bundle: Bundle) -> Advice:
    return advise(measured(bundle, [1, 4, 8], price=2.0))


@pytest.fixture(scope="module")
def estimate() -> Advice:
    return advise(described(FOUR, TARGET, [DRAFT], [[0.8]], [1, 8, 512]))


def test_the_advised_setting_is_the_best_of_all_that_were_looked_at(bundle: Bundle, advice: Advice) -> None:
    setup = advice.setup
    for b in advice.batches:
        sweep = {
            (c.name, depth): expect(setup.costs, c.draft, c.together, b.batch, depth).speedup
            for c in setup.candidates
            for depth in range(1, c.longest + 1)
        }
        top = max(sweep, key=lambda key: sweep[key])
        if sweep[top] < WORTH:
            assert b.best is None
        else:
            assert b.best is not None
            assert (b.best.drafter, b.best.prediction.depth) == top
            assert b.best.prediction.speedup == pytest.approx(sweep[top])


def test_predictions_are_those_of_the_law_the_measurement_was_made_from(advice: Advice) -> None:
    truth = Costs(advice.setup.step)
    for c in advice.setup.candidates:
        for task, law in {"code": (0.85, 0.8, 0.75), "edit": (0.8, 0.75)}.items():
            if c.name != SMALL:
                continue
            known = Acceptance.synthetic(law, 8)
            for depth in (2, 5, 8):
                found = predict(advice.setup.costs, c.draft, c.samples[task], 1, depth)
                true = expect(truth, c.draft, known, 1, depth).speedup
                assert found.speedup == pytest.approx(true, rel=0.1)
                assert found.low * 0.98 <= true <= found.high * 1.02


def test_drafting_is_switched_off_where_it_stops_paying(advice: Advice) -> None:
    off = advice.off_from
    assert off is not None and 1 < off <= 8
    setup = advice.setup
    for batch in batch_grid(setup.largest):
        best = max(
            best_length(setup.costs, c.draft, c.together, batch, c.longest).speedup for c in setup.candidates
        )
        if batch >= off:
            assert best < WORTH
        if batch == off - 1:
            assert best >= WORTH
    last = advice.batches[-1]
    assert last.batch >= off and last.best is None and last.regime == "compute-bound"
    assert f"from batch {off} on it does not pay" in advice.verdict


def test_where_nothing_pays_the_verdict_says_decode_plainly() -> None:
    slow = fake_bundle(step=lambda rows, nodes: 0.1 * rows * nodes, prices={"ngram": 0.05})
    found = advise(measured(slow, [1]))
    assert found.batches[0].best is None and found.off_from == 1
    assert "does not pay here at batch 1" in found.verdict
    assert [s.flags for s in found.scenarios][1] == "--drafter none"


def test_money_follows_the_rate(advice: Advice) -> None:
    first = advice.batches[0]
    assert first.cost == pytest.approx(2.0 / 3600 / first.plain.rate * 1e6)
    assert first.best is not None and first.best.cost is not None and first.cost is not None
    assert first.cost / first.best.cost == pytest.approx(first.best.prediction.speedup)
    free = advise(replace(advice.setup, price=None))
    assert free.batches[0].cost is None and to_json(free)["machine"]["price_per_hour"] is None


def test_memory_holds_the_draft_and_the_drafted_tokens(advice: Advice) -> None:
    (small,) = [o for o in advice.batches[1].options if o.drafter == SMALL]
    nodes = small.prediction.nodes
    assert small.memory == 1e9 + 4 * (256 + nodes) * 12288 + 4 * nodes * 28672
    (ngram,) = [o for o in advice.batches[1].options if o.drafter == "ngram"]
    assert ngram.memory == 4 * ngram.prediction.nodes * 28672
    full = advise(replace(advice.setup, memory=2.9e9))
    assert not full.batches[0].fits
    assert next(c for c in full.checks if c.name == "fits in memory at batch 1").passed is False


def test_the_first_token_waits_for_the_prompt_alone(advice: Advice) -> None:
    first = advice.batches[0]
    assert first.first_token == pytest.approx(1.5 + first.plain.step_seconds, rel=0.05)


def test_every_task_has_its_own_best(advice: Advice) -> None:
    tasks = advice.batches[0].tasks
    assert set(tasks) == {"code", "edit"}
    assert tasks["edit"] is not None and tasks["edit"].drafter == "ngram"
    assert tasks["code"] is not None and tasks["code"].drafter == SMALL


def test_rules_are_checked_as_numbers_and_misses_cost_what_meeting_them_would_give(advice: Advice) -> None:
    rules = {r.name: r for r in advice.rules[SMALL]}
    assert rules["speed ratio"].passed and rules["speed ratio"].value.startswith("6.")
    assert rules["size"].passed is False and "MB more memory" in rules["size"].cost
    assert rules["vocabulary"].passed and rules["acceptance"].passed
    assert {r.name: r.passed for r in advice.rules["ngram"]}["size"]
    # A draft twice as dear as the rule allows: the loss is what halving its time would bring.
    slow = fake_bundle(prices={SMALL: 0.04})
    found = advise(measured(slow, [1]))
    (rule,) = [r for r in found.rules[SMALL] if r.name == "speed ratio"]
    fixed = advise(measured(fake_bundle(prices={SMALL: 0.02}), [1]))
    gained = fixed.by_batch[SMALL][0][1] - found.by_batch[SMALL][0][1]
    assert rule.passed is False and rule.lost == pytest.approx(gained, abs=0.02) and rule.lost > 0.1


def test_poor_acceptance_has_a_price_too() -> None:
    poor = fake_bundle(rates={SMALL: {"prose": (0.4,)}}, prices={SMALL: 0.015})
    (rule,) = [r for r in advise(measured(poor, [1])).rules[SMALL] if r.name == "acceptance"]
    assert rule.passed is False and rule.lost > 0.3 and "instead of" in rule.cost


def test_another_vocabulary_is_a_miss_and_an_unknown_one_is_asked_about() -> None:
    for vocab, passed in ((128256, True), (128000, None), (32000, False)):
        other = shape_of({**TINY, "vocab_size": vocab}, "other")
        found = advise(described(FOUR, TARGET, [other], [[0.8]], [1]))
        (rule,) = [r for r in next(iter(found.rules.values())) if r.name == "vocabulary"]
        assert rule.passed is passed and bool(rule.cost) is (passed is not True)


def test_a_busy_measurement_is_told_not_hidden() -> None:
    noisy = fake_bundle(noise=0.5)
    found = advise(measured(noisy, [1]))
    assert found.setup.busy and "repeats of a step differ" in found.setup.busy[0]
    assert next(c for c in found.checks if c.name == "the machine was quiet").passed is False
    assert "The machine was not quiet" in to_html(found)


def test_few_counts_fail_the_checklist_and_widen_the_interval(advice: Advice) -> None:
    rates = {SMALL: {"code": (0.8, 0.7)}}
    few = advise(measured(fake_bundle(rates=rates, prompts=2, steps=8), [1]))
    many = advise(measured(fake_bundle(rates=rates, prompts=2, steps=800), [1]))
    assert next(c for c in few.checks if c.name == "acceptance counted often enough").passed is False
    assert next(c for c in advice.checks if c.name == "acceptance counted often enough").passed

    def width(found: Advice) -> float:
        p = found.batches[0].options[0].prediction
        return p.high - p.low

    assert width(few) > 3 * width(many)


def test_what_if_acceptance_were_another_on_a_measured_machine(bundle: Bundle) -> None:
    setup = measured(bundle, [1, 8], acceptance=[[0.7]])
    found = advise(setup)
    for b in found.batches:
        for o in b.options:
            p = o.prediction
            assert p.tau == pytest.approx(expected_tokens(0.7, p.depth))
            assert p.plain_seconds == float(setup.step.seconds(b.batch, 1, setup.context))
            assert p.low < p.speedup < p.high
    told = to_json(found)
    assert told["acceptance_given"] and not told["estimate"]
    assert "70% as given" in [r.value for r in found.rules[SMALL]]
    (counted,) = [c for c in found.checks if c.name == "acceptance counted often enough"]
    assert counted.passed is False and counted.detail == "as given, not counted"
    page = to_html(found)
    assert "what if: acceptance as given" in page and "What is accepted" not in page
    assert "what was counted is left out" in page
    nothing, all_ = (advise(measured(bundle, [1], acceptance=[[r]])).batches[0].best for r in (0.0, 1.0))
    assert nothing is None and all_ is not None
    each = advise(measured(bundle, [1], acceptance=[[0.9], [0.2]]))
    rates = {c.name: c.rate.rate for c in each.setup.candidates}
    assert rates == {name: pytest.approx(r) for name, r in zip(bundle.drafter_names, (0.9, 0.2), strict=True)}
    with pytest.raises(ParameterError, match="2 drafts need one --acceptance for all or 2 of them, not 3"):
        measured(bundle, [1], acceptance=[[0.5]] * 3)


def test_starting_points_say_why_where_nothing_pays() -> None:
    useless = {"ngram": {"code": (0.0,)}, SMALL: {"code": (0.01,)}}
    found = advise(measured(fake_bundle(rates=useless), [1, 8]))
    names = [s.name for s in found.scenarios]
    assert names == ["quick start", "general", "high throughput", "memory-poor", "chat latency"]
    assert all(s.why for s in found.scenarios)
    assert found.scenarios[0].flags == "--drafter none"


def test_trees_that_were_measured_compete_with_chains() -> None:
    made = fake_bundle(step=lambda rows, nodes: 0.1)
    shape = {"task": "edit", "depth": 2, "nodes": 8, "passes": 100, "emitted": 297}
    counts = {"drafted_at": [100, 100], "tested_at": [100, 99], "accepted_at": [99, 98]}
    tree = made.acceptance[-1].model_copy(update={**shape, **counts})
    rates = [
        a.model_copy(update={"accepted_at": [0] * 8, "tested_at": [a.passes, *[0] * 7]})
        for a in made.acceptance
    ]
    found = advise(measured(made.model_copy(update={"acceptance": [*rates, tree]}), [1]))
    best = found.batches[0].best
    assert best is not None and (best.prediction.depth, best.prediction.nodes) == (2, 8)
    assert best.flags.endswith("fixed:num_speculative_tokens=2,nodes=8")


def test_a_drafter_of_trees_alone_is_drawn_and_keeps_its_counts_in_a_what_if() -> None:
    made = fake_bundle()
    shape = {"drafter": SMALL, "task": "edit", "passes": 100, "emitted": 297}
    small, large = (
        made.acceptance[-1].model_copy(update={**shape, "depth": d, "nodes": 4 * d, **counts})
        for d, counts in (
            (1, {"drafted_at": [100], "tested_at": [100], "accepted_at": [90]}),
            (2, {"drafted_at": [100, 100], "tested_at": [100, 99], "accepted_at": [99, 98]}),
        )
    )
    chains = [a for a in made.acceptance if a.drafter == "ngram"]
    found = advise(
        measured(made.model_copy(update={"acceptance": [*chains, small, large]}), [1], acceptance=[[0.6]])
    )
    assert [(p.depth, p.nodes) for p in found.lengths[SMALL][1]] == [(1, 4), (2, 8)]
    trees = next(c for c in found.setup.candidates if c.name == SMALL)
    assert trees.deepest["edit"].total.accepted == (99, 98)
    assert trees.together.total.rate == pytest.approx(0.9)
    assert any(line.startswith(f"{SMALL}: as counted") for line in found.setup.assumptions)
    values = {name: [r.value for r in rules] for name, rules in found.rules.items()}
    assert "60% as given" in values["ngram"] and not any("given" in v for v in values[SMALL])
    assert "What is accepted" not in to_html(found)


def test_an_estimate_says_what_it_is_and_gives_the_same_advice_twice(estimate: Advice) -> None:
    assert estimate.setup.estimate and estimate.setup.assumptions
    first, _, large = estimate.batches
    assert first.best is not None and first.best.prediction.speedup > 2 and first.regime == "memory-bound"
    assert large.best is None and large.regime == "compute-bound"
    assert next(c for c in estimate.checks if c.name == "measured, not estimated").passed is False
    again = advise(described(FOUR, TARGET, [DRAFT], [[0.8]], [1, 8, 512]))
    assert to_json(again) == to_json(estimate)


def test_an_estimate_without_a_draft_is_of_a_drafter_without_a_model() -> None:
    found = advise(described(FOUR, TARGET, [], [[0.5, 0.4]], [1]))
    best = found.batches[0].best
    assert best is not None and best.drafter == "ngram" and best.memory < 1e8
    assert [s.flags for s in found.scenarios][0] == best.flags


def test_the_json_is_json_and_the_page_needs_nothing_from_outside(advice: Advice, estimate: Advice) -> None:
    for found in (advice, estimate):
        plain = json.loads(json.dumps(to_json(found), allow_nan=False))
        assert plain["estimate"] is found.setup.estimate and plain["verdict"] == found.verdict
        page = to_html(found)
        charts = 3 + (not found.setup.estimate) + (found.setup.price is not None)
        assert page.count("<svg") == page.count("</svg>") == charts
        for outside in ("src=", 'href="http', "@import", "url(http", "<script"):
            assert outside not in page
        assert "var(--ink)" in page and "prefers-color-scheme: dark" in page and "#1b1f24;" in page
        assert ("nothing was measured" in page) is found.setup.estimate


def test_names_are_escaped_in_the_page() -> None:
    odd = shape_of(TINY, "<b>x</b>")
    page = to_html(advise(described(FOUR, TARGET, [odd], [[0.8]], [1])))
    assert "<b>x</b>" not in page and "&lt;b&gt;x" in page


@pytest.mark.parametrize(
    ("batches", "words"),
    [([], "no batch size"), ([0], "at least 1, not 0"), ([1, 16], "batch 16 was not measured")],
)
def test_batches_that_cannot_be_advised(bundle: Bundle, batches: list[int], words: str) -> None:
    with pytest.raises(ParameterError, match=words):
        measured(bundle, batches)


def test_where_drafting_stops_is_told_to_the_batch(estimate: Advice) -> None:
    setup, off = estimate.setup, estimate.off_from
    assert off is not None and off > 16

    def best(batch: int) -> float:
        return max(
            best_length(setup.costs, c.draft, c.together, batch, c.longest).speedup for c in setup.candidates
        )

    assert best(off) < WORTH <= best(off - 1)
    far = advise(described(FOUR, TARGET, [DRAFT], [[0.8]], [1, 5000]))
    assert far.off_from == off and far.looked_to == 5000
    from_four = advise(measured(fake_bundle(rows=(4, 8)), [4, 8]))
    assert min(batch for batch, _ in next(iter(from_four.by_batch.values()))) == 4


def test_a_model_that_does_not_fit_is_said_in_the_verdict() -> None:
    verdict = advise(described(MACHINES["t4"], TARGET, [DRAFT], [[0.8]], [1])).verdict
    assert verdict.endswith("It does not fit in memory at batch 1.")


def test_a_draft_of_other_words_is_advised_with_a_drafter_that_translates() -> None:
    other = shape_of({**TINY, "vocab_size": 32000}, "other")
    (option,) = advise(described(FOUR, TARGET, [other], [[0.8]], [1])).batches[0].options
    assert option.flags.startswith("--drafter crossvocab:model=other ")


def test_a_context_that_was_not_measured_is_said(bundle: Bundle) -> None:
    assert measured(bundle, [1]).assumptions == ()
    (longer,) = measured(bundle, [1], context=4096).assumptions
    assert "is no longer than at 256" in longer and "--contexts 256,4096" in longer
    (shorter,) = measured(bundle, [1], context=16).assumptions
    assert "takes what one at 256 does" in shorter
    short = replace(TARGET, positions=1000)
    told = described(FOUR, short, [DRAFT], [[0.8]], [1], context=1001).assumptions
    assert any("though its config says 1000 positions" in line for line in told)


def test_what_cannot_be_planned_is_refused(bundle: Bundle) -> None:
    with pytest.raises(ParameterError, match="price must be a positive"):
        measured(bundle, [1], price=-1)
    with pytest.raises(ParameterError, match="2 drafts need one --acceptance"):
        described(FOUR, TARGET, [DRAFT, DRAFT], [[0.5]] * 3, [1])
    for more, words in (
        ({"context": 0}, "context must be at least 1"),
        ({"context": 10**400}, "context must be at most"),
        ({"prompt_tokens": -5}, "prompt tokens must be at least 1, not -5"),
        ({"price": float("nan")}, "price must be a positive"),
        ({"price": 1e300}, "price must be at most"),
    ):
        with pytest.raises(ParameterError, match=words):
            measured(bundle, [1], **more)
        with pytest.raises(ParameterError, match=words):
            described(FOUR, TARGET, [DRAFT], [[0.5]], [1], **more)
    with pytest.raises(ParameterError, match="at most 1000000000"):
        described(FOUR, TARGET, [DRAFT], [[0.5]], [10**400])
    with pytest.raises(ParameterError, match="two drafts are called tiny"):
        described(FOUR, TARGET, [DRAFT, DRAFT], [[0.5]], [1])
    with pytest.raises(ParameterError, match="batch 1 was not measured, the least is 4 rows"):
        measured(fake_bundle(rows=(4, 8)), [1, 4])
    with pytest.raises(ParameterError, match="no drafter has both"):
        measured(bundle.model_copy(update={"drafts": []}), [1])
    with pytest.raises(ParameterError, match="at least one prompt"):
        Sample(())
