"""Medusa heads draft a tree from the target's last hidden state (Cai et al., arXiv 2401.10774).

The state at hand is that of the token *before* the root: the last one the target has computed. Its LM
head gave the root, so Medusa's head 0 guesses the token after the root. All heads are computed in one
step, whatever the tree; the tree is point masses, so any shape keeps the output.

The tree is the best one for the measured accuracies of the heads (`accuracies.json` beside them, else
a prior), a full one (`topk=4x3x2`), or one from a file (`choices=tree.json`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from slipstream.core.choices import Choices, best_tree, full_tree, read_accuracies, read_choices
from slipstream.drafters.base import Draft, Drafter, DraftRequest, Needs, Observation, TargetInfo, empty_draft
from slipstream.errors import ParameterError
from slipstream.heads.io import load_medusa
from slipstream.heads.medusa import LMHead, MedusaHeads
from slipstream.model.house import house_drafter
from slipstream.model.pack import pad_rows
from slipstream.model.packed import can_pack, pack_linears, weight_bytes
from slipstream.model.parts import ModelParts

ACCURACIES = "accuracies.json"
_RANKS = 10


@dataclass(frozen=True, slots=True)
class MedusaDrafterConfig:
    """heads: folder of the trained heads; left out, those that come with Slipstream for this target.

    nodes: drafted tokens of the tree; with the root 64 rows. topk: a full tree, children a level ("4x3x2").
    choices: a JSON file of rank paths. accuracies: a JSON file of measured accuracies, instead of the one
    beside the heads.
    """

    heads: str = ""
    nodes: int = 63
    topk: str = ""
    choices: str = ""
    accuracies: str = ""

    def __post_init__(self) -> None:
        if self.nodes < 0:
            raise ParameterError(f"medusa needs nodes of 0 or more, not {self.nodes}")
        if sum(map(bool, (self.topk, self.choices, self.accuracies))) > 1:
            raise ParameterError("medusa takes one of topk, choices and accuracies, not several")


@dataclass(frozen=True, slots=True)
class _State:
    """The target's last hidden state [H] and how many tokens it stands behind."""

    hidden: torch.Tensor
    length: int


class MedusaDrafter(Drafter):
    name = "medusa"
    Config = MedusaDrafterConfig
    needs = Needs(last_hidden=True)

    def __init__(
        self, config: MedusaDrafterConfig, target: TargetInfo, heads: MedusaHeads | None = None
    ) -> None:
        """`heads` stand in for loading `config.heads`."""
        parts = ModelParts.of(target.model)
        device = parts.embedding.device
        if heads is None and not config.heads:
            config = replace(config, heads=str(house_drafter("medusa", parts.fingerprint)))
        loaded = heads or load_medusa(Path(config.heads).expanduser(), parts, parts.embedding.dtype)
        self._heads = loaded.to(device)
        self._lm_head: LMHead | None = None
        if loaded.config.output == "target":
            reduced = loaded.vocab.reduced
            self._lm_head = parts.lm_head_rows(loaded.vocab.target_ids()) if reduced else parts.lm_head
        if heads is None and can_pack(loaded):
            pack_linears(loaded)
        # A head may be padded beyond the tokens there are.
        self._width = loaded.vocab.size if loaded.vocab.reduced else target.vocab_size
        self._choices = _choices(config, loaded.config.num_heads)
        self.num_speculative_tokens = self._choices.depth
        self.draft_nodes = len(self._choices)
        self._states: dict[int, _State] = {}

    @property
    def choices(self) -> Choices:
        return self._choices

    @property
    def memory_bytes(self) -> int:
        return weight_bytes(self._heads) + sum(s.hidden.nbytes for s in self._states.values())

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
        shapes = {r.seq_id: self._choices.cut(r.budget.depth, r.budget.nodes) for r, _ in ready}
        depth = max((s.depth for s in shapes.values()), default=0)
        ranked: dict[int, list[list[int]]] = {}
        if depth:
            best = self._ranked(torch.stack([h for _, h in ready]), depth)
            ranked = {r.seq_id: row for (r, _), row in zip(ready, best, strict=True)}
        return [
            Draft(shapes[r.seq_id].tree(r.root, ranked[r.seq_id]), source=self.name)
            if r.seq_id in ranked
            else empty_draft(r)
            for r in requests
        ]

    @torch.inference_mode()
    def _ranked(self, hidden: torch.Tensor, depth: int) -> list[list[list[int]]]:
        """For every row of hidden [rows, H] and depth, the likeliest target ids, best first."""
        logits = self._heads(pad_rows(hidden), self._lm_head, depth)  # [depth, padded rows, V]
        logits = logits[:, : len(hidden), : self._width]  # [depth, rows, V]
        most = min(max(self._choices.widths[:depth]), logits.shape[-1])
        ids = self._heads.vocab.to_target(logits.float().topk(most).indices)  # [depth, rows, most]
        return ids.transpose(0, 1).tolist()  # type: ignore[no-any-return]

    def close(self, seq_id: int) -> None:
        self._states.pop(seq_id, None)

    def shutdown(self) -> None:
        self._states.clear()


def _choices(config: MedusaDrafterConfig, num_heads: int) -> Choices:
    if config.topk:
        try:
            widths = [int(w) for w in config.topk.split("x")]
        except ValueError:
            raise ParameterError(f"medusa:topk must look like 4x3x2, not {config.topk!r}") from None
        chosen = full_tree(widths)
    elif config.choices:
        chosen = read_choices(Path(config.choices).expanduser())
    else:
        beside = Path(config.heads).expanduser() / ACCURACIES
        if config.accuracies:
            table = read_accuracies(Path(config.accuracies).expanduser())
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
    return [[0.6 * 0.8**head / 3.0**rank for rank in range(_RANKS)] for head in range(num_heads)]
