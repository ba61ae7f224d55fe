"""Schemathesis against the served OpenAPI: whatever it sends, the server never fails."""

from __future__ import annotations

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings

from .conftest import Running


@pytest.fixture
def api(server: Running) -> schemathesis.BaseSchema:
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


schema = schemathesis.pytest.from_fixture("api")


@schema.parametrize()
@settings(
    max_examples=25,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
    derandomize=True,
    database=None,
)
def test_nothing_sent_is_a_server_error(case: schemathesis.Case, server: Running) -> None:
    if isinstance(case.body, dict):
        case.body.setdefault("max_tokens", 3)  # a valid request may ask for thousands of tokens
    response = case.call()
    assert response.status_code < 500, response.text
    if response.status_code >= 400:
        assert set(response.json()) == {"error"}


def test_the_server_lives(server: Running) -> None:
    assert httpx.get(f"{server.url}/health").status_code == 200
