"""Several drafters as one: the first whose draft is good enough, or all their trees merged.

`cascade:drafters=suffix+draft_model(model=NAME)` asks the model only where the suffix tree expects fewer than
`min_score` accepted tokens, the hybrid of suffix decoding (2411.04975, section 4). `mode=merge` verifies the
union of all drafts. Which part drafts is decided before a sampled token is drawn or without looking at it: a
draft with a law q is taken as it is, never merged and never passed over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from slipstream.core.ask import Later, ask, ask_drafts, shut_down
from slipstream.core.draft import Budget
from slipstream.core.spec import parse_specs, refuse_given
from slipstream.drafters import build_drafter, check_spec, predict_memory
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


@dataclass(frozen=True, slots=True)
class CascadeConfig:
    """drafters: the parts in order, as in suffix+draft_model(model=NAME,num_speculative_tokens=3).

    model: short for drafters=suffix+draft_model(model=…). mode: first takes the first draft that is good
    enough, merge verifies all of them as one tree. min_score: expected accepted tokens that are good enough;
    a part that does not tell them always is. num_speculative_tokens: tokens drafted a step, by default the
    most that a part drafts; each part keeps to its own limit as well.
    """

    drafters: str = ""
    model: str = ""
    mode: Literal["first", "merge"] = "first"
    min_score: float = 1.0
    num_speculative_tokens: int | None = None

    def __post_init__(self) -> None:
        if bool(self.drafters) == bool(self.model):
            raise ParameterError(
                "cascade needs either model=NAME or drafters=ONE+TWO, as in"
                " cascade:drafters=suffix+draft_model(model=NAME)"
            )
        if self.num_speculative_tokens is not None and self.num_speculative_tokens < 0:
            raise ParameterError("cascade needs num_speculative_tokens of 0 or more")
        if not self.min_score >= 0:
            raise ParameterError(f"cascade:min_score must be 0 or more, not {self.min_score}")
        if self.mode == "merge":
            refuse_given(self, "cascade:mode=merge verifies all drafts, whatever their score", "min_score")
        for spec in self.specs:
            check_spec(spec)

    @property
    def specs(self) -> list[str]:
        return parse_specs(self.drafters or f"suffix+draft_model(model={self.model})")


class CascadeDrafter(Drafter):
    name = "cascade"
    Config = CascadeConfig

    def __init__(
        self, config: CascadeConfig, target: TargetInfo, parts: Sequence[Drafter] | None = None
    ) -> None:
        """`parts` stand in for building those that `config` names."""
        self._config = config
        self.parts = tuple(_build(config.specs, target) if parts is None else parts)
        lengths = [part.num_speculative_tokens for part in self.parts]
        given = config.num_speculative_tokens
        self.num_speculative_tokens = max(lengths) if given is None else given
        trees = config.mode == "merge" or any(part.draft_nodes for part in self.parts)
        sizes = [part.draft_nodes or part.num_speculative_tokens for part in self.parts]
        if trees and given is None:
            self.draft_nodes = sum(sizes) if config.mode == "merge" else max(sizes)
        self.learns = any(part.learns for part in self.parts)
        self.needs = Needs.union(part.needs for part in self.parts)

    @classmethod
    def predict_memory(cls, config: CascadeConfig, target: TargetShape) -> MemoryEstimate:
        return sum((predict_memory(spec, target) for spec in config.specs), MemoryEstimate())

    def open(self, seq_id: int, prompt: Sequence[int]) -> None:
        for part in self.parts:
            ask(part, part.open, seq_id, prompt)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        chosen = self._merged(requests) if self._config.mode == "merge" else self._first(requests)
        return [chosen.get(r.seq_id) or empty_draft(r) for r in requests]

    def _first(self, requests: Sequence[DraftRequest]) -> dict[int, Draft]:
        """The first draft whose score is enough; where none is, the one of the highest score."""
        chosen: dict[int, Draft] = {}
        second: dict[int, Draft] = {}
        for part in self.parts:
            left = [replace(r, scored=True) for r in requests if r.seq_id not in chosen]
            for draft, request in _ask(part, left):
                seq_id = request.seq_id
                if draft.q is not None or _score(draft) >= self._config.min_score:
                    chosen[seq_id] = draft
                elif seq_id not in second or _score(draft) > _score(second[seq_id]):
                    second[seq_id] = draft
        return {**second, **chosen}

    def _merged(self, requests: Sequence[DraftRequest]) -> dict[int, Draft]:
        """The union of the drafts; each part has the nodes that those before it left."""
        chosen: dict[int, Draft] = {}
        done: set[int] = set()
        for part in self.parts:
            for draft, request in _ask(part, [r for r in requests if r.seq_id not in done], chosen):
                seq_id = request.seq_id
                before = chosen.get(seq_id)
                if draft.q is not None:
                    chosen[seq_id] = draft
                    done.add(seq_id)
                else:
                    chosen[seq_id] = draft if before is None else _merge(before, draft)
        return chosen

    def observe(self, observations: Sequence[Observation]) -> None:
        later = Later()
        for part in self.parts:
            with later:
                ask(part, part.observe, [seen.only(part.needs) for seen in observations])
        later.tell()

    def close(self, seq_id: int) -> None:
        later = Later()
        for part in self.parts:
            with later:
                ask(part, part.close, seq_id)
        later.tell()

    def keep_prefixes(self, tokens: int) -> None:
        later = Later()
        for part in self.parts:
            with later:
                ask(part, part.keep_prefixes, tokens)
        later.tell()

    @property
    def memory_bytes(self) -> int:
        return sum(part.memory_bytes for part in self.parts)

    def shutdown(self) -> None:
        shut_down(self.parts)


def _build(specs: Sequence[str], target: TargetInfo) -> list[Drafter]:
    parts: list[Drafter] = []
    try:
        for spec in specs:
            parts.append(build_drafter(spec, target))
    except BaseException:
        shut_down(parts)
        raise
    return parts


def _ask(
    part: Drafter, requests: Sequence[DraftRequest], taken: dict[int, Draft] | None = None
) -> list[tuple[Draft, DraftRequest]]:
    """The part's drafts that are not empty, cut to what it may draft and labelled with its name."""
    asked = []
    for request in requests:
        if part.needs.reads_prompt and len(request.tokens) == request.prompt_length:
            continue  # the first token must not wait until this part has read the prompt
        used = taken[request.seq_id].tree.num_drafted if taken and request.seq_id in taken else 0
        limit, budget = part.num_speculative_tokens, request.budget
        nodes = min(budget.nodes - used, part.draft_nodes or limit)
        if nodes > 0 and budget.depth > 0:
            depth = min(budget.depth, limit)
            asked.append(replace(request, budget=Budget(depth, nodes, budget.stop_below)))
    if not asked:
        return []
    answers = []
    for draft, request in zip(ask_drafts(part, asked), asked, strict=True):
        draft = draft.truncate(request.budget.depth, request.budget.nodes)
        if draft.tree.num_drafted:
            answers.append((replace(draft, source=draft.source or part.name), request))
    return answers


def _score(draft: Draft) -> float:
    """Expected accepted tokens; a part that does not tell is trusted."""
    return float("inf") if draft.scores is None else sum(draft.scores[1:])


def _merge(one: Draft, other: Draft) -> Draft:
    """The union of two point-mass drafts; a node of both has the higher score."""
    tree = one.tree.merge(other.tree)
    scores: tuple[float, ...] | None = None
    if one.scores is not None and other.scores is not None:
        best: dict[tuple[int, ...], float] = {}
        for draft, given in ((one, one.scores), (other, other.scores)):
            for node, score in enumerate(given):
                path = draft.tree.path_tokens(node)
                best[path] = max(score, best.get(path, 0.0))
        scores = tuple(best[tree.path_tokens(node)] for node in range(len(tree)))
    drafted: dict[tuple[int, ...], tuple[str, ...]] = {}
    for draft in (one, other):
        for node in range(1, len(draft.tree)):
            path = draft.tree.path_tokens(node)
            names = (draft.source,) if draft.sources is None else draft.sources[node]
            drafted[path] = tuple(dict.fromkeys((*drafted.get(path, ()), *names)))
    sources = tuple(drafted.get(tree.path_tokens(node), ()) for node in range(len(tree)))
    return Draft(tree, scores=scores, source=f"{one.source}+{other.source}", sources=sources)
