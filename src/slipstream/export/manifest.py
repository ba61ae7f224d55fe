"""YAML for an engine's own configuration file, and the Kubernetes manifest of a deployment."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any

from slipstream.errors import ParameterError
from slipstream.export.config import Settings

_IMAGES = {
    "vllm": "vllm/vllm-openai:v{version}",
    "sglang": "lmsysorg/sglang:v{version}",
    "llama.cpp": "ghcr.io/ggml-org/llama.cpp:server-cuda",
}


_NO_TEXT = re.compile(r"(?i)y|n|yes|no|on|off|true|false|null|~|[-+.\d][-+.:_\da-fox]*")


def to_yaml(*documents: Any) -> str:
    """One or more YAML documents, in the order of their keys."""
    try:
        from ruamel.yaml import YAML
        from ruamel.yaml.scalarstring import DoubleQuotedScalarString
    except ImportError:
        raise ParameterError("YAML needs ruamel.yaml: pip install 'slipstream-lm[scale]'") from None
    yaml = YAML()
    yaml.default_flow_style = False
    yaml.width = 4096
    yaml.indent(mapping=2, sequence=4, offset=2)
    out = io.StringIO()
    yaml.dump_all([_quoted(document, DoubleQuotedScalarString) for document in documents], out)
    return out.getvalue().removeprefix("---\n")


def _quoted(value: Any, quotes: Callable[[str], str]) -> Any:
    """With quotes around what YAML 1.1, which Kubernetes and the engines read, takes for something else."""
    if isinstance(value, dict):
        return {k: _quoted(v, quotes) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_quoted(v, quotes) for v in value]
    return quotes(value) if isinstance(value, str) and _NO_TEXT.fullmatch(value) else value


def options_yaml(settings: Settings) -> str:
    """What `vllm serve --config FILE` and SGLang's `--config FILE` read. ParameterError for llama.cpp."""
    if settings.plan.parsed_engine.name == "llama.cpp":
        raise ParameterError("llama-server reads no YAML file: print its command or a manifest")
    return to_yaml(settings.options)


def manifest(settings: Settings) -> str:
    """A Deployment and a Service: probes that wait for the weights, the GPUs of the plan, scraped metrics.

    Folders named by absolute paths are mounted from the plan's volume claim.
    """
    plan, engine = settings.plan, settings.plan.parsed_engine
    labels = {"app.kubernetes.io/name": plan.name}
    health = {"httpGet": {"path": "/health", "port": plan.port}}
    words = _in_container(settings)
    container: dict[str, Any] = {
        "name": "engine",
        "image": plan.image or _IMAGES[engine.name].format(version=engine.version),
        "command": words[:2]
        if engine.name == "vllm"
        else words[:3]
        if engine.name == "sglang"
        else words[:1],
        "args": words[2:] if engine.name == "vllm" else words[3:] if engine.name == "sglang" else words[1:],
        "ports": [{"name": "http", "containerPort": plan.port}],
        "resources": {"limits": {"nvidia.com/gpu": plan.tensor_parallel}},
        "startupProbe": {**health, "periodSeconds": 10, "failureThreshold": 180},
        "readinessProbe": {**health, "periodSeconds": 5},
        "livenessProbe": {**health, "periodSeconds": 15, "failureThreshold": 4},
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    mount = _mount(plan.target, plan.model)
    if mount is not None:
        container["volumeMounts"].append({"name": "models", "mountPath": mount, "readOnly": True})
        volumes.append({"name": "models", "persistentVolumeClaim": {"claimName": plan.volume_claim}})
    if settings.files:
        container["volumeMounts"].append(
            {"name": "settings", "mountPath": "/etc/slipstream", "readOnly": True}
        )
        volumes.append({"name": "settings", "configMap": {"name": f"{plan.name}-settings"}})
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": plan.name, "labels": labels},
        "spec": {
            "replicas": plan.replicas,
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {
                    "labels": dict(labels),
                    "annotations": {
                        "prometheus.io/scrape": "true",
                        "prometheus.io/port": str(plan.port),
                        "prometheus.io/path": "/metrics",
                    },
                },
                "spec": {"containers": [container], "volumes": volumes},
            },
        },
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": plan.name, "labels": dict(labels)},
        "spec": {
            "selector": dict(labels),
            "ports": [{"name": "http", "port": plan.port, "targetPort": "http"}],
        },
    }
    parts = [_plain(deployment), _plain(service)]
    if settings.files:
        parts.append(
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"name": f"{plan.name}-settings"},
                "data": dict(settings.files),
            }
        )
    return to_yaml(*parts)


def _plain(value: Any) -> Any:
    """A copy without shared parts, which YAML would write as anchors."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, list) else value


def _in_container(settings: Settings) -> list[str]:
    """The command for a container: it listens to the cluster, and reads its files from the mounted
    settings.
    """
    words = list(settings.command)
    host = words.index("--host") + 1
    if words[host] in ("127.0.0.1", "localhost"):
        words[host] = "0.0.0.0"
    return [f"/etc/slipstream/{w}" if w in settings.files else w for w in words]


def _mount(*paths: str | None) -> str | None:
    """The folder that holds all absolute paths among these."""
    folders = [PurePosixPath(p).parent for p in paths if p is not None and p.startswith("/")]
    if not folders:
        return None
    shared = folders[0]
    while not all(folder.is_relative_to(shared) for folder in folders):
        shared = shared.parent
    if shared == PurePosixPath("/"):
        raise ParameterError(
            f"the models {', '.join(p for p in paths if p)} have no folder in common that could be mounted:"
            " put them into one"
        )
    return str(shared)
