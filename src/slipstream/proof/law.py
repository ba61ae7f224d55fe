"""The law of what is drafted and verified, against the target's own, on the first few tokens after a text."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from slipstream.control import Controller
from slipstream.core.draft import Drafter
from slipstream.core.params import SamplingParams
from slipstream.core.stats import DraftCounts
from slipstream.engine.session import Session
from slipstream.logits.pipeline import LogitsPipeline
from slipstream.model.progress import Progress
from slipstream.proof.exact import Prefix, ShortLaw, evenness
from slipstream.proof.gtest import LEAST, detectable, g_test
from slipstream.proof.plan import FEWEST
from slipstream.proof.reference import Reference
from slipstream.proof.ties import may_be_drawn

_CUTS = 16  # places of an answer that are looked at for such a text

LAWS = {
    "T=1": SamplingParams(temperature=1.0, ignore_eos=True),
    "T=0.7, filters, penalty": SamplingParams(
        temperature=0.7, top_k=40, top_p=0.95, repetition_penalty=1.2, ignore_eos=True
    ),
}


@dataclass(frozen=True)
class LawCheck:
    """A G-test of one drafter's output. threshold: for its p-value, so that all tests together raise a false
    alarm with no more than the probability that was planned. detectable: the total variation from which on a
    difference is found with the probability `power`.

    impossible: outputs with a token that the target gives no probability. at_the_edge: those among them whose
    token a filter's edge lets through if its logit is rounded up; they are no fault.
    """

    setting: str
    drafter: str
    samples: int
    horizon: int
    cells: int
    statistic: float
    freedom: int
    p_value: float
    threshold: float
    detectable: float
    power: float
    impossible: int
    at_the_edge: int
    drafted: int
    accepted: int
    drawn: bool
    """Whether drafts carried a q, so that the ratio test was at work."""

    @property
    def broken(self) -> bool:
        return self.p_value < self.threshold or self.impossible > self.at_the_edge


def undecided_text(
    reference: Reference,
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[Sequence[int]],
    temperature: float,
    samples: int,
    longest: int,
) -> list[int]:
    """Of these prompts with some of their answers' tokens, the one behind which the cells of so many samples
    are filled most evenly: there most can be seen. longest: tokens that leave room for what is drawn; every
    prompt has no more."""
    best: tuple[float, list[int]] | None = None
    for prompt, output in zip(prompts, outputs, strict=True):
        # The last token may be the end of the answer.
        begun = output[:-1][: min(_CUTS, longest - len(prompt))]
        rows = reference.along(prompt, begun)[:, : reference.vocab_size]  # [n + 1, V]
        for end, value in enumerate(evenness(rows, temperature, LEAST / samples).tolist()):
            if best is None or value > best[0]:
                best = value, [*prompt, *begun[:end]]
    assert best is not None
    return best[1]


@dataclass(frozen=True)
class Drawing:
    """How many samples, until when (time.monotonic()), from which seeds, so many rows at once."""

    samples: int
    deadline: float
    seeds: Iterator[int]
    rows: int


def check_law(
    session: Session,
    reference: Reference,
    law: ShortLaw,
    setting: str,
    drafter: tuple[str, Drafter],
    drawing: Drawing,
    *,
    threshold: float,
    power: float,
    controller: Controller | str | None = None,
    progress: Progress,
    done: int = 0,
) -> LawCheck:
    """Draws outputs with the drafter, and tests them. done: samples that the progress bar has seen before."""
    name, built = drafter
    session.engine.set_drafter(built, controller)
    outputs, counts = _draw(session, law, drawing, progress, done)
    total = sum(outputs.values())
    cells = law.cells(LEAST / total)
    seen: Counter[Prefix] = Counter()
    for output, number in outputs.items():
        seen[law.cell_of(cells, output)] += number
    test = g_test(seen, cells)
    impossible, edge = _impossible(reference, law, outputs)
    return LawCheck(
        setting,
        name,
        total,
        law.horizon,
        test.freedom + 1,
        test.statistic,
        test.freedom,
        test.p_value,
        threshold,
        detectable(total, test.freedom, threshold, power),
        power,
        impossible,
        edge,
        counts.draft_tokens,
        counts.accepted_tokens,
        counts.sampled_drafts > 0,
    )


def _draw(
    session: Session, law: ShortLaw, drawing: Drawing, progress: Progress, done: int
) -> tuple[Counter[Prefix], DraftCounts]:
    engine = session.engine
    params = law.params.with_(max_tokens=law.horizon)
    outputs: Counter[Prefix] = Counter()
    counts, drawn = DraftCounts(), 0
    while drawn < drawing.samples and (drawn < FEWEST or time.monotonic() < drawing.deadline):
        rows, group = [], None
        for _ in range(min(4 * drawing.rows, drawing.samples - drawn)):
            seq_id = engine.add(law.prompt, params, seed=next(drawing.seeds), group=group)
            row = engine.find(seq_id)
            assert row is not None
            if group is None:
                row.group = group = seq_id  # the others copy what it has read of the prompt
            rows.append(row)
        while engine.has_work:
            engine.step()
        for row in rows:
            outputs[tuple(row.output)] += 1
            counts.add(row.counts)
        drawn += len(rows)
        progress.at(done + drawn)
    return outputs, counts


def _impossible(reference: Reference, law: ShortLaw, outputs: Counter[Prefix]) -> tuple[int, int]:
    """Outputs with a token of probability 0, and those of them at a filter's edge."""
    pipeline = LogitsPipeline(law.params, reference.vocab_size, frozenset(), len(law.prompt))
    places: Counter[tuple[Prefix, int]] = Counter()
    for output, number in outputs.items():
        place = law.impossible(output)
        if place is not None:
            places[place] += number
    edge = sum(
        number
        for (before, token), number in places.items()
        if may_be_drawn(reference, pipeline, law.prompt, before, token)
    )
    return sum(places.values()), edge
