"""Counts against a script worked out by hand, and the additive controller's schedule."""

from __future__ import annotations

import pytest

from slipstream.control import Additive, RowOutcome, RowState, build_controller
from slipstream.core.draft import Draft, DraftRequest
from slipstream.core.params import SamplingParams
from slipstream.core.stats import SourceCounts
from slipstream.core.tree import TokenTree
from slipstream.engine.engine import Engine
from slipstream.errors import ParameterError
from slipstream.model.runner import Runner
from slipstream.testing.adversaries import FunctionDrafter, upcoming
from slipstream.testing.oracle import Request, plain_decode
from slipstream.testing.tiny import tiny_model

VOCAB = 60
PARAMS = SamplingParams(max_tokens=14, temperature=1.5, seed=3)
PROMPT = (9, 8, 7)


def make() -> tuple[Engine, list[int], list[tuple[int, int]]]:
    """An engine whose drafter follows `script`: (drafted tokens, of which right) a pass."""
    model = tiny_model("llama", vocab_size=VOCAB, layers=1, seed=3)
    known = {3: plain_decode(model, Request(PROMPT, PARAMS, 3), vocab_size=VOCAB)}
    script: list[tuple[int, int]] = []

    def draft(request: DraftRequest) -> Draft:
        length, good = script.pop(0)
        future = upcoming(known, request)[:length]
        tokens = [(t + (i >= good)) % VOCAB for i, t in enumerate(future)]
        return Draft(TokenTree.chain(request.root, tokens), source="script")

    return Engine(Runner(model, pack=False), FunctionDrafter(draft, 8)), known[3], script


def test_counts_are_those_of_the_script() -> None:
    engine, known, script = make()
    script += [(3, 3), (3, 1), (0, 0), (2, 0), (4, 2), (5, 5)]
    # emitted:    4      2       1       1       3       3 (cut to two drafted and the bonus by the limit)
    seq_id = engine.add(PROMPT, PARAMS)
    row = engine.find(seq_id)
    list(engine.run())
    assert row is not None and row.output == known and not script
    for counts in (row.counts, engine.counts):
        assert (counts.passes, counts.emitted, counts.drafts) == (6, 14, 5)
        assert (counts.draft_tokens, counts.accepted_tokens) == (3 + 3 + 2 + 4 + 2, 3 + 1 + 0 + 2 + 2)
        assert counts.sources == {"script": SourceCounts(5, counts.draft_tokens, counts.accepted_tokens)}
        assert counts.drafted_at == [5, 5, 3, 1]
        assert counts.tested_at == [5, 4, 2, 0]
        assert counts.accepted_at == [4, 3, 1, 0]
        assert counts.tau == 14 / 6
        assert counts.acceptance_per_position == [4 / 5, 3 / 5, 1 / 5, 0]
        assert counts.conditional_acceptance == [4 / 5, 3 / 4, 1 / 2, 0]
    accepted = [1, 1, 1, 0, 1, 0, 0, 0, 1, 1, 0, 1, 1, 0]
    assert row.drafted == [bool(x) for x in accepted]


def test_what_lies_behind_an_end_token_is_not_counted() -> None:
    engine, known, script = make()
    at = next(i for i in range(2, 6) if known.index(known[i]) == i)
    engine.eos_ids = frozenset({known[at]})
    script.append((8, 8))
    row = engine.find(engine.add(PROMPT, PARAMS))
    list(engine.run())
    assert row is not None and row.output == known[: at + 1]
    assert (row.counts.emitted, row.counts.accepted_tokens, row.counts.draft_tokens) == (at + 1, at + 1, 8)
    assert row.counts.sources == {"script": SourceCounts(1, 8, at + 1)}
    assert row.counts.tested_at == row.counts.accepted_at == [1] * (at + 1) + [0] * (7 - at)
    assert row.counts.conditional_acceptance[: at + 1] == [1.0] * (at + 1)


# -- the additive controller ----------------------------------------------------------------------------


def additive(spec: str = "additive") -> Additive:
    built = build_controller(spec, 4)
    assert isinstance(built, Additive)
    return built


def depth(controller: Additive, seq_id: int = 0) -> int:
    (budget,) = controller.plan([RowState(seq_id, 10, 100)])
    assert budget.nodes == budget.depth
    return budget.depth


def tell(controller: Additive, drafted: int, accepted: int, seq_id: int = 0) -> None:
    controller.record([RowOutcome(seq_id, drafted, drafted, accepted, accepted + 1)], 0.1)


def test_the_length_starts_at_5_and_stays_between_2_and_8() -> None:
    controller = additive()
    lengths = [depth(controller)]
    for _ in range(5):
        tell(controller, depth(controller), depth(controller))
        lengths.append(depth(controller))
    assert lengths == [5, 6, 7, 8, 8, 8]
    controller = additive()
    lengths = [depth(controller)]
    for _ in range(5):
        tell(controller, depth(controller), 0)
        lengths.append(depth(controller))
    assert lengths == [5, 4, 3, 2, 2, 2]


def test_between_the_bounds_the_length_stays() -> None:
    controller = additive()
    for accepted, drafted in ((3, 4), (17, 20), (13, 20)):  # 0.75, then means of 0.8 and 0.75
        tell(controller, drafted, accepted)
        assert depth(controller) == 5
    exact = additive("additive:history=1")
    tell(exact, 20, 17)  # 0.85 is not above 0.85
    tell(exact, 20, 13)  # 0.65 is not below 0.65
    assert depth(exact) == 5


def test_only_the_last_100_verifications_count() -> None:
    controller = additive()
    for _ in range(100):
        tell(controller, 4, 0)
    assert depth(controller) == 2
    for n in range(1, 101):  # the mean over the last 100 is n / 100
        tell(controller, 4, 4)
        assert depth(controller) == min(8, 2 + max(0, n - 85))


def test_every_row_has_a_length_of_its_own_until_it_is_forgotten() -> None:
    controller = additive()
    tell(controller, 4, 4, seq_id=1)
    tell(controller, 4, 0, seq_id=2)
    tell(controller, 0, 0, seq_id=3)  # a plain step teaches nothing
    assert [depth(controller, i) for i in (1, 2, 3)] == [6, 4, 5]
    controller.forget(1)
    controller.forget(99)
    assert depth(controller, 1) == 5


@pytest.mark.parametrize("bad", ["min=6", "max=4", "history=0", "lower_below=0.9", "raise_above=1.1"])
def test_options_that_cannot_be_are_refused(bad: str) -> None:
    with pytest.raises(ParameterError):
        additive(f"additive:{bad}")
