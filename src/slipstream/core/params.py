"""`SamplingParams`: what one request asks for, validated once, where it enters."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import index
from typing import Any, Literal

from slipstream.errors import ParameterError

# Scores are float32 [-3e38, 3e38]: what is divided by a penalty, or biased, must stay inside.
MOST_PENALTY = 1e6
MOST_BIAS = 1e30
_LARGEST = sys.float_info.max


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """What an answer must look like. source: a JSON schema as JSON text, a regular expression, or Lark."""

    kind: Literal["json_schema", "regex", "lark"]
    source: str

    def __post_init__(self) -> None:
        if self.kind not in ("json_schema", "regex", "lark"):
            raise ParameterError(f"a grammar is json_schema, regex or lark, not {self.kind!r}")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is decoded. Defaults: greedy, until the model ends its answer.

    max_tokens None means: as far as the context reaches. top_k 0 and top_p 1.0 are off. stop holds
    strings, whose text is cut from the output; stop_token_ids ends at a token. logit_bias adds to
    raw logits by token id. bad_words may never appear; they are token id sequences (`Session.bad_words`
    makes them of strings). min_tokens forbids EOS and stop tokens before that many tokens. grammar: only what
    it allows can be said, and the answer ends where it does. logprobs asks
    for the log-probabilities of the chosen token and of that many alternatives, of the model's raw law.
    seed None draws a fresh one for each request.
    """

    max_tokens: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    grammar: GrammarSpec | None = None
    logprobs: int | None = None
    n: int = 1
    seed: int | None = None

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        if isinstance(self.stop, str):
            set_(self, "stop", (self.stop,))
        readings: Sequence[tuple[str, str, Callable[[], object]]] = (
            ("stop", "a list of strings", lambda: tuple(self.stop)),
            ("stop_token_ids", "a list of token ids", lambda: tuple(map(index, self.stop_token_ids))),
            (
                "bad_words",
                "a list of token id lists (Session.bad_words makes them of strings)",
                lambda: tuple(_ids(word) for word in self.bad_words),
            ),
            (
                "logit_bias",
                "a mapping of token ids to numbers",
                lambda: {_id(k): float(v) for k, v in self.logit_bias.items()},
            ),
        )
        for name, kind, read in readings:
            try:
                set_(self, name, read())
            except (TypeError, ValueError, AttributeError, OverflowError):
                raise ParameterError(f"{name} must be {kind}, not {getattr(self, name)!r}") from None
        checks: Sequence[tuple[bool, str]] = (
            (
                self.max_tokens is None or _whole(self.max_tokens, 1),
                f"max_tokens must be a whole number of at least 1, not {self.max_tokens}",
            ),
            (
                _finite(self.temperature, 0.0),
                f"temperature must be 0 (greedy) or more, not {self.temperature}",
            ),
            (_whole(self.top_k, 0), f"top_k must be 0 (off) or a whole number above it, not {self.top_k}"),
            (_finite(self.top_p, 0.0, 1.0) and self.top_p > 0, f"top_p must be in (0, 1], not {self.top_p}"),
            (_finite(self.min_p, 0.0, 1.0), f"min_p must be in [0, 1], not {self.min_p}"),
            (
                _finite(self.repetition_penalty, 1 / MOST_PENALTY, MOST_PENALTY),
                f"repetition_penalty must be from {1 / MOST_PENALTY:g} to {MOST_PENALTY:g} (1 is off),"
                f" not {self.repetition_penalty}",
            ),
            (
                _finite(self.presence_penalty, -2.0, 2.0),
                f"presence_penalty must be in [-2, 2], not {self.presence_penalty}",
            ),
            (
                _finite(self.frequency_penalty, -2.0, 2.0),
                f"frequency_penalty must be in [-2, 2], not {self.frequency_penalty}",
            ),
            (
                all(v <= MOST_BIAS for v in self.logit_bias.values()),
                f"logit_bias values must be numbers up to {MOST_BIAS:g} (-inf forbids a token)",
            ),
            (all(k >= 0 for k in self.logit_bias), "logit_bias keys must be token ids (0 or more)"),
            (all(self.bad_words), "bad_words must not hold an empty word"),
            (
                all(t >= 0 for ids in (self.stop_token_ids, *self.bad_words) for t in ids),
                "stop_token_ids and bad_words must hold token ids (0 or more)",
            ),
            (_whole(self.min_tokens, 0), f"min_tokens must be 0 or more, not {self.min_tokens}"),
            (
                not _whole(self.max_tokens, 1) or _finite(self.min_tokens, 0, self.max_tokens or 0),
                f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens})",
            ),
            (all(isinstance(s, str) for s in self.stop), f"stop must hold strings, not {self.stop!r}"),
            (all(self.stop), "stop must not hold an empty string: it would end every answer at once"),
            (
                self.logprobs is None or (_whole(self.logprobs, 0) and self.logprobs <= 1000),
                f"logprobs must be between 0 and 1000 alternatives, not {self.logprobs}",
            ),
            (_whole(self.n, 1), f"n must be a whole number of at least 1, not {self.n}"),
            (
                self.grammar is None or isinstance(self.grammar, GrammarSpec),
                f"grammar must be a GrammarSpec, not {type(self.grammar).__name__}",
            ),
            (
                self.grammar is None or not (self.min_tokens or self.ignore_eos),
                "min_tokens and ignore_eos contradict a grammar, which says itself where an answer may end",
            ),
            (
                self.seed is None or (isinstance(self.seed, int) and not isinstance(self.seed, bool)),
                f"seed must be a whole number, not {self.seed!r}",
            ),
        )
        for fine, message in checks:
            if not fine:
                raise ParameterError(message)

    def with_(self, **changes: Any) -> SamplingParams:
        """A copy with other values, validated again."""
        return replace(self, **changes)


def _ids(word: Sequence[int]) -> tuple[int, ...]:
    return tuple(map(index, word))  # no number is cut to a whole one, and digits of a string are no ids


def _id(key: int | str) -> int:
    """JSON has strings for keys."""
    return int(key) if isinstance(key, str) else index(key)


def _whole(value: object, low: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= low


def _finite(value: object, low: float, high: float = float("inf")) -> bool:
    """A number (not NaN, not infinite, not a truth value) within the bounds, that fits a float."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    return low <= value <= high and value <= _LARGEST
