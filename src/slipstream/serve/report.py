"""Usage, timings and acceptance of a finished request, from its tickets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from slipstream.core.sequence import Event, TokenLogprob
from slipstream.core.stats import DraftCounts
from slipstream.serve.replies import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptTokensDetails,
    SpeculativeReply,
    StepReply,
    Timings,
    TokenLogprobs,
    TopLogprob,
    TracedNode,
    TracedToken,
    Usage,
)
from slipstream.serve.routing import Step
from slipstream.serve.vocabulary import Vocabulary
from slipstream.serve.worker import Answer, Ticket

IMPOSSIBLE = -9999.0  # JSON has no -inf; OpenAI writes this


def usage(tickets: Sequence[Ticket], generated: int | None = None) -> Usage:
    """A prompt counts once, however many answers it has; the end token counts as generated.

    generated: how many tokens, where not all that there are shall count.
    """
    prompt = sum(len(t.job.prompt) for t in tickets)
    if generated is None:
        generated = sum(a.row.num_output for t in tickets for a in t.answers)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=generated,
        total_tokens=prompt + generated,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=_cached(tickets)),
    )


def _cached(tickets: Sequence[Ticket]) -> int:
    """Prompt tokens that other requests had left; the answers of one request share what one of them read."""
    return sum(min((a.row.cached_tokens for a in t.answers), default=0) for t in tickets)


def timings(tickets: Sequence[Ticket]) -> Timings:
    answers = [a for t in tickets for a in t.answers]
    cache_n = _cached(tickets)
    prompt_n = sum(len(t.job.prompt) for t in tickets) - cache_n
    queued = max((_span(t.arrived, a.route.opened) for t in tickets for a in t.answers), default=0.0)
    reading = max((_span(a.route.opened, a.first_at) for a in answers), default=0.0)
    first = min((a.first_at for a in answers if a.first_at is not None), default=None)
    last = max((a.last_at for a in answers if a.last_at is not None), default=None)
    writing = _span(first, last)
    later = sum(a.row.num_output - a.first_tokens for a in answers)
    counts = total(answers)
    return Timings(
        queued_ms=1e3 * queued,
        cache_n=cache_n,
        prompt_n=prompt_n,
        prompt_ms=1e3 * reading,
        prompt_per_second=_rate(prompt_n, reading),
        predicted_n=sum(a.row.num_output for a in answers),
        predicted_ms=1e3 * writing,
        predicted_per_second=_rate(later, writing),
        draft_n=counts.draft_tokens,
        draft_n_accepted=counts.accepted_tokens,
    )


def speculative(tickets: Sequence[Ticket]) -> SpeculativeReply:
    answers = [a for t in tickets for a in t.answers]
    counts = total(answers)
    return SpeculativeReply(
        drafter=answers[0].route.name if answers else "",
        num_passes=counts.passes,
        num_drafts=counts.drafts,
        num_draft_tokens=counts.draft_tokens,
        num_accepted_tokens=counts.accepted_tokens,
        mean_acceptance_length=counts.tau,
        acceptance_rate=counts.acceptance_rate,
        acceptance_per_position=counts.acceptance_per_position,
        sources={name: asdict(part) for name, part in counts.sources.items()},
    )


def total(answers: Sequence[Answer]) -> DraftCounts:
    counts = DraftCounts()
    for answer in answers:
        counts.add(answer.row.counts)
    return counts


def said(event: Event, ends: frozenset[int]) -> int:
    """How many of the event's tokens are part of the answer: all but the token that ended it."""
    count = len(event.tokens)
    ended = event.finish_reason == "stop" and count and event.tokens[-1] in ends
    return count - 1 if ended else count


def chat_logprobs(entries: Sequence[TokenLogprob], vocabulary: Vocabulary) -> ChatLogprobs:
    def one(token: int, logprob: float) -> dict[str, object]:
        raw = list(vocabulary.raw(token))
        return {"token": vocabulary.text(token), "logprob": max(logprob, IMPOSSIBLE), "bytes": raw}

    content = [
        TokenLogprobs.model_validate(
            {
                **one(e.token, e.logprob),
                "top_logprobs": [TopLogprob.model_validate(one(*pair)) for pair in e.top],
            }
        )
        for e in entries
    ]
    return ChatLogprobs(content=content)


def completion_logprobs(
    entries: Sequence[TokenLogprob], pieces: Sequence[str], offset: int, vocabulary: Vocabulary, top: bool
) -> CompletionLogprobs:
    """offset: characters of the answer before these tokens. Two tokens of one text share a key of top."""
    offsets = []
    for piece in pieces:
        offsets.append(offset)
        offset += len(piece)
    return CompletionLogprobs(
        tokens=[vocabulary.text(e.token) for e in entries],
        token_logprobs=[max(e.logprob, IMPOSSIBLE) for e in entries],
        top_logprobs=[_top(e, vocabulary) for e in entries] if top else None,
        text_offset=offsets,
    )


def _top(entry: TokenLogprob, vocabulary: Vocabulary) -> dict[str, float]:
    best: dict[str, float] = {}
    for token, logprob in entry.top:
        best.setdefault(vocabulary.text(token), max(logprob, IMPOSSIBLE))
    return best


def step_reply(event: Event, step: Step, vocabulary: Vocabulary) -> StepReply:
    accepted = {0, *step.accepted}
    return StepReply(
        tokens=[
            TracedToken(id=token, text=piece, drafted=drafted)
            for token, piece, drafted in zip(event.tokens, event.pieces, event.drafted, strict=True)
        ],
        tree=[
            TracedNode(id=token, text=vocabulary.text(token), parent=parent, accepted=node in accepted)
            for node, (token, parent) in enumerate(zip(step.tokens, step.parents, strict=True))
        ],
        source=step.source,
    )


def _span(begin: float | None, end: float | None) -> float:
    return 0.0 if begin is None or end is None else max(end - begin, 0.0)


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0
