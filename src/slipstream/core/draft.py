"""The interface between the loop and everything that drafts.

A drafter proposes; the loop verifies. The only promise a drafter must keep is that a `Draft` is
truthful: if it carries `q`, every drafted token was really drawn from the row it names; if it carries
none, the tokens were chosen without looking at the target's noise, and are verified as point masses.
Everything else (a bad guess, an empty draft, one that is too long) costs time and never the output.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from slipstream.core.estimate import MemoryEstimate
from slipstream.core.params import SamplingParams
from slipstream.core.stats import SourceCounts
from slipstream.core.tree import TokenTree

if TYPE_CHECKING:  # a mistyped drafter is refused before torch is imported, which takes seconds
    import torch


@dataclass(frozen=True, slots=True)
class Budget:
    """What a row may draft now.

    depth: longest path, in drafted tokens; 0 means a plain step. nodes: most drafted tokens in all.
    stop_below: a drafter that knows its confidence stops before drawing a token it trusts less.
    That test may look at q, never at the token drawn: stopping *because of* a sampled token biases
    the law.
    """

    depth: int = 0
    nodes: int = 0
    stop_below: float = 0.0

    @classmethod
    def chain(cls, depth: int, stop_below: float = 0.0) -> Budget:
        return cls(depth, depth, stop_below)


@dataclass(frozen=True, slots=True)
class Needs:
    """What a drafter must be given, declared before anything is loaded.

    hidden_layers: target layers whose output is wanted (k = the residual stream after k layers, 0 =
    the embeddings). last_hidden: the state that enters the LM head. node_logits: raw logits of every
    verified node. reads_prompt: the first proposal must first read the whole prompt, so the engine
    gives out the first token before asking for it. last_only: of hidden states, those of the last token
    of an observation are enough, so what is cached of a prompt need not be computed for them.
    """

    hidden_layers: tuple[int, ...] = ()
    last_hidden: bool = False
    node_logits: bool = False
    reads_prompt: bool = False
    last_only: bool = False

    @property
    def features(self) -> bool:
        """Whether hidden states are wanted."""
        return bool(self.hidden_layers or self.last_hidden)

    @classmethod
    def union(cls, parts: Iterable[Needs]) -> Needs:
        """Of a drafter made of parts. It reads the prompt first if all of them do: a part that does waits for
        the first token by itself, so that the others need not."""
        wanted = list(parts)
        fed = [n for n in wanted if n.features]
        return cls(
            hidden_layers=tuple(sorted({layer for n in wanted for layer in n.hidden_layers})),
            last_hidden=any(n.last_hidden for n in wanted),
            node_logits=any(n.node_logits for n in wanted),
            reads_prompt=all(n.reads_prompt for n in wanted),
            last_only=bool(fed) and all(n.last_only for n in fed),
        )


@dataclass(frozen=True)
class Draft:
    """A tree and the law it was drawn from.

    q: None for point masses. Otherwise q[i] is the row [V] that node i's children were drawn from,
    after the drafter's own warps, in the target's vocabulary, float32 or float64; None for a node
    without children. Several children of a node with q were drawn in their order, from q without
    replacement (`logits.law.draw_siblings`), or each from q itself if `tree.allow_duplicates`. All that
    were drawn are there: a sampled node must not be left out for its token or its score.

    scores: optional confidence per node, the probability that it and all before it are accepted as far as
    the drafter can tell. source: which drafter, or part of a composed one, made it, for the counters.
    sources: where several made it, for each node those that drafted it; the root has none.
    """

    tree: TokenTree
    q: tuple[torch.Tensor | None, ...] | None = None
    scores: tuple[float, ...] | None = None
    source: str = ""
    sources: tuple[tuple[str, ...], ...] | None = None

    def __post_init__(self) -> None:
        for name, values in (("q", self.q), ("scores", self.scores), ("sources", self.sources)):
            if values is not None and len(values) != len(self.tree):
                raise ValueError(f"{name} has {len(values)} entries for {len(self.tree)} nodes")
        if self.q is not None:
            for node in range(len(self.tree)):
                if self.tree.children(node) and self.q[node] is None:
                    raise ValueError(f"node {node} has children but no q row")

    def truncate(self, depth: int, nodes: int | None = None) -> Draft:
        """Cut to `depth` levels and `nodes` drafted tokens, in drafted order.

        Looks at no token value, so the law of what is submitted stays the law it was drawn from.
        """
        limit = len(self.tree) if nodes is None else nodes + 1
        if self.tree.depth <= depth and len(self.tree) <= limit:
            return self
        within = [n for n, d in enumerate(self.tree.depths) if d <= depth][:limit]
        return self.select(within)

    def select(self, nodes: Sequence[int]) -> Draft:
        """The draft of these nodes (and the root); see `TokenTree.keep`."""
        tree, order = self.tree.keep(nodes)
        q = (
            None
            if self.q is None
            else tuple(self.q[n] if tree.children(i) else None for i, n in enumerate(order))
        )
        scores = None if self.scores is None else tuple(self.scores[n] for n in order)
        sources = None if self.sources is None else tuple(self.sources[n] for n in order)
        return Draft(tree, q, scores, self.source, sources)

    def counts_by_source(self, accepted: Sequence[int]) -> dict[str, SourceCounts]:
        """What each source drafted, and what of it was accepted; a node of several counts for each."""
        sources = self.sources
        if sources is None:
            own = (self.source,) if self.source else ()
            sources = ((), *[own] * self.tree.num_drafted)
        counts: dict[str, SourceCounts] = {}
        for node, names in enumerate(sources):
            for name in names:
                counts.setdefault(name, SourceCounts(drafts=1)).draft_tokens += 1
                counts[name].accepted_tokens += node in accepted
        return counts


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """One row that wants a draft. `tokens` are all committed tokens; the last one is the root.

    prompt_length tells where the prompt ends. Do not keep or change `tokens`: it is the live list.
    scored: `Draft.scores` will be looked at. A drafter that knows them must then tell them; otherwise it
    may save itself the softmax they take.
    """

    seq_id: int
    tokens: Sequence[int]
    prompt_length: int
    budget: Budget
    params: SamplingParams
    seed: int
    scored: bool = False

    @property
    def root(self) -> int:
        return self.tokens[-1]

    @property
    def origin(self) -> int:
        """The root's absolute position, which keys all noise of this pass but the target's own."""
        return len(self.tokens) - 1


@dataclass(frozen=True)
class Observation:
    """What the target computed for one row: a prompt chunk, or a verified tree.

    tokens went into the target's cache from absolute position `start`. features has, for exactly
    these tokens, the tensors declared in `Needs`, keyed by layer number or "last", each [n, hidden].
    After a verification `draft` is what was verified, `accepted` the kept drafted nodes in order,
    and node_logits [nodes, V] is there if declared. next_token is the committed token behind `tokens`,
    which the target has not computed: the rest of the prompt begins with it, or it is the new root. Of a
    finished row it is the last one. The engine always tells it.

    Prompt tokens that were computed for an earlier sequence are not observed again: `start` may be beyond
    the last token told. A row that needs features is told all of them, with `Needs.last_only` the last one.
    """

    seq_id: int
    start: int
    tokens: tuple[int, ...]
    features: Mapping[int | str, torch.Tensor] = field(default_factory=dict)
    draft: Draft | None = None
    accepted: tuple[int, ...] = ()
    node_logits: torch.Tensor | None = None
    next_token: int | None = None

    def only(self, needs: Needs) -> Observation:
        """What a drafter that declared no more than `needs` is told."""
        wanted: set[int | str] = {*needs.hidden_layers, *(("last",) if needs.last_hidden else ())}
        return replace(
            self,
            features={k: v for k, v in self.features.items() if k in wanted},
            node_logits=self.node_logits if needs.node_logits else None,
        )


class Drafter(ABC):
    """Proposes drafts for many rows at once. Only `propose` must be written.

    `name` is what people type after --drafter. A drafter keeps per-row memory under `seq_id`, from
    `open` to `close`. It must not depend on the order or the company of the rows in a batch, except
    through what it has learned from them, if it `learns`.
    """

    name: str = ""
    needs: Needs = Needs()
    num_speculative_tokens: int = 0  # draft length unless a controller decides otherwise
    draft_nodes: int = 0  # drafted tokens of a whole tree, likewise; 0: a chain, as many as it is long
    learns: bool = False  # keeps something of each request for later ones: drafts get better, outputs stay

    def needs_of(self, seq_id: int) -> Needs:
        """What this row must be given: of all `needs`, those of the part that drafts for it."""
        return self.needs

    def open(self, seq_id: int, prompt: Sequence[int]) -> None:  # noqa: B027
        """A row was admitted."""

    @abstractmethod
    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """One draft a request, in order, each rooted at the request's root."""

    def observe(self, observations: Sequence[Observation]) -> None:  # noqa: B027
        """The target has computed these tokens. Rows whose draft was empty are reported as well."""

    def close(self, seq_id: int) -> None:  # noqa: B027
        """The row is finished or cancelled; free what it held. Unknown ids are ignored."""

    def keep_prefixes(self, tokens: int) -> None:  # noqa: B027
        """Keep no more than so many cached tokens of closed rows, for rows that begin alike; 0 to begin with.

        Told before each step and before a row is closed, as the room changes.
        """

    @classmethod
    def predict_memory(cls, config: Any, target: Any) -> MemoryEstimate:
        """What a drafter of this config (of `Config`) will hold, told before anything is loaded.

        target is a `slipstream.drafters.base.TargetShape`. Raises as building the drafter would, where that
        can be known.
        """
        return MemoryEstimate(unknown=f"the drafter {cls.name!r} does not tell what it will hold")

    @property
    def memory_bytes(self) -> int:
        """Weights, caches and tables held now, beyond the target's own; what `predict_memory` predicts."""
        return 0

    def shutdown(self) -> None:  # noqa: B027
        """The engine closes; free everything."""
