"""One controller for the whole server: what it decides is seen, and changes nothing that is said."""

from __future__ import annotations

from collections.abc import Callable

from slipstream import SamplingParams, Session
from slipstream.control import Goodput, GoodputConfig
from slipstream.control.curves import Curves
from slipstream.cost.roofline import Free
from slipstream.serve.capacity import bytes_per_token
from slipstream.serve.metrics import Metrics
from slipstream.serve.worker import Done, Job, Piece, Worker
from slipstream.testing.modelled import Stairs

MakeWorker = Callable[..., Worker]
REPEATS = list(b"abcabcabcabc")


def goodput(rise: float) -> Goodput:
    """Of a machine on which every block of 8 tokens costs `rise` more; only ngram drafts."""
    return Goodput(GoodputConfig(""), {"ngram": Curves(Stairs(rise), Free(), 8, block=8)})


def ask(worker: Worker, count: int, tokens: int = 24, **job: object) -> list[list[Piece]]:
    """So many answers to the same prompt, asked for at once."""
    import queue

    inboxes = [queue.SimpleQueue() for _ in range(count)]  # type: ignore[var-annotated]
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    jobs = [Job(REPEATS, params, **job) for _ in range(count)]  # type: ignore[arg-type]
    worker.submit(jobs, [inbox.put for inbox in inboxes])
    answers = []
    for inbox in inboxes:
        pieces: list[Piece] = []
        while not isinstance(message := inbox.get(timeout=30), Done):
            pieces += [message] if isinstance(message, Piece) else []
        answers.append(pieces)
    return answers


def told(pieces: list[Piece]) -> list[int]:
    return [t for piece in pieces for t in piece.event.tokens]


def test_what_is_said_does_not_depend_on_who_decides_how_much_is_drafted(
    session: Session, make_worker: MakeWorker
) -> None:
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    expected = list(session.generate(REPEATS, params).tokens)
    worker = make_worker(controller=goodput(0.2))
    for job in ({}, {"drafter": "none"}, {"length": 3}, {"drafter": "none", "length": 0}):
        assert [told(a) for a in ask(worker, 3, **job)] == [expected] * 3


def test_plain_requests_are_never_drafted_for_and_fixed_lengths_are_kept(make_worker: MakeWorker) -> None:
    worker = make_worker(controller=goodput(0.0))
    (plain,) = ask(worker, 1, drafter="none")
    assert len(plain) == 24
    (fixed,) = ask(worker, 1, length=2, traced=True)
    drafted = [len(p.step.tokens) - 1 for p in fixed if p.step is not None]
    assert max(drafted) == 2


def drafted_a_row(metrics: Metrics) -> dict[str, tuple[float, float]]:
    """(steps, sum of their mean drafted tokens a row) by the label `rows`."""
    lines = metrics.text()[0].decode().splitlines()
    found: dict[str, list[float]] = {}
    for end in ("count", "sum"):
        for line in lines:
            name, _, value = line.rpartition(" ")
            if name.startswith(f"slipstream:spec_decode_draft_tokens_per_row_{end}"):
                found.setdefault(name.split('rows="')[1][:-2], []).append(float(value))
    return {rows: (count, total) for rows, (count, total) in found.items()}


def test_metrics_tell_how_much_is_drafted_by_the_size_of_the_batch(make_worker: MakeWorker) -> None:
    worker = make_worker(controller=goodput(0.0))
    ask(worker, 1)
    alone = drafted_a_row(worker.metrics)
    assert set(alone) == {"1"} and alone["1"][1] > 0
    ask(worker, 3)
    assert "4" in drafted_a_row(worker.metrics)


def test_what_is_decoded_to_measure_is_not_counted_and_drafts_whatever_the_controller_says(
    session: Session, make_worker: MakeWorker
) -> None:
    dear = goodput(1e6)
    worker = make_worker(controller=dear, start=False)
    before = session.engine.counts.draft_tokens
    assert bytes_per_token(session) > 0
    assert session.engine.counts.passes
    assert session.engine.controller is not None and not dear._rows
    worker.start()
    ask(worker, 1)
    text = worker.metrics.text()[0].decode()
    assert 'generation_tokens_total{model_name="tiny"} 24.0' in text
    line = next(x for x in text.splitlines() if x.startswith("slipstream:spec_decode_num_draft_tokens_total"))
    assert float(line.split()[-1]) <= session.engine.counts.draft_tokens - before
