"""Shared by all tests: a cache of their own, and one thread; parallel workers would fight for cores."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

# Folders and files that train, start processes, convert checkpoints, or decode thousands of tokens: what
# `make test-slow` runs.
SLOW = (
    *("train", "serve", "proof", "bench/test_drafters_bench.py", "bench/test_quality_bench.py"),
    *("bench/test_bench_run.py", "bench/test_peers_bench.py", "engine/test_int8_exact.py"),
    *("cli/test_cli_serve.py", "cli/test_cli_verify.py", "control/test_goodput_load.py"),
    *("heads/test_quantised.py", "engine/test_hf_generate_law.py", "cli/test_cli_run.py"),
    *("plan/test_memory.py", "drafters/test_draft_vocab.py", "model/test_int8_store.py"),
    *("cli/test_cli_models.py", "cli/test_cli_scale.py", "heads/test_tune_medusa.py"),
    *("cli/test_cli_leaving.py", "unit/test_nested.py", "model/test_siblings.py"),
    *("cli/test_deploy_rough.py", "export/test_lint_rough.py"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    slow = [Path(__file__).parent / name for name in SLOW]
    for item in items:
        if any(item.path == place or place in item.path.parents for place in slow):
            item.add_marker(pytest.mark.slow)


def _real(request: pytest.FixtureRequest) -> bool:
    return any(item.get_closest_marker("real") for item in request.session.items)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """One thread: a command that was given --threads leaves its number behind, and sums would differ."""
    if not item.get_closest_marker("real"):
        torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _own_cache(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing of the user's is read, and int8 copies of tiny models do not stay behind."""
    with pytest.MonkeyPatch.context() as patch:
        if not _real(request):
            patch.setenv("SLIPSTREAM_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
