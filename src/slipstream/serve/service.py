"""`Service`: everything the HTTP routes share, and what they do with a request."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import Request
from starlette.responses import Response

from slipstream.core.params import GrammarSpec, SamplingParams
from slipstream.engine.session import Session
from slipstream.errors import ParameterError, SlipstreamError
from slipstream.logits.grammar import Grammar, Grammars
from slipstream.serve import report
from slipstream.serve.answer import ChatWriter, CompletionWriter, Writer
from slipstream.serve.chat import Prompts
from slipstream.serve.errors import ApiError, refused
from slipstream.serve.exchange import Exchange, as_api_error, unless_gone
from slipstream.serve.limits import Limits
from slipstream.serve.replies import Card
from slipstream.serve.sampling import check_speculative, read_format, read_params
from slipstream.serve.schemas import ChatRequest, CompletionRequest, Sampling
from slipstream.serve.stream import EventStream
from slipstream.serve.tools import CallReader, forced_call
from slipstream.serve.vocabulary import Vocabulary
from slipstream.serve.worker import Job, Worker

log = logging.getLogger("slipstream.serve.access")
T = TypeVar("T")


@dataclass(frozen=True)
class Options:
    """names: what the model is called, the first in answers. tool_form: see `tools.FORMS`; None finds it.

    log_prompts: write prompts and answers to the log as well.
    """

    names: tuple[str, ...]
    tool_form: str | None = None
    log_prompts: bool = False


class Service:
    """Owns the threads that encode; the worker is started and shut down by the application."""

    def __init__(self, session: Session, worker: Worker, limits: Limits, options: Options) -> None:
        self.worker = worker
        self.limits = limits
        self.options = options
        self.context = session.engine.context
        self._defaults = session.defaults
        self._eos = session.engine.eos_ids
        self._vocab_size = session.engine.vocab_size
        self.prompts = Prompts(session.tokenizer, limits, options.tool_form)
        self._grammars = session.engine.grammars
        self._vocabulary = Vocabulary(session.tokenizer, _table(self._grammars))
        self._created = int(time.time())
        # One thread: tokenizers are not made for several at once, and a long prompt must not stop the loop.
        self._encoder = ThreadPoolExecutor(1, thread_name_prefix="slipstream-encode")
        # Another, so that a grammar that takes long to compile holds up nobody's prompt.
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="slipstream-grammar")

    def close(self) -> None:
        for pool in (self._encoder, self._compiler):
            pool.shutdown(wait=False, cancel_futures=True)

    @property
    def name(self) -> str:
        return self.options.names[0]

    def cards(self) -> list[Card]:
        router = self.worker.router
        about = {
            "default": router.default,
            "drafters": {name: part.num_speculative_tokens for name, part in router.parts.items()},
            "max_num_speculative_tokens": self.limits.speculative_tokens,
        }
        return [
            Card(
                id=name,
                created=self._created,
                max_model_len=self.context,
                chat=self.prompts.chats,
                speculative=about,
            )
            for name in self.options.names
        ]

    def check_model(self, name: str | None) -> None:
        if name is not None and name not in self.options.names:
            raise ApiError(
                404,
                f"there is no model {name[:80]!r} here; there is {self.name!r}",
                param="model",
                code="model_not_found",
            )

    def check_tokens(self, tokens: Iterable[int], param: str = "tokens") -> None:
        bad = next((t for t in tokens if t >= self._vocab_size), None)
        if bad is not None:
            raise ApiError(
                400, f"{param}: token {bad} is outside the vocabulary of {self._vocab_size}", param=param
            )

    async def encode(self, work: Callable[..., T], *args: Any) -> T:
        """Run tokenizer work on its own thread."""
        return await asyncio.get_running_loop().run_in_executor(self._encoder, work, *args)

    # -- requests -------------------------------------------------------------------------------

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        self.check_model(body.model)
        self.prompts.need_template()
        tools = self.prompts.offered(body)
        form = self.prompts.form
        forced = forced_call(form, tools, body) if tools and form is not None else None
        params = await self._with_grammar(body, self._params(body), forced)
        ids = await self.encode(self.prompts.chat, body)
        reader = None
        if tools and form is not None:
            names = [tool.function.name for tool in tools]
            reader = lambda: CallReader(form, names)  # noqa: E731
        jobs = [self._job(body, ids, params)]
        writer = ChatWriter(*self._shared(params), reader=reader, **self._told(body, jobs))
        return await self._respond(request, body, jobs, writer)

    async def completion(self, body: CompletionRequest, request: Request) -> Response:
        self.check_model(body.model)
        params = await self._with_grammar(body, self._params(body))
        if body.best_of is not None and body.best_of != params.n:
            raise ApiError(400, "best_of is not supported other than n", param="best_of")
        if body.echo and body.logprobs is not None:
            raise ApiError(400, "logprobs of the prompt (echo) are not supported", param="echo")
        prompts = _prompts(body.prompt)
        if len(prompts) > self.limits.prompts:
            raise ApiError(400, f"at most {self.limits.prompts} prompts are allowed", param="prompt")
        encoded = [await self.encode(self.prompts.text, prompt) for prompt in prompts]
        echo: list[str] = []
        if body.echo:
            for prompt in prompts:
                text = prompt if isinstance(prompt, str) else await self.encode(self._decode, prompt)
                echo += [text] * params.n
        jobs = [self._job(body, ids, params) for ids in encoded]
        writer = CompletionWriter(*self._shared(params), echo=echo, **self._told(body, jobs))
        return await self._respond(request, body, jobs, writer)

    def _params(self, body: ChatRequest | CompletionRequest) -> SamplingParams:
        params = read_params(body, self._defaults, self.limits)
        self.check_tokens(params.logit_bias, "logit_bias")
        self.check_tokens(params.stop_token_ids, "stop_token_ids")
        return params

    async def _with_grammar(
        self, body: Sampling, params: SamplingParams, forced: GrammarSpec | None = None
    ) -> SamplingParams:
        """Compiled here, off the engine's thread, which finds it ready."""
        asked = read_format(body.response_format, self.limits)
        if asked is not None and forced is not None:
            raise ApiError(
                400, "response_format and a required tool_choice exclude each other", param="tool_choice"
            )
        spec = asked or forced
        if spec is None:
            return params
        param = "response_format" if asked else "tools"
        try:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._compiler, self._grammars, spec)
            return params.with_(grammar=spec)
        except SlipstreamError as error:
            raise refused(error, param) from error

    def _decode(self, ids: Sequence[int]) -> str:
        return self.prompts.decode(ids)

    def _job(self, body: Sampling, ids: Sequence[int], params: Any) -> Job:
        asked = check_speculative(body.speculative, self.limits)
        if asked.drafter is not None and asked.drafter not in self.worker.router.parts:
            offered = ", ".join(self.worker.router.parts)
            message = f"speculative.drafter is {asked.drafter[:80]!r}; this server has {offered}"
            raise ApiError(400, message, param="speculative.drafter")
        return Job(ids, params, asked.drafter, asked.num_speculative_tokens, asked.trace)

    def _shared(self, params: Any) -> tuple[str, Vocabulary, frozenset[int]]:
        return self.name, self._vocabulary, self._eos | frozenset(params.stop_token_ids)

    def _told(self, body: Sampling, jobs: Sequence[Job]) -> dict[str, Any]:
        return {
            "logprobs": jobs[0].params.logprobs,
            "tell_speculation": body.speculative is not None,
            "answers": sum(job.params.n for job in jobs),
        }

    # -- answers --------------------------------------------------------------------------------

    async def _respond(
        self, request: Request, body: Sampling, jobs: Sequence[Job], writer: Writer
    ) -> Response:
        began = time.monotonic()

        def ended(error: ApiError | None) -> None:
            self._log(request.url.path, body, writer, jobs, error, time.monotonic() - began)

        exchange = Exchange(self.worker, jobs)
        try:
            await exchange.start()
        except BaseException as error:
            await exchange.__aexit__()
            ended(as_api_error(error))
            raise
        writer.tickets = exchange.tickets
        if body.stream:
            options = body.stream_options
            usage = bool(options and options.include_usage)
            writer.continuous_usage = bool(usage and options and options.continuous_usage_stats)
            return EventStream(exchange, writer, include_usage=usage, ended=ended)

        async def collect() -> None:
            async for numbered in exchange.pieces():
                if numbered is not None:
                    writer.collect(*numbered)

        try:
            async with exchange:
                await unless_gone(request.receive, collect)
        except BaseException as error:
            ended(as_api_error(error))
            raise
        ended(None)
        text = writer.whole().model_dump_json(exclude_unset=True)
        return Response(text, media_type="application/json", headers={"X-Request-Id": writer.id})

    def _log(
        self,
        path: str,
        body: Sampling,
        writer: Writer,
        jobs: Sequence[Job],
        error: ApiError | None,
        seconds: float,
    ) -> None:
        """One JSON line a request; text only where the operator wants it."""
        facts: dict[str, Any] = {
            "event": "request",
            "id": writer.id,
            "path": path,
            "stream": bool(body.stream),
            "status": 200 if error is None else error.status,
            "seconds": round(seconds, 4),
            "answers": sum(job.params.n for job in jobs),
            "prompt_tokens": sum(len(job.prompt) for job in jobs),
        }
        if writer.tickets:
            told = report.timings(writer.tickets)
            facts |= {
                "cached_tokens": told.cache_n,
                "completion_tokens": told.predicted_n,
                "queued_ms": round(told.queued_ms, 1),
                "first_token_ms": round(told.queued_ms + told.prompt_ms, 1),
                "drafted": told.draft_n,
                "accepted": told.draft_n_accepted,
                "ends": [a.row.finish_reason for t in writer.tickets for a in t.answers],
            }
        if error is not None:
            facts["code"] = error.code
        if self.options.log_prompts:
            facts["request"] = body.model_dump(exclude_none=True)
            facts["texts"] = [a.row.text for t in writer.tickets for a in t.answers]
        log.info(json.dumps(facts))


def _table(grammars: Callable[[GrammarSpec], Grammar]) -> Any | None:
    """None for a tokenizer that llguidance cannot read: there are no grammars then, and bytes are guessed."""
    try:
        return grammars.table if isinstance(grammars, Grammars) else None
    except ParameterError as error:
        logging.getLogger("slipstream.serve").warning("no grammars: %s", error)
        return None


def _prompts(given: Any) -> list[Any]:
    """A prompt is a string or a list of ids; one or a list of them."""
    if isinstance(given, str) or not given or isinstance(given[0], int):
        return [given]
    return list(given)
