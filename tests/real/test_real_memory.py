"""What `slipstream doctor --drafter` predicts against what the real pair takes: told, and resident."""

from __future__ import annotations

import ctypes
import gc
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch

import slipstream
from slipstream import SamplingParams, Session
from slipstream.core.draft import Drafter
from slipstream.engine.inputs import encode
from slipstream.plan.memory import plan_memory
from slipstream.testing.quantised import lacks_int8

pytestmark = pytest.mark.real

TARGET, DRAFT = "qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b"
LINES = (Path(__file__).parent / "prompts.jsonl").read_text(encoding="utf-8").strip().split("\n")
TEXT = "\n\n".join(json.loads(line)["prompt"] for line in LINES)
CONTEXT = 600


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with slipstream.load(TARGET, context=CONTEXT) as loaded:
        yield loaded


def resident() -> int:
    """Bytes in memory, without what the allocator keeps of what was freed."""
    gc.collect()
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).malloc_trim(0)
    return int(psutil.Process().memory_info().rss)


def resident_while_running(
    session: Session, prompt: list[int], then: Callable[[], None] = lambda: None
) -> int:
    """With a row that has nearly filled the context; it is then run to its end."""
    (row,) = session.submit(prompt, SamplingParams(temperature=0, ignore_eos=True))
    while row.num_output < CONTEXT - len(prompt) - 6:
        session.engine.step()
    then()
    held = resident()
    list(session.engine.run())
    return held


def touch(drafter: Drafter) -> None:
    """Read all weights: a table of embeddings is mapped from its file, and pages never read are not there."""
    for module in drafter.runner.model.modules():  # type: ignore[attr-defined]
        for tensor in module.parameters(recurse=False):
            tensor.view(torch.uint8).max()


@pytest.mark.parametrize("options", ["", ",quantise=int8"])
def test_the_memory_of_a_draft_model_is_predicted(
    session: Session, options: str, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = f"draft_model:model={DRAFT}{options}"
    plan = plan_memory(TARGET, spec, context=CONTEXT)
    prompt = encode(session.tokenizer, TEXT)[: CONTEXT - 24]
    before = resident_while_running(session, prompt)
    drafter = session.use(spec)
    grown = resident_while_running(session, prompt, lambda: touch(drafter)) - before
    told, predicted = session.engine.drafter_peak_bytes, plan.drafter.total
    session.use("none")  # what is not used is freed
    session._built.remove(drafter)
    drafter.shutdown()
    with capsys.disabled():
        print(
            f"\n{spec}: predicted {predicted / 1e6:.0f} MB, told {told / 1e6:.0f}, resident {grown / 1e6:.0f}"
        )
    assert told == pytest.approx(predicted, rel=0.1)
    assert grown == pytest.approx(predicted, rel=0.1)


def test_the_memory_of_the_target_is_predicted(session: Session) -> None:
    plan = plan_memory(TARGET, context=CONTEXT)
    session.use("none")
    (row,) = session.submit(encode(session.tokenizer, TEXT)[: CONTEXT - 24], SamplingParams(max_tokens=2))
    while not row.num_output:
        session.engine.step()
    assert session.engine.runner.memory_bytes == plan.target.total
    session.cancel([row])


@pytest.mark.skipif(lacks_int8(), reason="this CPU has no int8 products")
@pytest.mark.parametrize("embedding", ["plain", "int8"])
def test_the_memory_of_an_int8_target_is_predicted(
    embedding: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Told by the runner, and resident with all pages of its tables read."""
    precision = {"weights": "int8", "embedding": embedding}
    plan = plan_memory(TARGET, context=CONTEXT, **precision)
    with slipstream.load(TARGET, context=CONTEXT, **precision):  # made now if it is not there yet
        pass
    before = resident()
    with slipstream.load(TARGET, context=CONTEXT, **precision) as loaded:
        prompt = encode(loaded.tokenizer, TEXT)[: CONTEXT - 24]

        def touch_tables() -> None:
            table = loaded.info.model.get_input_embeddings()
            for tensor in (*table.parameters(), *table.buffers()):
                tensor.view(torch.uint8).max()

        (row,) = loaded.submit(prompt, SamplingParams(max_tokens=2))
        while not row.num_output:
            loaded.engine.step()
        touch_tables()
        told, held = loaded.engine.runner.memory_bytes, resident() - before
        loaded.cancel([row])
    with capsys.disabled():
        print(
            f"\nint8, embedding {embedding}: predicted {plan.target.total / 1e6:.0f} MB, told"
            f" {told / 1e6:.0f}, resident {held / 1e6:.0f}"
        )
    assert told == plan.target.total
    assert held == pytest.approx(plan.target.total, rel=0.1)


def test_the_catalogue_says_what_the_checkpoints_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = [plan_memory(TARGET, f"draft_model:model={DRAFT}{o}") for o in ("", ",quantise=int8")]
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path))
    monkeypatch.setattr("slipstream.model.load.cached_snapshot", lambda *_: None)
    away = [plan_memory(TARGET, f"draft_model:model={DRAFT}{o}") for o in ("", ",quantise=int8")]
    for one, other in zip(here, away, strict=True):
        assert (one.target.total, one.drafter.total) == (other.target.total, other.drafter.total)
        assert len(other.drafter.notes) == len(one.drafter.notes) + 1
