"""From a plan to an engine's words: exact, checked by the linter, and refused with a reason where a version
lacks it.
"""

from __future__ import annotations

import json
import shlex
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from slipstream.errors import ParameterError
from slipstream.export.config import settings
from slipstream.export.deploy_plan import DeployPlan, make_plan, read_plan
from slipstream.export.lint import lint
from slipstream.export.manifest import manifest, options_yaml
from slipstream.integrations.vllm import speculative_config

SIMPLE: dict[str, Any] = {"engine": "vllm==0.32.0", "target": "org/target"}
DRAFT = {**SIMPLE, "drafter": "draft_model", "model": "org/small", "num_speculative_tokens": 4}


def yaml(text: str) -> list[Any]:
    from ruamel.yaml import YAML

    return list(YAML(typ="safe").load_all(text))


def test_vllm_says_it_as_vllm_reads_it() -> None:
    plan = make_plan(
        **DRAFT,
        tensor_parallel=4,
        draft_tensor_parallel=4,
        draft_quantization="compressed-tensors",
        per_batch_size=[(1, 8, 4), (9, 32, 2), (33, 33, 0)],
        max_model_len=4096,
        draft_max_model_len=2048,
        dtype="bfloat16",
        probabilistic=True,
    )
    made = settings(plan)
    assert made.speculative == {
        "method": "draft_model",
        "model": "org/small",
        "num_speculative_tokens": 4,
        "num_speculative_tokens_per_batch_size": [[1, 8, 4], [9, 32, 2], [33, 33, 0]],
        "draft_tensor_parallel_size": 4,
        "quantization": "compressed-tensors",
        "max_model_len": 2048,
        "draft_sample_method": "probabilistic",
    }
    words = made.command
    assert words[:3] == ["vllm", "serve", "org/target"]
    assert json.loads(words[words.index("--speculative-config") + 1]) == made.speculative
    assert words[words.index("--tensor-parallel-size") + 1] == "4"
    assert shlex.split(made.shell().replace("\\\n", " ")) == words, "the shell gives the same words"
    assert json.loads(made.speculative_json()) == made.speculative
    (options,) = yaml(options_yaml(made))
    assert options["model"] == "org/target" and options["speculative-config"] == made.speculative


def test_further_options_of_the_engine_are_checked_too() -> None:
    made = settings(
        make_plan(**DRAFT, extra={"enforce-eager": True, "gpu-memory-utilization": 0.8, "seed": False})
    )
    text = " ".join(made.command)
    assert (
        "--enforce-eager --gpu-memory-utilization 0.8 --speculative-config" in text and "--seed" not in text
    )
    with pytest.raises(ParameterError, match="no argument enforce_eagr.*write enforce_eager"):
        settings(make_plan(**DRAFT, extra={"enforce-eagr": True}))


def test_off_above_is_a_length_of_zero() -> None:
    made = settings(make_plan(**DRAFT, off_above=16)).speculative or {}
    assert made["num_speculative_tokens_per_batch_size"] == [[1, 16, 4], [17, 17, 0]]


GRID = [
    {"engine": f"vllm=={version}", "target": "org/target", **drafter, **more}
    for version, drafter, more in product(
        ("0.16.0", "0.24.0", "0.32.0", "0.33.0"),
        (
            {"drafter": "none"},
            {"drafter": "ngram"},
            {"drafter": "suffix", "num_speculative_tokens": 16},
            {"drafter": "draft_model", "model": "org/small"},
            {"drafter": "eagle", "model": "org/head"},
            {"drafter": "eagle3", "model": "org/head"},
            {"drafter": "medusa", "model": "org/head"},
            {"drafter": "mtp", "num_speculative_tokens": 1},
        ),
        ({}, {"off_above": 8}, {"tensor_parallel": 2, "max_model_len": 2048}, {"probabilistic": True}),
    )
]


@pytest.mark.parametrize(
    "fields", GRID, ids=lambda f: "-".join(map(str, list(f.values())[:1] + list(f.values())[2:]))
)
def test_every_plan_is_clean_or_refused_with_the_reason(fields: dict[str, Any]) -> None:
    plan = make_plan(**fields)
    lacks = {
        ("medusa", "0.33.0"): "0.8.5 to 0.32.0",
    }
    try:
        made = settings(plan)
    except ParameterError as error:
        version, kind = plan.parsed_engine.version, plan.drafter
        reasons = {
            lacks.get((kind, version), "-"),
            "0.24.0 and newer" if plan.off_above and version == "0.16.0" else "-",
            "0.21.0 and newer" if plan.probabilistic and version == "0.16.0" else "-",
            "does not change the length" if plan.off_above and kind in ("suffix", "medusa") else "-",
            "nothing to sample" if plan.probabilistic and kind in ("ngram", "suffix", "medusa") else "-",
        } - {"-"}
        assert any(reason in str(error) for reason in reasons), error
        return
    for text in (made.shell(), options_yaml(made), manifest(made)):
        assert lint(text, plan.engine).errors == []
    if plan.drafter != "none":
        assert speculative_config(plan, version=plan.parsed_engine.version) == made.speculative


def test_manifest_has_what_a_cluster_needs() -> None:
    plan = make_plan(
        **{**DRAFT, "target": "/models/big", "model": "/models/drafts/small"},
        tensor_parallel=2,
        replicas=3,
        name="chat",
        port=9000,
    )
    deployment, service = yaml(manifest(settings(plan)))
    spec = deployment["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert deployment["spec"]["replicas"] == 3 and deployment["metadata"]["name"] == "chat"
    assert container["image"] == "vllm/vllm-openai:v0.32.0" and container["command"] == ["vllm", "serve"]
    assert container["args"][container["args"].index("--host") + 1] == "0.0.0.0"
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 2}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": "/health", "port": 9000}
    assert {m["mountPath"] for m in container["volumeMounts"]} == {"/dev/shm", "/models"}
    assert {v["name"] for v in spec["volumes"]} == {"shm", "models"}
    assert deployment["spec"]["template"]["metadata"]["annotations"]["prometheus.io/port"] == "9000"
    assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"]
    apart = make_plan(**{**DRAFT, "target": "/a/big", "model": "/b/small"})
    with pytest.raises(ParameterError, match="no folder in common"):
        manifest(settings(apart))


def test_sglang() -> None:
    plan = make_plan(
        engine="sglang",
        target="t",
        drafter="eagle3",
        model="h",
        num_speculative_tokens=5,
        off_above=8,
        tensor_parallel=2,
    )
    made = settings(plan)
    text = " ".join(made.command)
    assert "--speculative-algorithm EAGLE3 --speculative-draft-model-path h" in text and "--tp-size 2" in text
    assert "--speculative-num-steps 5 --speculative-eagle-topk 1 --speculative-num-draft-tokens 6" in text
    adaptive = json.loads(made.files["speculative-adaptive.json"])
    assert {k: v["candidate_steps"] for k, v in adaptive.items()} == {"1": [5], "9": [0]}
    parts = yaml(manifest(made))
    assert parts[2]["kind"] == "ConfigMap" and parts[2]["data"] == dict(made.files)
    assert (
        "/etc/slipstream/speculative-adaptive.json"
        in parts[0]["spec"]["template"]["spec"]["containers"][0]["args"]
    )


def test_llamacpp() -> None:
    made = settings(
        make_plan(engine="llama.cpp", target="t.gguf", drafter="draft_model", model="d.gguf", dtype="f16")
    )
    text = " ".join(made.command)
    assert (
        "--spec-type draft-simple --spec-draft-model d.gguf --spec-draft-n-max 3" in text
        and "--metrics" in text
    )
    assert any("GGUF" in note for note in made.notes)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"engine": "sglang", "drafter": "medusa", "model": "m"}, "sglang 0.5.23 has no medusa.*0.32.0"),
        ({"engine": "sglang", "drafter": "suffix"}, "has no suffix"),
        ({"engine": "sglang", "drafter": "draft_model", "model": "m", "off_above": 4}, "EAGLE heads only"),
        ({"engine": "sglang", "drafter": "draft_model", "model": "m", "draft_tensor_parallel": 2}, "target's parallelism"),  # noqa: E501
        ({"engine": "llama.cpp", "drafter": "draft_model", "model": "m"}, "GGUF"),
        ({"engine": "llama.cpp", "target": "a.gguf", "drafter": "medusa", "model": "m"}, "has no medusa"),
        ({"engine": "vllm==0.14.0", "drafter": "draft_model", "model": "m"}, "0.15.0 and newer"),
        ({"drafter": "draft_model", "model": "m", "tensor_parallel": 2, "draft_tensor_parallel": 1}, "equal to the target's"),  # noqa: E501
        ({"drafter": "draft_model", "model": "my-eagle-thing"}, None),
        ({"drafter": "ngram", "draft_quantization": "fp8"}, "no draft that could be quantised"),
    ],
)  # fmt: skip
def test_refusals(fields: dict[str, Any], message: str | None) -> None:
    with pytest.raises(ParameterError, match=message or "eagle-"):
        settings(make_plan(**{"target": "t", **fields}))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"drafter": "eagle3"}, "needs a model"),
        ({"drafter": "ngram", "model": "m"}, "no model of its own"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens"),
        ({"per_batch_size": [(2, 4, 1)]}, "starts at batch size 1"),
        ({"per_batch_size": [(1, 4, 9)]}, "0 to num_speculative_tokens"),
        ({"per_batch_size": [(1, 4, 1), (4, 5, 1)]}, "overlap"),
        ({"per_batch_size": [(1, 4, 1)], "off_above": 3}, "not both"),
        ({"prompt_lookup_min": 5}, "may not exceed"),
        ({"engine": "tgi"}, "is unknown"),
        ({"temperature": 1}, "temperature"),
        ({"name": "Not a name"}, "name"),
    ],
)
def test_plans_are_checked(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        make_plan(**{**SIMPLE, **fields})


def test_plans_are_files(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(json.dumps({**DRAFT, "predicted_tau": 2.5}))
    assert read_plan(file, tensor_parallel=2) == make_plan(**DRAFT, predicted_tau=2.5, tensor_parallel=2)
    assert speculative_config(file, version="0.33.0") == speculative_config(DRAFT, version="0.33.0")
    assert speculative_config(DeployPlan(**DRAFT))["method"] == "draft_model"  # type: ignore[index]
    assert speculative_config(SIMPLE) is None
    for text, message in (("{", "not JSON"), ("[]", "must be a JSON object"), ('{"x": 1}', "target")):
        file.write_text(text)
        with pytest.raises(ParameterError, match=message):
            read_plan(file)
    with pytest.raises(ParameterError, match="cannot be read"):
        read_plan(tmp_path / "none.json")
    with pytest.raises(ParameterError, match="0.8.5 to 0.32.0"):
        speculative_config({**SIMPLE, "drafter": "medusa", "model": "m"}, version="0.33.0")
