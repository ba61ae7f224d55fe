"""A smaller model of the same vocabulary drafts a chain.

Greedy by default: the drafted tokens are point masses, so the output is token for token what plain
decoding with the same seed gives. With `sampled=true` tokens are drawn from the draft's own law under the
request's temperature, top-k, top-p and min-p, and verified by the ratio test (Leviathan et al.,
2211.17192): the law of the output is the same, its tokens are not.

The draft keeps a cache of its own. Its length is the only state: before drafting a row it rolls
back to where cached and committed tokens part and reads what is missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from slipstream.core.noise import Purpose
from slipstream.drafters.base import Draft, Drafter, DraftRequest, Needs, TargetInfo, TokenTree, empty_draft
from slipstream.errors import ParameterError
from slipstream.logits.warp import warped_law
from slipstream.model.load import load
from slipstream.model.pack import PackRow
from slipstream.model.runner import CHUNK, Runner
from slipstream.model.vocab import shared_vocabulary


@dataclass(frozen=True, slots=True)
class DraftModelConfig:
    """model: catalogue name, folder, .gguf file or hub id. num_speculative_tokens: tokens drafted a step.

    sampled: draw the draft instead of taking its likeliest tokens. min_confidence: stop before a token
    whose likeliest candidate has less probability than this. dtype: auto is the target's.
    """

    model: str
    num_speculative_tokens: int = 4
    sampled: bool = False
    min_confidence: float = 0.0
    dtype: str = "auto"

    def __post_init__(self) -> None:
        if self.num_speculative_tokens < 0:
            raise ParameterError("draft_model needs num_speculative_tokens of 0 or more")
        if not 0 <= self.min_confidence <= 1:
            raise ParameterError(f"draft_model:min_confidence must be in [0, 1], not {self.min_confidence}")


@dataclass
class _Row:
    """One row in progress: tokens in the draft's cache, and what this step drafted."""

    cached: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    laws: list[torch.Tensor] = field(default_factory=list)


class ModelDrafter(Drafter):
    name = "draft_model"
    Config = DraftModelConfig
    needs = Needs(reads_prompt=True)

    def __init__(self, config: DraftModelConfig, target: TargetInfo, runner: Runner | None = None) -> None:
        """`runner` stands in for loading `config.model` (a model that is loaded already)."""
        self._config = config
        self.num_speculative_tokens = config.num_speculative_tokens
        self._target_vocab = target.vocab_size
        if runner is None:
            dtype = config.dtype if config.dtype != "auto" else target.dtype
            loaded = load(config.model, dtype=dtype, device=target.device, **target.options)
            self._vocab = shared_vocabulary(
                target.tokenizer, loaded.tokenizer, target.vocab_size, int(loaded.model.config.vocab_size)
            )
            runner = Runner(loaded.model, pack=True)
        else:
            self._vocab = min(target.vocab_size, runner.vocab_size)
        self._runner = runner
        self._rows: dict[int, _Row] = {}

    @property
    def runner(self) -> Runner:
        return self._runner

    @property
    def memory_bytes(self) -> int:
        return self._runner.memory_bytes

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        depths = {r.seq_id: self._room(r) for r in requests}
        active = [r for r in requests if depths[r.seq_id] > 0]
        pending = [self._catch_up(r) for r in active]
        while active:
            logits = self._runner.forward(
                [PackRow(r.seq_id, p) for r, p in zip(active, pending, strict=True)], logits="last"
            ).logits
            assert logits is not None
            for request, read in zip(active, pending, strict=True):
                self._runner.cache.commit(request.seq_id, range(len(read)))
                self._rows[request.seq_id].cached.extend(read)
            self._choose(active, logits[:, : self._vocab])  # [rows, V]
            going = [
                (r, [self._rows[r.seq_id].drafted[-1]])
                for r, p in zip(active, pending, strict=True)
                if self._goes_on(r, depths[r.seq_id])
            ]
            active = [r for r, _ in going]
            pending = [p for _, p in going]
        return [self._draft(r) for r in requests]

    def _room(self, request: DraftRequest) -> int:
        """How deep this row may draft: its budget, as far as the draft's context reaches.

        A row that has outgrown the draft's context is no longer drafted for; generation goes on.
        """
        row = self._rows.setdefault(request.seq_id, _Row())
        row.drafted, row.laws = [], []
        return min(request.budget.depth, self._runner.context - len(request.tokens))

    def _catch_up(self, request: DraftRequest) -> list[int]:
        """Roll back to the committed prefix and read on; gives the last piece, root included."""
        row, tokens, cache = self._rows[request.seq_id], request.tokens, self._runner.cache
        if request.seq_id not in cache:
            cache.open(request.seq_id)
        same = 0
        limit = min(len(row.cached), len(tokens) - 1)
        while same < limit and row.cached[same] == tokens[same]:
            same += 1
        cache.rollback(request.seq_id, same)
        del row.cached[same:]
        missing = list(tokens[same:])
        ready = (len(missing) - 1) // CHUNK * CHUNK
        if ready:
            self._runner.extend(request.seq_id, missing[:ready])
            row.cached.extend(missing[:ready])
        return missing[ready:]

    def _choose(self, active: Sequence[DraftRequest], logits: torch.Tensor) -> None:
        """Add one token to each row, or none where the draft is not confident. logits [rows, V]."""
        threshold = [max(self._config.min_confidence, r.budget.stop_below) for r in active]
        confident = [True] * len(active)
        if any(threshold):
            top = logits.float().softmax(-1).amax(-1).tolist()
            confident = [p >= t for p, t in zip(top, threshold, strict=True)]
        best = logits.float().argmax(-1).tolist()
        for i, request in enumerate(active):
            row = self._rows[request.seq_id]
            if not confident[i]:
                continue
            if not self._samples(request):
                row.drafted.append(best[i])
                continue
            law = warped_law(logits[i], request.params, self._vocab)
            position = len(request.tokens) + len(row.drafted)
            row.drafted.append(law.draw(request.seed, position, Purpose.DRAFT, origin=request.origin))
            row.laws.append(law.dense(self._target_vocab))  # [V] float64

    def _samples(self, request: DraftRequest) -> bool:
        return self._config.sampled and request.params.temperature > 0

    def _goes_on(self, request: DraftRequest, depth: int) -> bool:
        """Whether the row's last token may be followed by another one."""
        row = self._rows[request.seq_id]
        read_so_far = len(row.cached) - len(request.tokens)  # drafted tokens already read
        return len(row.drafted) < depth and len(row.drafted) > read_so_far

    def _draft(self, request: DraftRequest) -> Draft:
        row = self._rows[request.seq_id]
        if not row.drafted:
            return empty_draft(request)
        tree = TokenTree.chain(request.root, row.drafted)
        q = (*row.laws, None) if row.laws else None
        return Draft(tree, q, source=self.name)

    def close(self, seq_id: int) -> None:
        self._rows.pop(seq_id, None)
        self._runner.cache.close(seq_id)

    def shutdown(self) -> None:
        self._rows.clear()
        self._runner.close()
