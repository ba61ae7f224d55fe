"""An EAGLE head drafts from the target's features (EAGLE-1, -2 and -3).

Its cache holds one entry a position t: token t+1 joined with the *target's* feature of token t. Drafting
adds entries that are made from the head's own outputs; they lie behind the row's length and are
forgotten after the draft, and what was accepted is read again with the target's features. All
nodes of a level, of all rows, are computed in one forward.

The draft is a greedy chain (`top_k=1`), EAGLE-2's dynamic tree around that chain (the default), or a tree of
a fixed shape (`choices=tree.json`). Drafted tokens are point masses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from slipstream.core.choices import check_nodes, choices_of
from slipstream.core.places import expanded
from slipstream.core.spec import refuse_given
from slipstream.drafters._growth import ROOT, DynamicGrowth, Growth, Level, StaticGrowth, grow
from slipstream.drafters._head_runner import HeadRunner
from slipstream.drafters.base import (
    Draft,
    Drafter,
    DraftRequest,
    MemoryEstimate,
    Observation,
    TargetInfo,
    TargetShape,
    empty_draft,
)
from slipstream.errors import ParameterError
from slipstream.heads.base import DraftVocab
from slipstream.heads.eagle import EagleHead
from slipstream.heads.io import AuxConvention, load_eagle, loaded_bytes, open_eagle
from slipstream.model.cache import columns
from slipstream.model.house import house_drafter
from slipstream.model.int8 import Quantise, prepare_linears
from slipstream.model.pack import PackRow
from slipstream.model.parts import ModelParts

# More features than this are read when they come: a prompt's must neither be kept nor delay the first draft.
EAGER = 64


@dataclass(frozen=True, slots=True)
class EagleDrafterConfig:
    """heads: folder of the trained head; left out, the one that comes with Slipstream for this target.

    num_speculative_tokens: longest path. nodes: drafted tokens in all. top_k: nodes expanded a level; 1 is a
    chain. choices: rank paths instead, as in 0+1+0.0, or a JSON file of them. min_confidence: leave out
    tokens the head gives less probability. aux_layers: how the checkpoint counts tapped layers: after (2 is
    the state after two layers), output (2 is the output of layer 2, counted from 0), or auto, which refuses
    what could be either. quantise: none, or int8 weights for half the memory of bfloat16.
    """

    heads: str = ""
    num_speculative_tokens: int = 5
    top_k: int = 4
    nodes: int = 15
    choices: str = ""
    min_confidence: float = 0.0
    aux_layers: AuxConvention = "auto"
    quantise: Quantise = "none"

    def __post_init__(self) -> None:
        if self.num_speculative_tokens < 0 or self.nodes < 0 or self.top_k < 1:
            raise ParameterError(
                "eagle needs num_speculative_tokens and nodes of 0 or more and top_k of 1 or more"
            )
        check_nodes("eagle:nodes", self.nodes)
        check_nodes("eagle:top_k", self.top_k)
        if self.choices:
            refuse_given(
                self, "eagle:choices gives the whole tree", "num_speculative_tokens", "top_k", "nodes"
            )
        elif self.top_k == 1 and self.nodes != self.num_speculative_tokens:
            refuse_given(self, "eagle:top_k=1 is a chain of num_speculative_tokens", "nodes")
        if not 0 <= self.min_confidence <= 1:
            raise ParameterError(f"eagle:min_confidence must be in [0, 1], not {self.min_confidence}")


@dataclass
class _Row:
    """Features that were observed and not yet read: of the tokens at positions end - n … end - 1.

    tip: the head's output [1, H] at the last position read; it stands for the root's continuation.
    """

    end: int
    features: list[torch.Tensor] = field(default_factory=list)  # each [n_i, F]
    tokens: list[int] = field(default_factory=list)
    tip: torch.Tensor | None = None


@dataclass
class _Growing:
    """A tree that is being drafted. outputs [n, H]: the head's at the nodes `at`."""

    request: DraftRequest
    growth: Growth
    outputs: torch.Tensor
    at: list[int] = field(default_factory=lambda: [ROOT])


class EagleDrafter(Drafter):
    name = "eagle"
    Config = EagleDrafterConfig

    def __init__(self, config: EagleDrafterConfig, target: TargetInfo, head: EagleHead | None = None) -> None:
        """`head` stands in for loading `config.heads`."""
        parts = ModelParts.of(target.model)
        device = parts.embedding.device
        given = head
        if head is None:
            folder = config.heads or house_drafter("eagle", parts.fingerprint)
            head = load_eagle(expanded(folder), parts, parts.embedding.dtype, aux=config.aux_layers)
        head.target = parts
        head.to(device)
        if given is None:
            head.share_embedding()
            prepare_linears(head, config.quantise)
        self.needs = head.needs
        self._runner = HeadRunner(head, device)
        self._vocab = target.vocab_size
        self._config = config
        self._choices = choices_of(config.choices) if config.choices else None
        length = config.num_speculative_tokens
        self.num_speculative_tokens = self._choices.depth if self._choices else length
        self.draft_nodes = (
            len(self._choices) if self._choices else length if config.top_k == 1 else config.nodes
        )
        self._rows: dict[int, _Row] = {}

    @classmethod
    def predict_memory(cls, config: EagleDrafterConfig, target: TargetShape) -> MemoryEstimate:
        dtype = target.model.dtype
        folder = expanded(config.heads or house_drafter("eagle", target.model.fingerprint))
        head, tensors = open_eagle(folder, ModelParts.of(target.model.model), aux=config.aux_layers)
        vocab = DraftVocab(head.vocab_size, head.draft_vocab_size)
        weights = loaded_bytes(tensors, vocab, dtype, config.quantise)
        own = tensors.get("embed_tokens.weight")
        if own is not None and target.model.has_embedding(own):
            weights -= own.numel() * dtype.itemsize  # `share_embedding`
        depth, computed = config.num_speculative_tokens, config.top_k * (config.num_speculative_tokens - 1)
        if config.choices:
            choices = choices_of(config.choices)
            depth, computed = choices.depth, len(choices.inner) - 1
        column = 2 * head.num_layers * head.num_key_value_heads * head.head_dim  # keys and values
        cache = column * columns(target.context - 2 - depth + computed) if depth else 0
        features = head.target_hidden_size * max(1, len(head.aux_layers))
        waiting = (depth + 1) * features + head.hidden_size
        rows = target.rows * dtype.itemsize
        return MemoryEstimate(weights, rows * cache, rows * waiting)

    @property
    def runner(self) -> HeadRunner:
        return self._runner

    @property
    def memory_bytes(self) -> int:
        held = [f for row in self._rows.values() for f in (*row.features, row.tip) if f is not None]
        return self._runner.memory_bytes + sum(f.nbytes for f in held)

    # -- what the target computed ---------------------------------------------------------------

    def observe(self, observations: Sequence[Observation]) -> None:
        long: list[int] = []
        for seen in observations:
            row = self._rows.get(seen.seq_id)
            if row is None or row.end != seen.start:  # the first features, or some were never seen
                self._runner.cache.close(seen.seq_id)
                self._runner.cache.open(seen.seq_id)
                row = self._rows[seen.seq_id] = _Row(seen.start)
            row.features.append(self._runner.head.features(seen.features))
            row.tokens.extend(seen.tokens)
            row.end += len(seen.tokens)
            if len(row.tokens) > EAGER:
                long.append(seen.seq_id)
        self._read(long, [None] * len(long))

    def _read(self, seq_ids: Sequence[int], roots: Sequence[int | None]) -> None:
        """Give waiting features, each joined with the token after its own, to the head's cache for good.

        The last feature's next token is the root; where it is None that feature keeps waiting.
        """
        packs: list[PackRow] = []
        features: list[torch.Tensor] = []
        for seq_id, root in zip(seq_ids, roots, strict=True):
            row = self._rows[seq_id]
            waiting = torch.cat(row.features)  # [n, F]
            last = row.tokens[-1]
            following = [*row.tokens[1:], *([] if root is None else [root])]
            packs.append(PackRow(seq_id, following))
            features.append(waiting[: len(following)])
            row.tokens = [] if root is not None else [last]
            row.features = [] if root is not None else [waiting[-1:].clone()]
        if not packs:
            return
        counts = [len(f) for f in features]
        hidden = torch.split(self._runner.fuse(torch.cat(features)), counts)
        for pack, out in zip(packs, self._runner.forward(packs, hidden), strict=True):
            self._runner.cache.commit(pack.slot, range(len(pack.tokens)))
            self._rows[pack.slot].tip = out[-1:].clone()

    # -- drafting -------------------------------------------------------------------------------

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        ready = [r for r in requests if self._is_ready(r)]
        behind = [r for r in ready if self._rows[r.seq_id].tokens]
        self._read([r.seq_id for r in behind], [r.root for r in behind])
        growing: list[_Growing] = []
        for request in ready:
            tip = self._rows[request.seq_id].tip
            assert tip is not None
            growing.append(_Growing(request, self._growth(request), tip))
        lengths = {g.request.seq_id: self._runner.cache.length(g.request.seq_id) for g in growing}
        grow(growing, self._expand)
        for seq_id, length in lengths.items():  # entries made from the head's own outputs
            self._runner.cache.rollback(seq_id, length)
        drafts = {g.request.seq_id: g.growth.draft(g.request.root, self.name) for g in growing}
        return [drafts.get(r.seq_id) or empty_draft(r) for r in requests]

    def _is_ready(self, request: DraftRequest) -> bool:
        """Whether the features reach up to the root; a one-token prompt has none at first."""
        row = self._rows.get(request.seq_id)
        if row is None or row.end != len(request.tokens) - 1:
            return False
        return bool(row.tokens) or row.tip is not None

    def _growth(self, request: DraftRequest) -> Growth:
        config, budget = self._config, request.budget
        least = max(config.min_confidence, budget.stop_below)
        if self._choices is not None:
            shape = self._choices.cut(budget.depth, budget.nodes)
            return StaticGrowth(shape, least, scored=request.scored)
        # A head learns the target's law, so it scores an argmax that will be taken as if it were drawn: by
        # scores alone a greedy answer gets a tree too broad and too shallow, worse than its own chain.
        return DynamicGrowth(
            config.top_k, budget.depth, budget.nodes, least, scored=request.scored, greedy_path=True
        )

    def _expand(self, live: Sequence[_Growing], width: int, scored: bool) -> Level:
        """The continuations of every frontier, all rows at once."""
        if live[0].growth.frontier != [ROOT]:  # the tip is there already
            self._compute(live)
        outputs = torch.cat([g.outputs for g in live])  # [frontier nodes of all rows, H]
        return self._runner.best(outputs, self._vocab, width, scored)

    def _compute(self, live: Sequence[_Growing]) -> None:
        """One level of every tree in one forward, behind the levels that are in the cache already."""
        packs, hidden = [], []
        for g in live:
            place = {node: i for i, node in enumerate(g.at)}
            # every node continues from the output of its parent
            hidden.append(g.outputs[[place[g.growth.parents[n]] for n in g.growth.frontier]])
            packs.append(PackRow(g.request.seq_id, *g.growth.place()))
        for g, out in zip(live, self._runner.forward(packs, hidden), strict=True):
            self._runner.cache.commit(g.request.seq_id, range(len(out)))
            g.outputs, g.at = out, g.growth.frontier

    def close(self, seq_id: int) -> None:
        self._rows.pop(seq_id, None)
        self._runner.cache.close(seq_id)

    def shutdown(self) -> None:
        for seq_id in list(self._rows):
            self.close(seq_id)
