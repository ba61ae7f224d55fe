"""Alert rules for Prometheus, in the words of an engine's metrics."""

from __future__ import annotations

from typing import Any

from slipstream.errors import ParameterError
from slipstream.export.manifest import to_yaml

_PREFIX = {"vllm": "vllm:", "llama.cpp": "llamacpp:", "slipstream": "slipstream:"}


def alert_rules(engine: str, predicted_tau: float | None = None, off_above: int | None = None) -> str:
    """A rules file: acceptance near zero; tau far below the plan's and drafting under compute-bound load, if
    these are told.

    engine: vllm, sglang, llama.cpp or slipstream.
    """
    rules = []
    if engine == "sglang":
        tau = "sglang:spec_accept_length"
        running, busy = "sglang:num_running_reqs", "sglang:num_running_reqs > 0"
    elif engine in _PREFIX:
        prefix = _PREFIX[engine]
        drafts = f"rate({prefix}spec_decode_num_drafts_total[5m])"
        tau = f"1 + rate({prefix}spec_decode_num_accepted_tokens_total[5m]) / {drafts}"
        busy = f"{drafts} > 0"
        running = prefix + ("requests_processing" if engine == "llama.cpp" else "num_requests_running")
    else:
        raise ParameterError(
            f"no metrics of {engine!r} are known: give vllm, sglang, llama.cpp or slipstream"
        )
    rules.append(
        _rule(
            "SpeculationAcceptsNothing",
            f"({tau}) < 1.05 and {busy}",
            "critical",
            "drafts are made and next to nothing is accepted: wrong head, wrong tapped layers or another"
            " vocabulary",
        )
    )
    if predicted_tau is not None:
        least = 1 + 0.5 * (predicted_tau - 1)
        rules.append(
            _rule(
                "SpeculationBelowPlan",
                f"({tau}) < {least:.2f} and {busy}",
                "warning",
                f"tau is far below the {predicted_tau:.2f} of the plan",
            )
        )
    if off_above is not None:
        rules.append(
            _rule(
                "SpeculationComputeBound",
                f"{running} > {off_above} and {busy}",
                "warning",
                f"more than {off_above} requests run and drafting is still on: it costs throughput there",
            )
        )
    return to_yaml({"groups": [{"name": "slipstream-speculation", "rules": rules}]})


def _rule(name: str, expression: str, severity: str, summary: str) -> dict[str, Any]:
    return {
        "alert": name,
        "expr": expression,
        "for": "10m",
        "labels": {"severity": severity},
        "annotations": {"summary": summary},
    }
