"""Shared by all tests: a cache of their own, and one thread; parallel workers would fight for cores."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


def _real(request: pytest.FixtureRequest) -> bool:
    return any(item.get_closest_marker("real") for item in request.session.items)


@pytest.fixture(scope="session", autouse=True)
def _one_thread(request: pytest.FixtureRequest) -> None:
    if not _real(request):
        torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _own_cache(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing of the user's is read, and int8 copies of tiny models do not stay behind."""
    with pytest.MonkeyPatch.context() as patch:
        if not _real(request):
            patch.setenv("SLIPSTREAM_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
