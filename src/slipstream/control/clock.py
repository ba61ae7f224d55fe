"""What steps really take, against what the curves say: a running correction by regime.

Curves are measured once. Later the machine is shared or throttled, or a curve was measured while something
else ran. log(measured / predicted) of a step is taken to be a sum of terms: the machine's, in every step;
that of plain steps, or of steps with drafts, at about so many rows; and that of about so many tokens. Each
has a variance, which says how far off it may still be, and takes its share of every surprise (a Kalman filter
with a diagonal covariance, Kalman 1960). So a machine that has become slower moves the first term, which
changes no choice, and a curve that is wrong about drafts moves the others. The more a step surprises, beyond
what is likely, the less it counts: something else may have held it up.

What is never done is never measured, so a wrong curve could keep its choice for ever. `stale` says when
another choice, plain steps or larger ones, is due for a look: soon after the machine's term has moved, else
rarely.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_NOISE = 0.1  # standard deviation of log seconds of equal steps
_GATE = 3.0  # beyond so many standard deviations a surprise counts less the larger it is
_MOVED = 0.2  # change of the machine's term after which the other choice is looked at soon
_SOON, _LATE = 16, 256  # steps at about so many rows until it is looked at


@dataclass(frozen=True)
class _Prior:
    """Of a kind of term. sd: how far off the curve may be. drift: what it may change by from step to step.
    most: its bound, in log seconds."""

    sd: float
    drift: float
    most: float


_KNOWN = (_Prior(0.5, 0.03, math.log(16)), _Prior(0.4, 0.003, math.log(16)), _Prior(0.1, 0.003, math.log(2)))
# A guessed curve has the wrong unit as well.
_GUESSED = (_Prior(5.0, 0.03, math.inf), _Prior(0.7, 0.003, math.log(16)), _Prior(0.7, 0.003, math.log(16)))


class _Term:
    def __init__(self, prior: _Prior) -> None:
        self.value = 0.0
        self.variance = prior.sd**2
        self._prior = prior

    def learn(self, surprise: float, total: float, weight: float) -> None:
        gain = weight * self.variance / total
        self.value = min(max(self.value + gain * surprise, -self._prior.most), self._prior.most)
        self.variance = (1 - gain) * self.variance + self._prior.drift**2


@dataclass
class _Sight:
    """Of steps of a size. last: number of the step that was one. level: the machine's term then, roughly."""

    level: float
    last: int = 0


class Clock:
    """Factors on predicted seconds. measured: whether the curves were, or are guesses without a unit."""

    def __init__(self, measured: bool = True) -> None:
        self._priors = _KNOWN if measured else _GUESSED
        self._machine = _Term(self._priors[0])
        self._terms: dict[tuple[object, ...], _Term] = {}
        self._steps: dict[int, int] = {}  # seen at about so many rows
        self._sights: dict[tuple[int, int | None], _Sight] = {}
        self._unseen = 0.0 if measured else math.inf  # level of a size that was never seen

    def plain(self, rows: int) -> float:
        """Factor of a step without drafts."""
        return math.exp(self._level(rows, rows, ()))

    def drafting(self, rows: int, tokens: Floats, who: Sequence[str]) -> Floats:
        """Factors of steps with drafts of these drafters, by all the tokens that are computed in them."""
        sizes = np.ceil(np.log2(np.maximum(tokens, 1.0)) - 1e-6).astype(int).tolist()
        factors = {size: math.exp(self._level(rows, 1 << size, who)) for size in set(sizes)}
        return np.array([factors[size] for size in sizes])

    def record(self, rows: int, tokens: int, who: Sequence[str], seconds: float, predicted: float) -> None:
        """A step of so many tokens in all took `seconds`; the curves alone said `predicted`."""
        terms = [self._machine, *self._own(rows, tokens, who)]
        total = sum(term.variance for term in terms) + _NOISE**2
        surprise = math.log(seconds / predicted) - sum(term.value for term in terms)
        weight = min(1.0, _GATE**2 * total / max(surprise**2, 1e-12))
        for term in terms:
            term.learn(surprise, total, weight)
        count = self._steps[_octave(rows)] = self._steps.get(_octave(rows), 0) + 1
        seen = self._sight(rows, tokens if who else None)
        known = self._machine.value if math.isinf(seen.level) else seen.level
        seen.level = (known + self._machine.value) / 2  # a few looks settle it
        seen.last = count

    def stale(self, rows: int, tokens: int | None) -> bool:
        """Whether steps of so many rows were not seen for too long: plain ones (None), or with drafts, of so
        many tokens in all."""
        seen = self._sight(rows, tokens)
        moved = abs(self._machine.value - seen.level) > _MOVED
        return self._steps.get(_octave(rows), 0) - seen.last >= (_SOON if moved else _LATE)

    def _own(self, rows: int, tokens: int, who: Sequence[str]) -> list[_Term]:
        """The terms that only some steps have."""
        group = (_octave(rows), tuple(who))
        keys = (group, (*group, _octave(tokens)))
        return [
            self._terms.setdefault(key, _Term(prior))
            for key, prior in zip(keys, self._priors[1:], strict=True)
        ]

    def _level(self, rows: int, tokens: int, who: Sequence[str]) -> float:
        return self._machine.value + sum(term.value for term in self._own(rows, tokens, who))

    def _sight(self, rows: int, tokens: int | None) -> _Sight:
        size = None if tokens is None else _octave(tokens)
        return self._sights.setdefault((_octave(rows), size), _Sight(self._unseen))


def _octave(count: int) -> int:
    """1, 2, 3…4, 5…8 and so on are told apart."""
    return (count - 1).bit_length()
