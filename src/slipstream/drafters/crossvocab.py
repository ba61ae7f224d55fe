"""A draft model with another tokenizer.

`mode=text` (SLEM of Timor et al., 2502.05202): the draft goes on with the text in its own tokens, and what it
wrote is tokenised for the target. Drafts are point masses, so the output is that of plain decoding with
the same seed. `mode=intersect` (their TLI): the draft's law is restricted to the tokens that both
vocabularies have and renormalised; that is the law the tokens are really drawn from, so the ratio test
keeps the target's law. At temperature 0 its drafts are point masses too.

The draft reads the committed text in its own tokenisation, cached and cut at the first token that differs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch

from slipstream.core.estimate import INT_BYTES
from slipstream.core.noise import Purpose
from slipstream.drafters._growth import DynamicGrowth, Growth, SampledChain
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
    TokenTree,
    empty_draft,
)
from slipstream.errors import DrafterError, ParameterError
from slipstream.logits.warp import law_of
from slipstream.model.blueprint import Blueprint
from slipstream.model.load import load
from slipstream.model.runner import Runner
from slipstream.model.static_runner import open_runner
from slipstream.model.translate import Translator, shared_tokens

# A token of a tokenizer: tokenizers 0.22 keeps 99 MB for the 151,936 of Qwen2.5 (resident set).
TOKENIZER_BYTES = 650


@dataclass(frozen=True, slots=True)
class CrossVocabConfig:
    """model: catalogue name, folder, .gguf file or hub id. mode: text has the draft write text, which is
    tokenised for the target; intersect draws from the tokens that both have.

    num_speculative_tokens: tokens drafted a step. min_confidence: stop before a token whose likeliest
    candidate has less probability than this. dtype: auto is the target's.
    """

    model: str
    mode: Literal["text", "intersect"] = "text"
    num_speculative_tokens: int = 4
    min_confidence: float = 0.0
    dtype: str = "auto"

    def __post_init__(self) -> None:
        if self.num_speculative_tokens < 0:
            raise ParameterError("crossvocab needs num_speculative_tokens of 0 or more")
        if not 0 <= self.min_confidence <= 1:
            raise ParameterError(f"crossvocab:min_confidence must be in [0, 1], not {self.min_confidence}")


class CrossVocabDrafter(Drafter):
    name = "crossvocab"
    Config = CrossVocabConfig
    needs = Needs(reads_prompt=True)

    def __init__(
        self,
        config: CrossVocabConfig,
        target: TargetInfo,
        runner: Runner | None = None,
        tokenizer: Any = None,
    ) -> None:
        """`runner` and `tokenizer` stand in for loading `config.model`."""
        if target.tokenizer is None:
            raise DrafterError("crossvocab compares tokenizers and the target has none: give TargetInfo one")
        self._config = config
        self.num_speculative_tokens = config.num_speculative_tokens
        if runner is None:
            dtype = config.dtype if config.dtype != "auto" else target.dtype
            loaded = load(config.model, dtype=dtype, device=target.device, **target.options)
            runner, tokenizer = open_runner(loaded.model), loaded.tokenizer
        self._runner = runner
        self._cache = OwnCache(runner)
        self._translator = Translator(target.tokenizer, tokenizer)
        self._vocab = min(runner.vocab_size, len(tokenizer))
        self._target_vocab = target.vocab_size
        self._banned: torch.Tensor | None = None
        self._to_target: dict[int, int] = {}
        self._to_draft: dict[int, int] = {}
        if config.mode == "intersect":
            ours, theirs = shared_tokens(target.tokenizer, tokenizer, target.vocab_size, self._vocab)
            if not len(ours):
                raise DrafterError(
                    "target and draft model have no token in common, so nothing can be drawn:"
                    " use crossvocab:mode=text"
                )
            self._ours, self._theirs = ours.to(runner.device), theirs.to(runner.device)  # [n], [n]
            pairs = list(zip(ours.tolist(), theirs.tolist(), strict=True))
            self._to_target = {draft: token for token, draft in pairs}
            self._to_draft = dict(pairs)
            self._banned = torch.ones(self._vocab, dtype=torch.bool, device=runner.device)  # [vocab]
            self._banned[self._theirs] = False

    @classmethod
    def predict_memory(cls, config: CrossVocabConfig, target: TargetShape) -> MemoryEstimate:
        """As if the draft needed as many tokens for the text, and knew all of the target's if it draws."""
        dtype = config.dtype if config.dtype != "auto" else target.dtype
        shape = Blueprint.of(
            config.model, dtype=dtype, device=target.device, trust_remote_code=target.trust_remote_code
        )
        tokens = tokens_held(min(target.context, shape.runner.context), config.num_speculative_tokens)
        vocab = shape.runner.vocab_size
        shared = min(target.vocab_size, vocab) if config.mode == "intersect" else 0
        tables = _table_bytes(vocab, shared, sys.getsizeof(dict.fromkeys(range(shared))))
        return MemoryEstimate(
            shape.weight_bytes, shape.cache_bytes(tokens, target.rows), tables, notes=shape.notes
        )

    @property
    def runner(self) -> Runner:
        return self._runner

    @property
    def memory_bytes(self) -> int:
        table = sys.getsizeof(self._to_target)
        held = self._runner.memory_bytes + self._cache.kept_bytes
        return held + _table_bytes(self._vocab, len(self._to_target), table)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        texts = {r.seq_id: self._translator.to_draft(r.tokens) for r in requests}
        rows = {r.seq_id: self._reading(r, texts) for r in requests if self._room(r, texts) > 0}
        grow_with(
            self._runner,
            list(rows.values()),
            self._vocab,
            banned=self._banned,
            after_reading=self._cache.after_reading,
        )
        return [
            self._draft(r, texts[r.seq_id], rows[r.seq_id].growth) if r.seq_id in rows else empty_draft(r)
            for r in requests
        ]

    def _room(self, request: DraftRequest, texts: dict[int, list[int]]) -> int:
        """How many draft tokens this row may get: none beyond the draft's context or without any text."""
        length = len(texts[request.seq_id])
        budget = min(request.budget.depth, request.budget.nodes)
        return min(budget, self._runner.context - length) if length else 0

    def _reading(self, request: DraftRequest, texts: dict[int, list[int]]) -> Reading:
        read = self._cache.catch_up(request.seq_id, texts[request.seq_id])
        return Reading(request.seq_id, read, self._growth(request, self._room(request, texts)))

    def _growth(self, request: DraftRequest, depth: int) -> Growth:
        least = max(self._config.min_confidence, request.budget.stop_below)
        if self._banned is not None and request.params.temperature > 0:
            return SampledChain(depth, least, partial(self._sample, request))
        # In text mode the tokens that are handed in are not the ones that have scores.
        scored = request.scored and self._banned is not None
        return DynamicGrowth(1, depth, depth, least, scored=scored)

    def _sample(self, request: DraftRequest, logits: torch.Tensor, drawn: int) -> tuple[int, torch.Tensor]:
        """A draft token from the law restricted to shared tokens, and that law in target ids, float64 [V].

        logits [vocab]. The request's warps come after the restriction: this is q as it is drawn from.
        """
        scores = logits.new_full((self._target_vocab,), float("-inf"), dtype=torch.float32)  # [V]
        scores[self._ours] = logits[self._theirs].float()
        law = law_of(scores, request.params)
        position = len(request.tokens) + drawn
        token = law.draw(request.seed, position, Purpose.DRAFT, origin=request.origin)
        return self._to_draft[token], law.dense(self._target_vocab)

    def _draft(self, request: DraftRequest, text: list[int], growth: Growth) -> Draft:
        if self._banned is not None:
            draft = growth.draft(request.root, self.name)
            drafted = (self._to_target[t] for t in draft.tree.tokens[1:])
            return replace(draft, tree=TokenTree.chain(request.root, drafted))
        written = self._translator.drafted_text(text, growth.tokens)
        tokens = self._translator.to_target(request.tokens, written)[: request.budget.depth]
        return Draft(TokenTree.chain(request.root, tokens), source=self.name)

    def close(self, seq_id: int) -> None:
        self._cache.close(seq_id)

    def keep_prefixes(self, tokens: int) -> None:
        self._cache.keep_prefixes(tokens)

    def shutdown(self) -> None:
        self._cache.clear()


def _table_bytes(vocab: int, shared: int, table: int) -> int:
    """The draft's tokenizer, and what translates `shared` ids both ways: two dicts of `table` bytes with
    their numbers, two tensors, and the mask of what may not be drawn."""
    translation = shared and 2 * (table + shared * (INT_BYTES + torch.int64.itemsize)) + vocab
    return vocab * TOKENIZER_BYTES + translation
