"""Schemathesis against the served OpenAPI: whatever it sends, the server never fails."""

from __future__ import annotations

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode

from .conftest import Running


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_nothing_sent_is_a_server_error(server: Running, mode: GenerationMode) -> None:
    schema = schemathesis.openapi.from_dict(httpx.get(f"{server.url}/openapi.json").json())
    sent: dict[int, int] = {}

    def check(case: schemathesis.Case) -> None:
        if isinstance(case.body, dict):
            case.body["max_tokens"] = 3  # a valid request may ask for thousands of tokens
            case.body.pop("max_completion_tokens", None)
        response = case.call(base_url=server.url)
        sent[response.status_code] = sent.get(response.status_code, 0) + 1
        assert response.status_code < 500, response.text
        if response.status_code >= 400:
            assert set(response.json()) == {"error"}

    for found in schema.get_all_operations():
        strategy = found.ok().as_strategy(generation_mode=mode)
        quick = settings(
            max_examples=15,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
            derandomize=True,
            database=None,
        )
        if mode is GenerationMode.POSITIVE or found.ok().body:
            quick(given(case=strategy)(check))()
    assert sum(sent.values()) > 40 and (400 if mode is GenerationMode.NEGATIVE else 200) in sent, sent
    assert httpx.get(f"{server.url}/health").status_code == 200
