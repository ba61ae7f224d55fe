"""Slipstream: exact speculative decoding of Hugging Face models.

    session = slipstream.load("qwen2.5-coder-1.5b", drafter="draft_model:model=qwen2.5-coder-0.5b")
    print(session.generate("def fib(n):", slipstream.SamplingParams(max_tokens=64)).text)

    ids = slipstream.generate(model, **tokenizer("def fib(n):", return_tensors="pt"), max_new_tokens=64)

Names are imported when they are first used, so that `import slipstream` stays cheap.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from slipstream.version import __version__

if TYPE_CHECKING:
    from slipstream.api import load
    from slipstream.core.params import SamplingParams
    from slipstream.engine.session import Completion, Session
    from slipstream.errors import SlipstreamError
    from slipstream.integrations.generate import generate
    from slipstream.proof.pair import verify_pair

__all__ = [
    "Completion",
    "SamplingParams",
    "Session",
    "SlipstreamError",
    "__version__",
    "generate",
    "load",
    "verify_pair",
]

_HOMES = {
    "Completion": "slipstream.engine.session",
    "SamplingParams": "slipstream.core.params",
    "Session": "slipstream.engine.session",
    "SlipstreamError": "slipstream.errors",
    "generate": "slipstream.integrations.generate",
    "load": "slipstream.api",
    "verify_pair": "slipstream.proof.pair",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'slipstream' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
