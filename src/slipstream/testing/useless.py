"""A drafter that costs nothing and is never right: what speculation loses where nothing can be guessed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.drafters.base import Draft, Drafter, DraftRequest, TargetInfo, TokenTree
from slipstream.errors import ParameterError


@dataclass(frozen=True, slots=True)
class UselessConfig:
    """num_speculative_tokens: tokens drafted a step. token: the one that is drafted; -1 is the last id, which
    in most vocabularies is one that no text has."""

    num_speculative_tokens: int = 4
    token: int = -1

    def __post_init__(self) -> None:
        if self.num_speculative_tokens < 0:
            raise ParameterError("useless needs num_speculative_tokens of 0 or more")


class UselessDrafter(Drafter):
    name = "useless"
    Config = UselessConfig

    def __init__(self, config: UselessConfig, target: TargetInfo) -> None:
        self.num_speculative_tokens = config.num_speculative_tokens
        self._token = config.token % target.vocab_size

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [Draft(TokenTree.chain(r.root, [self._token] * r.budget.depth)) for r in requests]
