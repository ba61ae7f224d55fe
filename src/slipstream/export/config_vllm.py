"""vLLM's words for a plan: the speculative config and the arguments of `vllm serve`, for a named version."""

from __future__ import annotations

from typing import Any

from slipstream.errors import ParameterError
from slipstream.export.deploy_plan import DeployPlan
from slipstream.export.engines import vllm


def vllm_speculative(plan: DeployPlan) -> dict[str, Any] | None:
    """The `speculative_config` of the plan, None for plain decoding.

    Raises ParameterError, with the versions that have it, for what this one lacks.
    """
    engine = plan.parsed_engine
    if engine.name != "vllm":
        raise ParameterError(f"the plan is for {engine}: set its engine to vllm")
    if plan.drafter == "none":
        return None
    _require("methods", plan.drafter, plan)
    config: dict[str, Any] = {"method": plan.drafter}
    if plan.model is not None:
        config["model"] = plan.model
    config["num_speculative_tokens"] = plan.num_speculative_tokens
    if plan.drafter == "ngram":
        config |= {"prompt_lookup_min": plan.prompt_lookup_min, "prompt_lookup_max": plan.prompt_lookup_max}
    if plan.lengths is not None:
        if plan.drafter not in ("ngram", "eagle", "eagle3", "mtp", "draft_model"):
            raise ParameterError(
                f"{engine} does not change the length by batch size for {plan.drafter}: give one length"
                " (--tokens N)"
            )
        config[_key("num_speculative_tokens_per_batch_size", plan)] = [list(row) for row in plan.lengths]
    if plan.draft_tensor_parallel is not None:
        if plan.model is None:
            raise ParameterError(f"{plan.drafter} has no draft whose parallelism could be set")
        config["draft_tensor_parallel_size"] = plan.draft_tensor_parallel
    if plan.draft_quantization is not None:
        if plan.model is None:
            raise ParameterError(f"{plan.drafter} has no draft that could be quantised")
        config["quantization"] = plan.draft_quantization
    if plan.draft_max_model_len is not None:
        config["max_model_len"] = plan.draft_max_model_len
    if plan.heterogeneous_vocab:
        if plan.drafter != "draft_model" or plan.probabilistic:
            raise ParameterError("drafts of another vocabulary are draft models with greedy drafts")
        config[_key("use_heterogeneous_vocab", plan)] = True
    if plan.probabilistic:
        if plan.drafter in ("ngram", "suffix", "medusa"):
            raise ParameterError(f"{plan.drafter} proposes single tokens: there is nothing to sample")
        config[_key("draft_sample_method", plan)] = "probabilistic"
    return config


def vllm_arguments(plan: DeployPlan) -> dict[str, Any]:
    """The other arguments, by option name without the dashes in front."""
    options: dict[str, Any] = {"host": plan.host, "port": plan.port}
    for name, value in (
        ("tensor-parallel-size", plan.tensor_parallel if plan.tensor_parallel > 1 else None),
        ("dtype", plan.dtype),
        ("quantization", plan.quantization),
        ("max-model-len", plan.max_model_len),
        ("max-num-seqs", plan.max_running),
    ):
        if value is not None:
            options[name] = value
    return options | plan.extra_options


def _require(table: str, name: str, plan: DeployPlan) -> None:
    facts, engine = vllm(), plan.parsed_engine
    names = facts.methods if table == "methods" else facts.keys
    if facts.has(names, name, engine.version):
        return
    what = "method" if table == "methods" else "key"
    instead = "; train an EAGLE head, or use a draft model" if name == "medusa" else ""
    raise ParameterError(f"{engine} has no {what} {name}: it is in vllm {facts.when(names, name)}{instead}")


def _key(name: str, plan: DeployPlan) -> str:
    _require("keys", name, plan)
    return name
