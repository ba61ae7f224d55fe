"""One reading of a server's /metrics: the same counters whatever the engine calls them.

Names were read in the sources: vllm 0.32.0 and 0.33.0 v1/spec_decode/metrics.py and v1/metrics/loggers.py;
sglang 0.5.23 srt/observability/metrics_collector.py; llama.cpp's tools/server (its spec_decode_* counters
came in 2026: an older server has none, or none by position). Slipstream's own server uses vLLM's names with
the prefix `slipstream`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from slipstream.errors import ParameterError, SlipstreamError


class WatchError(SlipstreamError):
    """A server cannot be read; the message says why and what to do."""


@dataclass(frozen=True)
class Reading:
    """Counters since the server's start, and gauges of this moment; None where the engine has no such number.

    drafts: verifications of a draft. accepted excludes the bonus token. per_position: accepted at position
    1, 2, … tau: tokens a verification as the engine itself says it (SGLang's gauge). steps: drafted tokens
    a step, likewise.
    """

    url: str
    engine: str
    at: float
    drafts: float | None = None
    draft_tokens: float | None = None
    accepted: float | None = None
    per_position: tuple[float, ...] = ()
    tokens: float | None = None
    running: float | None = None
    waiting: float | None = None
    tau: float | None = None
    acceptance: float | None = None
    steps: float | None = None
    throughput: float | None = None
    models: tuple[str, ...] = field(default=())


def parse(text: str, url: str, at: float) -> Reading:
    """Reads Prometheus text. at: seconds, of any clock. Raises WatchError for text of no engine that is
    known.
    """
    samples = list(_samples(text, url))
    for engine, prefix in (
        ("vllm", "vllm:"),
        ("sglang", "sglang:"),
        ("llama.cpp", "llamacpp:"),
        ("slipstream", "slipstream:"),
        ("slipstream", "slipstream_"),
    ):
        named = [(n.removeprefix(prefix), labels, v) for n, labels, v in samples if n.startswith(prefix)]
        if named:
            read = {"sglang": _sglang, "llama.cpp": _llamacpp}.get(engine, _vllm)
            return read(_Table(named), url, engine, at)
    raise WatchError(
        f"{url} shows no metrics of vLLM, SGLang, llama.cpp or Slipstream: SGLang needs --enable-metrics,"
        " llama-server"
        " --metrics"
    )


def _samples(text: str, url: str) -> Iterable[tuple[str, dict[str, str], float]]:
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError:
        raise ParameterError("watch needs prometheus-client: pip install 'slipstream-lm[scale]'") from None
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if math.isfinite(sample.value):  # a mean of nothing is NaN
                    yield sample.name, dict(sample.labels), float(sample.value)
    except (ValueError, LookupError) as error:
        raise WatchError(f"{url} answers something else than Prometheus text ({error})") from error


class _Table:
    """Samples by name, summed over engines and models."""

    def __init__(self, samples: list[tuple[str, dict[str, str], float]]) -> None:
        self.samples = samples

    def total(self, *names: str) -> float | None:
        """The sum of the first of these that is there."""
        for name in names:
            found = [v for n, _, v in self.samples if n == name]
            if found:
                return sum(found)
        return None

    def over_engines(self, name: str) -> float | None:
        """The sum over SGLang's data-parallel engines: its ranks all say the same, if they are told to, and
        beside the whole (an empty priority) stand the parts by priority."""
        engines: dict[tuple[str, str], float] = {}
        for n, labels, value in self.samples:
            if n == name and not labels.get("priority"):
                engine = labels.get("model_name", ""), labels.get("dp_rank", "")
                engines[engine] = max(value, engines.get(engine, value))
        return sum(engines.values()) if engines else None

    def mean(self, name: str) -> float | None:
        """The mean over ranks, of those that are above 0."""
        found = [v for n, _, v in self.samples if n == name and v > 0]
        return sum(found) / len(found) if found else None

    def by_position(self, name: str) -> tuple[float, ...]:
        sums: dict[int, float] = {}
        for n, labels, value in self.samples:
            position = labels.get("position", "")
            if n == name and position.isdecimal() and len(position) <= 3:
                sums[int(position)] = sums.get(int(position), 0.0) + value
        return tuple(sums.get(i, 0.0) for i in range(max(sums, default=-1) + 1))

    def models(self) -> tuple[str, ...]:
        return tuple(
            sorted({labels["model_name"] for _, labels, _ in self.samples if "model_name" in labels})
        )


def _counters(table: _Table) -> dict[str, Any]:
    """vLLM's four, which llama.cpp and Slipstream have as well."""
    return {
        "drafts": table.total("spec_decode_num_drafts_total"),
        "draft_tokens": table.total("spec_decode_num_draft_tokens_total"),
        "accepted": table.total("spec_decode_num_accepted_tokens_total"),
        "per_position": table.by_position("spec_decode_num_accepted_tokens_per_pos_total"),
    }


def _vllm(table: _Table, url: str, engine: str, at: float) -> Reading:
    return Reading(
        url,
        engine,
        at,
        **_counters(table),
        tokens=table.total("generation_tokens_total"),
        running=table.total("num_requests_running"),
        waiting=table.total("num_requests_waiting"),
        models=table.models(),
    )


def _sglang(table: _Table, url: str, engine: str, at: float) -> Reading:
    return Reading(
        url,
        engine,
        at,
        drafts=table.total("spec_verify_calls_total"),
        tokens=table.total("generation_tokens_total"),
        running=table.over_engines("num_running_reqs"),
        waiting=table.over_engines("num_queue_reqs"),
        tau=table.mean("spec_accept_length"),
        acceptance=table.mean("spec_accept_rate"),
        steps=table.mean("spec_num_steps"),
        throughput=table.over_engines("gen_throughput"),
        models=table.models(),
    )


def _llamacpp(table: _Table, url: str, engine: str, at: float) -> Reading:
    return Reading(
        url,
        engine,
        at,
        **_counters(table),
        tokens=table.total("tokens_predicted_total"),
        running=table.total("requests_processing"),
        waiting=table.total("requests_deferred"),
        throughput=table.total("predicted_tokens_seconds"),
        models=table.models(),
    )
