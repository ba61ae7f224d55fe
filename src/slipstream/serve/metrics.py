"""Prometheus metrics, named and defined as vLLM's, under a prefix of their own.

Mean acceptance length is 1 + accepted / drafts; acceptance at a position is accepted there / drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from slipstream.core.stats import DraftCounts, PrefixCounts
from slipstream.errors import ParameterError

if TYPE_CHECKING:
    from slipstream.engine.engine import Engine

PREFIX = "slipstream"
_FIRST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0)
_NEXT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)
_TOKENS = (0.0, 0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 12.0, 16.0, 32.0, 64.0)
_WHOLE = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 240.0, 480.0, 960.0)


class Metrics:
    """Counted by the worker, read by `/metrics`. prefix: `vllm` is what tools made for vLLM ask for."""

    def __init__(self, model_name: str, prefix: str = PREFIX) -> None:
        if not prefix.isidentifier():
            raise ParameterError(f"the metrics prefix must be letters, digits and _, not {prefix!r}")
        self._registry = CollectorRegistry()
        self._name = model_name
        self._prefix = prefix
        self._told = DraftCounts()
        self._told_prefixes = PrefixCounts()
        self._running = self._gauge("num_requests_running", "Sequences that hold a slot.")
        self._waiting = self._gauge("num_requests_waiting", "Sequences that wait for a slot.")
        self._cache = self._gauge(
            "kv_cache_usage_perc", "Share of the cache budget that is promised, 0 to 1."
        )
        self._parked = self._gauge("prefix_cache_tokens", "Cached tokens of requests that have ended.")
        self._memory = self._gauge("memory_bytes", "Weights and caches of the target and all drafters.")
        self._prompt = self._counter("prompt_tokens", "Prompt tokens of requests that were taken.")
        self._looked_up = self._counter("prefix_cache_queries", "Prompt tokens looked up in the cache.")
        self._found = self._counter("prefix_cache_hits", "Prompt tokens found in it.")
        self._generated = self._counter("generation_tokens", "Tokens generated.")
        self._steps = self._counter("engine_steps", "Steps of the engine.")
        self._step_seconds = self._counter("engine_step_seconds", "Seconds spent in them.")
        self._drafts = self._counter("spec_decode_num_drafts", "Verifications of a draft that was not empty.")
        self._drafted = self._counter("spec_decode_num_draft_tokens", "Tokens drafted.")
        self._accepted = self._counter(
            "spec_decode_num_accepted_tokens", "Drafted tokens that were accepted."
        )
        self._at = Counter(
            f"{prefix}:spec_decode_num_accepted_tokens_per_pos",
            "Drafted tokens that were accepted, by position in the draft.",
            ("model_name", "position"),
            registry=self._registry,
        )
        self._a_row = Histogram(
            f"{prefix}:spec_decode_draft_tokens_per_row",
            "Tokens drafted in a step, by row: their mean. rows: of the step, up to so many.",
            ("model_name", "rows"),
            registry=self._registry,
            buckets=_TOKENS,
        )
        self._ended = Counter(
            f"{prefix}:request_success",
            "Answers by how they ended.",
            ("model_name", "finished_reason"),
            registry=self._registry,
        )
        self._refused = self._counter("request_refused", "Requests refused because the queue was full.")
        self._first = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", _FIRST
        )
        self._next = self._histogram(
            "inter_token_latency_seconds",
            "Between tokens of an answer; a step's tokens share its time.",
            _NEXT,
        )
        self._whole = self._histogram("e2e_request_latency_seconds", "From arrival to the end.", _WHOLE)
        self._queued = self._histogram("request_queue_time_seconds", "From arrival to a slot.", _WHOLE)

    def _gauge(self, name: str, text: str) -> Gauge:
        full = f"{self._prefix}:{name}"
        return Gauge(full, text, ("model_name",), registry=self._registry).labels(self._name)

    def _counter(self, name: str, text: str) -> Counter:
        full = f"{self._prefix}:{name}"
        return Counter(full, text, ("model_name",), registry=self._registry).labels(self._name)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        full = f"{self._prefix}:{name}"
        made = Histogram(full, text, ("model_name",), registry=self._registry, buckets=buckets)
        return made.labels(self._name)

    # -- the worker tells -----------------------------------------------------------------------

    def took(self, prompt_tokens: int) -> None:
        self._prompt.inc(prompt_tokens)

    def refused(self) -> None:
        self._refused.inc()

    def starts(self, engine: Engine) -> None:
        """What was decoded until now, to warm up and to measure, was nobody's."""
        self._told = DraftCounts()
        self._told.add(engine.counts)

    def stepped(self, engine: Engine, seconds: float) -> None:
        """After every step."""
        counts, told = engine.counts, self._told
        rows = counts.passes - told.passes
        if rows:
            drafted = (counts.draft_tokens - told.draft_tokens) / rows
            self._a_row.labels(self._name, str(1 << (rows - 1).bit_length())).observe(drafted)
        self._steps.inc()
        self._step_seconds.inc(seconds)
        self._drafts.inc(counts.drafts - told.drafts)
        self._drafted.inc(counts.draft_tokens - told.draft_tokens)
        self._accepted.inc(counts.accepted_tokens - told.accepted_tokens)
        for i, count in enumerate(counts.accepted_at):
            before = told.accepted_at[i] if i < len(told.accepted_at) else 0
            self._at.labels(self._name, str(i)).inc(count - before)
        self._told = DraftCounts()
        self._told.add(counts)
        prefixes, told_prefixes = engine.prefix_counts, self._told_prefixes
        self._looked_up.inc(prefixes.queries - told_prefixes.queries)
        self._found.inc(prefixes.hits - told_prefixes.hits)
        self._told_prefixes = replace(prefixes)
        self._show(engine)

    def holds(self, engine: Engine) -> None:
        """What is held now, after a request has ended."""
        self._show(engine)
        self._memory.set(engine.memory_bytes)

    def _show(self, engine: Engine) -> None:
        load = engine.load
        self._running.set(len(load.admitted))
        self._waiting.set(load.waiting)
        self._parked.set(load.parked)
        self._cache.set(load.reserved / load.cache_tokens if load.cache_tokens else 0.0)

    def emitted(self, tokens: int, since_arrival: float, since_last: float | None) -> None:
        """A step gave an answer tokens; since_last is None for its first."""
        self._generated.inc(tokens)
        if since_last is None:
            self._first.observe(since_arrival)
            return
        for _ in range(tokens):
            self._next.observe(since_last / tokens)

    def finished(self, reasons: Sequence[str], seconds: float, queued: float | None) -> None:
        """A request ended; one reason an answer."""
        for reason in reasons:
            self._ended.labels(self._name, reason).inc()
        self._whole.observe(seconds)
        if queued is not None:
            self._queued.observe(queued)

    # -- somebody reads -------------------------------------------------------------------------

    def text(self) -> tuple[bytes, str]:
        """The exposition and its content type."""
        return generate_latest(self._registry), CONTENT_TYPE_PLAIN_0_0_4
