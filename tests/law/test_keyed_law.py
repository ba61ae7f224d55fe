"""The real view with real keyed noise: the same sample as plain decoding, and the target's law."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch

from slipstream.core.draft import Draft
from slipstream.core.noise import Purpose
from slipstream.core.params import SamplingParams
from slipstream.core.tree import TokenTree
from slipstream.logits.law import Law, draw_siblings
from slipstream.logits.pipeline import LogitsPipeline
from slipstream.logits.warp import warped_law
from slipstream.testing.exact import plain
from slipstream.testing.table_lm import TableLM
from slipstream.verify import LogitsView, ViewRow, block, build_views, choose_rule

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


def sampled_tree(tokens: Sequence[int], seed: int, params: SamplingParams) -> Draft:
    """Three children of the root, two of the first one and one of the second, without replacement."""
    parents, links, drawn = [0, 1, 2], [-1], [tokens[-1]]
    rows: list[torch.Tensor | None] = [None]
    for node, count in zip(parents, (3, 2, 1), strict=True):
        if node >= len(drawn):  # the support was smaller
            break
        law = warped_law(DRAFT_ROWS[drawn[node]], params, V)
        depth = 0 if node == 0 else 1
        children, row = draw_siblings(law, count, V, seed, len(tokens) + depth, node, origin=len(tokens) - 1)
        rows[node] = row.float()
        drawn += children
        links += [node] * len(children)
        rows += [None] * len(children)
        if node == 0 and len(children) == 1:
            break
    return Draft(TokenTree(tuple(drawn), tuple(links)), tuple(rows))


def independent_tree(tokens: Sequence[int], seed: int, params: SamplingParams) -> Draft:
    """Three independent candidates, which may repeat."""
    law = warped_law(DRAFT_ROWS[tokens[-1]], params, V)
    drawn = [law.draw(seed, len(tokens), Purpose.DRAFT, i, origin=len(tokens) - 1) for i in range(3)]
    tree = TokenTree((tokens[-1], *drawn), (-1, 0, 0, 0), allow_duplicates=True)
    return Draft(tree, (law.dense(V), None, None, None))


def generate(
    drafting: Drafting, params: SamplingParams, seed: int, n: int, rule: str = "auto"
) -> tuple[tuple[int, ...], int]:
    """n tokens after token 0 by the loop, and the passes it took."""
    pipeline = LogitsPipeline(params, V, frozenset({0}), 1)
    tokens, passes = [0], 0
    while len(tokens) <= n:
        draft = drafting(tokens, seed, params)
        logits = torch.stack([ROWS[t] for t in draft.tree.tokens])  # [nodes, V]
        (view,) = build_views([ViewRow(pipeline, tokens, draft.tree, seed, 0)], logits)
        verdict = choose_rule(draft, rule)(draft, view)
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


CASES = {
    "plain": (nothing, "auto"),
    "point masses": (best_chain, "auto"),
    "rejection": (sampled, "rejection"),
    "block": (sampled, "block"),
    "tree": (sampled_tree, "auto"),
    "independent candidates": (independent_tree, "auto"),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_drawn_tokens_follow_the_law(case: str, temperature: float) -> None:
    """4 sigma: one false alarm in 30000 for another choice of seeds; for these it is fixed."""
    (drafting, rule), params, total = CASES[case], SamplingParams(temperature=temperature), 1500
    pipeline = LogitsPipeline(params, V, frozenset(), 1)
    law = plain(lambda prefix: pipeline.probs(ROWS[prefix[-1]], prefix), 3)
    counts = Counter(generate(drafting, params, seed, 3, rule)[0] for seed in range(total))
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


# -- siblings ---------------------------------------------------------------------------------------


SIBLINGS = Law.from_probs(torch.tensor([0.5, 0.0, 0.3, 0.15, 0.05], dtype=torch.float64))


def test_siblings_are_drawn_without_replacement_in_the_order_verification_assumes() -> None:
    total, p = 3000, SIBLINGS.dense(5).tolist()
    law = {
        (a, b): p[a] * p[b] / (1.0 - p[a]) for a in range(5) for b in range(5) if a != b and p[a] * p[b] > 0.0
    }
    assert sum(law.values()) == pytest.approx(1.0)
    counts = Counter(tuple(draw_siblings(SIBLINGS, 2, 5, seed, 7, 0, origin=6)[0]) for seed in range(total))
    assert chi_square_z(counts, law, total) < 4.0
    likeliest_first = Counter({key: counts[key] + counts[key[::-1]] for key in law if key[0] < key[1]})
    assert chi_square_z(likeliest_first, law, total) > 4.0


def test_the_first_sibling_is_the_draw_of_a_chain_and_all_differ() -> None:
    for seed in range(50):
        tokens, row = draw_siblings(SIBLINGS, 9, 5, seed, 3, 0, origin=2)
        assert tokens[0] == SIBLINGS.draw(seed, 3, Purpose.DRAFT, 0, origin=2)
        assert sorted(tokens) == [0, 2, 3, 4]
        assert torch.equal(row, SIBLINGS.dense(5))
        assert SIBLINGS.draw_distinct(0, seed, 3, Purpose.DRAFT, origin=2) == []


def test_siblings_never_come_from_where_a_float32_row_has_lost_its_digits() -> None:
    sharp = Law.from_scores(torch.arange(4), torch.tensor([0.0, -60.0, -99.0, -103.0], dtype=torch.float64))
    tokens, row = draw_siblings(sharp, 4, 6, 1, 3, 0, origin=2)
    assert tokens == [0, 1]
    assert torch.equal(row > 0, torch.tensor([True, True, False, False, False, False]))
    assert draw_siblings(Law.point(2, torch.device("cpu")), 3, 4, 1, 3, 0, origin=2)[0] == [2]


def test_every_draw_but_the_targets_own_needs_the_pass() -> None:
    with pytest.raises(ValueError, match="origin"):
        SIBLINGS.draw(0, 3, Purpose.DRAFT)
    with pytest.raises(ValueError, match="where a pass began"):
        SIBLINGS.draw(0, 3, Purpose.TOKEN, origin=2)


# -- noise of several passes ------------------------------------------------------------------------


class ForgetsThePass(LogitsView):
    """Noise by position alone."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._origin = 0


@cache
def pair_rows(pair: int) -> tuple[torch.Tensor, Law]:
    """Two letters: the target's logits after each, and the draft's law, which is the same after both.

    So the drafted token is a function of its noise alone, and noise that is used twice shows most.
    """
    target = TableLM(2, pair, zeros=0.0, order=1)
    draft = TableLM(2, pair + 50, zeros=0.0)
    return torch.stack([target.logits([t]) for t in range(2)]), Law.from_probs(draft.law(()))


def block_passes(pair: int, seed: int, n: int, view_kind: type[LogitsView], by_pass: bool) -> tuple[int, ...]:
    """n tokens, drafted two at a time and verified as blocks, with keyed noise."""
    logits, law = pair_rows(pair)
    pipeline = LogitsPipeline(SamplingParams(temperature=1.0), 2, frozenset(), 1)
    tokens, q = [0], (law.dense(2), law.dense(2), None)
    while len(tokens) <= n:
        start, origin = len(tokens), len(tokens) - 1 if by_pass else 0
        drawn = [law.draw(seed, start + i, Purpose.DRAFT, origin=origin) for i in range(2)]
        tree = TokenTree.chain(tokens[-1], drawn)
        view = view_kind(logits[list(tree.tokens)], pipeline, tokens, tree, seed)
        verdict = block(Draft(tree, q), view)
        tokens += [*(tree.tokens[node] for node in verdict.path), verdict.token]
    return tuple(tokens[1 : n + 1])


@pytest.mark.parametrize(
    ("pair", "view_kind", "draft_by_pass", "follows"),
    [
        (121, LogitsView, True, True),
        (93, LogitsView, True, True),
        (93, ForgetsThePass, True, False),
        (121, LogitsView, False, False),
    ],
    ids=["by pass", "by pass, other pair", "ACCEPT by position", "DRAFT by position"],
)
def test_block_verification_follows_the_law_only_with_noise_of_its_pass(
    pair: int, view_kind: type[LogitsView], draft_by_pass: bool, follows: bool
) -> None:
    """The pairs are those of 150 where `testing.reuse` finds the reuse to matter most."""
    total, n = 2000, 3
    logits, _ = pair_rows(pair)
    law = plain(lambda prefix: logits[prefix[-1]].double().softmax(0), n)
    counts = Counter(block_passes(pair, seed, n, view_kind, draft_by_pass) for seed in range(total))
    z = chi_square_z(counts, law, total)
    assert z < 4.0 if follows else z > 4.0, z
