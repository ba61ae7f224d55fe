"""Training text: the target answers prompts itself, through our own engine, many at a time.

A drafter is only asked what its target says, so it learns from the target's own words. What an answer
is depends on the prompt, the target and the arguments alone: its noise is keyed by the prompt, so neither
the order, nor the batch, nor a run that was killed in between changes a token.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from slipstream.core.params import SamplingParams
from slipstream.core.sequence import Sequence as Live
from slipstream.engine.inputs import encode
from slipstream.engine.session import Session
from slipstream.errors import CapacityError, ParameterError
from slipstream.model import memory
from slipstream.model.cache import WIDTH, round_up
from slipstream.model.progress import size
from slipstream.prompts.rows import Message, Row
from slipstream.train.dataset import Conversation, DataWriter
from slipstream.train.samples import Sample
from slipstream.train.template import conversation_sample, question_tokens

MOST_ROWS = {"cpu": 16, "cuda": 64}  # beyond them a CPU's step grows with the rows: docs/train-data.md


@dataclass(frozen=True)
class AnswerSettings:
    """All that decides what an answer is. params: max_tokens is the longest answer; its seed is not used.

    max_length: most tokens of question and answer together. template False continues the prompt as plain
    text. keep_answers: the conversations' own answers are kept, nothing is generated.
    """

    params: SamplingParams
    seed: int = 0
    max_length: int = 2048
    template: bool = True
    keep_answers: bool = False

    def __post_init__(self) -> None:
        if self.params.max_tokens is None or self.params.n != 1:
            raise ParameterError("training answers need max_tokens, and n of 1")
        if not self.keep_answers and self.params.max_tokens >= self.max_length:
            raise ParameterError(
                f"max_length ({self.max_length}) leaves no room for a question beside"
                f" max_tokens ({self.params.max_tokens}): raise one or lower the other"
            )
        if self.keep_answers and not self.template:
            raise ParameterError("kept answers need the chat template: drop --no-chat-template")

    def to_json(self) -> dict[str, Any]:
        params = asdict(self.params)
        del params["seed"], params["n"], params["logprobs"]
        params["logit_bias"] = {str(k): v for k, v in params["logit_bias"].items()}
        others = {"seed": self.seed, "max_length": self.max_length, "template": self.template}
        told = {**params, **others, "keep_answers": self.keep_answers}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in told.items()}


@dataclass(frozen=True)
class Limits:
    """When to stop, whichever comes first; None is never. prompts and answer tokens count the whole
    folder, seconds this run."""

    prompts: int | None = None
    tokens: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("prompts", self.prompts), ("tokens", self.tokens), ("seconds", self.seconds)):
            if value is not None and value <= 0:
                raise ParameterError(f"a limit of {name} must be above 0, not {value}")


@dataclass
class Tally:
    """How far it is. answers and tokens are those of this run, running the tokens of unfinished
    conversations; resumed were there before it."""

    total: int = 0
    resumed: int = 0
    answers: int = 0
    tokens: int = 0
    duplicates: int = 0
    too_long: int = 0
    running: int = 0
    seconds: float = 0.0
    ended: str = ""

    @property
    def rate(self) -> float:
        """Answer tokens a second, those of unfinished answers included."""
        return (self.tokens + self.running) / self.seconds if self.seconds else 0.0

    def left(self, limits: Limits, done: int, answer_tokens: int, longest: int) -> float | None:
        """Seconds until the first limit or the last prompt; None while nothing tells.

        done, answer_tokens: conversations of the folder and what they hold; longest: most tokens of one.
        The answers that end first are the short ones, so the length of those to come is taken as all tokens,
        those of unfinished answers included, over all that ended.
        """
        guesses = []
        if done and self.rate:
            each = min(longest, (answer_tokens + self.running) / done)
            prompts = self.total - self.resumed - self.answers - self.too_long
            guesses.append(max(0.0, prompts * each - self.running) / self.rate)
        if limits.tokens is not None and self.rate:  # what is unfinished when the limit is met is dropped
            guesses.append(max(0.0, limits.tokens - answer_tokens) / self.rate)
        if limits.seconds is not None:
            guesses.append(max(0.0, limits.seconds - self.seconds))
        return min(guesses) if guesses else None


def distinct(rows: Sequence[Row], tally: Tally) -> list[Row]:
    """Each question once, the first of them."""
    kept: dict[str, Row] = {}
    for row in rows:
        kept.setdefault(row.key, row)
    tally.duplicates += len(rows) - len(kept)
    return list(kept.values())


def rows_that_fit(
    config: Any, dtype: torch.dtype, device: torch.device, max_length: int, wanted: int | None = None
) -> int:
    """How many answers of full length can grow at once in half of the free memory, at most `MOST_ROWS`; or
    `wanted`, if all of the free memory holds so many.

    config is the target's text config. CapacityError when not even one fits, or not what is wanted.
    """
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_token = 2 * config.num_hidden_layers * heads * width * dtype.itemsize
    per_row = per_token * round_up(max_length, WIDTH) + 8 * config.vocab_size * 4
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else memory.available()
    if wanted is not None and wanted * per_row > free:
        raise CapacityError(
            f"{wanted} answers of {max_length} tokens at once need {size(wanted * per_row)} of memory beside"
            f" the model and {size(free)} are free: lower --batch or --max-length"
        )
    if wanted is not None:
        return wanted
    fits = free // 2 // per_row
    if fits < 1:
        raise CapacityError(
            f"one answer of {max_length} tokens needs {size(per_row)} of memory beside the model and"
            f" {size(free)} are free: close other programs, or lower --max-length"
        )
    return int(min(fits, MOST_ROWS.get(device.type, 16)))


@dataclass
class _Talk:
    """A conversation that is being answered: its last user's turn waits for `live`."""

    row: Row
    asked: list[Message]  # users' turns still to come
    said: list[Message]
    samples: list[Sample] = field(default_factory=list)
    finish: list[str] = field(default_factory=list)
    prompt: tuple[int, ...] = ()
    live: Live | None = None
    answered: int = 0  # tokens of the answers before this one

    @property
    def running(self) -> int:
        return self.answered + (self.live.num_output if self.live else 0)

    def finished(self) -> Conversation:
        return Conversation(
            self.row.key, tuple(self.said), tuple(self.samples), tuple(self.finish), self.row.where
        )


class Answerer:
    """Lets the target answer rows into a folder. `run` goes on until nothing is left or a limit is met."""

    def __init__(
        self, session: Session, settings: AnswerSettings, writer: DataWriter, limits: Limits
    ) -> None:
        self._session, self._settings, self._writer, self._limits = session, settings, writer, limits
        self._talks: list[_Talk] = []
        self.tally = Tally()

    def run(
        self,
        rows: Sequence[Row],
        *,
        batch: int,
        report: Callable[[Tally], None] = lambda tally: None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Tally:
        """Answer rows, `batch` conversations at once; report after every step.

        What is unfinished when it ends (limit, `stopped`, error) is dropped: a later run makes it again,
        token by token the same. Gives the tally.
        """
        waiting = self._plan(rows)
        began = time.perf_counter()
        try:
            while not self.tally.ended:
                while len(self._talks) < batch and (row := next(waiting, None)) is not None:
                    self._open(row)
                if not self._talks:
                    self.tally.ended = "done"
                    break
                self._session.engine.step()
                self._collect()
                self.tally.seconds = time.perf_counter() - began
                self.tally.running = sum(t.running for t in self._talks)
                self._check(stopped)
                report(self.tally)
        finally:
            self._session.cancel([t.live for t in self._talks if t.live])
            self._talks.clear()
        return self.tally

    def _plan(self, rows: Sequence[Row]) -> Iterator[Row]:
        chosen = distinct(rows, self.tally)[: self._limits.prompts]
        self.tally.total = len(chosen)
        todo = [row for row in chosen if row.key not in self._writer.done]
        self.tally.resumed = len(chosen) - len(todo)
        if todo:
            self._check(lambda: False)
        return iter(todo)

    def _check(self, stopped: Callable[[], bool]) -> None:
        limits, tally = self._limits, self.tally
        if stopped():
            tally.ended = "interrupted"
        elif limits.tokens is not None and self._writer.answer_tokens >= limits.tokens:
            tally.ended = "limit of tokens"
        elif limits.seconds is not None and tally.seconds >= limits.seconds:
            tally.ended = "limit of time"

    def _open(self, row: Row) -> None:
        system = [m for m in row.messages if m["role"] == "system"]
        talk = _Talk(row, [m for m in row.questions if m["role"] == "user"], system)
        if self._ask(talk):
            self._talks.append(talk)

    def _ask(self, talk: _Talk) -> bool:
        """Put the next question; False when there is none or no room for it, and the talk is over."""
        if talk.asked:
            messages = [*talk.said, talk.asked[0]]
            prompt = self._prompt(messages, talk.row.where)
            room = min(self._settings.max_length, self._session.engine.context)
            params = self._settings.params
            assert params.max_tokens is not None
            if len(prompt) + params.max_tokens <= room:
                seed = row_seed(self._settings.seed, talk.row.key, len(talk.finish))
                talk.asked.pop(0)
                talk.said, talk.prompt = messages, prompt
                (talk.live,) = self._session.submit(prompt, params.with_(seed=seed))
                return True
            if not talk.finish:
                self.tally.too_long += 1
        talk.live = None
        if talk.finish:
            self._add(talk.finished())
        return False

    def _prompt(self, messages: Sequence[Message], where: str) -> tuple[int, ...]:
        if self._settings.template:
            return question_tokens(self._session.tokenizer, messages, where)
        if len(messages) > 1:
            raise ParameterError(
                f"{where}: without a chat template only single prompts can be continued: no system message,"
                " no further turns"
            )
        return tuple(encode(self._session.tokenizer, messages[0]["content"]))

    def _collect(self) -> None:
        ended = [t for t in self._talks if t.live is not None and t.live.finished]
        for talk in ended:
            assert talk.live is not None and talk.live.finish_reason is not None
            output, text = tuple(talk.live.output), talk.live.text
            talk.finish.append(talk.live.finish_reason)
            talk.said.append({"role": "assistant", "content": text})
            talk.samples = _joined(talk.samples, talk.prompt, output)
            talk.answered += len(output)
            if not self._ask(talk):
                self._talks.remove(talk)

    def _add(self, conversation: Conversation) -> None:
        self._writer.add(conversation)
        self.tally.answers += 1
        self.tally.tokens += conversation.answer_tokens


def _joined(samples: Sequence[Sample], prompt: tuple[int, ...], output: tuple[int, ...]) -> list[Sample]:
    """The samples with one more answer; it joins the last one if the new prompt begins with its tokens."""
    earlier, kept = (False,) * len(prompt), list(samples)
    if samples and prompt[: len(samples[-1].tokens)] == samples[-1].tokens:
        last = kept.pop()
        earlier = (*last.loss, *(False,) * (len(prompt) - len(last.loss)))
    return [*kept, Sample((*prompt, *output), (*earlier, *(True,) * len(output)))]


def row_seed(seed: int, key: str, turn: int) -> int:
    """A seed of 62 bits for one answer."""
    digest = hashlib.blake2b(f"{seed} {key} {turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 2


def keep_answers(
    tokenizer: Any,
    rows: Sequence[Row],
    end_ids: frozenset[int],
    settings: AnswerSettings,
    writer: DataWriter,
    limits: Limits,
    report: Callable[[Tally], None] = lambda tally: None,
    stopped: Callable[[], bool] = lambda: False,
) -> Tally:
    """Takes conversations with the answers they have. Rows that end with the user lose that turn; what is
    beyond max_length is cut, and a row without an answer before it is left out."""
    tally, began = Tally(), time.perf_counter()
    chosen = distinct(rows, tally)[: limits.prompts]
    tally.total = len(chosen)
    for row in chosen:
        tally.seconds = time.perf_counter() - began
        if row.key in writer.done:
            tally.resumed += 1
            continue
        if limits.tokens is not None and writer.answer_tokens >= limits.tokens:
            tally.ended = "limit of tokens"
        elif limits.seconds is not None and tally.seconds >= limits.seconds:
            tally.ended = "limit of time"
        elif stopped():
            tally.ended = "interrupted"
        if tally.ended:
            break
        messages = row.messages if row.messages[-1]["role"] == "assistant" else row.messages[:-1]
        if not any(m["role"] == "assistant" for m in messages):
            raise ParameterError(
                f"{row.where}: there is no assistant's turn: drop --keep-answers to make one"
            )
        sample = conversation_sample(tokenizer, messages, end_ids, row.where)
        cut = Sample(sample.tokens[: settings.max_length], sample.loss[: settings.max_length])
        if not any(cut.loss):
            tally.too_long += 1
            continue
        conversation = Conversation(row.key, messages, (cut,), (), row.where)
        writer.add(conversation)
        tally.answers += 1
        tally.tokens += conversation.answer_tokens
        report(tally)
    tally.ended = tally.ended or "done"
    return tally


def describe(tally: Tally, drafter: str, batch: int, tau: float | None) -> Mapping[str, Any]:
    """What a run adds to the manifest."""
    return {
        "ended": tally.ended,
        "prompts": tally.total,
        "duplicates": tally.duplicates,
        "too_long": tally.too_long,
        "run": {
            "answers": tally.answers,
            "answer_tokens": tally.tokens,
            "seconds": round(tally.seconds, 3),
            "tokens_per_second": round(tally.rate, 3),
            "drafter": drafter,
            "batch": batch,
            "tau": None if tau is None else round(tau, 4),
        },
    }
