"""What a drafter is told about the target when it is built."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from slipstream.core.draft import Draft, Drafter, DraftRequest, Needs, Observation
from slipstream.core.tree import TokenTree

if TYPE_CHECKING:
    from slipstream.model.runner import Runner

__all__ = [
    "Draft",
    "DraftRequest",
    "Drafter",
    "Needs",
    "Observation",
    "TargetInfo",
    "TokenTree",
    "empty_draft",
]


@dataclass(frozen=True)
class TargetInfo:
    """The target, for drafters that must fit it.

    vocab_size: ids the target can emit. context: most positions. dtype and device: how the target
    runs. tokenizer: to compare vocabularies. model: the loaded transformers model, for drafters that
    share its weights. options: how models are loaded (trust_remote_code, progress). runner: the engine's
    own, for drafters that compute with the target's cache as well: a row's slot is its seq_id, it holds
    everything committed but the root, and what a drafter writes behind its length is overwritten by the
    verification. Such a drafter must leave every slot with the length it had.
    """

    vocab_size: int
    context: int
    tokenizer: Any = None
    dtype: str = "auto"
    device: str = "cpu"
    eos_ids: frozenset[int] = frozenset()
    model: Any = None
    options: dict[str, Any] = field(default_factory=dict)
    runner: Runner | None = None


def empty_draft(request: DraftRequest) -> Draft:
    """Nothing drafted: a plain step."""
    return Draft(TokenTree.root(request.root))
