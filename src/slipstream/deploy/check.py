"""A smoke request, and whether live acceptance is what the plan predicts."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.core import jsontext
from slipstream.deploy.process import DeployError
from slipstream.export.deploy_plan import DeployPlan
from slipstream.watch.advice import ENOUGH
from slipstream.watch.fetch import get, open_url
from slipstream.watch.metrics import Reading, parse
from slipstream.watch.rates import Rates, rates

PROMPTS = (
    "Write a Python function that reverses a linked list.",
    "List the first twenty prime numbers, one a line.",
    "Repeat this line ten times: the quick brown fox jumps over the lazy dog.",
    "Explain in three sentences what a hash table is.",
)
# Below this part of what is predicted, acceptance is called a fault; sampling noise of ENOUGH drafts stays
# well above.
_PART = 0.5
_NOTHING = 0.05  # accepted tokens a draft


@dataclass(frozen=True)
class Check:
    """text: of the first answer. seen: between before and after. problem: None if the plan's prediction
    holds.
    """

    model: str
    text: str
    requests: int
    seen: Rates
    problem: str | None

    def as_dict(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "text": self.text,
            "requests": self.requests,
            "measured": self.seen.as_dict(),
            "problem": self.problem,
        }


def check(
    url: str, plan: DeployPlan, prompts: Sequence[str] = PROMPTS, max_tokens: int = 64, rounds: int = 4
) -> Check:
    """Ask until enough was drafted, then compare. Raises DeployError if the server does not answer as it
    should.
    """
    model = _model(url)
    before = _reading(url)
    first, requests = "", 0
    after = before
    for _ in range(rounds):
        for prompt in prompts:
            text = complete(url, model, prompt, max_tokens)
            first = first or text
            requests += 1
        after = _reading(url)
        if plan.drafter == "none" or _drafts(after) - _drafts(before) >= ENOUGH:
            break
    seen = rates(after, before)
    return Check(model, first, requests, seen, judge(seen, plan))


def judge(seen: Rates, plan: DeployPlan) -> str | None:
    """What is wrong with the acceptance that was seen, None if nothing is."""
    if plan.drafter == "none":
        return None
    if not seen.drafts:
        return "nothing was drafted: the server runs without speculation, or its lengths are 0 at this load"
    accepted = (seen.tau or 1.0) - 1
    where = f"{seen.drafts:.0f} drafts, tau {seen.tau or 1.0:.2f}"
    if accepted < _NOTHING and plan.drafter not in ("ngram", "suffix"):
        return (
            f"next to nothing is accepted ({where}): the drafter is of another model, its tapped layers"
            " are counted"
            " otherwise, or its vocabulary is another; export it again with `slipstream export`"
        )
    if plan.predicted_tau is not None and accepted < _PART * (plan.predicted_tau - 1):
        return f"tau is far below the {plan.predicted_tau:.2f} that the plan predicts ({where})"
    if plan.predicted_acceptance and seen.per_position:
        wanted, found = plan.predicted_acceptance[0], seen.per_position[0]
        if found < _PART * wanted:
            return f"{found:.0%} of first tokens are accepted where the plan predicts {wanted:.0%} ({where})"
    return None


def complete(url: str, model: str, prompt: str, max_tokens: int) -> str:
    """The text that a server adds to a prompt, greedily."""
    body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    answer = _json(f"{url}/v1/completions", body)
    try:
        text = answer["choices"][0]["text"]
    except (KeyError, IndexError, TypeError):
        raise DeployError(f"{url}/v1/completions answered without a text: {str(answer)[:200]}") from None
    if not isinstance(text, str) or not text:
        raise DeployError(f"the smoke request was answered with no text ({str(answer)[:200]})")
    return text


def _model(url: str) -> str:
    try:
        return str(_json(f"{url}/v1/models")["data"][0]["id"])
    except (KeyError, IndexError, TypeError):
        raise DeployError(f"{url}/v1/models names no model") from None


def _reading(url: str) -> Reading:
    return parse(get(f"{url}/metrics"), f"{url}/metrics", time.monotonic())


def _drafts(reading: Reading) -> float:
    return reading.drafts or 0.0


def _json(url: str, body: Any = None, timeout: float = 300.0) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with open_url(request, timeout) as answer:
            return jsontext.parse(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            said = error.read(500).decode("utf-8", errors="replace")
        raise DeployError(f"{url} answers {error.code}: {' '.join(said.split())[:300]}") from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise DeployError(f"{url} does not answer ({error})") from error
