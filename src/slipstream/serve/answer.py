"""From pieces to OpenAI's objects: the same parts make a stream of chunks or one whole answer."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from slipstream.core.sequence import TokenLogprob
from slipstream.serve import report
from slipstream.serve.replies import (
    ChatChoice,
    ChatChunk,
    ChatReply,
    CompletionReply,
    Delta,
    DeltaChoice,
    Finish,
    FunctionReply,
    MessageReply,
    Reply,
    StepReply,
    TextChoice,
    ToolCallReply,
)
from slipstream.serve.tools import Call, CallReader
from slipstream.serve.vocabulary import Vocabulary
from slipstream.serve.worker import Piece, Ticket
from slipstream.version import __version__


@dataclass
class Part:
    """What one step, or all of them together, said in answer `index`."""

    index: int
    text: str = ""
    calls: list[Call] = field(default_factory=list)
    entries: list[TokenLogprob] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    steps: list[StepReply] = field(default_factory=list)
    finish: Finish | None = None

    def add(self, other: Part) -> None:
        self.text += other.text
        self.calls += other.calls
        self.entries += other.entries
        self.pieces += other.pieces
        self.steps += other.steps
        self.finish = other.finish


class Writer(ABC):
    """Of one request. tickets are there once it has started; answers are numbered prompt by prompt."""

    prefix = ""
    object = ""

    def __init__(
        self,
        model: str,
        vocabulary: Vocabulary,
        ends: frozenset[int],
        *,
        logprobs: int | None,
        tell_speculation: bool,
        answers: int,
    ) -> None:
        self.id = f"{self.prefix}-{secrets.token_hex(12)}"
        self._model = model
        self._created = int(time.time())
        self._vocabulary = vocabulary
        self._ends = ends
        self._logprobs = logprobs
        self._tell_speculation = tell_speculation
        self._left = answers
        self._parts: dict[int, Part] = {}
        self._sent = 0
        self.continuous_usage = False  # the usage so far in every chunk
        self.tickets: Sequence[Ticket] = ()

    # -- what a stream sends --------------------------------------------------------------------

    def opening(self) -> list[Reply]:
        return []

    def chunk(self, index: int, piece: Piece) -> Reply | None:
        """None if nothing can be shown yet. The chunk that ends the last answer has the timings."""
        part = self._read(index, piece)
        self._sent += len(piece.event.tokens)
        if part.finish is None and not (part.text or part.calls or part.entries or part.steps):
            return None
        self._left -= part.finish is not None
        more = {} if self._left else self._closing()
        if self.continuous_usage:
            more["usage"] = report.usage(self.tickets, self._sent)
        return self._chunk(part, **more)

    def usage_chunk(self) -> Reply:
        return self._empty_chunk(usage=report.usage(self.tickets), **self._closing())

    # -- or what a whole answer is --------------------------------------------------------------

    def collect(self, index: int, piece: Piece) -> None:
        part = self._read(index, piece)
        self._parts.setdefault(index, Part(index)).add(part)

    def whole(self) -> Reply:
        parts = [self._parts[index] for index in sorted(self._parts)]
        return self._whole(parts, usage=report.usage(self.tickets), **self._closing())

    # -- parts ----------------------------------------------------------------------------------

    def _read(self, index: int, piece: Piece) -> Part:
        event = piece.event
        reason = event.finish_reason
        part = Part(index, event.text)
        if reason is not None:
            part.finish = "length" if reason == "length" else "stop"
        if self._logprobs is not None:
            said = report.said(event, self._ends)
            part.entries, part.pieces = list(event.logprobs[:said]), list(event.pieces[:said])
        if piece.step is not None:
            part.steps = [report.step_reply(event, piece.step, self._vocabulary)]
        return part

    def _closing(self) -> dict[str, Any]:
        more: dict[str, Any] = {"timings": report.timings(self.tickets)}
        if self._tell_speculation:
            more["speculative"] = report.speculative(self.tickets)
        return more

    def _base(self, kind: str, **more: Any) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": f"slipstream-{__version__}",
            **more,
        }

    @abstractmethod
    def _chunk(self, part: Part, **more: Any) -> Reply: ...

    @abstractmethod
    def _empty_chunk(self, **more: Any) -> Reply: ...

    @abstractmethod
    def _whole(self, parts: Sequence[Part], **more: Any) -> Reply: ...


class ChatWriter(Writer):
    """reader: makes what reads tool calls from one answer's text; None without tools."""

    prefix = "chatcmpl"

    def __init__(self, *args: Any, reader: Callable[[], CallReader] | None = None, **more: Any) -> None:
        super().__init__(*args, **more)
        self._answers = more["answers"]
        self._reader = reader
        self._readers: dict[int, CallReader] = {}
        self._called: dict[int, int] = {}

    def opening(self) -> list[Reply]:
        return [
            self._one(
                DeltaChoice(
                    index=i, delta=Delta(role="assistant", content=""), logprobs=None, finish_reason=None
                )
            )
            for i in range(self._answers)
        ]

    def _read(self, index: int, piece: Piece) -> Part:
        part = super()._read(index, piece)
        if self._reader is not None:
            if index not in self._readers:
                self._readers[index] = self._reader()
            reader = self._readers[index]
            told = [reader.feed(part.text)] + ([reader.finish()] if part.finish is not None else [])
            part.text = "".join(t.content for t in told)
            part.calls = [call for t in told for call in t.calls]
            if part.finish == "stop" and reader.called:
                part.finish = "tool_calls"
        return part

    def _chunk(self, part: Part, **more: Any) -> Reply:
        delta = Delta()
        if part.text or not part.calls and part.finish is None:
            delta.content = part.text
        if part.calls:
            first = self._called.get(part.index, 0)
            self._called[part.index] = first + len(part.calls)
            delta.tool_calls = [_call(call, first + i) for i, call in enumerate(part.calls)]
        choice = DeltaChoice(
            index=part.index,
            delta=delta,
            logprobs=self._logprobs_of(part) if part.entries else None,
            finish_reason=part.finish,
        )
        if part.steps:
            choice.steps = part.steps
        return self._one(choice, **more)

    def _one(self, choice: DeltaChoice, **more: Any) -> Reply:
        return ChatChunk(**self._base("chat.completion.chunk", choices=[choice], **more))

    def _empty_chunk(self, **more: Any) -> Reply:
        return ChatChunk(**self._base("chat.completion.chunk", choices=[], **more))

    def _whole(self, parts: Sequence[Part], **more: Any) -> Reply:
        choices = []
        for part in parts:
            message = MessageReply(role="assistant", content=part.text, refusal=None)
            if part.calls:
                message.content = part.text or None
                message.tool_calls = [_call(call) for call in part.calls]
            assert part.finish is not None
            choice = ChatChoice(
                index=part.index,
                message=message,
                logprobs=None if self._logprobs is None else self._logprobs_of(part),
                finish_reason=part.finish,
            )
            if part.steps:
                choice.steps = part.steps
            choices.append(choice)
        return ChatReply(**self._base("chat.completion", choices=choices, **more))

    def _logprobs_of(self, part: Part) -> Any:
        return report.chat_logprobs(part.entries, self._vocabulary)


class CompletionWriter(Writer):
    """echo: the text of each answer's prompt, to stand before it; empty without."""

    prefix = "cmpl"

    def __init__(self, *args: Any, echo: Sequence[str] = (), **more: Any) -> None:
        super().__init__(*args, **more)
        self._echo = echo
        self._offsets: dict[int, int] = {}

    def opening(self) -> list[Reply]:
        return [self._one(Part(i, text)) for i, text in enumerate(self._echo) if text]

    def _chunk(self, part: Part, **more: Any) -> Reply:
        return self._one(part, **more)

    def _one(self, part: Part, **more: Any) -> Reply:
        return CompletionReply(**self._base("text_completion", choices=[self._choice(part)], **more))

    def _choice(self, part: Part) -> TextChoice:
        offset = self._offsets.get(part.index, 0)
        self._offsets[part.index] = offset + len(part.text)
        logprobs = None
        if self._logprobs is not None and (part.entries or part.finish is not None):
            logprobs = report.completion_logprobs(
                part.entries, part.pieces, offset, self._vocabulary, self._logprobs > 0
            )
        choice = TextChoice(index=part.index, text=part.text, logprobs=logprobs, finish_reason=part.finish)
        if part.steps:
            choice.steps = part.steps
        return choice

    def _empty_chunk(self, **more: Any) -> Reply:
        return CompletionReply(**self._base("text_completion", choices=[], **more))

    def _whole(self, parts: Sequence[Part], **more: Any) -> Reply:
        for part in parts:
            if self._echo:
                part.text = self._echo[part.index] + part.text
        return CompletionReply(
            **self._base("text_completion", choices=[self._choice(p) for p in parts], **more)
        )


def _call(call: Call, index: int | None = None) -> ToolCallReply:
    reply = ToolCallReply(
        id=call.id, type="function", function=FunctionReply(name=call.name, arguments=call.arguments)
    )
    if index is not None:
        reply.index = index
    return reply
