"""Which noise a pass may share with the one before it: all passes of a run, enumerated together."""

from __future__ import annotations

from functools import lru_cache

import pytest

from slipstream.core.noise import Purpose
from slipstream.core.tree import TokenTree
from slipstream.testing.branching import LawAt
from slipstream.testing.exact import EXACT, distance, plain
from slipstream.testing.reuse import Key, Shape, by_pass, by_position, emitted_together
from slipstream.testing.table_lm import TableLM
from slipstream.verify import Rule, block, multi_candidate, rejection

PAIRS = 8
ACCEPT, DRAFT = by_position(Purpose.ACCEPT), by_position(Purpose.DRAFT)
BOTH = by_position(Purpose.ACCEPT, Purpose.DRAFT)
KEYS = {"by pass": by_pass, "ACCEPT by position": ACCEPT, "DRAFT by position": DRAFT, "both": BOTH}


def always(*parents: int) -> Shape:
    return lambda before: parents


def bias(pair: int, shape: Shape, rule: Rule, key: Key, sizes: tuple[int, int]) -> float:
    vocab, n = sizes
    laws: list[LawAt] = [
        lru_cache(maxsize=None)(TableLM(vocab, seed, zeros=0.1).law) for seed in (pair, pair + 50)
    ]
    return distance(emitted_together(*laws, shape, rule, n, key), plain(laws[0], n))


SIZES = [(2, 4), (3, 2)]  # vocabulary, tokens
CHAIN, TREE = always(-1, 0, 1), always(-1, 0, 0, 1)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("rule", [rejection, block])
def test_passes_with_noise_of_their_own_keep_the_law(rule: Rule, sizes: tuple[int, int]) -> None:
    for pair in range(PAIRS):
        assert bias(pair, CHAIN, rule, by_pass, sizes) < EXACT


@pytest.mark.parametrize("key", KEYS)
def test_reuse_is_harmless_under_rejection(key: str) -> None:
    for pair in range(PAIRS):
        assert bias(pair, CHAIN, rejection, KEYS[key], (2, 4)) < EXACT
        assert bias(pair, CHAIN, rejection, KEYS[key], (3, 2)) < EXACT


@pytest.mark.parametrize("key", KEYS)
def test_reuse_is_harmless_at_multi_candidate_nodes(key: str) -> None:
    for pair in range(4):
        assert bias(pair, TREE, multi_candidate, KEYS[key], (3, 2)) < EXACT
        assert bias(pair, always(-1, 0, 0, 1, 2), multi_candidate, KEYS[key], (2, 4)) < EXACT


@pytest.mark.parametrize("key", ["ACCEPT by position", "DRAFT by position", "both"])
def test_reuse_under_block_verification_is_caught(key: str) -> None:
    assert max(bias(pair, CHAIN, block, KEYS[key], (3, 2)) for pair in range(PAIRS)) > 1e-2


def after_what_was_refused(before: TokenTree | None) -> tuple[int, ...]:
    """A longer draft after one that ended in token 0, which may have been refused or never tested."""
    return (-1, 0, 1) if before is None or before.tokens[-1] == 0 else (-1,)


@pytest.mark.parametrize(
    ("key", "is_exact"),
    [(by_pass, True), (ACCEPT, True), (DRAFT, False)],
    ids=["by pass", "ACCEPT by position", "DRAFT by position"],
)
def test_a_controller_that_heard_of_refused_tokens_needs_fresh_draft_noise(key: Key, is_exact: bool) -> None:
    found = [bias(pair, after_what_was_refused, rejection, key, (2, 4)) for pair in range(PAIRS)]
    assert max(found) < EXACT if is_exact else max(found) > 1e-3
