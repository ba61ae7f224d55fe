"""Medusa heads draft a tree from the target's last hidden state (Cai et al., arXiv 2401.10774).

The state at hand is that of the token *before* the root: the last one the target has computed. Its LM
head gave the root, so Medusa's head 0 guesses the token after the root. All heads are computed in one
step, whatever the tree; the tree is point masses, so any shape keeps the output.

The tree is the best one of `nodes` nodes for the measured accuracies of the heads (`accuracies.json` beside
them, which `slipstream tune medusa` writes, else a prior), a full one (`topk=4x3x2`), or a given one
(`choices=tree.json`).

The accuracies, averages over many texts, say which shape to draft. How much this draft is worth at this
place is told by the heads' own probabilities: its scores are their products along the path (the heads do
not see each other's guesses), and less likely tokens than the budget's `stop_below` are left out. Scores
from the table would be the same for every draft, and no threshold could tell a good one from a bad one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from slipstream.core.choices import (
    Choices,
    best_tree,
    check_nodes,
    choices_of,
    full_tree,
    read_accuracies,
)
from slipstream.core.places import expanded
from slipstream.core.spec import refuse_given
from slipstream.drafters._growth import Level, StaticGrowth, grow, likeliest
from slipstream.drafters.base import (
    Draft,
    Drafter,
    DraftRequest,
    MemoryEstimate,
    Needs,
    Observation,
    TargetInfo,
    TargetShape,
    empty_draft,
)
from slipstream.errors import ParameterError
from slipstream.heads.base import DraftVocab
from slipstream.heads.io import load_medusa, loaded_bytes, open_medusa
from slipstream.heads.medusa import LMHead, MedusaHeads
from slipstream.model.house import house_drafter
from slipstream.model.int8 import Quantise, prepare_linears
from slipstream.model.pack import pad_rows
from slipstream.model.packed import weight_bytes
from slipstream.model.parts import ModelParts

ACCURACIES = "accuracies.json"
RANKS = 10  # of each head, that a tree is made from


@dataclass(frozen=True, slots=True)
class MedusaDrafterConfig:
    """heads: folder of the trained heads; left out, those that come with Slipstream for this target.

    nodes: drafted tokens of the tree; with the root 64 rows. topk: a full tree, children a level ("4x3x2").
    choices: rank paths, as in 0+1+0.0, or a JSON file of them. accuracies: a JSON file of measured
    accuracies, instead of the one beside the heads. min_confidence: leave out tokens their head gives less
    probability. quantise: none, or int8 weights for half the memory of bfloat16.
    """

    heads: str = ""
    nodes: int = 63
    topk: str = ""
    choices: str = ""
    accuracies: str = ""
    min_confidence: float = 0.0
    quantise: Quantise = "none"

    def __post_init__(self) -> None:
        check_nodes("medusa:nodes", self.nodes)
        if sum(map(bool, (self.topk, self.choices, self.accuracies))) > 1:
            raise ParameterError("medusa takes one of topk, choices and accuracies, not several")
        if self.topk or self.choices:
            refuse_given(self, f"medusa:{'topk' if self.topk else 'choices'} gives the whole tree", "nodes")
        if not 0 <= self.min_confidence <= 1:
            raise ParameterError(f"medusa:min_confidence must be in [0, 1], not {self.min_confidence}")


@dataclass(frozen=True, slots=True)
class _State:
    """The target's last hidden state [H] and how many tokens it stands behind."""

    hidden: torch.Tensor
    length: int


@dataclass(frozen=True)
class _Growing:
    """A tree that is being drafted. ranked: of each head, the likeliest ids and their log-probabilities."""

    growth: StaticGrowth
    ranked: Iterator[tuple[list[int], list[float]]]


class MedusaDrafter(Drafter):
    name = "medusa"
    Config = MedusaDrafterConfig
    needs = Needs(last_hidden=True, last_only=True)

    def __init__(
        self, config: MedusaDrafterConfig, target: TargetInfo, heads: MedusaHeads | None = None
    ) -> None:
        """`heads` stand in for loading `config.heads`."""
        parts = ModelParts.of(target.model)
        device = parts.embedding.device
        if heads is None and not config.heads:
            config = replace(config, heads=str(house_drafter("medusa", parts.fingerprint)))
        loaded = heads or load_medusa(expanded(config.heads), parts, parts.embedding.dtype)
        self._heads = loaded.to(device)
        self._lm_head: LMHead | None = None
        # What belongs to the drafter alone: the heads, and their copy of some rows of the LM head.
        self._own = nn.ModuleList([self._heads])
        if loaded.config.output == "target":
            self._lm_head = parts.lm_head
            if loaded.vocab.reduced:
                self._lm_head = nn.Sequential(parts.lm_head_rows(loaded.vocab.target_ids()))
                self._own.append(self._lm_head)
        if heads is None:
            prepare_linears(self._own, config.quantise)
        # A head may be padded beyond the tokens there are.
        self._width = loaded.vocab.size if loaded.vocab.reduced else target.vocab_size
        self._choices = _choices(config, loaded.config.num_heads)
        self.num_speculative_tokens = self._choices.depth
        self.draft_nodes = len(self._choices)
        self._config = config
        self._states: dict[int, _State] = {}

    @classmethod
    def predict_memory(cls, config: MedusaDrafterConfig, target: TargetShape) -> MemoryEstimate:
        dtype = target.model.dtype
        folder = expanded(config.heads or house_drafter("medusa", target.model.fingerprint))
        heads, tensors = open_medusa(folder, ModelParts.of(target.model.model))
        _choices(replace(config, heads=str(folder)), heads.num_heads)  # told here as when it is built
        vocab = DraftVocab(heads.vocab_size, heads.draft_vocab_size)
        weights = loaded_bytes(tensors, vocab, dtype, config.quantise)
        if heads.output == "target" and vocab.reduced:
            rows = torch.empty(vocab.size, heads.hidden_size, dtype=dtype, device="meta")
            weights += loaded_bytes({"rows": rows}, DraftVocab(heads.vocab_size), dtype, config.quantise)
        return MemoryEstimate(weights, tables=target.rows * heads.hidden_size * dtype.itemsize)

    @property
    def choices(self) -> Choices:
        return self._choices

    @property
    def num_heads(self) -> int:
        return self._heads.config.num_heads

    @property
    def vocab_size(self) -> int:
        """Tokens that can be drafted."""
        return self._width

    @property
    def memory_bytes(self) -> int:
        return weight_bytes(self._own) + sum(s.hidden.nbytes for s in self._states.values())

    def observe(self, observations: Sequence[Observation]) -> None:
        for seen in observations:
            last = seen.features["last"][-1].clone()  # a view would hold the whole step's features
            self._states[seen.seq_id] = _State(last, seen.start + len(seen.tokens))

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        ready = [
            (r, s.hidden)
            for r in requests
            if (s := self._states.get(r.seq_id)) is not None and s.length == len(r.tokens) - 1
        ]
        growths = [self._growth(r) for r, _ in ready]
        depth = max((g.depth for g in growths), default=0)
        growing: list[_Growing] = []
        if depth:
            width = max(self._choices.widths[:depth])
            hidden = torch.stack([h for _, h in ready])  # [rows, H]
            ids, logprobs = self.ranked(hidden, depth, width, any(g.scored for g in growths))
            for i, growth in enumerate(growths):
                likely = [[]] * depth if logprobs is None else logprobs[i].tolist()
                growing.append(_Growing(growth, zip(ids[i].tolist(), likely, strict=True)))
        grow(growing, _expand)
        drafts = {
            r.seq_id: g.growth.draft(r.root, self.name) for (r, _), g in zip(ready, growing, strict=False)
        }
        return [drafts.get(r.seq_id) or empty_draft(r) for r in requests]

    def _growth(self, request: DraftRequest) -> StaticGrowth:
        budget = request.budget
        least = max(self._config.min_confidence, budget.stop_below)
        return StaticGrowth(self._choices.cut(budget.depth, budget.nodes), least, scored=request.scored)

    @torch.inference_mode()
    def ranked(
        self, hidden: torch.Tensor, depth: int, width: int, scored: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """For last hidden states [rows, H], the likeliest target ids of the first `depth` heads, best first.

        int64 [rows, depth, width], and if `scored` their log-probabilities, of the same shape.
        """
        logits = self._heads(pad_rows(hidden), self._lm_head, depth)  # [depth, padded rows, V]
        logits = logits[:, : len(hidden), : self._width].transpose(0, 1)  # [rows, depth, V]
        ids, logprobs = likeliest(logits, width, scored)  # [rows, depth, width]
        return self._heads.vocab.to_target(ids), logprobs

    def close(self, seq_id: int) -> None:
        self._states.pop(seq_id, None)

    def shutdown(self) -> None:
        self._states.clear()


def _expand(live: Sequence[_Growing], _width: int, _scored: bool) -> Level:
    """A head guesses the same whatever is drafted before its token."""
    tokens: list[list[int]] = []
    logprobs: list[list[float]] = []
    for g in live:
        ids, likely = next(g.ranked)
        tokens += [ids] * len(g.growth.frontier)
        logprobs += [likely] * len(g.growth.frontier)
    return Level(tokens, logprobs)


def _choices(config: MedusaDrafterConfig, num_heads: int) -> Choices:
    if config.topk:
        try:
            widths = [int(w) for w in config.topk.split("x")]
        except ValueError:
            raise ParameterError(f"medusa:topk must look like 4x3x2, not {config.topk!r}") from None
        chosen = full_tree(widths)
    elif config.choices:
        chosen = choices_of(config.choices)
    else:
        beside = expanded(config.heads) / ACCURACIES
        if config.accuracies:
            table = read_accuracies(expanded(config.accuracies))
        elif config.heads and beside.is_file():
            table = read_accuracies(beside)
        else:
            table = prior_accuracies(num_heads)
        return best_tree(table, config.nodes, num_heads)
    if chosen.depth > num_heads:
        raise ParameterError(f"the tree is {chosen.depth} deep and there are {num_heads} Medusa heads")
    return chosen


def prior_accuracies(num_heads: int) -> list[list[float]]:
    """For heads that were never measured: each rank a third of the one before, each head four fifths.

    Only the shape of the tree depends on it; a measured `accuracies.json` replaces it.
    """
    return [[0.6 * 0.8**head / 3.0**rank for rank in range(RANKS)] for head in range(num_heads)]
