"""What a drafter is told about the target when it is built."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from slipstream.core.draft import Draft, Drafter, DraftRequest, Needs, Observation
from slipstream.core.estimate import MemoryEstimate
from slipstream.core.tree import TokenTree

if TYPE_CHECKING:
    from slipstream.model.blueprint import Blueprint
    from slipstream.model.runner import Runner

__all__ = [
    "Draft",
    "DraftRequest",
    "Drafter",
    "MemoryEstimate",
    "Needs",
    "Observation",
    "TargetInfo",
    "TargetShape",
    "TokenTree",
    "empty_draft",
]


@dataclass(frozen=True)
class TargetInfo:
    """The target, for drafters that must fit it.

    vocab_size: ids the target can emit. context: most positions. dtype and device: how the target
    runs. weights: plain, or int8 (its linear layers). tokenizer: to compare vocabularies. model: the loaded
    transformers model, for drafters that share its weights. options: how models are loaded
    (trust_remote_code, progress). runner: the engine's own, for drafters that compute with the target's
    cache as well: a row's slot is its seq_id, it holds everything committed but the root, and what a drafter
    writes behind its length is overwritten by the verification. Such a drafter must leave every slot with the
    length it had.
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
    weights: str = "plain"


@dataclass(frozen=True)
class TargetShape:
    """The target before it is loaded and how it is to be used, for `Drafter.predict_memory`.

    vocab_size, dtype, device: as in `TargetInfo`. context: most tokens of a row, prompt and answer. rows:
    sequences at once. model: the target's modules without data. trust_remote_code: as to `slipstream.load`.
    """

    vocab_size: int
    context: int
    rows: int
    dtype: str
    device: str
    model: Blueprint
    trust_remote_code: bool = False


def empty_draft(request: DraftRequest) -> Draft:
    """Nothing drafted: a plain step."""
    return Draft(TokenTree.root(request.root))
