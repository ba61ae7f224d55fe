"""What `slipstream tune selfspec` found for a model: one small JSON file a model in the cache folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.errors import DrafterError, ModelError, ParameterError
from slipstream.model.skip import SkipSet, fingerprint
from slipstream.model.store import Store, read_json, reading_errors, try_writing, write_atomic

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Tuned:
    """A skip set with the draft length and confidence it does best with, and what was measured.

    acceptance: share of drafted tokens that the target would accept. cost: share of the weights a
    drafting pass reads. speedup: predicted against plain decoding.
    """

    skip: SkipSet
    num_speculative_tokens: int
    min_confidence: float
    acceptance: float
    cost: float
    speedup: float

    def to_json(self) -> dict[str, Any]:
        return {
            "skip": str(self.skip),
            "num_speculative_tokens": self.num_speculative_tokens,
            "min_confidence": self.min_confidence,
            "acceptance": round(self.acceptance, 4),
            "cost": round(self.cost, 4),
            "speedup": round(self.speedup, 4),
        }


def check_place() -> None:
    """Raise CapacityError or ModelError where nothing can be kept, before a search that takes minutes."""
    with reading_errors(_folder()):
        try_writing(_folder())


def _folder() -> Path:
    return Store.default().root / "selfspec"


def tuned_path(model: Any) -> Path:
    return _folder() / f"{fingerprint(model)}.json"


def save_tuned(model: Any, tuned: Tuned, name: str) -> Path:
    """Write the file, whole or not at all. name: of the model, for whoever looks into the file."""
    path = tuned_path(model)
    with reading_errors(path):
        write_atomic(path, json.dumps({"format": FORMAT, "model": name, **tuned.to_json()}, indent=1) + "\n")
    return path


def load_tuned(model: Any) -> Tuned:
    """Raises DrafterError if the model was not tuned or the file is damaged."""
    path = tuned_path(model)
    fix = "run `slipstream tune selfspec --model MODEL --prompts FILE`, or give selfspec:skip=… or exit=…"
    if not path.is_file():
        raise DrafterError(f"this model has no tuned set of sublayers to leave out yet: {fix}")
    try:
        value = read_json(path)
        if value["format"] != FORMAT:
            raise ParameterError(f"format {value['format']}")
        found = Tuned(
            SkipSet.parse(value["skip"]),
            int(value["num_speculative_tokens"]),
            float(value["min_confidence"]),
            float(value["acceptance"]),
            float(value["cost"]),
            float(value["speedup"]),
        )
        if found.num_speculative_tokens < 0 or not 0 <= found.min_confidence <= 1:
            raise ParameterError("values that no search finds")
        return found
    except (ModelError, LookupError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise DrafterError(f"{path} cannot be used ({type(error).__name__}): {fix}") from error
