"""`LogitsPipeline`: the law of one request's next token, from the model's raw row and the tokens so far.

Every method is a pure function of its arguments, so asking about a drafted token that is rejected
afterwards can change nothing. The order is: bias, repetition, presence and frequency, bad words,
min_tokens, grammar; then temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slipstream.core.noise import Purpose
from slipstream.core.params import SamplingParams
from slipstream.core.sequence import TokenLogprob
from slipstream.errors import ParameterError
from slipstream.logits import penalties
from slipstream.logits.grammar import Grammar
from slipstream.logits.law import Law
from slipstream.logits.warp import best_token, fit, law_of

_NEVER = float("-inf")


class LogitsPipeline:
    """Holds what does not change during a request. Rows are [any width], of any float dtype.

    vocab_size: ids from there on are padding of the head and can never be chosen. stop_ids: the
    tokens that end the answer, which `min_tokens` forbids at first. prompt_length: tokens from there
    on are output. grammar: that of `params.grammar`, for this request alone. Raises ParameterError if a
    parameter names a token that does not exist.
    """

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        stop_ids: frozenset[int],
        prompt_length: int,
        grammar: Grammar | None = None,
    ) -> None:
        named = {
            "logit_bias": params.logit_bias,
            "bad_words": [t for word in params.bad_words for t in word],
        }
        for name, ids in named.items():
            for token in ids:
                if not 0 <= token < vocab_size:
                    raise ParameterError(f"{name} names token {token}, but ids end at {vocab_size - 1}")
        self.params = params
        self.vocab_size = vocab_size
        self.prompt_length = prompt_length
        self.grammar = grammar
        self._stop_ids = sorted(t for t in stop_ids if 0 <= t < vocab_size)
        counts_output = params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        waits = params.min_tokens > 0 and bool(self._stop_ids)
        self._counts_output = counts_output
        self._waits = waits
        self._reads_history = counts_output or params.repetition_penalty != 1.0
        self.greedy = params.temperature == 0.0
        self.history_free = not (
            self._reads_history or waits or grammar or any(len(w) > 1 for w in params.bad_words)
        )
        untouched = self.history_free and not params.bad_words and not params.logit_bias
        self.plain = self.greedy and untouched

    def scores(self, row: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
        """Biased, penalised and masked scores, float32 [V]; `tokens` are all tokens before the position."""
        params, scores = self.params, fit(row, self.vocab_size)  # [V]
        if params.logit_bias:
            scores = penalties.add_bias(scores, params.logit_bias)  # [V]
        if self._reads_history:
            seen = torch.tensor(tokens, dtype=torch.int64, device=scores.device)  # [n]
            if params.repetition_penalty != 1.0:
                known = seen[seen < self.vocab_size]  # a prompt may hold ids of the head's padding
                scores = penalties.repetition(scores, known, params.repetition_penalty)  # [V]
            if self._counts_output:
                scores = penalties.presence_frequency(
                    scores, seen[self.prompt_length :], params.presence_penalty, params.frequency_penalty
                )  # [V]
        if params.bad_words:
            scores = penalties.ban(scores, penalties.completes_bad_word(tokens, params.bad_words))  # [V]
        if self._waits and len(tokens) - self.prompt_length < params.min_tokens:
            scores = penalties.ban(scores, self._stop_ids)  # [V]
        if self.grammar is not None:
            allowed = self.grammar.allowed(tokens[self.prompt_length :])  # [V]
            if allowed is not None:
                scores = scores.masked_fill(~allowed.to(scores.device), _NEVER)  # [V]
        return scores

    def law(self, row: torch.Tensor, tokens: Sequence[int]) -> Law:
        """The law of the token that follows `tokens`; at temperature 0 the point mass of the argmax."""
        return law_of(self.scores(row, tokens), self.params)

    def probs(self, row: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
        """The law as a dense row, float64 [V], which sums to 1."""
        return self.law(row, tokens).dense(self.vocab_size)

    def token(self, row: torch.Tensor, tokens: Sequence[int], seed: int, position: int) -> int:
        """The target's own draw at an absolute position: the argmax, or Gumbel-max over the support."""
        if self.greedy:
            return best_token(self.scores(row, tokens))
        return self.law(row, tokens).draw(seed, position, Purpose.TOKEN)

    def logprobs(self, row: torch.Tensor, token: int, n_top: int) -> TokenLogprob:
        """log softmax of the untouched row, in float32: of `token` and of the `n_top` best, best first."""
        logp = fit(row, self.vocab_size).log_softmax(0)  # [V]
        top = logp.topk(min(n_top, self.vocab_size))
        pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        ordered = sorted(pairs, key=lambda pair: (-pair[1], pair[0]))
        return TokenLogprob(token, float(logp[token]), tuple(ordered))

    def chosen_logprobs(
        self, logits: torch.Tensor, nodes: Sequence[int], tokens: Sequence[int]
    ) -> list[TokenLogprob]:
        """`logprobs` of each token at its node, from one row's logits [nodes, width]; [] if not asked for."""
        n_top = self.params.logprobs
        if n_top is None:
            return []
        return [self.logprobs(logits[node], token, n_top) for node, token in zip(nodes, tokens, strict=True)]
