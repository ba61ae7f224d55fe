"""Planting a fault (`core.fault`) in one engine, by wrapping the part that it is in.

A sound engine neither imports this module nor has a switch for it. A fault stays in its engine and in that
engine's runner for good. `RULES` are the ones that are in a verification rule, as functions of the right one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import fields, replace

import torch

from slipstream.core.draft import Budget, Draft
from slipstream.core.fault import THRESHOLD, FaultWarning, warning_of
from slipstream.core.params import SamplingParams
from slipstream.core.sequence import Event, FinishReason, Sequence, TokenLogprob
from slipstream.engine.drafting import Work
from slipstream.engine.engine import Engine
from slipstream.model.pack import Pack, Span
from slipstream.model.runner import Output
from slipstream.verify import Rule, TargetView, Verdict
from slipstream.verify.rejection import laws


def plant(engine: Engine, name: str) -> None:
    """Plants the fault of that name, and says so by a FaultWarning."""
    warnings.warn(warning_of(name), FaultWarning, stacklevel=3)
    if name in RULES:
        choose, spoil = engine._rule, RULES[name]
        engine._rule = lambda draft: spoil(choose(draft))
    else:
        _PARTS[name](engine)


# -- in the rule ------------------------------------------------------------------------------------


def _threshold(rule: Rule) -> Rule:
    """What articles call verification."""

    def spoiled(draft: Draft, view: TargetView) -> Verdict:
        node, path = 0, list[int]()
        while True:
            p = view.probs(node)  # [V]
            likely = [c for c in draft.tree.children(node) if float(p[draft.tree.tokens[c]]) > THRESHOLD]
            if not likely:
                return Verdict(tuple(path), view.token(node))
            node = likely[0]
            path.append(node)

    return spoiled


def _bonus(rule: Rule) -> Rule:
    def spoiled(draft: Draft, view: TargetView) -> Verdict:
        verdict, tree = rule(draft, view), draft.tree
        if not verdict.path or tree.children(verdict.path[-1]):
            return verdict
        return Verdict(verdict.path, view.token(tree.parents[verdict.path[-1]]))

    return spoiled


class _OtherDraw:
    """A view that draws otherwise after a refusal. It inverts the distribution function, as is usual."""

    def __init__(self, view: TargetView, draft: Draft) -> None:
        self.view, self.draft = view, draft

    def token(self, node: int) -> int:
        return self.view.token(node)

    def probs(self, node: int) -> torch.Tensor:
        return self.view.probs(node)

    def uniform(self, node: int, index: int = 0) -> float:
        return self.view.uniform(node, index)

    def draw(self, node: int, law: torch.Tensor) -> int:
        raise NotImplementedError


class _NotRenormalised(_OtherDraw):
    """A uniform beyond the mass that is left ends on the last token."""

    def draw(self, node: int, law: torch.Tensor) -> int:
        p, q = laws(self.draft, self.view, node)  # [V], [V]
        rest = (p - q).clamp(min=0.0)  # [V]
        rest[-1] += 1.0 - float(rest.sum())
        return self.view.draw(node, rest)


class _NoiseAgain(_OtherDraw):
    def draw(self, node: int, law: torch.Tensor) -> int:
        below = int((law.cumsum(0) <= self.view.uniform(node)).sum())
        return min(below, int(law.nonzero().max()))


def _with_view(kind: type[_OtherDraw]) -> Callable[[Rule], Rule]:
    return lambda rule: lambda draft, view: rule(draft, kind(view, draft))


RULES: dict[str, Callable[[Rule], Rule]] = {
    "threshold": _threshold,
    "bonus": _bonus,
    "residual": _with_view(_NotRenormalised),
    "noise": _with_view(_NoiseAgain),
}


# -- in the draft -----------------------------------------------------------------------------------


def _other_temperature(engine: Engine) -> None:
    propose = engine._propose

    def spoiled(rows: list[Sequence], budgets: list[Budget]) -> list[Work]:
        return [replace(work, draft=_flattened(work.draft)) for work in propose(rows, budgets)]

    engine._propose = spoiled  # type: ignore[method-assign]


def _flattened(draft: Draft) -> Draft:
    if draft.q is None:
        return draft
    roots = [None if row is None else row.double().sqrt() for row in draft.q]  # each [V]
    return replace(draft, q=tuple(None if row is None else row / row.sum() for row in roots))


# -- in the forward ---------------------------------------------------------------------------------


def _in_pack(spoil: Callable[[Pack], Pack]) -> Callable[[Engine], None]:
    def put(engine: Engine) -> None:
        compute = engine.runner._compute

        def spoiled(pack: Pack, logits: str) -> torch.Tensor | None:
            return compute(spoil(pack), logits)

        engine.runner._compute = spoiled  # type: ignore[method-assign]

    return put


class _FamilySpan(Span):
    def mask(self, rows: int, window: int | None, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        mask = super().mask(rows, window, dtype, device)  # [1, 1, rows, width]
        parents, trunk = self.parents or (), self.length - self.earlier
        for node in range(self.earlier, len(parents)):
            for elder in range(node):
                if parents[elder] == parents[node]:
                    mask[0, 0, node - self.earlier, trunk + elder] = 0.0
        return mask

    def ancestors(self) -> list[int]:
        parents, seen = self.parents or (), super().ancestors()
        for node in range(self.earlier, len(parents)):
            for elder in range(node):
                if parents[elder] == parents[node]:
                    seen[node - self.earlier] |= 1 << elder  # an elder is never node 63, which has the sign
        return seen


def _see_siblings(pack: Pack) -> Pack:
    spans = [
        span if span.parents is None else _FamilySpan(*(getattr(span, f.name) for f in fields(span)))
        for span in pack.spans
    ]
    return replace(pack, spans=tuple(spans))


def _by_number(pack: Pack) -> Pack:
    positions = pack.position_ids.clone()  # [1, T]
    for span in pack.spans:
        if span.parents is not None:
            numbers = torch.arange(span.length, span.length + span.count, device=positions.device)
            positions[0, span.start : span.end] = numbers
    return replace(pack, position_ids=positions)


# -- in the bookkeeping -----------------------------------------------------------------------------


def _no_rollback(engine: Engine) -> None:
    commit = engine._commit

    def spoiled(
        work: list[Work],
        output: Output,
        verdicts: list[Verdict],
        chosen_logprobs: list[list[TokenLogprob]],
        began: float,
    ) -> list[Event]:
        events = commit(work, output, verdicts, chosen_logprobs, began)
        for one, verdict in zip(work, verdicts, strict=True):
            if not one.sequence.finished:
                refused = len(one.draft.tree) - 1 - len(verdict.path)
                engine.runner.cache.commit(one.sequence.id, range(refused))
        return events

    engine._commit = spoiled  # type: ignore[method-assign]


def _in_request(spoil: Callable[[Engine, Sequence], None]) -> Callable[[Engine], None]:
    def put(engine: Engine) -> None:
        add = engine.add

        def spoiled(
            prompt: Items[int], params: SamplingParams, *, seed: int | None = None, group: int | None = None
        ) -> int:
            seq_id = add(prompt, params, seed=seed, group=group)
            sequence = engine.find(seq_id)
            assert sequence is not None
            spoil(engine, sequence)
            return seq_id

        engine.add = spoiled  # type: ignore[method-assign]

    return put


def _forget_drafted(engine: Engine, sequence: Sequence) -> None:
    pipeline = engine._pipelines[sequence.id]
    law = pipeline.law
    pipeline.law = lambda row, tokens: law(row, tokens[: len(sequence.tokens)])  # type: ignore[method-assign]


class _RunsOn(Sequence):
    passing: int = 0

    def commit(self, tokens: Items[int], num_drafted: int, logprobs: Items[TokenLogprob] = ()) -> Event:
        self.passing = num_drafted
        return super().commit(tokens, num_drafted, logprobs)

    def _end_at(self, token: int) -> FinishReason | None:
        self.passing -= 1
        if self.passing < 0:
            return super()._end_at(token)
        if self.stream:
            self.stream.push(token, check_stop=False)
        return "length" if self.remaining <= 0 else None


def _run_on(engine: Engine, sequence: Sequence) -> None:
    sequence.__class__ = _RunsOn


_PARTS: dict[str, Callable[[Engine], None]] = {
    "stale-cache": _no_rollback,
    "sibling": _in_pack(_see_siblings),
    "position": _in_pack(_by_number),
    "draft-temperature": _other_temperature,
    "penalty": _in_request(_forget_drafted),
    "end": _in_request(_run_on),
}
