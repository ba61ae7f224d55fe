"""Which sublayers to leave out, found by measuring (`slipstream tune selfspec`).

The target's own greedy answers are cut into windows. A thinned pass computes all windows at once under
exactly the conditions of a draft: everything before a window's first token has the full model's keys and
values, the tokens of the window have the thinned model's. So how far each draft would be accepted, and how
confident it was, is known for every draft length and every confidence threshold from one pass a set.
The search starts from the sublayers that are missed least and then tries random changes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slipstream.drafters._tuned import Tuned
from slipstream.model.pack import PackRow
from slipstream.model.runner import Runner
from slipstream.model.skip import SkipSet, Thinnable

CONFIDENCES = (0.0, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
_PATIENCE = 6  # additions in the order of the ranking that may fail one after the other


@dataclass(frozen=True, slots=True)
class Step:
    """One position of a window: is the thinned model's best token the target's, and how sure was it."""

    right: bool
    confidence: float


Window = tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt and the target's greedy answer."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


class Measure:
    """Texts held in the runner's cache with the full model's keys, ready for thinned passes.

    depth: longest draft considered; answers shorter than that are of no use. Call `close` at the end.
    """

    def __init__(self, runner: Runner, texts: Sequence[Text], depth: int = 8) -> None:
        self.model = Thinnable(runner)
        self._runner = runner
        self._rows: list[PackRow] = []
        self._wanted: list[list[int]] = []  # a text: what follows each token of its windows
        self._depth = depth
        for number, text in enumerate(t for t in texts if len(t.answer) >= depth):
            slot = -2 - number
            runner.cache.open(slot)
            chain = [text.prompt[-1], *text.answer[:-1]]
            runner.extend(slot, [*text.prompt[:-1], *chain])
            trunk = tuple(range(-1, len(chain) - 1))  # as nodes of a tree: a window may branch off at any
            tokens: list[int] = []
            parents: list[int] = []
            wanted: list[int] = []
            for start in range(0, len(chain) - depth + 1, depth):
                parents += [start - 1, *(len(trunk) + len(tokens) + i for i in range(depth - 1))]
                tokens += chain[start : start + depth]
                wanted += text.answer[start : start + depth]
            self._rows.append(PackRow(slot, tokens, (*trunk, *parents)))
            self._wanted.append(wanted)

    def __len__(self) -> int:
        """Windows measured."""
        return sum(len(w) for w in self._wanted) // self._depth

    def windows(self, skip: SkipSet) -> list[Window]:
        """What drafting with this set would do, one forward a text."""
        found: list[Window] = []
        with self.model.without(skip):
            for row, wanted in zip(self._rows, self._wanted, strict=True):
                logits = self._runner.forward([row], taps=False).logits
                assert logits is not None
                sure, best = logits.float().softmax(-1).max(-1)  # [n]
                steps = [
                    Step(token == right, confidence)
                    for token, right, confidence in zip(best.tolist(), wanted, sure.tolist(), strict=True)
                ]
                found += [tuple(steps[i : i + self._depth]) for i in range(0, len(steps), self._depth)]
        return found

    def close(self) -> None:
        for row in self._rows:
            self._runner.cache.close(row.slot)


def predict(windows: Sequence[Window], cost: float, depth: int, confidence: float) -> tuple[float, float]:
    """Speed-up against plain decoding and acceptance, if drafting stops below `confidence`.

    A step emits the accepted tokens and one more, and costs the verification (1, as a plain step) and
    `cost` for every drafting pass, that which was not confident included:
    (accepted + 1) / (1 + cost · passes), summed over the windows (Leviathan et al., 2211.17192, 3.4).
    """
    emitted = passes = drafted = accepted = 0
    for window in windows:
        length = next((i for i, s in enumerate(window[:depth]) if s.confidence < confidence), depth)
        right = next((i for i, s in enumerate(window[:length]) if not s.right), length)
        passes += min(length + 1, depth)
        drafted += length
        accepted += right
        emitted += right + 1
    return emitted / (len(windows) + cost * passes), accepted / max(drafted, 1)


def best_plan(windows: Sequence[Window], cost: float, skip: SkipSet) -> Tuned:
    """The draft length and confidence with which this set is predicted to be fastest."""
    plans = [
        (predict(windows, cost, depth, confidence), depth, confidence)
        for depth in range(1, len(windows[0]) + 1)
        for confidence in CONFIDENCES
    ]
    (speedup, acceptance), depth, confidence = max(plans, key=lambda p: (p[0][0], -p[1], p[2]))
    return Tuned(skip, depth, confidence, acceptance, cost, speedup)


Report = Callable[[int, Tuned], None]
"""Told after every measured set: how many were, and the best plan so far."""


def search(measure: Measure, trials: int, seed: int = 0, report: Report = lambda *_: None) -> Tuned:
    """The best plan among `trials` measured sets; the same for the same seed."""
    return _Search(measure, trials, seed, report).run()


class _Search:
    def __init__(self, measure: Measure, trials: int, seed: int, report: Report) -> None:
        self._measure = measure
        self._trials = trials
        self._chance = random.Random(seed)
        self._report = report
        self._known: dict[SkipSet, tuple[Tuned, float]] = {}  # and the share of wrong tokens
        layers = measure.model.layers
        self._sublayers = [(kind, layer) for layer in range(layers) for kind in "am"]
        self._best: Tuned | None = None

    @property
    def _left(self) -> bool:
        return len(self._known) < self._trials

    def _try(self, sublayers: frozenset[tuple[str, int]]) -> tuple[Tuned, float]:
        skip = _skip_set(sublayers)
        if skip not in self._known:
            windows = self._measure.windows(skip)
            plan = best_plan(windows, self._measure.model.cost(skip), skip)
            wrong = sum(not s.right for w in windows for s in w) / sum(len(w) for w in windows)
            self._known[skip] = plan, wrong
            if self._best is None or plan.speedup > self._best.speedup:
                self._best = plan
            self._report(len(self._known), self._best)
        return self._known[skip]

    def run(self) -> Tuned:
        chosen = self._in_order(self._ranked())
        self._exits()
        self._changes(chosen)
        assert self._best is not None
        return self._best

    def _ranked(self) -> list[tuple[str, int]]:
        """Sublayers by how little is lost a weight saved, each left out alone; half of the trials at most."""
        singles = list(self._sublayers)
        if len(singles) > self._trials // 2:
            singles = sorted(self._chance.sample(singles, max(1, self._trials // 2)))
        loss = {}
        for sublayer in singles:
            plan, wrong = self._try(frozenset({sublayer}))
            loss[sublayer] = wrong / (1.0 - plan.cost)
        return sorted(loss, key=lambda s: (loss[s], s))

    def _in_order(self, ranked: Sequence[tuple[str, int]]) -> frozenset[tuple[str, int]]:
        """Leave out more and more, those that are missed least first, as long as it may pay."""
        chosen: frozenset[tuple[str, int]] = frozenset()
        best, best_speedup, failed = chosen, 0.0, 0
        for sublayer in ranked[: len(self._sublayers) - 2]:
            if not self._left or failed >= _PATIENCE:
                break
            chosen |= {sublayer}
            speedup = self._try(chosen)[0].speedup
            best, best_speedup, failed = (
                (chosen, speedup, 0) if speedup > best_speedup else (best, best_speedup, failed + 1)
            )
        return best

    def _exits(self) -> None:
        """Early exit after an eighth, a quarter, … of the layers."""
        layers = self._measure.model.layers
        for layer in sorted({max(1, layers * i // 8) for i in range(1, 8)}):
            if self._left and layer < layers:
                self._try(frozenset((k, i) for k, i in self._sublayers if i >= layer))

    def _changes(self, chosen: frozenset[tuple[str, int]]) -> None:
        """Random changes of one or two sublayers, kept when they help."""
        speedup = self._try(chosen)[0].speedup if chosen else 0.0
        fruitless = 0
        while self._left and fruitless < 200:  # small models have few sets, and all may be known
            flipped = frozenset(self._chance.sample(self._sublayers, self._chance.choice((1, 1, 2))))
            changed = chosen ^ flipped
            if not changed or len(changed) >= len(self._sublayers) or _skip_set(changed) in self._known:
                fruitless += 1
                continue
            fruitless = 0
            found = self._try(changed)[0].speedup
            if found > speedup:
                chosen, speedup = changed, found


def _skip_set(sublayers: frozenset[tuple[str, int]]) -> SkipSet:
    return SkipSet(
        frozenset(i for kind, i in sublayers if kind == "a"),
        frozenset(i for kind, i in sublayers if kind == "m"),
    )
