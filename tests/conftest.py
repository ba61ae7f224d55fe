"""Shared by all tests: tiny models run on one thread; parallel workers would fight for cores otherwise."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _one_thread(request: pytest.FixtureRequest) -> None:
    if not any(item.get_closest_marker("real") for item in request.session.items):
        torch.set_num_threads(1)
