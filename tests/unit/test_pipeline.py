"""Each warp and penalty against its definition, against transformers, and at its edges."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from slipstream.core.noise import Purpose
from slipstream.core.params import SamplingParams
from slipstream.core.tree import TokenTree
from slipstream.errors import ModelError, ParameterError
from slipstream.logits.law import Law
from slipstream.logits.pipeline import LogitsPipeline
from slipstream.logits.warp import law_of, top_p_floor, warp, warped
from slipstream.verify import LogitsView

V = 12
EMPTY: frozenset[int] = frozenset()

# few different values, so that ties are common
scores_with_ties = st.lists(st.sampled_from([-2.0, -1.0, 0.0, 0.5, 1.0, 3.0]), min_size=1, max_size=30)
warps = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.01, 0.5, 1.0, 2.5]),
    top_k=st.integers(0, 12),
    top_p=st.floats(0.01, 1.0),
    min_p=st.sampled_from([0.0, 0.05, 0.3, 1.0]),
)


def pipeline(prompt_length: int = 2, stop: frozenset[int] = EMPTY, **params: Any) -> LogitsPipeline:
    return LogitsPipeline(SamplingParams().with_(**params), V, stop, prompt_length)


def row(seed: int = 0, width: int = V) -> torch.Tensor:
    return torch.randn(width, generator=torch.Generator().manual_seed(seed)) * 3


# -- warps ------------------------------------------------------------------------------------------


def naive(scores: list[float], params: SamplingParams) -> list[float]:
    """The documented law, by sets and thresholds, in plain Python."""
    best = max(scores)
    weights = [math.exp((s - best) / params.temperature) for s in scores]
    kept = {i for i, s in enumerate(scores) if s > float("-inf")}
    if params.top_k:
        edge = sorted((scores[i] for i in kept), reverse=True)[: params.top_k][-1]
        kept = {i for i in kept if scores[i] >= edge}
    wanted = params.top_p * math.fsum(weights[i] for i in kept)
    above = {i: math.fsum(weights[j] for j in kept if scores[j] > scores[i]) for i in kept}
    if params.top_p < 1.0:
        kept = {i for i in kept if above[i] < wanted}
    kept = {i for i in kept if weights[i] >= params.min_p * (1 - 1e-12)}
    total = math.fsum(weights[i] for i in kept)
    return [weights[i] / total if i in kept else 0.0 for i in range(len(scores))]


def near_edge(scores: list[float], params: SamplingParams) -> bool:
    """Whether top-p cuts within rounding of a set's mass, where either answer is right."""
    weights = sorted((math.exp((s - max(scores)) / params.temperature) for s in scores), reverse=True)
    for size in range(1, len(weights) + 1):
        for mass in {math.fsum(weights[:k]) for k in range(1, size + 1)}:
            if abs(mass - params.top_p * math.fsum(weights[:size])) < 1e-9 * mass:
                return True
    return False


@given(scores_with_ties, warps)
def test_law_is_the_documented_one(scores: list[float], params: SamplingParams) -> None:
    if params.top_p < 1.0 and near_edge(scores, params):
        return
    law = law_of(torch.tensor(scores), params)
    expected = naive(scores, params)
    assert law.dense(len(scores)).tolist() == pytest.approx(expected, abs=1e-12)
    assert law.ids.tolist() == [i for i, p in enumerate(expected) if p > 0.0 or i in law.ids.tolist()]


@given(st.lists(st.floats(-20, 20, width=32), min_size=2, max_size=40), warps)
def test_batched_warp_gives_the_same_law(scores: list[float], params: SamplingParams) -> None:
    rows = torch.tensor([scores, scores[::-1]])  # [2, n]
    batched = warp(rows, params).softmax(-1)  # [2, n]
    single = torch.stack([law_of(r, params).dense(len(scores)) for r in rows])
    assert torch.allclose(batched, single, rtol=0, atol=1e-9)


@given(
    st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=60) | scores_with_ties,
    st.floats(0.001, 0.999),
    st.integers(1, 8),
)
def test_top_p_of_a_prefix_is_top_p_of_the_whole_row(scores: list[float], p: float, prefix: int) -> None:
    values = torch.tensor(scores, dtype=torch.float64)
    full = top_p_floor(values, p, prefix=len(scores))
    assert torch.equal(top_p_floor(values, p, prefix=prefix), full)
    ordered = values.sort(descending=True).values  # the full computation, once more by hand
    mass = (ordered - ordered[0]).exp().cumsum(0)
    wanted = p * (values - ordered[0]).exp().sum()
    assert float(full) == float(ordered[min(int((mass < wanted).sum()), len(scores) - 1)])


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9, 0.99, 0.9999])
@pytest.mark.parametrize("spread", [0.1, 1.0, 4.0])
def test_top_p_at_a_real_vocabulary_equals_the_full_sort(p: float, spread: float) -> None:
    values = (row(3, 20_000) * spread).bfloat16().double()
    assert torch.equal(top_p_floor(values, p), top_p_floor(values, p, prefix=len(values)))


@given(scores_with_ties, warps, st.randoms())
def test_law_does_not_depend_on_the_order_of_ids(scores: list[float], params: SamplingParams, dice) -> None:  # type: ignore[no-untyped-def]
    order = list(range(len(scores)))
    dice.shuffle(order)
    values = torch.tensor(scores)
    moved = law_of(values[order], params).dense(len(scores))
    assert torch.allclose(moved, law_of(values, params).dense(len(scores))[order], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("params", "processor"),
    [
        ({"top_k": 5}, lambda: [TopKLogitsWarper(5)]),
        ({"top_k": 100_000}, lambda: [TopKLogitsWarper(100_000)]),
        ({"top_p": 0.8}, lambda: [TopPLogitsWarper(0.8)]),
        ({"top_p": 0.0001}, lambda: [TopPLogitsWarper(0.0001)]),
        ({"min_p": 0.1}, lambda: [MinPLogitsWarper(0.1)]),
        (
            {"top_k": 40, "top_p": 0.9, "min_p": 0.05},
            lambda: [TopKLogitsWarper(40), TopPLogitsWarper(0.9), MinPLogitsWarper(0.05)],
        ),
    ],
)
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.5])
def test_warps_equal_transformers(
    params: dict[str, float], processor: Callable[[], list[object]], temperature: float
) -> None:
    for seed in range(5):
        raw = row(seed, 300)
        hf = raw[None].clone()
        for step in [TemperatureLogitsWarper(temperature), *processor()]:
            hf = step(torch.zeros(1, 1, dtype=torch.long), hf)  # type: ignore[operator]
        ours = warped(raw, SamplingParams(temperature=temperature).with_(**params), 300)
        assert torch.equal(ours > 0, hf[0] > float("-inf"))
        assert torch.allclose(ours, hf[0].double().softmax(0), rtol=1e-5, atol=1e-9)


def test_the_smallest_and_largest_temperatures_are_finite() -> None:
    for temperature in (5e-324, 1e-30, 1e-3, 1e30):
        law = law_of(row(), SamplingParams(temperature=temperature))
        assert bool(torch.isfinite(law.logp.exp()).all())
        assert float(law.logp.exp().sum()) == pytest.approx(1.0)
    assert law_of(row(), SamplingParams(temperature=5e-324)).dense(V).argmax() == row().argmax()


def test_a_drafter_with_another_head_gets_a_law_over_the_target_vocabulary() -> None:
    params = SamplingParams(temperature=1.0)
    narrow, wide = warped(row(1, 8), params, V), warped(row(1, 20), params, V)
    assert narrow.shape == wide.shape == (V,)
    assert float(narrow[8:].sum()) == 0.0
    assert torch.allclose(narrow[:8], row(1, 8).double().softmax(0))
    assert torch.allclose(wide, row(1, 20)[:V].double().softmax(0))


# -- penalties --------------------------------------------------------------------------------------


def test_repetition_penalty_equals_transformers() -> None:
    tokens = [3, 1, 3, 7, 0, 1]
    ours = pipeline(repetition_penalty=1.3).scores(row(), tokens)
    hf = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([tokens]), row()[None].clone())
    assert torch.equal(ours, hf[0])


def test_presence_and_frequency_count_the_output_alone() -> None:
    tokens = [3, 1, 3, 7, 3, 1]  # the prompt is 3, 1
    ours = pipeline(presence_penalty=0.5, frequency_penalty=0.25).scores(row(), tokens)
    expected = row()
    for token, count in {3: 2, 7: 1, 1: 1}.items():
        expected[token] -= 0.5 + 0.25 * count
    assert torch.allclose(ours, expected)
    untouched = pipeline(presence_penalty=0.5, frequency_penalty=0.25).scores(row(), [3, 1])
    assert torch.equal(untouched, row())


def test_bias_comes_before_penalties() -> None:
    ours = pipeline(logit_bias={4: 2.0, 5: float("-inf")}, repetition_penalty=2.0).scores(row(), [4, 4])
    biased = float(row()[4]) + 2.0
    assert float(ours[4]) == pytest.approx(biased / 2 if biased > 0 else biased * 2)
    assert float(ours[5]) == float("-inf")


@pytest.mark.parametrize(
    ("tokens", "banned"),
    [
        ([9, 9], {5}),
        ([9, 1], {5, 2}),  # begun in the prompt
        ([9, 9, 1], {5, 2}),
        ([9, 9, 1, 2], {5, 3}),
        ([1, 9, 2], {5}),
        ([2], {5}),
    ],
)
def test_bad_words_are_banned_where_they_would_be_complete(tokens: list[int], banned: set[int]) -> None:
    words = ((5,), (1, 2), (1, 2, 3))
    scores = pipeline(bad_words=words).scores(row(), tokens)
    assert {t for t in range(V) if scores[t] == float("-inf")} == banned


def test_min_tokens_forbids_every_stop_id_until_then() -> None:
    waiting = pipeline(min_tokens=2, stop=frozenset({0, 6, 500}))
    for output, masked in ((0, True), (1, True), (2, False), (3, False)):
        scores = waiting.scores(row(), [1, 1, *[2] * output])
        forbidden = {t for t in range(V) if scores[t] == float("-inf")}
        assert forbidden == ({0, 6} if masked else set())


def test_penalties_follow_the_drafted_path_and_leave_no_trace() -> None:
    """Position by position on a drafted tree the answer is that of plain decoding with this prefix."""
    request = pipeline(
        temperature=1.0,
        repetition_penalty=1.2,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        bad_words=((2, 3), (7,)),
        min_tokens=3,
        stop=frozenset({0}),
    )
    tree = TokenTree.from_paths(4, [[2, 3, 2], [2, 2], [5, 0]])
    logits, committed = torch.stack([row(i) for i in range(len(tree))]), [8, 9, 4]
    before = logits.clone()
    view = LogitsView(logits, request, committed, tree, seed=11)
    for node in [*reversed(range(len(tree))), *range(len(tree))]:
        prefix = [*committed, *tree.path_tokens(node)]
        assert torch.equal(view.probs(node), request.probs(row(node), prefix))
        assert view.token(node) == request.token(row(node), prefix, 11, len(prefix))
    assert torch.equal(logits, before) and committed == [8, 9, 4]


# -- the whole pipeline -----------------------------------------------------------------------------

KINDS = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 3, "top_p": 0.9},
    {"repetition_penalty": 1.5},
    {"logit_bias": {3: 1.0}},
]


@pytest.mark.parametrize("params", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padding_of_the_head_is_never_chosen(params: dict[str, Any], dtype: torch.dtype) -> None:
    padded = torch.full((V + 5,), 50.0, dtype=dtype)
    padded[:V] = row().to(dtype)
    request = pipeline(**params)
    assert request.probs(padded, [1, 1]).shape == (V,)
    assert torch.equal(request.probs(padded, [1, 1]), request.probs(row().to(dtype), [1, 1]))
    assert all(request.token(padded, [1, 1], seed, 2) < V for seed in range(20))


def test_greedy_is_a_one_hot_law_and_the_lowest_id_wins() -> None:
    tied = torch.zeros(V)
    tied[4] = tied[9] = 2.0
    request = pipeline()
    assert request.token(tied, [1, 1], 0, 2) == 4
    assert request.probs(tied, [1, 1]).tolist() == [float(i == 4) for i in range(V)]


def test_a_token_has_the_same_noise_in_every_support() -> None:
    """Filters change who takes part, not the noise: a narrower law redraws only what it forbids."""
    for seed in range(50):
        wide = pipeline(temperature=1.0).token(row(), [], seed, 7)
        law = pipeline(temperature=1.0, top_k=6).law(row(), [])
        if wide in law.ids.tolist():
            assert law.draw(seed, 7, Purpose.TOKEN) == wide


@pytest.mark.parametrize(
    ("params", "greedy", "plain", "history_free"),
    [
        ({}, True, True, True),
        ({"top_p": 0.5, "top_k": 3}, True, True, True),
        ({"min_tokens": 3}, True, False, False),
        ({"logit_bias": {1: 1.0}}, True, False, True),
        ({"bad_words": ((1,),)}, True, False, True),
        ({"bad_words": ((1, 2),)}, True, False, False),
        ({"repetition_penalty": 1.1}, True, False, False),
        ({"temperature": 1.0}, False, False, True),
        ({"temperature": 1.0, "presence_penalty": 0.1}, False, False, False),
    ],
)
def test_shortcuts_are_taken_only_where_they_hold(
    params: dict[str, Any], greedy: bool, plain: bool, history_free: bool
) -> None:
    request = pipeline(stop=frozenset({0}), **params)
    assert (request.greedy, request.plain, request.history_free) == (greedy, plain, history_free)


def test_min_tokens_without_stop_ids_touches_nothing() -> None:
    assert pipeline(min_tokens=3).plain


@pytest.mark.parametrize("params", [{"logit_bias": {V: 1.0}}, {"bad_words": ((1, V + 3),)}])
def test_tokens_that_do_not_exist_are_refused(params: dict[str, Any]) -> None:
    with pytest.raises(ParameterError, match=f"ids end at {V - 1}"):
        pipeline(**params)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_hopeless_rows_are_refused(temperature: float) -> None:
    broken = row()
    broken[3] = float("nan")
    with pytest.raises(ModelError, match="NaN"):
        pipeline(temperature=temperature, logit_bias={1: 1.0}).token(broken, [], 0, 0)
    everything = tuple((t,) for t in range(V))
    with pytest.raises(ParameterError, match="forbid every token"):
        pipeline(temperature=temperature, bad_words=everything).token(row(), [], 0, 0)


def test_logprobs_are_those_of_the_raw_law() -> None:
    padded = torch.cat((row(), torch.full((4,), 50.0))).bfloat16()
    expected = padded[:V].float().log_softmax(0)
    found = pipeline(temperature=0.3, top_k=1, logit_bias={0: 9.0}).logprobs(padded, 5, 3)
    assert found.token == 5 and found.logprob == float(expected[5])
    best = sorted(range(V), key=lambda t: (-float(expected[t]), t))[:3]
    assert found.top == tuple((t, float(expected[t])) for t in best)
    assert pipeline().logprobs(padded, 5, 0).top == ()
    assert len(pipeline().logprobs(padded, 5, 100).top) == V


@settings(max_examples=30)
@given(st.integers(0, 2**32), st.integers(0, 1000))
def test_draw_never_leaves_the_support(seed: int, position: int) -> None:
    probs = torch.tensor([0.0, 0.5, 0.0, 1e-300, 0.5 - 1e-16, 0.0], dtype=torch.float64)
    assert float(probs[Law.from_probs(probs).draw(seed, position, Purpose.RESIDUAL, origin=0)]) > 0.0
