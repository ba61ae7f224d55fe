"""Imports point one way, and the other house rules that can be read off the source."""

from __future__ import annotations

import ast
from functools import lru_cache
from pathlib import Path

import pytest

import slipstream

ROOT = Path(slipstream.__file__).parent
MODULES = sorted(ROOT.rglob("*.py"))
BASE = {"errors", "version"}
LOGIC = {"core", "logits", "verify", "model", "drafters", "control", "cost", "heads"}
# A package may import itself, BASE, and these.
ALLOWED = {
    "core": set(),
    "prompts": {"core"},
    "logits": {"core"},
    "verify": {"core", "logits"},
    "model": {"core"},
    "heads": {"core", "model"},
    "cost": {"core"},
    "control": {"core", "cost"},
    # A drafter that samples draws from the very law its q tells, so drafters see the warps, no more.
    # Text to count tokens in lies with the prompts.
    "drafters": {"core", "model", "heads", "logits.warp", "prompts"},
    "engine": LOGIC,
    "train": LOGIC | {"engine", "api", "prompts"},  # the target's answers come out of the engine
    "export": {"core", "model", "heads"},
    "watch": {"core", "model", "export"},
    "deploy": {"core", "model", "export", "watch"},
    "integrations": LOGIC | {"engine", "api", "export"},
    "api": LOGIC | {"engine"},
    "testing": LOGIC | {"engine", "api", "bench"},
    "serve": LOGIC | {"engine", "api"},
    "plan": LOGIC | {"engine", "api", "prompts"},
    "bench": LOGIC
    | {"engine", "api", "prompts", "plan"},  # what was predicted stands beside what was measured
    "proof": LOGIC | {"engine", "api", "plan", "prompts"},
}
TORCH_FREE = (
    *(f"core/{name}.py" for name in ("fault", "sequence", "stats", "text", "tree")),
    "engine/scheduler.py",
    *(f"cost/{name}.py" for name in ("accept", "bundle", "curve", "machines", "model", "roofline", "shape")),
)
MAY_USE_TRANSFORMERS = ("model/", "integrations/", "testing/", "cli/doctor.py")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@lru_cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@lru_cache
def imports(path: Path) -> frozenset[str]:
    """Every module named in an import, wherever it stands; `from a import b` names a and a.b."""
    found: set[str] = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name_of(path)}: relative import"
            found.update({node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)})
    return frozenset(found)


def uses(path: Path, package: str) -> bool:
    return any(i == package or i.startswith(package + ".") for i in imports(path))


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_point_one_way(path: Path) -> None:
    own = path.relative_to(ROOT).parts[0].removesuffix(".py")
    if own in ("cli", "__init__", "__main__"):
        return
    assert own in ALLOWED or own in BASE, f"{own} has no place in the layers yet"
    allowed = ALLOWED.get(own, set()) | BASE | {own}
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "slipstream" and len(parts) > 1 and parts[1] != "__version__":
            fine = parts[1] in allowed or ".".join(parts[1:3]) in allowed
            assert fine or name in {"slipstream." + a.split(".")[0] for a in allowed}, name


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_every_module_keeps_the_house_rules(path: Path) -> None:
    tree, name = tree_of(path), name_of(path)
    assert ast.get_docstring(tree), "a module says what it gives"
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 400
    if uses(path, "transformers"):
        assert name.startswith(MAY_USE_TRANSFORMERS), "contact with transformers is kept in model/"
    if name in TORCH_FREE:
        assert not uses(path, "torch") and not uses(path, "transformers")
    calls = [n.func for n in ast.walk(tree) if isinstance(n, ast.Call)]
    if not name.startswith("cli/"):
        assert not any(isinstance(f, ast.Name) and f.id == "print" for f in calls), "only the cli prints"


def test_the_modules_named_here_exist() -> None:
    assert {*TORCH_FREE} <= {name_of(p) for p in MODULES}


def test_the_public_names_are_all_there_and_no_more() -> None:
    assert sorted(slipstream.__all__) == slipstream.__all__
    assert set(slipstream.__all__) == {*slipstream._HOMES, "__version__"}
    for name in slipstream.__all__:
        assert getattr(slipstream, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        slipstream.nonsense  # noqa: B018
