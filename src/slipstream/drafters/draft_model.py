"""A smaller model of the same vocabulary drafts a chain or a tree.

Greedy by default: the drafted tokens are point masses, so the output is token for token what plain
decoding with the same seed gives. With `sampled=true` tokens are drawn from the draft's own law under the
request's temperature, top-k, top-p and min-p, and verified by the ratio test (Leviathan et al.,
2211.17192): the law of the output is the same, its tokens are not.

With `width` above 1 the draft follows its `width` best paths and proposes a tree of them (`_growth`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from slipstream.core.noise import Purpose
from slipstream.drafters._growth import DynamicGrowth, Growth, SampledChain, check_tree
from slipstream.drafters._model_growth import Reading, grow_with
from slipstream.drafters._own_cache import OwnCache, tokens_held
from slipstream.drafters.base import (
    Draft,
    Drafter,
    DraftRequest,
    MemoryEstimate,
    Needs,
    TargetInfo,
    TargetShape,
    empty_draft,
)
from slipstream.errors import ParameterError
from slipstream.logits.warp import warped_law
from slipstream.model.blueprint import Blueprint
from slipstream.model.house import house_drafter
from slipstream.model.int8 import Quantise, prepare_linears, require_int8
from slipstream.model.int8_share import share_inputs
from slipstream.model.load import load
from slipstream.model.parts import ModelParts
from slipstream.model.runner import Runner
from slipstream.model.vocab import shared_vocabulary


@dataclass(frozen=True, slots=True)
class DraftModelConfig:
    """model: catalogue name, folder, .gguf file or hub id; left out, the one that comes with Slipstream for
    this target. num_speculative_tokens: tokens drafted a step.

    sampled: draw the draft instead of taking its likeliest tokens. min_confidence: leave out tokens of less
    probability than this; draw none where even the likeliest has less. dtype: auto is the target's. width:
    paths followed at once, 1 is a chain. nodes: most tokens of a tree, 0 is width times depth. quantise:
    none, or int8 weights for half the memory traffic of bfloat16.
    """

    model: str = ""
    num_speculative_tokens: int = 4
    sampled: bool = False
    min_confidence: float = 0.0
    dtype: str = "auto"
    width: int = 1
    nodes: int = 0
    quantise: Quantise = "none"

    def __post_init__(self) -> None:
        if self.num_speculative_tokens < 0:
            raise ParameterError("draft_model needs num_speculative_tokens of 0 or more")
        if not 0 <= self.min_confidence <= 1:
            raise ParameterError(f"draft_model:min_confidence must be in [0, 1], not {self.min_confidence}")
        if self.width < 1 or self.nodes < 0:
            raise ParameterError(
                f"draft_model needs width >= 1 and nodes >= 0, not width={self.width}, nodes={self.nodes}"
            )
        check_tree("draft_model", self.width, self.nodes, self.num_speculative_tokens)
        if self.sampled and self.width > 1:
            raise ParameterError("draft_model:sampled draws one chain: leave out sampled, or set width=1")


class ModelDrafter(Drafter):
    name = "draft_model"
    Config = DraftModelConfig
    needs = Needs(reads_prompt=True)

    def __init__(self, config: DraftModelConfig, target: TargetInfo, runner: Runner | None = None) -> None:
        """`runner` stands in for loading `config.model` (a model that is loaded already)."""
        self._config = config
        self.num_speculative_tokens = config.num_speculative_tokens
        if config.width > 1:
            self.draft_nodes = config.nodes or config.width * config.num_speculative_tokens
        self._target_vocab = target.vocab_size
        if config.quantise == "int8":
            require_int8(target.device)
        if runner is None:
            dtype = config.dtype if config.dtype != "auto" else target.dtype
            name = config.model or str(house_drafter("draft", _fingerprint(target)))
            weights = "int8" if config.quantise == "int8" else "plain"
            loaded = load(name, dtype=dtype, weights=weights, device=target.device, **target.options)
            self._vocab = shared_vocabulary(
                target.tokenizer, loaded.tokenizer, target.vocab_size, int(loaded.model.config.vocab_size)
            )
            runner = Runner(loaded.model, pack=True)
        else:
            self._vocab = min(target.vocab_size, runner.vocab_size)
            if config.quantise == "int8":
                prepare_linears(runner.model, config.quantise)
        if config.quantise == "int8":
            share_inputs(runner)
        self._runner = runner
        self._cache = OwnCache(runner)

    @classmethod
    def predict_memory(cls, config: DraftModelConfig, target: TargetShape) -> MemoryEstimate:
        if config.quantise == "int8":
            require_int8(target.device)
        dtype = config.dtype if config.dtype != "auto" else target.dtype
        name = config.model or str(house_drafter("draft", target.model.fingerprint))
        shape = Blueprint.of(
            name,
            dtype=dtype,
            device=target.device,
            weights="int8" if config.quantise == "int8" else "plain",
            trust_remote_code=target.trust_remote_code,
        )
        length = min(target.context, shape.runner.context)
        tokens = tokens_held(length, config.num_speculative_tokens, config.width)
        return MemoryEstimate(shape.weight_bytes, shape.cache_bytes(tokens, target.rows), notes=shape.notes)

    @property
    def runner(self) -> Runner:
        return self._runner

    @property
    def memory_bytes(self) -> int:
        return self._runner.memory_bytes

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        rows = {r.seq_id: self._reading(r) for r in requests if self._room(r) > 0}
        grow_with(self._runner, list(rows.values()), self._vocab, after_reading=self._cache.after_reading)
        return [
            rows[r.seq_id].growth.draft(r.root, self.name) if r.seq_id in rows else empty_draft(r)
            for r in requests
        ]

    def _room(self, request: DraftRequest) -> int:
        """How deep this row may draft: its budget, as far as the draft's context reaches.

        A row that has outgrown the draft's context is no longer drafted for; generation goes on.
        """
        return min(request.budget.depth, request.budget.nodes, self._runner.context - len(request.tokens))

    def _reading(self, request: DraftRequest) -> Reading:
        read = self._cache.catch_up(request.seq_id, request.tokens)
        return Reading(request.seq_id, read, self._growth(request))

    def _growth(self, request: DraftRequest) -> Growth:
        config, budget, depth = self._config, request.budget, self._room(request)
        least = max(config.min_confidence, budget.stop_below)
        if config.sampled and request.params.temperature > 0:
            return SampledChain(depth, least, partial(self._sample, request))
        return DynamicGrowth(
            config.width, depth, budget.nodes, least, scored=request.scored, greedy_path=True
        )

    def _sample(self, request: DraftRequest, logits: torch.Tensor, drawn: int) -> tuple[int, torch.Tensor]:
        """A token from the draft's warped law, and the law, float64 [V]; logits [vocab]."""
        law = warped_law(logits, request.params, self._vocab)
        position = len(request.tokens) + drawn
        token = law.draw(request.seed, position, Purpose.DRAFT, origin=request.origin)
        return token, law.dense(self._target_vocab)

    def close(self, seq_id: int) -> None:
        self._cache.close(seq_id)

    def shutdown(self) -> None:
        self._cache.clear()


def _fingerprint(target: TargetInfo) -> str:
    """Of the target, "" where it was not given."""
    return "" if target.model is None else ModelParts.of(target.model).fingerprint
