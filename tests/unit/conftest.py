"""Settings of the property tests."""

from __future__ import annotations

from hypothesis import settings

# No deadlines (machines differ) and no chance (a run that passes passes again).
settings.register_profile("slipstream", deadline=None, derandomize=True)
settings.load_profile("slipstream")
