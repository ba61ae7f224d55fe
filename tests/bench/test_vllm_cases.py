"""How the benches against the real vLLM count: one rule for both engines."""

from __future__ import annotations

from pathlib import Path

import pytest

import vllm_cases
from vllm_cases import Answers, Case, answers_of, compared, digest, steps_of_counts, steps_of_flags


def test_both_engines_tell_the_same_steps() -> None:
    # the prompt's token, two accepted and one more, none accepted, one accepted and one more
    flags = [False, True, True, False, False, True, False]
    assert steps_of_flags(flags) == [(0, 0), (1, 2), (4, 0), (5, 1)]
    assert steps_of_counts([2, 0, 1], len(flags)) == steps_of_flags(flags)[1:]
    # a draft behind the prompt, which vLLM never makes; an answer that ends within a draft
    assert steps_of_flags([True, False, True, True]) == [(0, 1)]
    assert steps_of_counts([3], 2) == [(1, 3)] and steps_of_counts([], 5) == []
    with pytest.raises(ValueError, match="steps are missing"):
        steps_of_counts([2, 0], 7)


def test_only_drafts_with_room_are_counted() -> None:
    steps = [(0, 2), (1, 2), (4, 0), (5, 1)]
    assert Answers([[7] * 7], [steps]).rates(2) == ([0.5, 0.5], 2)  # those at 1 and 4; at 5 two do not fit
    assert Answers([[7] * 8], [steps]).rates(2) == ([2 / 3, 1 / 3], 3)
    assert Answers([[7] * 3], [steps]).rates(2) == ([0.0, 0.0], 0)


def test_a_case_is_the_same_within_five_points() -> None:
    def answers(accepted: int) -> Answers:
        """100 drafts of one token, so many of them accepted."""
        return Answers([[7] * 3] * 100, [[(1, 1)] if i < accepted else [(1, 0)] for i in range(100)])

    def fine(here: int, there: int, right: bool = False) -> bool:
        case = Case("c", "t", {"num_speculative_tokens": 1}, answers(here), right)
        return compared(case, answers(there))[1]

    assert fine(50, 55) and fine(50, 45) and not fine(50, 56) and not fine(50, 44)
    assert fine(100, 100, right=True) and not fine(98, 98, right=True), "what cannot be wrong never is"
    told = {"tokens": [[1, 2, 3, 4]], "steps": [[2]]}
    assert answers_of(told) == Answers([[1, 2, 3, 4]], [[(1, 2)]])


def test_answers_are_kept_for_the_same_question_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "python"
    script.write_text('#!/bin/sh\necho "ValueError: no head" ; test -e "$2.fine" && cp "$2.fine" "$3"\n')
    script.chmod(0o755)
    monkeypatch.setattr(vllm_cases, "prepare", lambda name: script)
    monkeypatch.setattr(vllm_cases, "vllm_variables", lambda threads: {})
    failed = vllm_cases.theirs("a", {"x": 1}, tmp_path / "work", 1)
    assert isinstance(failed, str) and failed.startswith("ValueError: no head (status 1")
    answer = tmp_path / "work" / "a.json.fine"
    answer.write_text('{"tokens": []}')
    assert vllm_cases.theirs("a", {"x": 1}, tmp_path / "work", 1) == {"tokens": []}
    answer.unlink()
    assert vllm_cases.theirs("a", {"x": 1}, tmp_path / "work", 1) == {"tokens": []}, "kept"
    assert isinstance(vllm_cases.theirs("a", {"x": 2}, tmp_path / "work", 1), str), "another question"


def test_other_weights_are_another_drafter(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    before = digest(tmp_path)
    assert digest(tmp_path) == before
    (tmp_path / "config.json").write_text("{ }")
    assert digest(tmp_path) != before
