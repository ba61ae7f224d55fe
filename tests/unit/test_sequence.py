"""Committing: where an answer ends, and what of text, tokens and log-probabilities is kept."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.core.params import SamplingParams
from slipstream.core.sequence import Sequence, TokenLogprob
from slipstream.core.text import TextStream

EOS = 0
PIECES: tuple[bytes, ...] = (
    b"", b"a", b"b", b"ab", b"ba", b"abc", b" a", "é".encode(), b"\xc3", b"\xa9", b"\xe2\x82", b"\xac",
    b"b\xe2", b"\x82\xac", b"c", b"\xff",
)  # fmt: skip
NAMES = {piece: token for token, piece in enumerate(PIECES)}
A, B, AB, BA, C = (NAMES[p] for p in (b"a", b"b", b"ab", b"ba", b"c"))


def decode(tokens: Tokens[int]) -> str:
    """Byte-level, like a BPE tokenizer: characters may be split over tokens."""
    return b"".join(PIECES[t] for t in tokens).decode("utf-8", errors="replace")


def sequence(room: int = 100, **params: Any) -> Sequence:
    request = SamplingParams().with_(**params)
    return Sequence(1, (9, 9), request, 0, frozenset({EOS}), room, TextStream(decode, request.stop))


def test_tokens_become_final_in_order() -> None:
    row = sequence()
    event = row.commit([A, B, C], num_drafted=2)
    assert event.tokens == (A, B, C) and event.drafted == (True, True, False) and event.text == "abc"
    assert event.finish_reason is None and not row.finished
    assert row.output == [A, B, C] and row.drafted == [True, True, False] and row.num_output == 3
    assert row.tokens == [9, 9, A, B, C] and row.remaining == 97


def test_eos_in_the_middle_of_a_block_ends_it() -> None:
    row = sequence()
    event = row.commit([A, EOS, B, C], num_drafted=3)
    assert event.tokens == (A, EOS) and event.text == "a" and event.finish_reason == "stop"
    assert event.drafted == (True, True) and row.output == [A, EOS]


def test_ignored_eos_goes_on_and_a_stop_id_ends() -> None:
    row = sequence(ignore_eos=True, stop_token_ids=(C,))
    assert row.stop_ids == {C}
    event = row.commit([A, EOS, B, C, A], num_drafted=4)
    assert event.tokens == (A, EOS, B, C) and event.text == "ab" and event.finish_reason == "stop"


def test_stop_string_over_token_borders_is_cut_off() -> None:
    row = sequence(stop=("bab",))
    event = row.commit([A, B, AB, C, A], num_drafted=4)
    assert event.tokens == (A, B, AB) and event.text == "a" == row.text and event.finish_reason == "stop"


def test_the_stop_string_that_is_complete_first_wins() -> None:
    row = sequence(stop=("bc", "aba"))
    assert row.commit([AB, A, B, C], 0).text == "" and row.output == [AB, A]
    row = sequence(stop=("cab", "a"))
    assert row.commit([C, AB], 0).text == "c"


@pytest.mark.parametrize(
    ("tokens", "kept", "reason"),
    [
        ([A, EOS, AB], 2, "stop"),  # EOS before the stop string
        ([AB, EOS], 1, "stop"),  # stop string before EOS
        ([A, A, AB], 3, "stop"),  # stop string and limit at one token
        ([A, A, EOS], 3, "stop"),  # EOS and limit at one token
        ([A, A, A, AB], 3, "length"),  # limit before the stop string
    ],
)
def test_what_comes_first_in_token_order_wins(tokens: list[int], kept: int, reason: str) -> None:
    row = sequence(stop=("b",), max_tokens=3)
    event = row.commit(tokens, len(tokens))
    assert (len(event.tokens), event.finish_reason) == (kept, reason)


@pytest.mark.parametrize(("max_tokens", "room", "limit"), [(3, 100, 3), (None, 4, 4), (10, 4, 4), (1, 1, 1)])
def test_the_limit_is_met_exactly(max_tokens: int | None, room: int, limit: int) -> None:
    row = sequence(room, max_tokens=max_tokens)
    event = row.commit([A] * 9, 8)
    assert row.num_output == len(event.tokens) == limit and row.remaining == 0
    assert event.finish_reason == "length"


def test_min_tokens_holds_back_every_kind_of_stop() -> None:
    row = sequence(min_tokens=3, stop=("b",), stop_token_ids=(C,))
    assert row.commit([B, C], 0).finish_reason is None
    event = row.commit([B], 0)
    assert event.finish_reason == "stop" and row.output == [B, C, B] and row.text == "bc"
    row = sequence(min_tokens=3)
    assert row.commit([EOS, EOS, A, EOS], 0).tokens == (EOS, EOS, A, EOS)


def test_an_early_stop_string_does_not_end_the_answer_later() -> None:
    """One that was complete while stops were held back, beside a longer one that widens the search."""
    row = sequence(min_tokens=2, stop=("b", "cccc"))
    assert row.commit([B, A, A, C], 0).finish_reason is None
    assert row.text == "baac"


def test_a_stop_string_begun_early_and_completed_later_counts() -> None:
    row = sequence(min_tokens=2, stop=("ab",))
    assert row.commit([A, B], 0).finish_reason == "stop"
    assert row.text == ""


def test_text_that_may_become_a_stop_string_is_held_back() -> None:
    row = sequence(stop=("abc",))
    assert [row.commit([t], 0).text for t in (C, A, B, A, B, B)] == ["c", "", "", "ab", "", "abb"]
    row = sequence(stop=("abc",))
    assert [row.commit([t], 0).text for t in (C, A, B, C)] == ["c", "", "", ""]
    assert row.text == "c"
    row = sequence(stop=("abc",))
    assert [row.commit([t], 0).text for t in (C, A, B, EOS)] == ["c", "", "", "ab"]


def test_characters_split_over_tokens_come_out_whole() -> None:
    row = sequence()
    euro = [NAMES[b"b\xe2"], NAMES[b"\x82\xac"]]
    assert [row.commit([t], 0).text for t in [A, *euro, C]] == ["a", "", "b€", "c"]
    assert row.text == "ab€c"


def test_a_broken_character_at_the_end_is_given_out() -> None:
    row = sequence(max_tokens=2)
    assert row.commit([A, NAMES[b"\xc3"]], 0).text == "a\ufffd"


def test_a_stop_string_behind_a_broken_character_is_cut_at_the_end() -> None:
    """Text is held back while its last character is unfinished; a stop string in it must not get out."""
    row = sequence(stop=("b",), max_tokens=2)
    event = row.commit([A, NAMES[b"b\xe2"]], 0)
    assert event.text == "a" == row.text and event.finish_reason == "stop"


def test_logprobs_are_cut_with_the_tokens() -> None:
    row = sequence()
    given_ = [TokenLogprob(t, -float(i)) for i, t in enumerate([A, EOS, B])]
    event = row.commit([A, EOS, B], 2, given_)
    assert event.logprobs == tuple(given_[:2]) == tuple(row.logprobs)


def test_cancel_gives_out_what_is_held_and_nothing_after() -> None:
    row = sequence(stop=("abc",))
    assert row.commit([C, A, B], 0).text == "c"
    event = row.cancel()
    assert (event.pieces, event.text, event.tokens) == (("ab",), "ab", ())
    assert event.finish_reason == "cancelled"
    late = row.commit([A, B], 1, [TokenLogprob(A, 0.0), TokenLogprob(B, 0.0)])
    assert (late.tokens, late.text, late.logprobs, late.finish_reason) == ((), "", (), "cancelled")
    assert row.output == [C, A, B] and row.logprobs == []


def test_each_token_has_the_text_that_became_final_with_it() -> None:
    row = sequence(stop=("abc",))
    half, rest = NAMES[b"\xe2\x82"], NAMES[b"\xac"]
    assert row.commit([A, C, half, rest, B], 4).pieces == ("", "ac", "", "€", "b")
    assert row.commit([A, B], 2).pieces == ("", "")
    assert row.commit([A, B, C, B], 4).pieces == ("ab", "", "")  # cut at the stop string
    row = sequence(max_tokens=2)
    assert row.commit([A, half], 1).pieces == ("a", "\ufffd")


def test_without_a_stream_tokens_alone_are_kept() -> None:
    row = Sequence(1, (9,), SamplingParams(max_tokens=2), 0, frozenset({EOS}), 10)
    event = row.commit([A, B, C], 3)
    assert (event.text, row.text, event.tokens, event.pieces) == ("", "", (A, B), ("", ""))


tokens_ = st.lists(st.integers(0, len(PIECES) - 1), max_size=25)
stops = st.lists(st.text("abcé€", min_size=1, max_size=4), max_size=3).map(tuple)


@given(tokens_, stops, st.integers(1, 25), st.integers(0, 12), st.booleans(), st.data())
def test_blocks_of_any_size_give_what_single_tokens_give(
    tokens: list[int], stop: tuple[str, ...], limit: int, early: int, ignore: bool, data: st.DataObject
) -> None:
    params: dict[str, Any] = {
        "stop": stop,
        "max_tokens": limit,
        "min_tokens": min(early, limit),
        "ignore_eos": ignore,
    }
    logprobs = [TokenLogprob(t, -float(i)) for i, t in enumerate(tokens)]
    single, blocks = sequence(**params), sequence(**params)
    pieces = []
    for token, logprob in zip(tokens, logprobs, strict=True):
        if not single.finished:
            pieces.append(single.commit([token], 0, [logprob]).text)
    grown, at = [], 0
    while at < len(tokens) and not blocks.finished:
        size = data.draw(st.integers(1, len(tokens) - at))
        event = blocks.commit(tokens[at : at + size], 0, logprobs[at : at + size])
        assert len(event.pieces) == len(event.tokens)
        grown.extend(event.pieces)
        at += size
    assert blocks.tokens == single.tokens and blocks.logprobs == single.logprobs
    assert blocks.finish_reason == single.finish_reason
    assert blocks.text == single.text and grown == pieces
    if single.finished:
        assert "".join(pieces) == single.text
        if not params["min_tokens"]:
            assert not any(s in single.text for s in stop)
        ids = [t for t in single.output if t not in single.stop_ids]
        assert decode(ids).startswith(single.text)


@given(tokens_, stops)
def test_no_stop_string_can_begin_in_given_text(tokens: list[int], stop: tuple[str, ...]) -> None:
    row = sequence(stop=stop, ignore_eos=True)
    given_ = ""
    for token in tokens:
        if row.finished:
            break
        given_ += row.commit([token], 0).text
        assert row.text.startswith(given_)
        if not row.finished:
            assert not any(s.startswith(row.text[i:]) for i in range(len(given_)) for s in stop)
