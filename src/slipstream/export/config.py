"""From a plan to the configuration of an engine: command line, JSON, YAML, manifest. What a version lacks
is refused.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slipstream.errors import ParameterError
from slipstream.export.config_vllm import vllm_arguments, vllm_speculative
from slipstream.export.deploy_plan import DeployPlan
from slipstream.export.engines import beyond
from slipstream.export.lint import lint

__all__ = ["Settings", "settings", "vllm_speculative"]


@dataclass(frozen=True)
class Settings:
    """What starts the engine. command: its words. options: what an engine's own YAML file holds. files:
    further files that the command names, by path. notes: what the plan wants and this engine does
    otherwise.
    """

    plan: DeployPlan
    command: list[str]
    speculative: dict[str, Any] | None
    options: dict[str, Any]
    files: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def shell(self) -> str:
        """The command for a shell, one option a line."""
        lines, line = list[str](), list[str]()
        for word in self.command:
            if word.startswith("--") and line:
                lines.append(" ".join(line))
                line = []
            line.append(shlex.quote(word))
        return " \\\n  ".join([*lines, " ".join(line)]) + "\n"

    def speculative_json(self) -> str:
        return json.dumps(self.speculative or {}, indent=2) + "\n"


def settings(plan: DeployPlan) -> Settings:
    """The configuration of the plan's engine. Raises ParameterError for what that version does not have."""
    engine = plan.parsed_engine
    made = {"vllm": _vllm, "sglang": _sglang, "llama.cpp": _llamacpp}[engine.name](plan)
    report = lint(made.shell(), plan.engine, target=plan.target)
    if report.errors:
        fault = report.errors[0]
        raise ParameterError(f"{engine} would refuse this plan: {fault.message} ({fault.where}); {fault.fix}")
    return Settings(
        made.plan,
        made.command,
        made.speculative,
        made.options,
        made.files,
        (*made.notes, *(f"{f.where}: {f.message}; {f.fix}" for f in report.faults)),
    )


def _vllm(plan: DeployPlan) -> Settings:
    options = vllm_arguments(plan)
    speculative = vllm_speculative(plan)
    command = ["vllm", "serve", plan.target]
    command += _words(options)
    if speculative is not None:
        command += ["--speculative-config", json.dumps(speculative)]
        options["speculative-config"] = speculative
    return Settings(plan, command, speculative, {"model": plan.target, **options}, notes=_notes(plan))


def _words(options: Mapping[str, Any]) -> list[str]:
    """Options as words; True is a bare flag."""
    words = list[str]()
    for name, value in options.items():
        words += ["--" + name] if value is True else ["--" + name, str(value)]
    return words


def _notes(plan: DeployPlan) -> tuple[str, ...]:
    notes = [*plan.notes]
    newer = beyond(plan.parsed_engine)
    if newer is not None:
        notes.append(newer)
    if plan.drafter in ("eagle", "eagle3", "medusa"):
        notes.append(
            "engines draft chains: a tree's acceptance is not reached, compare with a chain of the same"
            " length"
        )
    if plan.drafter == "suffix":
        notes.append("suffix needs `pip install arctic-inference==0.1.1` beside vLLM")
    if plan.off_above is not None:
        notes.append(f"above {plan.off_above} running requests nothing is drafted")
    return tuple(notes)


# -- SGLang -----------------------------------------------------------------------------------------

_ALGORITHMS = {
    "draft_model": "STANDALONE",
    "eagle": "EAGLE",
    "eagle3": "EAGLE3",
    "ngram": "NGRAM",
    "mtp": "NEXTN",
}
ADAPTIVE_FILE = "speculative-adaptive.json"


def _sglang(plan: DeployPlan) -> Settings:
    engine = plan.parsed_engine
    options: dict[str, Any] = {"host": plan.host, "port": plan.port, "enable-metrics": True}
    files: dict[str, str] = {}
    notes = [*_notes(plan)]
    if plan.tensor_parallel > 1:
        options["tp-size"] = plan.tensor_parallel
    for name, value in (
        ("dtype", plan.dtype),
        ("quantization", plan.quantization),
        ("context-length", plan.max_model_len),
        ("max-running-requests", plan.max_running),
    ):
        if value is not None:
            options[name] = value
    if plan.drafter != "none":
        if plan.drafter not in _ALGORITHMS:
            raise ParameterError(
                f"{engine} has no {plan.drafter}: it takes {', '.join(_ALGORITHMS)}"
                + ("; vLLM up to 0.32.0 serves Medusa" if plan.drafter == "medusa" else "")
            )
        if plan.draft_tensor_parallel not in (None, plan.tensor_parallel):
            raise ParameterError(
                f"{engine} runs the draft with the target's parallelism ({plan.tensor_parallel})"
            )
        if plan.heterogeneous_vocab:
            raise ParameterError(f"{engine} needs a draft with the target's vocabulary")
        options["speculative-algorithm"] = _ALGORITHMS[plan.drafter]
        if plan.model is not None:
            options["speculative-draft-model-path"] = plan.model
        if plan.drafter == "ngram":
            options["speculative-num-draft-tokens"] = plan.num_speculative_tokens + 1
        else:
            options |= {
                "speculative-num-steps": plan.num_speculative_tokens,
                "speculative-eagle-topk": 1,
                "speculative-num-draft-tokens": plan.num_speculative_tokens + 1,
            }
        if plan.draft_quantization is not None:
            options["speculative-draft-model-quantization"] = plan.draft_quantization
        if plan.probabilistic:
            if plan.drafter not in ("eagle", "eagle3", "mtp"):
                raise ParameterError(
                    f"{engine} samples the drafts of EAGLE heads only, not of {plan.drafter}"
                )
            options["speculative-use-rejection-sampling"] = True
        if plan.lengths is not None:
            if plan.drafter not in ("eagle", "eagle3"):
                raise ParameterError(
                    f"{engine} changes the length by batch size for EAGLE heads only, not for {plan.drafter}:"
                    " give one length (--tokens N)"
                )
            options |= {"speculative-adaptive": True, "speculative-adaptive-config": ADAPTIVE_FILE}
            files[ADAPTIVE_FILE] = json.dumps(
                {str(first): {"candidate_steps": [length]} for first, _, length in plan.lengths}, indent=2
            )
            notes.append(f"write {ADAPTIVE_FILE} where the command runs; its path is taken from there")
        elif plan.drafter == "ngram":
            notes.append("the window of n-grams is SGLang's own: prompt_lookup_min and _max are not used")
    command = ["python", "-m", "sglang.launch_server", "--model-path", plan.target]
    options |= plan.extra_options
    command += _words(options)
    return Settings(plan, command, None, {"model-path": plan.target, **options}, files, tuple(notes))


# -- llama.cpp --------------------------------------------------------------------------------------


def _llamacpp(plan: DeployPlan) -> Settings:
    engine = plan.parsed_engine
    kinds = {
        "draft_model": "draft-simple",
        "eagle3": "draft-eagle3",
        "ngram": "ngram-mod",
        "mtp": "draft-mtp",
    }
    options: dict[str, Any] = {"host": plan.host, "port": plan.port, "metrics": True}
    notes = [*_notes(plan)]
    if plan.max_model_len is not None:
        options["ctx-size"] = plan.max_model_len
    if plan.max_running is not None:
        options["parallel"] = plan.max_running
    if plan.drafter != "none":
        if plan.drafter not in kinds:
            raise ParameterError(f"llama.cpp has no {plan.drafter}: it takes {', '.join(kinds)}")
        if plan.lengths is not None:
            raise ParameterError(
                "llama.cpp has one draft length for all batch sizes: give one (--tokens N), and neither"
                " per_batch_size nor off_above"
            )
        options["spec-type"] = kinds[plan.drafter]
        if plan.model is not None:
            options["spec-draft-model"] = plan.model
        if plan.drafter == "ngram":
            options["spec-ngram-mod-n-max"] = plan.num_speculative_tokens
        else:
            options["spec-draft-n-max"] = plan.num_speculative_tokens
    for name, value in (("target", plan.target), ("model", plan.model)):
        if value is not None and not value.endswith(".gguf"):
            raise ParameterError(
                f"llama.cpp reads GGUF files, and {name} is {value!r}: convert it and name the file"
            )
    for name in ("quantization", "draft_quantization", "dtype"):
        if getattr(plan, name) is not None:
            notes.append(f"{name} is in the GGUF file, not an option of {engine.name}")
    if plan.tensor_parallel > 1:
        notes.append("llama.cpp splits layers over GPUs by itself; tensor_parallel is not used")
    command = ["llama-server", "--model", plan.target]
    options |= plan.extra_options
    command += _words(options)
    return Settings(plan, command, None, {"model": plan.target, **options}, {}, tuple(notes))
