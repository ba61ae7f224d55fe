"""What the benches against the real vLLM share: running a case there, and counting both sides alike.

A verification is counted on both sides by one rule: it began behind the answer's first token, and all its
drafted tokens and one more had room before the answer's end. So neither the prompt's pass, in which engines
differ, nor the last drafts, which one engine cuts and the other lets run past the end, are in a rate. Rates
are unconditional: accepted at position i over all counted drafts.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from environments import prepare
from peer_processes import bound, vllm_variables
from slipstream.engine.session import Completion
from slipstream.model.progress import Silent
from slipstream.model.store import sha256_of

RUN = Path(__file__).with_name("vllm_run.py")
CLOSE = 0.05 + 1e-9  # of acceptance by position

Steps = list[tuple[int, int]]
"""Of one answer: where in it a verification began, and how many drafted tokens it accepted."""


@dataclass(frozen=True)
class Answers:
    """Of one setting to all prompts."""

    tokens: list[list[int]]
    steps: list[Steps] = field(default_factory=list)

    def rates(self, length: int) -> tuple[list[float], int]:
        """Acceptance by position for drafts of `length` tokens, and how many drafts were counted."""
        counted, accepted = 0, [0] * length
        for tokens, steps in zip(self.tokens, self.steps, strict=True):
            for start, kept in steps:
                if start >= 1 and start + length + 1 <= len(tokens):
                    counted += 1
                    for i in range(kept):
                        accepted[i] += 1
        return [a / counted if counted else 0.0 for a in accepted], counted


@dataclass(frozen=True)
class Case:
    """One drafter in both engines. right: it cannot be wrong, so all of it must be accepted."""

    name: str
    target: str
    speculative: dict[str, Any]
    ours: Answers
    right: bool = False

    @property
    def length(self) -> int:
        return int(self.speculative["num_speculative_tokens"])


def chain_of(method: str, folder: Path, length: int) -> str:
    """The drafter that drafts here as `method` does in vLLM: a chain of so many tokens."""
    if method == "draft_model":
        return f"draft_model:model={folder},num_speculative_tokens={length}"
    if method == "medusa":
        return f"medusa:heads={folder},topk={'x'.join('1' * length)}"
    return f"eagle:heads={folder},top_k=1,num_speculative_tokens={length},nodes={length}"


def completed(answers: Sequence[Completion]) -> Answers:
    """Slipstream's answers."""
    return Answers([list(a.tokens) for a in answers], [steps_of_flags(a.drafted) for a in answers])


def steps_of_flags(drafted: Sequence[bool]) -> Steps:
    """From Slipstream's `Completion.drafted`: a verification ends with the one token that is not drafted."""
    steps, start = list[tuple[int, int]](), 0
    for i, flag in enumerate(drafted):
        if not flag:
            steps.append((start, i - start))
            start = i + 1
    return steps


def steps_of_counts(accepted: Sequence[int], length: int) -> Steps:
    """From vLLM's accepted tokens of each verification; the first token comes with the prompt. length: of
    the answer. Raises ValueError if these are not all verifications of it.
    """
    steps, start = list[tuple[int, int]](), 1
    for kept in accepted:
        steps.append((start, kept))
        start += kept + 1
    if accepted and start < length:
        raise ValueError(f"vLLM tells of {start} tokens and gave {length}: steps are missing")
    return steps


def theirs(
    name: str, case: Mapping[str, Any], work: Path, threads: int, timeout: float = 1800.0
) -> dict[str, Any] | str:
    """What vLLM answers to a case of `vllm_run.py`, or why it does not. Kept in `work`, asked once."""
    work.mkdir(parents=True, exist_ok=True)
    asked, told, log = (work / f"{name}.{end}" for end in ("json", "out.json", "log"))
    text = json.dumps(case)
    if told.exists() and asked.exists() and asked.read_text() == text:
        return dict(json.loads(told.read_text()))
    told.unlink(missing_ok=True)
    asked.write_text(text)
    variables = {**vllm_variables(threads), **bound(threads)}
    with log.open("w") as out:
        try:
            done = subprocess.run(
                [str(prepare("vllm")), str(RUN), str(asked), str(told)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={**os.environ, **variables},
                timeout=timeout,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"no answer within {timeout:.0f} s; see {log}"
    if done.returncode or not told.exists():
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        wrong = [line for line in lines if "Error" in line]
        return f"{(wrong or lines or ['it said nothing'])[-1][-300:]} (status {done.returncode}; see {log})"
    return dict(json.loads(told.read_text()))


def digest(folder: Path) -> str:
    """Of a folder's files: what is kept of a drafter's answers is of these weights."""
    found = hashlib.sha256()
    for path in sorted(p for p in folder.iterdir() if p.is_file()):
        found.update(f"{path.name}\n{sha256_of(path, Silent())}\n".encode())
    return found.hexdigest()


def answers_of(told: Mapping[str, Any]) -> Answers:
    """vLLM's answers, as `vllm_run.py` writes them."""
    pairs = zip(told["steps"], told["tokens"], strict=True)
    return Answers(told["tokens"], [steps_of_counts(steps, len(tokens)) for steps, tokens in pairs])


def compared(case: Case, answers: Answers) -> tuple[str, bool]:
    """Acceptance by position in words, and whether it is the same in both engines."""
    (there, many), (here, ours) = answers.rates(case.length), case.ours.rates(case.length)
    fine = many > 0 and ours > 0 and max(abs(a - b) for a, b in zip(there, here, strict=True)) <= CLOSE
    fine &= not case.right or there[0] >= 0.999
    told = " ".join(f"{a:.3f}/{b:.3f}" for a, b in zip(there, here, strict=True))
    return f"accepted by position, vLLM/ours: {told} of {many}/{ours} drafts", fine
