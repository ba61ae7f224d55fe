"""A smaller model of the same vocabulary drafts a chain or a tree.

Greedy by default: the drafted tokens are point masses, so the output is token for token what plain
decoding with the same seed gives. With `sampled=true` tokens are drawn from the draft's own law under the
request's temperature, top-k, top-p and min-p, and verified by the ratio test (Leviathan et al.,
2211.17192): the law of the output is the same, its tokens are not.

With `width` above 1 the draft follows its `width` best paths and proposes a tree of them (`_growth`).

With `draft_vocab` only the commonest tokens are drafted (`_draft_vocab`), and the draft's LM head has no
other rows. What is drafted is still chosen without a look at the target's noise, and a law q that is 0
elsewhere is as good as any, so both claims hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from slipstream.core.noise import Purpose
from slipstream.drafters._draft_vocab import DraftVocabulary
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
from slipstream.model.head import reduce_head
from slipstream.model.house import house_drafter
from slipstream.model.int8 import Quantise, prepare_linears, require_int8
from slipstream.model.load import load
from slipstream.model.parts import ModelParts
from slipstream.model.runner import Runner
from slipstream.model.static_runner import open_runner
from slipstream.model.vocab import shared_vocabulary


@dataclass(frozen=True, slots=True)
class DraftModelConfig:
    """model: catalogue name, folder, .gguf file or hub id; left out, the one that comes with Slipstream for
    this target. num_speculative_tokens: tokens drafted a step.

    sampled: draw the draft instead of taking its likeliest tokens. min_confidence: leave out tokens of less
    probability than this; draw none where even the likeliest has less. dtype: auto is the target's. width:
    paths followed at once, 1 is a chain. nodes: most tokens of a tree, 0 is width times depth. quantise:
    none, or int8 weights for half the memory traffic of bfloat16. draft_vocab: how many of the commonest
    tokens may be drafted, or a JSON file of ids (`slipstream train vocab`); left out, all.
    """

    model: str = ""
    num_speculative_tokens: int = 4
    sampled: bool = False
    min_confidence: float = 0.0
    dtype: str = "auto"
    width: int = 1
    nodes: int = 0
    quantise: Quantise = "none"
    draft_vocab: str = ""

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
        DraftVocabulary.parse(self.draft_vocab)


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

            def drafted(model: Any, tokenizer: Any) -> torch.Tensor | None:
                size = int(model.config.vocab_size)
                return self._choose(
                    shared_vocabulary(target.tokenizer, tokenizer, target.vocab_size, size), target
                )

            loaded = load(
                name, dtype=dtype, weights=weights, device=target.device, head_rows=drafted, **target.options
            )
            runner = open_runner(loaded.model)
        else:
            ids = self._choose(min(target.vocab_size, runner.vocab_size), target)
            if ids is not None:
                reduce_head(runner.model, ids)
            if config.quantise == "int8":
                prepare_linears(runner.model, config.quantise, runner.siblings())
            runner.parts_replaced()
        self._runner = runner
        self._cache = OwnCache(runner)

    def _choose(self, shared: int, target: TargetInfo) -> torch.Tensor | None:
        """Remember which of the first `shared` ids may be drafted; gives them, None for all."""
        chosen = DraftVocabulary.parse(self._config.draft_vocab)
        ids = None if chosen is None else chosen.ids(target.tokenizer, shared, target.eos_ids)
        self._vocab = shared if ids is None else len(ids)
        self._names = None if ids is None else ids.to(target.device)  # [vocab], ascending
        return ids

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
        chosen = DraftVocabulary.parse(config.draft_vocab)
        shared = min(target.vocab_size, shape.runner.vocab_size)
        ids = None if chosen is None else chosen.stand_in(shared, target.model.eos_ids)
        if ids is not None:
            reduce_head(shape.model, ids)
        length = min(target.context, shape.runner.context)
        tokens = tokens_held(length, config.num_speculative_tokens, config.width)
        return MemoryEstimate(
            shape.weight_bytes,
            shape.cache_bytes(tokens, target.rows),
            tables=0 if ids is None else ids.nbytes,
            notes=shape.notes,
        )

    @property
    def runner(self) -> Runner:
        return self._runner

    @property
    def memory_bytes(self) -> int:
        names = 0 if self._names is None else self._names.nbytes
        return self._runner.memory_bytes + self._cache.kept_bytes + names

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        rows = {r.seq_id: self._reading(r) for r in requests if self._room(r) > 0}
        grow_with(
            self._runner,
            list(rows.values()),
            self._vocab,
            names=self._names,
            after_reading=self._cache.after_reading,
        )
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
        if self._names is not None:
            law = replace(law, ids=self._names[law.ids])
        position = len(request.tokens) + drawn
        token = law.draw(request.seed, position, Purpose.DRAFT, origin=request.origin)
        return token, law.dense(self._target_vocab)

    def close(self, seq_id: int) -> None:
        self._cache.close(seq_id)

    def keep_prefixes(self, tokens: int) -> None:
        self._cache.keep_prefixes(tokens)

    def shutdown(self) -> None:
        self._cache.clear()


def _fingerprint(target: TargetInfo) -> str:
    """Of the target, "" where it was not given."""
    return "" if target.model is None else ModelParts.of(target.model).fingerprint
