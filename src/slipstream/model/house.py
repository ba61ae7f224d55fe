"""Models and drafters that come with Slipstream: the tiny family, and heads for catalogue models.

house/NAME/target is a model; every other folder below holds a drafter, whose `slipstream.json` says of
which kind it is and for which target.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from slipstream.core import jsontext
from slipstream.errors import DrafterError

_PACKAGE = Path(__file__).parents[1]
# What the package ships, and what a source checkout has beside it.
ROOTS = (_PACKAGE / "house", _PACKAGE.parents[1] / "models" / "heads")
NOTE = "slipstream.json"
TARGET = "target"


def house_models() -> dict[str, Path]:
    """The models by name."""
    found = {}
    for root in ROOTS:
        for folder in sorted(root.glob(f"*/{TARGET}")) if root.is_dir() else []:
            if (folder / "config.json").is_file():
                found[folder.parent.name] = folder
    return found


def house_model(spec: str) -> Path | None:
    """The folder of the house model of that name."""
    return house_models().get(spec.lower())


def house_drafter(kind: str, fingerprint: str) -> Path:
    """The drafter of that kind for the target of that `ModelParts.fingerprint`.

    kind: draft, medusa or eagle. Raises DrafterError, saying how to get one, where there is none.
    """
    for folder, note in _notes():
        if note.get("kind") == kind and note.get("target_fingerprint") == fingerprint:
            return folder
    drafter, option = ("draft_model", "model") if kind == "draft" else (kind, "heads")
    raise DrafterError(
        f"no {kind} for this target comes with Slipstream: name one with {drafter}:{option}=FOLDER, or train"
        f" it (slipstream train {kind} --help)"
    )


def _notes() -> Iterator[tuple[Path, dict[str, object]]]:
    for root in ROOTS:
        for file in sorted(root.rglob(NOTE)) if root.is_dir() else []:
            if file.parent.name == TARGET:
                continue
            try:
                note = jsontext.parse(file.read_text(encoding="utf-8"))
            except (OSError, ValueError):
                continue
            if isinstance(note, dict):
                yield file.parent, note
