"""Bias, penalties and bans: functions of a row of scores and explicit token ids. Nothing is changed in place.

Every one sees the whole prefix of the position it is for, drafted tokens on the path included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

_NEVER = float("-inf")


def add_bias(scores: torch.Tensor, bias: Mapping[int, float]) -> torch.Tensor:
    """scores[id] + bias[id]; -inf forbids. scores fp32 [V] -> [V]."""
    ids = torch.tensor(list(bias.keys()), dtype=torch.int64, device=scores.device)  # [b]
    values = torch.tensor(list(bias.values()), dtype=scores.dtype, device=scores.device)  # [b]
    return scores.index_add(0, ids, values)  # [V]


def repetition(scores: torch.Tensor, seen: torch.Tensor, penalty: float) -> torch.Tensor:
    """Scores of seen tokens are divided by the penalty if positive, multiplied if negative.

    CTRL (arXiv 1909.05858), with the sign rule of transformers. seen int64 [n], prompt and output.
    """
    old = scores[seen]  # [n]
    new = torch.where(old < 0, old * penalty, old / penalty)  # [n]
    return scores.index_copy(0, seen, new)  # [V]; a repeated id gets the same value again


def presence_frequency(
    scores: torch.Tensor, output: torch.Tensor, presence: float, frequency: float
) -> torch.Tensor:
    """scores - presence * [count > 0] - frequency * count, counted over the output alone, as OpenAI does.

    output int64 [n].
    """
    ids, counts = torch.unique(output, return_counts=True)  # [u], [u]
    return scores.index_add(0, ids, -(presence + frequency * counts.to(scores.dtype)))  # [V]


def ban(scores: torch.Tensor, ids: Sequence[int]) -> torch.Tensor:
    """These tokens can never be chosen."""
    return scores.index_fill(0, torch.tensor(ids, dtype=torch.int64, device=scores.device), _NEVER)  # [V]


def completes_bad_word(tokens: Sequence[int], bad_words: Sequence[tuple[int, ...]]) -> list[int]:
    """The tokens that would complete a bad word now, begun in the prompt or in the output."""
    banned: list[int] = []
    for word in bad_words:
        before = len(word) - 1
        if before <= len(tokens) and tuple(tokens[len(tokens) - before :]) == word[:-1]:
            banned.append(word[-1])
    return banned
