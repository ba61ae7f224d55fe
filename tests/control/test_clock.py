"""The clock: what it learns of steps that take other times than the curves say, and what it may not learn."""

from __future__ import annotations

import numpy as np
import pytest

from slipstream.control.clock import Clock

WHO = ("draft",)


def plain(clock: Clock, rows: int = 1) -> float:
    return clock.plain(rows)


def drafting(clock: Clock, rows: int = 1, tokens: int = 4) -> float:
    return float(clock.drafting(rows, np.array([float(tokens)]), WHO)[0])


def see_plain(clock: Clock, factor: float, rows: int = 1) -> None:
    clock.record(rows, rows, (), factor, 1.0)


def see_drafts(clock: Clock, factor: float, rows: int = 1, tokens: int = 4) -> None:
    clock.record(rows, tokens, WHO, factor, 1.0)


def test_what_was_measured_is_believed_until_a_step_says_otherwise() -> None:
    assert plain(Clock()) == drafting(Clock()) == 1.0


def test_a_machine_that_has_become_slower_is_slower_at_what_it_did_not_do_as_well() -> None:
    clock = Clock()
    for factor in (1.0, 2.0):
        for _ in range(200):
            see_drafts(clock, factor)
    assert drafting(clock) == pytest.approx(2.0, rel=0.05)
    assert plain(clock) == pytest.approx(2.0, rel=0.25)
    assert drafting(clock, rows=8, tokens=64) == pytest.approx(2.0, rel=0.25)


def test_a_curve_that_is_wrong_about_drafts_is_put_right_where_both_are_seen() -> None:
    clock = Clock()
    for step in range(120):
        if step % 8:
            see_drafts(clock, 2.0)
        else:
            see_plain(clock, 1.0)
    assert drafting(clock) / plain(clock) == pytest.approx(2.0, rel=0.1)


def test_numbers_of_tokens_are_told_apart() -> None:
    clock = Clock()
    for _ in range(100):
        see_plain(clock, 1.0)
        see_drafts(clock, 1.0, tokens=4)
        see_drafts(clock, 1.8, tokens=16)
    assert drafting(clock, tokens=4) == pytest.approx(1.0, rel=0.1)
    assert drafting(clock, tokens=16) == pytest.approx(1.8, rel=0.1)


def test_steps_that_something_else_held_up_move_little() -> None:
    clock = Clock()
    for step in range(400):
        see_drafts(clock, 30.0 if step % 20 == 19 else 1.0)
        if step > 100:
            assert drafting(clock) < 1.5
    assert plain(clock) < 1.3


def test_the_correction_is_bounded() -> None:
    clock = Clock()
    for _ in range(3000):
        see_drafts(clock, 1e9)
    assert drafting(clock) <= 16 * 16 * 2 * (1 + 1e-9)


def test_a_guess_gets_its_unit_from_the_first_step() -> None:
    clock = Clock(measured=False)
    see_plain(clock, 0.05)
    assert plain(clock) == pytest.approx(0.05, rel=0.05)
    assert 0.02 < drafting(clock, rows=4, tokens=8) < 0.1


def test_what_is_never_done_is_due_for_a_look_after_a_while() -> None:
    clock = Clock()
    for _ in range(255):
        see_drafts(clock, 1.0)
    assert not clock.stale(1, None)
    see_drafts(clock, 1.0)
    assert clock.stale(1, None) and not clock.stale(1, 4)
    see_plain(clock, 1.0)
    assert not clock.stale(1, None)


def test_it_is_due_soon_once_the_machine_has_changed_and_a_few_looks_settle_it() -> None:
    clock = Clock()
    looks = 0
    for step in range(400):
        if clock.stale(1, None):
            see_plain(clock, 3.0)
            looks += 1
        else:
            see_drafts(clock, 3.0)
        if step < 15:
            assert not looks
        if step == 20:
            assert looks == 1
    assert 2 <= looks <= 8


def test_larger_steps_are_another_choice_and_of_a_guessed_curve_seen_early() -> None:
    measured, guessed = Clock(), Clock(measured=False)
    for _ in range(20):
        see_drafts(measured, 1.0)
        see_drafts(guessed, 1.0)
    assert not measured.stale(1, 8) and guessed.stale(1, 8)
    see_drafts(guessed, 1.0, tokens=8)
    assert not guessed.stale(1, 8)


def test_batches_of_other_sizes_are_looked_at_on_their_own() -> None:
    clock = Clock()
    for _ in range(300):
        see_drafts(clock, 1.0, rows=1)
    assert clock.stale(1, None) and not clock.stale(8, None)
