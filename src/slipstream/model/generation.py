"""`GenerationDefaults`: what the checkpoint itself says about how to decode it and where an answer ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.errors import ModelError


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


def generation_defaults(
    generation: Mapping[str, Any], config: Mapping[str, Any], tokenizer_eos: int | None
) -> GenerationDefaults:
    """Reads them; the end tokens come from the first of generation config, model config, tokenizer that
    has any."""
    nested = config.get("text_config")
    text = nested if isinstance(nested, Mapping) else {}
    eos = (
        _ids(generation.get("eos_token_id"))
        or _ids(config.get("eos_token_id"))
        or _ids(text.get("eos_token_id"))
        or _ids(tokenizer_eos)
    )
    return GenerationDefaults(
        eos_ids=eos,
        bos_id=_whole(generation, "bos_token_id")
        if "bos_token_id" in generation
        else _whole(config, "bos_token_id"),
        pad_id=_whole(generation, "pad_token_id"),
        do_sample=bool(generation.get("do_sample", False)),
        temperature=_number(generation, "temperature"),
        top_k=_whole(generation, "top_k"),
        top_p=_number(generation, "top_p"),
        min_p=_number(generation, "min_p"),
        repetition_penalty=_number(generation, "repetition_penalty"),
    )


def _ids(value: object) -> frozenset[int]:
    if value is None:
        return frozenset()
    ids: list[int] = []
    for i in value if isinstance(value, (list, tuple)) else [value]:
        if not isinstance(i, int) or isinstance(i, bool):
            raise ModelError(
                f"eos_token_id must be one or more token ids, not {value!r}: mend generation_config.json"
            )
        ids.append(i)
    return frozenset(i for i in ids if i >= 0)  # -1 is written for "none"


def _number(values: Mapping[str, Any], key: str) -> float | None:
    value = values.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ModelError(f"{key} must be a number, not {value!r}: mend generation_config.json")
    return float(value)


def _whole(values: Mapping[str, Any], key: str) -> int | None:
    value = values.get(key)
    if isinstance(value, list):  # a few configs list several ids; the first is the main one
        value = value[0] if value else None
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise ModelError(f"{key} must be a whole number, not {value!r}: mend generation_config.json")
    return value
