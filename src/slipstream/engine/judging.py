"""What comes of a step's forward: the rule's verdict on every row, and what the drafter is told of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items

from slipstream.core.draft import Draft, Needs, Observation
from slipstream.core.sequence import TokenLogprob
from slipstream.engine.drafting import Work
from slipstream.errors import met_by
from slipstream.logits.pipeline import LogitsPipeline
from slipstream.model.pack import Span
from slipstream.model.runner import Output
from slipstream.verify import Rule, Verdict, build_views
from slipstream.verify.view import ViewRow


def judge(
    work: Items[Work], output: Output, pipelines: Mapping[int, LogitsPipeline], rule: Callable[[Draft], Rule]
) -> tuple[list[Verdict], list[list[TokenLogprob]]]:
    """A verdict a row, and the log-probabilities of its tokens where they are asked for (else none)."""
    assert output.logits is not None
    spans = output.pack.spans
    rows_of = [(w.sequence, w.draft.tree, span.start) for w, span in zip(work, spans, strict=True)]
    seen = [ViewRow(pipelines[s.id], s.tokens, tree, s.seed, start) for s, tree, start in rows_of]
    views = build_views(seen, output.logits)
    verdicts = []
    for w, view in zip(work, views, strict=True):
        with met_by(w.sequence.id):
            verdicts.append(rule(w.draft)(w.draft, view))
    chosen_logprobs = [
        seen_row.pipeline.chosen_logprobs(
            output.logits[span.start : span.end],
            (0, *verdict.path),
            (*(w.draft.tree.tokens[n] for n in verdict.path), verdict.token),
        )
        for w, seen_row, span, verdict in zip(work, seen, spans, verdicts, strict=True)
    ]
    return verdicts, chosen_logprobs


def observed(
    work: Work, output: Output, span: Span, kept: tuple[int, ...], start: int, needs: Needs
) -> Observation:
    """What was computed of a row: the nodes in `kept`, root first, at position `start` and behind it."""
    sequence, tree = work.sequence, work.draft.tree
    return Observation(
        sequence.id,
        start,
        tuple(tree.tokens[n] for n in kept),
        output.features_of([span.start + n for n in kept]),
        work.draft,
        kept[1:],
        output.logits[span.start : span.end] if needs.node_logits and output.logits is not None else None,
        sequence.tokens[-1],
    )
