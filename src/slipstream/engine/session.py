"""`Session`: an engine with a tokenizer, for people: prompts in, completions out.

`slipstream.load` gives one. It adds no decoding of its own; everything is `Engine.step`.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, overload

from slipstream.control import Controller
from slipstream.core.ask import shut_down
from slipstream.core.draft import Drafter
from slipstream.core.params import SamplingParams
from slipstream.core.sequence import Event, FinishReason, TokenLogprob
from slipstream.core.sequence import Sequence as Row
from slipstream.core.stats import DraftCounts, Seconds
from slipstream.drafters import build_drafter
from slipstream.drafters.base import TargetInfo
from slipstream.engine.engine import Engine
from slipstream.engine.inputs import Prompt, encode, is_single
from slipstream.errors import ParameterError, SlipstreamError


@dataclass(frozen=True)
class Completion:
    """One finished answer.

    tokens holds the end token, text does not. drafted[i] tells whether token i was drafted and
    accepted. counts are the raw draft counters of this answer; seconds are those of the whole call.
    lossy: decoded by a rule that does not keep the target's law. cached_tokens: of the prompt, that had been
    computed before.
    """

    text: str
    tokens: tuple[int, ...]
    prompt_tokens: int
    finish_reason: FinishReason
    drafted: tuple[bool, ...]
    logprobs: tuple[TokenLogprob, ...] | None
    counts: DraftCounts
    seed: int
    seconds: Seconds = field(default_factory=Seconds)
    lossy: bool = False
    cached_tokens: int = 0

    @property
    def tau(self) -> float:
        """Tokens a target pass, bonus included."""
        return self.counts.tau


class Session:
    """Owns an engine, a tokenizer and the drafters built for it. Use as a context manager, or `close`."""

    def __init__(self, engine: Engine, tokenizer: Any, info: TargetInfo, defaults: SamplingParams) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.info = info
        self.defaults = defaults
        self._built: list[Drafter] = [engine.drafter]
        # What open streams have not given yet, by sequence.
        self._streams: dict[int, deque[Event | Exception]] = {}

    # -- drafters -------------------------------------------------------------------------------

    @property
    def drafter(self) -> Drafter:
        return self.engine.drafter

    def use(self, drafter: str | Drafter, controller: Controller | str | None = None) -> Drafter:
        """Draft with this from now on; gives it. An earlier one is kept until `close`."""
        built = build_drafter(drafter, self.info)
        if built not in self._built:
            self._built.append(built)
        self.engine.set_drafter(built, controller)
        return built

    # -- generation -----------------------------------------------------------------------------

    @overload
    def generate(self, prompts: str, params: SamplingParams | None = None, **template: Any) -> Completion: ...

    @overload
    def generate(
        self, prompts: Any, params: SamplingParams | Sequence[SamplingParams] | None = None, **template: Any
    ) -> Any: ...

    def generate(
        self, prompts: Any, params: SamplingParams | Sequence[SamplingParams] | None = None, **template: Any
    ) -> Any:
        """Answer one prompt (text, token ids, or a chat) or a list of them, all together.

        params: one for all, or one a prompt; None is the model's own defaults. A single prompt gives a
        `Completion`, or with n > 1 a list of them; a list of prompts gives a list of either.
        """
        single = is_single(prompts)
        given: list[Prompt] = [prompts] if single else list(prompts)
        if not given:
            raise ParameterError("there is no prompt; give text, token ids, a chat, or a list of them")
        many = self._params(params, len(given))
        encoded = [encode(self.tokenizer, p, **template) for p in given]
        before = self.engine.seconds.copy()
        groups: list[list[Row]] = []
        try:
            for prompt, one in zip(encoded, many, strict=True):
                groups.append(self._add(prompt, one))
            while self.engine.has_work:
                self._step()
        except BaseException:
            self.cancel([row for group in groups for row in group])
            raise
        seconds = self.engine.seconds - before
        answers = [[self.completion(row, seconds) for row in group] for group in groups]
        shaped = [group if one.n > 1 else group[0] for group, one in zip(answers, many, strict=True)]
        return shaped[0] if single else shaped

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **template: Any
    ) -> Iterator[Event]:
        """Answer one prompt piece by piece. Closing the iterator cancels the request."""
        if not is_single(prompt):
            raise ParameterError("stream takes one prompt; use generate for several")
        (one,) = self._params(params, 1)
        if one.n != 1:
            raise ParameterError(f"stream gives one answer, n must be 1, not {one.n}")
        (row,) = self._add(encode(self.tokenizer, prompt, **template), one)
        told = self._streams[row.id] = deque()
        try:
            while told or not row.finished:
                if not told:
                    try:
                        self._step(row.id)
                    except Exception as error:  # what this stream was given in that step comes first
                        told.append(error)
                if told:
                    item = told.popleft()
                    if isinstance(item, Exception):
                        raise item
                    yield item
        finally:
            del self._streams[row.id]
            self.cancel([row])

    def _step(self, mine: int | None = None) -> None:
        """One step; open streams get what is theirs, whoever asked for the step (stream `mine`, or none). An
        error of other streams alone ends these, and waits for them."""
        try:
            for event in self.engine.turn():
                if event.seq_id in self._streams:
                    self._streams[event.seq_id].append(event)
        except SlipstreamError as error:
            theirs = error.seq_ids or frozenset()
            if not theirs or mine in theirs or not theirs <= self._streams.keys():
                raise
            self.engine.abandon(theirs)
            for seq_id in theirs:
                self._streams[seq_id].append(error)

    def submit(self, prompt: Prompt, params: SamplingParams | None = None, **template: Any) -> list[Row]:
        """Queue one prompt and give its n live sequences, for callers that drive `engine.step` themselves."""
        (one,) = self._params(params, 1)
        return self._add(encode(self.tokenizer, prompt, **template), one)

    def cancel(self, rows: Sequence[Row]) -> list[Event]:
        """End these now, with what there is; gives the events of those that were still going."""
        for row in rows:
            self.engine.cancel(row.id)
        return self.engine.apply_cancels()

    def _params(
        self, params: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params or self.defaults] * count
        odd: object = params
        if isinstance(params, (list, tuple)):
            odd = next((one for one in params if not isinstance(one, SamplingParams)), None)
        if odd is not None:
            raise ParameterError(
                f"params must be SamplingParams, or a list with one for each prompt, not {type(odd).__name__}"
            )
        if len(params) != count:
            raise ParameterError(
                f"{count} prompts need {count} parameters (or one for all), not {len(params)}"
            )
        return list(params)

    def _add(self, prompt: Sequence[int], params: SamplingParams) -> list[Row]:
        """Queue n sequences; sequence i has seed + i."""
        seed = secrets.randbits(62) if params.seed is None else params.seed
        rows: list[Row] = []
        for i in range(params.n):
            group = rows[0].id if rows else None
            row = self.engine.find(self.engine.add(prompt, params, seed=seed + i, group=group))
            assert row is not None
            row.group = row.id if params.n > 1 and not rows else group
            rows.append(row)
        return rows

    def completion(self, row: Row, seconds: Seconds) -> Completion:
        """A finished sequence as an answer."""
        assert row.finish_reason is not None
        return Completion(
            row.text,
            tuple(row.output),
            len(row.prompt),
            row.finish_reason,
            tuple(row.drafted),
            tuple(row.logprobs) if row.params.logprobs is not None else None,
            row.counts,
            row.seed,
            replace(seconds),
            row.lossy,
            row.cached_tokens,
        )

    def bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Token sequences of words that must not appear, with and without a space before them."""
        spellings = [w for word in words for w in (word, " " + word)]
        found = (tuple(self.tokenizer(w, add_special_tokens=False)["input_ids"]) for w in spellings)
        return tuple(dict.fromkeys(f for f in found if f))

    def close(self) -> None:
        """Free models, caches and drafters."""
        others = [drafter for drafter in self._built if drafter is not self.engine.drafter]
        self._built.clear()
        try:
            shut_down(others)
        finally:
            self.engine.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
