"""The heads that come with the repository for a catalogue model: found by themselves, and exact."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import slipstream
from slipstream import SamplingParams, Session
from slipstream.drafters import build_drafter

pytestmark = pytest.mark.real

LINES = (Path(__file__).parent / "prompts.jsonl").read_text(encoding="utf-8").strip().split("\n")
CHATS = [[{"role": "user", "content": json.loads(line)["prompt"]}] for line in LINES[::4]]
GREEDY = SamplingParams(temperature=0, max_tokens=64)


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with slipstream.load("qwen2.5-coder-1.5b") as loaded:
        yield loaded


def answers(session: Session, spec: str) -> tuple[list[tuple[int, ...]], float]:
    """Tokens, and tau."""
    session.engine.set_drafter(build_drafter(spec, session.info))
    counts = session.engine.counts
    before = counts.emitted, counts.passes
    tokens = [answer.tokens for answer in session.generate(list(CHATS), GREEDY)]
    counts = session.engine.counts
    return tokens, (counts.emitted - before[0]) / (counts.passes - before[1])


@pytest.fixture(scope="module")
def plain(session: Session) -> list[tuple[int, ...]]:
    return answers(session, "none")[0]


# Chains, whose bits are plain decoding's; trees may differ at near-ties (docs/lossless.md).
@pytest.mark.parametrize(
    ("chain", "tree"), [("medusa:topk=1x1x1x1", "medusa:nodes=15"), ("eagle:top_k=1", "eagle:nodes=15")]
)
def test_shipped_heads_are_found_exact_and_good_for_something(
    session: Session, plain: list[tuple[int, ...]], chain: str, tree: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens, tau = answers(session, chain)
    _, wider = answers(session, tree)
    with capsys.disabled():
        print(f"\n{chain}: tau {tau:.2f}; {tree}: {wider:.2f}")
    assert tokens == plain
    assert 1.3 < tau <= wider
