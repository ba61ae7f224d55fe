"""The real view with real keyed noise: the same sample as plain decoding, and the target's law."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch

from slipstream.core.draft import Draft
from slipstream.core.noise import Purpose
from slipstream.core.params import SamplingParams
from slipstream.core.tree import TokenTree
from slipstream.logits.pipeline import LogitsPipeline
from slipstream.logits.warp import warped_law
from slipstream.testing.exact import plain
from slipstream.testing.table_lm import TableLM
from slipstream.verify import ViewRow, build_views, choose_rule

V = 4
TARGET = TableLM(V, seed=7, zeros=0.15, order=1)
DRAFTER = TableLM(V, seed=8, zeros=0.15, order=1)
ROWS = {t: TARGET.logits((t,)) for t in range(V)}
DRAFT_ROWS = {t: DRAFTER.logits((t,)) for t in range(V)}

Drafting = Callable[[Sequence[int], int, SamplingParams], Draft]


def nothing(tokens: Sequence[int], seed: int, params: SamplingParams) -> Draft:
    return Draft(TokenTree.root(tokens[-1]))


def best_chain(tokens: Sequence[int], seed: int, params: SamplingParams) -> Draft:
    path = [int(DRAFT_ROWS[tokens[-1]].argmax())]
    path.append(int(DRAFT_ROWS[path[0]].argmax()))
    return Draft(TokenTree.chain(tokens[-1], path))


def bushy_tree(tokens: Sequence[int], seed: int, params: SamplingParams) -> Draft:
    paths = [(3, 1, 0), (1, 2), (3, 0), (0,), (1, 1, 1)]
    return Draft(TokenTree.from_paths(tokens[-1], paths[seed % 3 :]))


def sampled(tokens: Sequence[int], seed: int, params: SamplingParams) -> Draft:
    path: list[int] = []
    rows: list[torch.Tensor | None] = []
    for i in range(2):
        law = warped_law(DRAFT_ROWS[(path or tokens)[-1]], params, V)
        rows.append(law.dense(V).float())  # drafters may hand over float32
        path.append(law.draw(seed, len(tokens) + i, Purpose.DRAFT, origin=len(tokens) - 1))
    return Draft(TokenTree.chain(tokens[-1], path), (*rows, None))


def generate(drafting: Drafting, params: SamplingParams, seed: int, n: int) -> tuple[tuple[int, ...], int]:
    """n tokens after token 0 by the loop, and the passes it took."""
    pipeline = LogitsPipeline(params, V, frozenset({0}), 1)
    tokens, passes = [0], 0
    while len(tokens) <= n:
        draft = drafting(tokens, seed, params)
        logits = torch.stack([ROWS[t] for t in draft.tree.tokens])  # [nodes, V]
        (view,) = build_views([ViewRow(pipeline, tokens, draft.tree, seed, 0)], logits)
        verdict = choose_rule(draft)(draft, view)
        tokens += [*(draft.tree.tokens[node] for node in verdict.path), verdict.token]
        passes += 1
    return tuple(tokens[1 : n + 1]), passes


REQUESTS = [
    SamplingParams(),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.8, top_k=3, top_p=0.95),
    SamplingParams(temperature=1.3, repetition_penalty=1.3, presence_penalty=0.3, frequency_penalty=0.2),
    SamplingParams(temperature=1.0, bad_words=((1, 2), (3,)), min_tokens=4, logit_bias={2: 0.5}),
    SamplingParams(repetition_penalty=1.2, frequency_penalty=0.5, bad_words=((2, 2),), min_tokens=6),
]


@pytest.mark.parametrize("drafting", [best_chain, bushy_tree])
@pytest.mark.parametrize("request_", REQUESTS)
def test_point_masses_give_the_tokens_of_plain_decoding(drafting: Drafting, request_: SamplingParams) -> None:
    saved = 0
    for seed in range(15):
        expected, plain_passes = generate(nothing, request_, seed, 12)
        found, passes = generate(drafting, request_, seed, 12)
        assert found == expected
        saved += plain_passes - passes
    assert saved > 0  # otherwise nothing was tested


def chi_square_z(counts: Counter[tuple[int, ...]], law: dict[tuple[int, ...], float], total: int) -> float:
    """How far from the law the counts are, in standard deviations (Wilson-Hilferty); rare cells pooled."""
    pooled_count, pooled_mass, statistic, cells = 0, 0.0, 0.0, 0
    for key, mass in law.items():
        if mass * total < 5.0:
            pooled_count, pooled_mass = pooled_count + counts[key], pooled_mass + mass
        else:
            statistic, cells = statistic + (counts[key] - mass * total) ** 2 / (mass * total), cells + 1
    if pooled_mass:
        statistic += (pooled_count - pooled_mass * total) ** 2 / (pooled_mass * total)
        cells += 1
    freedom = cells - 1
    spread = 2.0 / (9.0 * freedom)
    return float(((statistic / freedom) ** (1 / 3) - (1.0 - spread)) / math.sqrt(spread))


@pytest.mark.parametrize("drafting", [nothing, best_chain, sampled])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_drawn_tokens_follow_the_law(drafting: Drafting, temperature: float) -> None:
    """4 sigma: one false alarm in 30000 for another choice of seeds; for these it is fixed."""
    params, total = SamplingParams(temperature=temperature), 1500
    pipeline = LogitsPipeline(params, V, frozenset(), 1)
    law = plain(lambda prefix: pipeline.probs(ROWS[prefix[-1]], prefix), 3)
    counts = Counter(generate(drafting, params, seed, 3)[0] for seed in range(total))
    assert set(counts) <= set(law)
    assert chi_square_z(counts, law, total) < 4.0


def test_the_statistic_sees_a_bias() -> None:
    """The power of the test above: a greedy draft that hands over a soft q fails it."""

    def untruthful(tokens: Sequence[int], seed: int, params: SamplingParams) -> Draft:
        return Draft(best_chain(tokens, seed, params).tree, sampled(tokens, seed, params).q)

    params, total = SamplingParams(temperature=1.0), 1500
    law = plain(lambda prefix: TARGET.law(prefix[-1:]), 3)
    counts = Counter(generate(untruthful, params, seed, 3)[0] for seed in range(total))
    assert chi_square_z(counts, law, total) > 4.0
