"""The same tokens with and without a drafter: greedy, and with the same seed at any temperature."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from slipstream.control import Controller
from slipstream.core.draft import Drafter
from slipstream.core.params import SamplingParams
from slipstream.core.stats import DraftCounts
from slipstream.engine.session import Completion, Session
from slipstream.logits.pipeline import LogitsPipeline
from slipstream.proof.probes import Coming
from slipstream.proof.reference import Reference
from slipstream.proof.ties import margin_of

_PENALTIES: dict[str, Any] = {
    "repetition_penalty": 1.3,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.5,
}
_BANNED_AT = (2, 5, 9, 14, 20)  # tokens of the answer that are forbidden behind the one before them


@dataclass(frozen=True)
class Setting:
    """One way to decode every prompt; each of them has a seed of its own."""

    name: str
    params: tuple[SamplingParams, ...]

    @property
    def greedy(self) -> bool:
        return self.params[0].temperature == 0.0

    def changed(self, name: str, **changes: Any) -> Setting:
        return Setting(name, tuple(p.with_(**changes) for p in self.params))


@dataclass(frozen=True)
class Difference:
    """The first place where an answer differs from plain decoding's.

    at: tokens before it, which are equal. plain, drafted: the tokens there, None where the answer had ended.
    margin, spacing, allowed: see `ties.Margin`; None where an end was passed or missed.
    """

    prompt: int
    at: int
    plain: int | None
    drafted: int | None
    plain_text: str
    drafted_text: str
    margin: float | None = None
    spacing: float | None = None
    allowed: float | None = None

    @property
    def near_tie(self) -> bool:
        if self.margin is None or self.spacing is None or self.allowed is None:
            return False
        return self.margin <= self.allowed * self.spacing


@dataclass(frozen=True)
class IdentityCheck:
    """One setting with one drafter. alone: prompts one after the other, not as a batch. promised: False for
    drafts that were drawn at random at a temperature above 0, which keep the law and not the tokens."""

    setting: str
    drafter: str
    alone: bool
    answers: int
    tokens: int
    drafted: int
    accepted: int
    branched: bool
    promised: bool
    differences: tuple[Difference, ...]

    @property
    def identical(self) -> int:
        return self.answers - len(self.differences)

    @property
    def broken(self) -> bool:
        return any(not d.near_tie for d in self.differences)


def first_settings(seeds: Sequence[int], tokens: int) -> list[Setting]:
    """Those that need no answer to be made from; the second is the one `later_settings` start from."""
    greedy = Setting("greedy", tuple(SamplingParams(max_tokens=tokens, seed=seed) for seed in seeds))
    return [
        greedy,
        greedy.changed("greedy, penalties", **_PENALTIES),
        greedy.changed("T=1, same seed", temperature=1.0),
        greedy.changed("T=0.8, filters, penalties", temperature=0.8, top_k=50, top_p=0.95, **_PENALTIES),
    ]


def later_settings(before: Setting, answers: Sequence[Completion]) -> list[Setting]:
    """Bans and ends where the answers to `before` go: pairs of tokens that they have are forbidden, and a
    token in their middle ends them."""
    bans, ends = [], []
    for params, answer in zip(before.params, answers, strict=True):
        told = answer.tokens
        pairs = (told[at - 1 : at + 1] for at in _BANNED_AT if at < len(told))
        bans.append(params.with_(bad_words=tuple(dict.fromkeys(pairs))))
        new = [at for at in range(1, len(told) - 1) if told[at] not in told[:at]]
        middle = min(new, key=lambda at: abs(at - len(told) // 2), default=None)
        ends.append(params if middle is None else params.with_(stop_token_ids=(told[middle],)))
    return [Setting("greedy, bad words", tuple(bans)), Setting("greedy, stop tokens", tuple(ends))]


def plainly(session: Session, prompts: Sequence[Sequence[int]], setting: Setting) -> list[Completion]:
    """Plain decoding's answers, with the two likeliest tokens of every place."""
    asked = setting.changed(setting.name, logprobs=2)
    return answers(session, None, prompts, asked.params)


def coming(answer: Completion) -> Coming:
    """What `probes.Replay` drafts from."""
    assert answer.logprobs is not None
    return [
        (t, next(o for o, _ in row.top if o != t))
        for t, row in zip(answer.tokens, answer.logprobs, strict=True)
    ]


def answers(
    session: Session,
    drafter: Drafter | None,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    *,
    controller: Controller | str | None = None,
    alone: bool = False,
) -> list[Completion]:
    """All prompts as one batch, or each alone."""
    session.engine.set_drafter(drafter, controller)
    asked = [list(prompt) for prompt in prompts]
    if not alone:
        found: list[Completion] = session.generate(asked, list(params))
        return found
    return [session.generate([one], [p])[0] for one, p in zip(asked, params, strict=True)]


def compare(
    session: Session,
    reference: Reference,
    prompts: Sequence[Sequence[int]],
    setting: Setting,
    expected: Sequence[Completion],
    got: Sequence[Completion],
    drafter: str,
    *,
    alone: bool = False,
) -> IdentityCheck:
    """What came out against plain decoding's, and every difference with its margin."""
    counts = DraftCounts()
    for completion in got:
        counts.add(completion.counts)
    promised = setting.greedy or not counts.sampled_drafts
    differences = []
    for i, (want, have) in enumerate(zip(expected, got, strict=True)):
        found = _first_difference(i, want, have, session.tokenizer.decode) if promised else None
        if found is not None:
            differences.append(_audited(session, reference, prompts[i], setting.params[i], want, found))
    return IdentityCheck(
        setting.name,
        drafter,
        alone,
        len(got),
        counts.emitted,
        counts.draft_tokens,
        counts.accepted_tokens,
        counts.branched,
        promised,
        tuple(differences),
    )


def _first_difference(
    prompt: int, want: Completion, have: Completion, decode: Callable[[list[int]], str]
) -> Difference | None:
    ours, theirs = want.tokens, have.tokens
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
    if at is None:
        same = (ours, want.finish_reason, want.text) == (theirs, have.finish_reason, have.text)
        if same:
            return None
        at = min(len(ours), len(theirs))
    here = [told[at] if at < len(told) else None for told in (ours, theirs)]
    texts = ["" if token is None else decode([token]) for token in here]
    return Difference(prompt, at, here[0], here[1], texts[0], texts[1])


def _audited(
    session: Session,
    reference: Reference,
    prompt: Sequence[int],
    params: SamplingParams,
    want: Completion,
    found: Difference,
) -> Difference:
    if found.plain is None or found.drafted is None:
        return found
    stop_ids = frozenset(params.stop_token_ids) | session.engine.eos_ids
    pipeline = LogitsPipeline(params, reference.vocab_size, stop_ids, len(prompt))
    pair = (found.plain, found.drafted)
    margin = margin_of(reference, pipeline, prompt, want.tokens[: found.at], want.seed, pair)
    return replace(found, margin=margin.logits, spacing=margin.spacing, allowed=margin.allowed)


def known(seeds: Sequence[int], plain: Sequence[Completion]) -> Mapping[int, Coming]:
    """What is to come for each seed."""
    return {seed: coming(answer) for seed, answer in zip(seeds, plain, strict=True)}
