"""The near-tie audit tells how far two tokens are apart, and against what rounding."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from slipstream.core.noise import Purpose, gumbel
from slipstream.core.params import SamplingParams
from slipstream.engine.session import Session
from slipstream.logits.pipeline import LogitsPipeline
from slipstream.proof.reference import Reference
from slipstream.proof.ties import ALLOWED, Margin, allowed, margin_of, may_be_drawn, spacing

PROMPT, BEFORE, SEED = (5, 6, 7), (9, 1), 3


@pytest.fixture
def reference(session: Session) -> Iterator[Reference]:
    made = Reference(session.engine)
    yield made
    made.close()


def pipeline(**params: object) -> LogitsPipeline:
    return LogitsPipeline(SamplingParams().with_(**params), 258, frozenset(), len(PROMPT))


def margin(reference: Reference, tokens: tuple[int, int], **params: object) -> Margin:
    return margin_of(reference, pipeline(**params), PROMPT, BEFORE, SEED, tokens)


def test_the_margin_of_a_greedy_choice_is_the_difference_of_the_logits(reference: Reference) -> None:
    row = reference.behind(PROMPT, [BEFORE])[0]
    first, second, third = row.topk(3).indices.tolist()
    found = margin(reference, (first, second))
    assert found.logits == pytest.approx(float(row[first] - row[second]), abs=1e-5) and not found.near_tie
    # Both tokens must be near to what is chosen, not to each other.
    assert margin(reference, (second, third)).logits == pytest.approx(
        float(row[first] - row[third]), abs=1e-5
    )
    assert margin(reference, (first, first)).logits == 0.0


def test_a_token_that_is_forbidden_is_never_near(reference: Reference) -> None:
    row = reference.behind(PROMPT, [BEFORE])[0]
    first, second = row.topk(2).indices.tolist()
    assert margin(reference, (first, second), bad_words=((second,),)).logits == math.inf


@pytest.mark.parametrize("params", [{"temperature": 1.0}, {"temperature": 0.7}])
def test_the_margin_of_a_draw_is_that_of_its_noise(reference: Reference, params: dict[str, float]) -> None:
    """Between the drawn token and the one that would be drawn without it."""
    row, position = reference.behind(PROMPT, [BEFORE])[0], len(PROMPT) + len(BEFORE)
    law = pipeline(**params).law(row, (*PROMPT, *BEFORE))
    best = (law.logp + gumbel(law.ids, SEED, position, Purpose.TOKEN)).topk(2)
    drawn, other = law.ids[best.indices].tolist()
    found = margin(reference, (drawn, other), **params)
    assert found.logits == pytest.approx(
        params["temperature"] * float(best.values[0] - best.values[1]), abs=1e-4
    )


def test_the_edge_of_top_p_moves_with_what_is_above_it(reference: Reference) -> None:
    row = reference.behind(PROMPT, [BEFORE])[0]
    best = row.double().softmax(0).sort(descending=True)
    edge = float(best.values[:6].sum()) - 1e-7  # six tokens are just enough, so the seventh is just out
    made, seventh = pipeline(temperature=1.0, top_p=edge), int(best.indices[6])
    prefix = (*PROMPT, *BEFORE)
    assert float(made.probs(row, prefix)[seventh]) == 0.0
    seed = next(
        s for s in range(5000) if pipeline(temperature=1.0).token(row, prefix, s, len(prefix)) == seventh
    )
    drawn = made.token(row, prefix, seed, len(prefix))
    found = margin_of(reference, made, PROMPT, BEFORE, seed, (drawn, seventh))
    assert found.logits < 1e-5 and found.near_tie
    clear = pipeline(temperature=1.0, top_p=edge - 0.5 * float(best.values[5]))
    far = margin_of(reference, clear, PROMPT, BEFORE, seed, (drawn, seventh))
    assert far.logits > 0.01 and not far.near_tie


def test_spacing_is_that_of_neighbouring_numbers() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for value in (0.75, 1.0, 3.0, -17.5, 40.0):
            row = torch.tensor([value, 0.1], dtype=dtype)
            size = row[0].abs()
            up = torch.nextafter(size, torch.tensor(math.inf, dtype=dtype))
            assert spacing(row, (0, 1), dtype) == float(up) - float(size)
    assert spacing(torch.zeros(2), (0, 1), torch.float32) == torch.finfo(torch.float32).eps


def test_what_is_near_depends_on_the_dtype() -> None:
    assert Margin(0.25, 0.125, allowed(torch.bfloat16)).near_tie
    assert not Margin(1.0, 0.125, allowed(torch.bfloat16)).near_tie
    assert allowed(torch.float32) == ALLOWED[torch.float32] > allowed(torch.float16)
    assert not Margin(math.inf, 1.0, 4.0).near_tie


def test_a_filter_lets_through_what_is_at_its_edge(reference: Reference) -> None:
    row = reference.behind(PROMPT, [BEFORE])[0]
    order = row.topk(12).indices.tolist()
    made = pipeline(temperature=1.0, top_k=10)
    gap = float(row[order[9]] - row[order[10]])
    assert gap > 1e-3 and not may_be_drawn(reference, made, PROMPT, BEFORE, order[10])
    ALLOWED[torch.float32], before = (
        2 * gap / spacing(row, (order[10],), torch.float32),
        ALLOWED[torch.float32],
    )
    try:
        assert may_be_drawn(reference, made, PROMPT, BEFORE, order[10])
        assert not may_be_drawn(reference, made, PROMPT, BEFORE, int(row.argmin()))
    finally:
        ALLOWED[torch.float32] = before
