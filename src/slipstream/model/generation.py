"""`GenerationDefaults`: what the checkpoint itself says about how to decode it and where an answer ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.errors import ModelError

GENERATION = "generation_config.json"


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """The values of generation_config.json; None where it is silent.

    eos_ids is every token that ends an answer (empty if the model names none).
    """

    eos_ids: frozenset[int] = frozenset()
    bos_id: int | None = None
    pad_id: int | None = None
    do_sample: bool = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True)
class _File:
    """One of the checkpoint's files, for errors that name it."""

    path: Path
    values: Mapping[str, Any]

    def ids(self, key: str) -> frozenset[int]:
        return _ids(self.values.get(key), self.path)

    def number(self, key: str) -> float | None:
        value = self.values.get(key)
        if value is None:
            return None
        try:
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise ValueError
            return float(value)
        except (ValueError, OverflowError):
            raise ModelError(f"{self.path}: {key} must be a number, not {value!r}: mend it there") from None

    def whole(self, key: str) -> int | None:
        value = self.values.get(key)
        if isinstance(value, list):  # a few configs list several ids; the first is the main one
            value = value[0] if value else None
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise ModelError(f"{self.path}: {key} must be a whole number, not {value!r}: mend it there")
        return value


def generation_defaults(
    generation: Mapping[str, Any],
    config: Mapping[str, Any],
    tokenizer_eos: int | None,
    folder: Path = Path(),
) -> GenerationDefaults:
    """Reads them; the end tokens come from the first of generation config, model config, tokenizer that
    has any. folder: where the files are, for errors."""
    nested = config.get("text_config")
    said, model = _File(folder / GENERATION, generation), _File(folder / "config.json", config)
    text = _File(model.path, nested if isinstance(nested, Mapping) else {})
    eos = (
        said.ids("eos_token_id")
        or model.ids("eos_token_id")
        or text.ids("eos_token_id")
        or _ids(tokenizer_eos, folder / "tokenizer_config.json")
    )
    return GenerationDefaults(
        eos_ids=eos,
        bos_id=(said if "bos_token_id" in generation else model).whole("bos_token_id"),
        pad_id=said.whole("pad_token_id"),
        do_sample=bool(generation.get("do_sample", False)),
        temperature=said.number("temperature"),
        top_k=said.whole("top_k"),
        top_p=said.number("top_p"),
        min_p=said.number("min_p"),
        repetition_penalty=said.number("repetition_penalty"),
    )


def _ids(value: object, where: Path) -> frozenset[int]:
    if value is None:
        return frozenset()
    ids: list[int] = []
    for i in value if isinstance(value, (list, tuple)) else [value]:
        if not isinstance(i, int) or isinstance(i, bool):
            raise ModelError(
                f"{where}: eos_token_id must be one or more token ids, not {value!r}: mend it there"
            )
        ids.append(i)
    return frozenset(i for i in ids if i >= 0)  # -1 is written for "none"
