"""A draft model with another tokenizer.

`mode=text` (SLEM of Timor et al., 2502.05202): the draft goes on with the text in its own tokens, and what it
wrote is tokenised for the target. Drafts are point masses, so the output is that of plain decoding with
the same seed. `mode=intersect` (their TLI): the draft's law is restricted to the tokens that both
vocabularies have and renormalised; that is the law the tokens are really drawn from, so the ratio test
keeps the target's law. At temperature 0 its drafts are point masses too.

The draft reads the committed text in its own tokenisation, cached and cut at the first token that differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from slipstream.core.noise import Purpose
from slipstream.drafters._beam import Beam, Draw, grow
from slipstream.drafters._own_cache import OwnCache
from slipstream.drafters.base import Draft, Drafter, DraftRequest, Needs, TargetInfo, TokenTree, empty_draft
from slipstream.errors import DrafterError, ParameterError
from slipstream.logits.warp import law_of
from slipstream.model.load import load
from slipstream.model.runner import Runner
from slipstream.model.translate import Translator, shared_tokens


@dataclass(frozen=True, slots=True)
class CrossVocabConfig:
    """model: catalogue name, folder, .gguf file or hub id. mode: text, or intersect.

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
            runner, tokenizer = Runner(loaded.model, pack=True), loaded.tokenizer
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
            self._to_target = dict(zip(theirs.tolist(), ours.tolist(), strict=True))
            self._to_draft = dict(zip(ours.tolist(), theirs.tolist(), strict=True))
            self._banned = torch.ones(self._vocab, dtype=torch.bool, device=runner.device)  # [vocab]
            self._banned[self._theirs] = False

    @property
    def runner(self) -> Runner:
        return self._runner

    @property
    def memory_bytes(self) -> int:
        return self._runner.memory_bytes

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        texts = {r.seq_id: self._translator.to_draft(r.tokens) for r in requests}
        beams = {r.seq_id: self._beam(r, texts[r.seq_id]) for r in requests if self._room(r, texts) > 0}
        of = {r.seq_id: r for r in requests}

        def draw(beam: Beam) -> Draw | None:
            request = of[beam.slot]
            if self._banned is None or request.params.temperature == 0:
                return None
            return lambda beam, logits: self._sample(request, beam, logits)

        grow(
            self._runner,
            list(beams.values()),
            self._vocab,
            banned=self._banned,
            after_reading=self._cache.after_reading,
            draw=draw,
        )
        return [
            self._draft(r, texts[r.seq_id], beams[r.seq_id]) if r.seq_id in beams else empty_draft(r)
            for r in requests
        ]

    def _room(self, request: DraftRequest, texts: dict[int, list[int]]) -> int:
        """How many draft tokens this row may get: none beyond the draft's context or without any text."""
        length = len(texts[request.seq_id])
        budget = min(request.budget.depth, request.budget.nodes)
        return min(budget, self._runner.context - length) if length else 0

    def _beam(self, request: DraftRequest, text: list[int]) -> Beam:
        depth = self._room(request, {request.seq_id: text})
        stop = max(self._config.min_confidence, request.budget.stop_below)
        return Beam(request.seq_id, self._cache.catch_up(request.seq_id, text), depth, depth, stop_below=stop)

    def _sample(self, request: DraftRequest, beam: Beam, logits: torch.Tensor) -> int:
        """A draft token drawn from the law restricted to shared tokens, in target ids; logits [vocab].

        The request's warps come after the restriction: this is q as it is drawn from.
        """
        scores = logits.new_full((self._target_vocab,), float("-inf"), dtype=torch.float32)  # [V]
        scores[self._ours] = logits[self._theirs].float()
        law = law_of(scores, request.params)
        beam.laws.append(law.dense(self._target_vocab))  # [V] float64
        position = len(request.tokens) + len(beam.tokens)
        return self._to_draft[law.draw(request.seed, position, Purpose.DRAFT, origin=request.origin)]

    def _draft(self, request: DraftRequest, text: list[int], beam: Beam) -> Draft:
        if self._banned is not None:
            tokens = [self._to_target[t] for t in beam.tokens]
        else:
            written = self._translator.drafted_text(text, beam.tokens)
            tokens = self._translator.to_target(request.tokens, written)[: request.budget.depth]
        q = (*beam.laws, None) if beam.laws else None
        return Draft(TokenTree.chain(request.root, tokens), q, source=self.name)

    def close(self, seq_id: int) -> None:
        self._cache.close(seq_id)

    def shutdown(self) -> None:
        self._cache.clear()
