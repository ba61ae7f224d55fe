"""`Limits`: how much one request, and all of them, may ask for."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.errors import ParameterError


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds an operator can set. What is beyond them is refused with a message that names the bound.

    body_bytes: of a request body. waiting: sequences that may wait for a slot beyond those that run. seconds:
    from arrival to the last token. n: answers of one prompt. prompts: prompts of one request. top_logprobs:
    alternatives a token. stops: stop strings or ids. stop_chars: of one stop string. bias: entries of
    logit_bias. schema_bytes and schema_depth: of a JSON schema, regular expression, grammar or tool. tools:
    of one request. speculative_tokens: most that a request may ask to draft.
    """

    body_bytes: int = 4 << 20
    waiting: int = 64
    seconds: float = 600.0
    n: int = 8
    prompts: int = 16
    top_logprobs: int = 20
    stops: int = 16
    stop_chars: int = 256
    bias: int = 1024
    schema_bytes: int = 64 << 10
    schema_depth: int = 16
    tools: int = 64
    speculative_tokens: int = 16

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            low = 0 if name in ("waiting", "top_logprobs", "bias", "tools", "speculative_tokens") else 1
            value = getattr(self, name)
            if not (value > 0 if name == "seconds" else value >= low):
                bound = "above 0" if name == "seconds" else f"at least {low}"
                raise ParameterError(f"the limit {name} must be {bound}, not {value}")
