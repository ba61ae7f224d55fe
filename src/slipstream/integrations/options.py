"""What one call of `generate` asks for, in Slipstream's terms."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from slipstream.core.params import SamplingParams
from slipstream.errors import CapacityError, ParameterError
from slipstream.integrations.fields import DEFAULTS, SAMPLING, asks_nothing

_DEFAULT_NEW_TOKENS = 20  # transformers' own, when nothing says how long


@dataclass(frozen=True)
class Options:
    """The call, less its prompts. base: everything but lengths. eos_ids end a row, pad_id fills it up.

    max_length and min_length count the prompt's columns, padding included, as in transformers.
    """

    base: SamplingParams
    max_new_tokens: int | None
    max_length: int | None
    min_new_tokens: int | None
    min_length: int
    eos_ids: tuple[int, ...]
    pad_id: int | None
    bos_id: int | None
    stop_strings: tuple[str, ...]
    copies: int
    as_dict: bool

    def params(self, width: int, longest: int, context: int) -> SamplingParams:
        """For prompts of `width` columns, of which the longest holds `longest` tokens."""
        if self.max_new_tokens is not None:
            new, how = self.max_new_tokens, f"max_new_tokens={self.max_new_tokens}"
        elif self.max_length is not None:
            new, how = self.max_length - width, f"max_length={self.max_length}"
            if new < 1:
                raise ParameterError(
                    f"the prompt has {width} columns and max_length={self.max_length} counts them too;"
                    " set max_new_tokens instead"
                )
        else:
            new, how = min(_DEFAULT_NEW_TOKENS, max(context - width, 1)), "the default of 20 new tokens"
        if longest + new > context:
            raise CapacityError(
                f"{how} after a prompt of {longest} tokens goes beyond the model's context of {context};"
                f" set max_new_tokens to at most {max(context - longest, 0)} or shorten the prompt"
            )
        if self.min_new_tokens is not None:
            least = self.min_new_tokens
        else:
            least = max(self.min_length - width, 0)
        return self.base.with_(max_tokens=new, min_tokens=min(least, new))


def read_options(values: Mapping[str, Any], call: Mapping[str, Any], vocab_size: int) -> Options:
    """From resolved fields; `call` holds those that were named in the call itself."""
    eos = _ids("eos_token_id", values["eos_token_id"])
    pad = _optional_id("pad_token_id", values["pad_token_id"])
    copies = _count("num_return_sequences", values["num_return_sequences"], 1)
    law = _sampling(values, call)
    if copies > 1 and not law["temperature"]:
        raise ParameterError(
            f"num_return_sequences={copies} would give equal rows; set do_sample=True or leave it out"
        )
    banned = [w for w in _bad_words(values["bad_words_ids"], vocab_size) if len(w) > 1 or w[0] not in eos]
    suppressed = [t for t in _ids("suppress_tokens", values["suppress_tokens"]) if t < vocab_size]
    stop = values["stop_strings"] or ()
    stop = (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(isinstance(s, str) and s for s in stop):
        raise ParameterError("stop_strings must be strings that are not empty")
    return Options(
        base=SamplingParams(
            **law,
            logit_bias=_bias(values["sequence_bias"], vocab_size),
            bad_words=(*banned, *((t,) for t in suppressed)),
        ),
        max_new_tokens=_optional_count("max_new_tokens", values["max_new_tokens"], 1),
        max_length=_optional_count("max_length", values["max_length"], 1),
        min_new_tokens=_optional_count("min_new_tokens", values["min_new_tokens"], 0),
        min_length=_optional_count("min_length", values["min_length"], 0) or 0,
        eos_ids=eos,
        pad_id=eos[0] if pad is None and eos else pad,
        bos_id=_optional_id("bos_token_id", values["bos_token_id"]),
        stop_strings=stop,
        copies=copies,
        as_dict=bool(values["return_dict_in_generate"]),
    )


def _sampling(values: Mapping[str, Any], call: Mapping[str, Any]) -> dict[str, Any]:
    penalty = values["repetition_penalty"]
    law: dict[str, Any] = {"temperature": 0.0, "repetition_penalty": 1.0 if penalty is None else penalty}
    if values["do_sample"]:
        law["temperature"] = 1.0 if values["temperature"] is None else values["temperature"]
        if not law["temperature"]:
            raise ParameterError("temperature=0 is greedy decoding: set do_sample=False")
        law |= {n: values[n] for n in ("top_k", "top_p", "min_p") if values[n] is not None}
        return law
    for name in SAMPLING:
        value = call.get(name)
        if not asks_nothing(value, (DEFAULTS.get(name), 0.0)):
            # A checkpoint's own values mean nothing when decoding greedily; those of the call were meant.
            warnings.warn(f"{name}={value} has no effect without do_sample=True", UserWarning, stacklevel=4)
    return law


def _bad_words(words: Any, vocab_size: int) -> list[tuple[int, ...]]:
    read = [_ids("bad_words_ids", word) for word in words or ()]
    if not all(read):
        raise ParameterError("bad_words_ids must be a list of token id lists that are not empty")
    _exist("bad_words_ids", [t for word in read for t in word], vocab_size)
    return read


def _bias(bias: Any, vocab_size: int) -> dict[int, float]:
    pairs = bias.items() if isinstance(bias, Mapping) else (bias or ())
    read: dict[int, float] = {}
    for tokens, value in pairs:
        ids = _ids("sequence_bias", tokens)
        if len(ids) != 1:
            raise ParameterError(
                f"sequence_bias of {list(ids)}: only single tokens can be biased; use model.generate"
            )
        read[ids[0]] = float(value)
    _exist("sequence_bias", read, vocab_size)
    return read


def _exist(name: str, ids: Any, vocab_size: int) -> None:
    bad = next((t for t in ids if not 0 <= t < vocab_size), None)
    if bad is not None:
        raise ParameterError(f"{name} names token {bad}, but the model's ids end at {vocab_size - 1}")


def _ids(name: str, value: Any) -> tuple[int, ...]:
    """One id, a list of them or a tensor; negative ones mean nothing."""
    if value is None:
        return ()
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    items = value if isinstance(value, (list, tuple)) else [value]
    return tuple(t for t in (_count(name, item, None) for item in items) if t >= 0)


def _optional_id(name: str, value: Any) -> int | None:
    ids = _ids(name, value)
    return ids[0] if ids else None


def _optional_count(name: str, value: Any, low: int | None) -> int | None:
    return None if value is None else _count(name, value, low)


def _count(name: str, value: Any, low: int | None) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise ParameterError(f"{name} must be a whole number, not {value!r}") from None
    if low is not None and number < low:
        raise ParameterError(f"{name} must be at least {low}, not {number}")
    return number
