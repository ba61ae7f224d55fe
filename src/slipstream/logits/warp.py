"""Temperature, top-k, top-p and min-p, applied in this order (that of transformers and vLLM).

Each filter keeps all tokens whose score reaches a *floor*. So tokens of equal score stay or go
together, and the law does not depend on the order in which a sort puts them; it may keep more than k
tokens when several share the k-th place. Everything is computed in float64.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from slipstream.core.params import SamplingParams
from slipstream.errors import ModelError, ParameterError
from slipstream.logits.law import Law

Filter = Callable[[torch.Tensor], torch.Tensor]

_NEVER = float("-inf")
_FIRST_PREFIX = 256  # top-p looks at this many best tokens first: enough for nearly every row


def temper(scores: torch.Tensor, temperature: float) -> torch.Tensor:
    """(scores - max) / T in float64 [..., V]: subtracting first, no T above 0 can overflow."""
    exact = scores.to(torch.float64, copy=True)  # [..., V]; in place from here: rows are wide
    return exact.sub_(exact.amax(-1, keepdim=True)).div_(temperature)  # [..., V]


def top_k_floor(scores: torch.Tensor, k: int) -> torch.Tensor:
    """The k-th best score [..., 1]; the lowest if there are fewer than k."""
    return scores.topk(min(k, scores.shape[-1]), dim=-1).values[..., -1:]  # [..., 1]


def top_p_floor(scores: torch.Tensor, p: float, prefix: int = _FIRST_PREFIX) -> torch.Tensor:
    """The lowest score [..., 1] of the smallest set of best tokens that holds at least mass p.

    Only a prefix of the descending order is looked at, and a longer one if it holds too little. The
    running sum over a prefix is the beginning of the running sum over all, so the answer is the same.
    """
    width = scores.shape[-1]
    best = scores.amax(-1, keepdim=True)  # [..., 1]
    wanted = p * (scores - best).exp_().sum(-1, keepdim=True)  # [..., 1]
    while True:
        prefix = min(prefix, width)
        head = scores.topk(prefix, dim=-1).values  # [..., prefix]
        reached = (head - best).exp().cumsum(-1) >= wanted  # [..., prefix]
        if prefix == width or bool(reached[..., -1].all()):
            break
        prefix *= 8
    reached[..., -1] = True  # rounding may leave the whole row a hair below p: then all of it is kept
    return head.gather(-1, reached.int().argmax(-1, keepdim=True))  # [..., 1]


def min_p_floor(scores: torch.Tensor, ratio: float) -> torch.Tensor:
    """The score [..., 1] of a token `ratio` times as likely as the best one; needs ratio > 0."""
    log_ratio = torch.tensor(ratio, dtype=torch.float64).log().item()
    return scores.amax(-1, keepdim=True) + log_ratio  # [..., 1]


def mass_filters(params: SamplingParams) -> list[Filter]:
    """Top-p and min-p, those that are on: each gives the floor [..., 1] of tempered scores [..., V]."""
    on: list[Filter] = []
    if params.top_p < 1.0:
        on.append(lambda scores: top_p_floor(scores, params.top_p))
    if params.min_p > 0.0:
        on.append(lambda scores: min_p_floor(scores, params.min_p))
    return on


def warp(scores: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Tempered scores, filtered tokens at -inf: float64 [..., V]. Needs a temperature above 0."""
    warped = temper(scores, params.temperature)  # [..., V]
    if params.top_k > 0:
        warped = warped.masked_fill(warped < top_k_floor(warped, params.top_k), _NEVER)  # [..., V]
    for floor in mass_filters(params):
        warped = warped.masked_fill(warped < floor(warped), _NEVER)  # [..., V]
    return warped


def law_of(scores: torch.Tensor, params: SamplingParams) -> Law:
    """The law of one row of scores [V]: softmax of `warp`, computed on a support that shrinks.

    At temperature 0 all mass is on the best token, the lowest id of equals. Raises ModelError for a
    row with NaN and ParameterError for one in which every token is forbidden.
    """
    if params.temperature == 0.0:
        return Law.point(best_token(scores), scores.device)
    _refuse_hopeless(scores)
    floor = torch.finfo(scores.dtype).min  # forbidden tokens are at -inf
    if params.top_k > 0:  # before the temperature, which keeps the order, and on far fewer tokens after
        floor = max(floor, float(top_k_floor(scores, params.top_k)))
    ids = torch.arange(len(scores), device=scores.device)  # [V]
    if float(scores.amin()) < floor:
        ids = (scores >= floor).nonzero().squeeze(-1)  # [k]
        scores = scores[ids]  # [k]
    values = temper(scores, params.temperature)  # [k]
    for filter_ in mass_filters(params):
        kept = (values >= filter_(values)).nonzero().squeeze(-1)  # [k']
        ids, values = ids[kept], values[kept]  # [k']
    return Law.from_scores(ids, values)


def best_token(scores: torch.Tensor) -> int:
    """argmax of a row [V], the lowest id of equals; refuses the rows that `law_of` refuses."""
    _refuse_hopeless(scores)
    return int(scores.argmax())


def _refuse_hopeless(scores: torch.Tensor) -> None:
    best = float(scores.amax())
    if best != best:
        raise ModelError("the model's logits are not numbers (NaN): load it in float32")
    if best == _NEVER:
        raise ParameterError("logit_bias, bad_words, min_tokens and grammar forbid every token: relax one")


def fit(row: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """A head's row as float32 [vocab_size]: padding ids are cut off, ids the head lacks are at -inf."""
    fitted = row[:vocab_size].float()  # [<= V]
    if len(fitted) == vocab_size:
        return fitted
    missing = fitted.new_full((vocab_size - len(fitted),), _NEVER)
    return torch.cat((fitted, missing))  # [V]


def warped_law(row: torch.Tensor, params: SamplingParams, vocab_size: int) -> Law:
    """A drafter's law from its own logits [any width]: the request's warps, no penalties.

    Draw the drafted token from it with `Law.draw(..., Purpose.DRAFT, origin=request.origin)` and give
    `dense` as q, or several siblings and their q with `draw_siblings`.
    """
    return law_of(fit(row, vocab_size), params)


def warped(row: torch.Tensor, params: SamplingParams, vocab_size: int) -> torch.Tensor:
    """`warped_law` as a row of probabilities, float64 [V]."""
    return warped_law(row, params, vocab_size).dense(vocab_size)
