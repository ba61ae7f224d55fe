"""The target drafts for itself with some of its sublayers left out; no second model, no extra memory.

Draft & Verify (2309.08168) with a tuned set of attention and MLP sublayers, or early exit after the first
layers (LayerSkip, 2404.16710). The draft reads the target's own cache for everything committed; what it
writes for drafted tokens lies behind the slot's length and is overwritten when the full model verifies.
Drafts are greedy point masses. A drafted token costs a good part of a target pass, so drafting stops
when the thinned model is not sure, before the token is chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.drafters._growth import DynamicGrowth, check_tree
from slipstream.drafters._model_growth import Reading, grow_with
from slipstream.drafters._tuned import load_tuned
from slipstream.drafters.base import (
    Draft,
    Drafter,
    DraftRequest,
    MemoryEstimate,
    TargetInfo,
    TargetShape,
    empty_draft,
)
from slipstream.errors import DrafterError, ParameterError
from slipstream.model.parts import ModelParts
from slipstream.model.skip import SkipSet, Thinnable

DEPTH, CONFIDENCE = 4, 0.4  # where neither given nor tuned


@dataclass(frozen=True, slots=True)
class SelfSpecConfig:
    """skip: sublayers left out, like a3-9+m4+12-14 (a: attention, m: MLP, without letter: both).

    exit: run only so many first layers. Without skip and exit the set that `slipstream tune selfspec` found
    for this model is used, and its values for the rest. num_speculative_tokens: tokens drafted a step, by
    default the tuned number or 4. min_confidence: stop before a token whose likeliest candidate has less
    probability than this, by default the tuned value or 0.4. width: paths followed at once, 1 is a chain.
    nodes: most tokens of a tree, 0 is width times depth.
    """

    skip: str = ""
    exit: int = 0
    num_speculative_tokens: int | None = None
    min_confidence: float | None = None
    width: int = 1
    nodes: int = 0

    def __post_init__(self) -> None:
        if self.skip and self.exit:
            raise ParameterError("selfspec takes skip or exit, not both")
        if self.exit < 0:
            raise ParameterError(f"selfspec:exit must be a number of layers, not {self.exit}")
        if (self.num_speculative_tokens or 0) < 0:
            raise ParameterError("selfspec needs num_speculative_tokens of 0 or more")
        if not 0 <= (self.min_confidence or 0) <= 1:
            raise ParameterError(f"selfspec:min_confidence must be in [0, 1], not {self.min_confidence}")
        if self.width < 1 or self.nodes < 0:
            raise ParameterError(
                f"selfspec needs width >= 1 and nodes >= 0, not width={self.width}, nodes={self.nodes}"
            )
        check_tree("selfspec", self.width, self.nodes, self.num_speculative_tokens or 0)
        SkipSet.parse(self.skip)


class SelfSpecDrafter(Drafter):
    name = "selfspec"
    Config = SelfSpecConfig

    def __init__(self, config: SelfSpecConfig, target: TargetInfo) -> None:
        if target.runner is None:
            raise DrafterError(
                "selfspec needs the runner of the target, whose weights and cache it shares: load both with"
                " slipstream.load, or give TargetInfo its runner"
            )
        self._runner = target.runner
        self._model = Thinnable(self._runner)
        depth, confidence = DEPTH, CONFIDENCE
        skip = _given(config, self._model.layers)
        if skip is None:
            tuned = load_tuned(self._runner.model)
            depth, confidence = tuned.num_speculative_tokens, tuned.min_confidence
            skip = tuned.skip.check(self._model.layers)
        self.skip = skip
        if config.num_speculative_tokens is not None:
            depth = config.num_speculative_tokens
        self.num_speculative_tokens = depth
        self.min_confidence = confidence if config.min_confidence is None else config.min_confidence
        check_tree("selfspec", config.width, config.nodes, depth)
        if config.width > 1:
            self.draft_nodes = config.nodes or config.width * depth
        self._width = config.width
        self._vocab = min(target.vocab_size, self._runner.vocab_size)

    @classmethod
    def predict_memory(cls, config: SelfSpecConfig, target: TargetShape) -> MemoryEstimate:
        """Nothing: it has the target's weights and cache."""
        given = _given(config, ModelParts.of(target.model.model).num_layers)
        tuned = "selfspec without skip and exit takes what `slipstream tune selfspec` found for this model"
        return MemoryEstimate(notes=() if given else (tuned,))

    @property
    def cost(self) -> float:
        """Share of the target's weights that one drafting pass reads."""
        return self._model.cost(self.skip)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        rows = {r.seq_id: self._reading(r) for r in requests if self._has_slot(r)}
        with self._model.without(self.skip):
            grow_with(self._runner, list(rows.values()), self._vocab)
        return [
            rows[r.seq_id].growth.draft(r.root, self.name) if r.seq_id in rows else empty_draft(r)
            for r in requests
        ]

    def _has_slot(self, request: DraftRequest) -> bool:
        """Whether the target's cache holds this row up to its root, as it does inside the engine."""
        cache, slot = self._runner.cache, request.seq_id
        return slot in cache and cache.length(slot) == len(request.tokens) - 1

    def _reading(self, request: DraftRequest) -> Reading:
        budget = request.budget
        growth = DynamicGrowth(
            self._width,
            min(budget.depth, self._runner.context - len(request.tokens)),
            budget.nodes,
            max(self.min_confidence, budget.stop_below),
            scored=request.scored,
            greedy_path=True,
        )
        return Reading(request.seq_id, [request.root], growth)


def _given(config: SelfSpecConfig, layers: int) -> SkipSet | None:
    """What the options leave out of a model of so many layers, None if they do not say."""
    if config.exit >= layers:
        raise ParameterError(f"selfspec:exit must be below the model's {layers} layers, not {config.exit}")
    if config.exit:
        return SkipSet.exit_at(config.exit, layers)
    return SkipSet.parse(config.skip).check(layers) if config.skip else None
