"""Step time T(rows, nodes, context) as it was measured: an interpolation that keeps kinks.

A step computes `rows` sequences of `nodes` tokens each (the root is one: plain decoding is nodes = 1) with
`context` tokens of each already in the cache. Kernels see the rows laid end to end, so what decides is the
number of tokens, rows · nodes: between measured points the time is linear in it, for each measured number
of rows, and linear in rows and context between those. No smooth function is fitted: a step that doubles
from 4 to 5 tokens is what a planner must see.

More work takes no less time, so a measured decrease that the spread explains is levelled out (isotonic
regression); one that it does not explain stays, and is told as an inversion.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from slipstream.errors import ParameterError

Floats = NDArray[np.float64]
_JUMP = 0.15  # a kink is a rise by this share …
_STEEP = 1.5  # … at least so many times as steep as a cost in proportion to the tokens
_CERTAIN = 3.0  # standard errors beyond which a decrease is not explained by the spread


class StepTime(Protocol):
    """Seconds of a target step: measured (`StepCurve`) or computed (`cost.roofline.Roofline`)."""

    def seconds(self, rows: int, nodes: ArrayLike, context: float = 0.0) -> Floats:
        """Of a step with `rows` sequences of `nodes` tokens each, root included; nodes may be a mean."""
        ...

    def relative_error(self, rows: int, nodes: ArrayLike, context: float = 0.0) -> Floats:
        """Standard error of `seconds`, as a share of it."""
        ...


@dataclass(frozen=True, slots=True)
class Point:
    """A measured step: median seconds of `count` repeats and the standard error of that median."""

    rows: int
    nodes: int
    context: int
    seconds: float
    error: float = 0.0
    count: int = 1

    @property
    def tokens(self) -> int:
        return self.rows * self.nodes

    @classmethod
    def of(cls, rows: int, nodes: int, context: int, seconds: Sequence[float]) -> Point:
        """From repeats. Raises ParameterError where there are none or one is not a positive number."""
        return cls(rows, nodes, context, *median(seconds, f"{rows} rows × {nodes} nodes"), len(seconds))


@dataclass(frozen=True, slots=True)
class Jump:
    """Two neighbouring measured token counts between which the time rises steeply, or falls."""

    rows: int
    context: int
    tokens: tuple[int, int]
    seconds: tuple[float, float]

    @property
    def ratio(self) -> float:
        return self.seconds[1] / self.seconds[0]


def median(seconds: Sequence[float], what: str = "a measurement") -> tuple[float, float]:
    """Median and its standard error: 1.2533 σ/√n, with σ from the interquartile range (1.349 σ)."""
    if not seconds:
        raise ParameterError(f"{what} has no seconds; measure it again")
    values = np.asarray(seconds, dtype=np.float64)
    if not np.all(np.isfinite(values)) or np.any(values <= 0):
        raise ParameterError(f"{what} has seconds that are not positive numbers; measure it again")
    low, middle, high = np.percentile(values, (25, 50, 75))
    return float(middle), float(1.2533 * (high - low) / 1.349 / math.sqrt(len(values)))


def spread(seconds: Sequence[float]) -> float:
    """Interquartile range as a share of the median: how quiet the machine was."""
    low, middle, high = np.percentile(np.asarray(seconds, dtype=np.float64), (25, 50, 75))
    return float((high - low) / middle) if middle else 0.0


@dataclass(frozen=True)
class _Line:
    """The points of one number of rows and one context, by tokens; beyond the last, the steeper of the last
    and the overall slope goes on."""

    tokens: Floats
    seconds: Floats
    errors: Floats

    def at(self, tokens: Floats) -> Floats:
        inside = np.interp(tokens, self.tokens, self.seconds)
        return np.asarray(inside + np.maximum(tokens - self.tokens[-1], 0.0) * self._slope)

    def error_at(self, tokens: Floats) -> Floats:
        return np.interp(tokens, self.tokens, self.errors)

    @cached_property
    def _slope(self) -> float:
        if len(self.tokens) < 2:
            return float(self.seconds[0] / self.tokens[0])
        last = (self.seconds[-1] - self.seconds[-2]) / (self.tokens[-1] - self.tokens[-2])
        whole = (self.seconds[-1] - self.seconds[0]) / (self.tokens[-1] - self.tokens[0])
        return float(max(last, whole, 0.0))


class StepCurve:
    """Step time interpolated over measured points. `levelled` says how many points isotony moved."""

    def __init__(self, points: Iterable[Point]) -> None:
        self.points = tuple(sorted(points, key=lambda p: (p.context, p.rows, p.nodes)))
        if not self.points:
            raise ParameterError("there is no measured step time; run `slipstream measure`")
        grouped: dict[int, dict[int, list[Point]]] = {}
        for point in self.points:
            if min(point.rows, point.nodes) < 1 or point.context < 0 or not point.seconds > 0:
                raise ParameterError(
                    f"a step time needs rows and nodes of at least 1, context of at least 0 and positive"
                    f" seconds, not {point}"
                )
            line = grouped.setdefault(point.context, {}).setdefault(point.rows, [])
            if line and line[-1].nodes == point.nodes:
                raise ParameterError(
                    f"the step of {point.rows} rows × {point.nodes} nodes at context {point.context} is there"
                    " twice; join its seconds"
                )
            line.append(point)
        self.inversions: list[Jump] = []
        self.levelled = 0
        self._lines = {c: {r: self._line(line) for r, line in rows.items()} for c, rows in grouped.items()}

    def _line(self, points: Sequence[Point]) -> _Line:
        seconds = np.array([p.seconds for p in points])
        errors = np.array([p.error for p in points])
        start = 0
        for i in range(1, len(points) + 1):
            if i < len(points):
                certain = _CERTAIN * math.hypot(errors[i], errors[i - 1])
                if not 0 < certain < points[i - 1].seconds - points[i].seconds:
                    continue
                before, after = points[i - 1], points[i]
                self.inversions.append(
                    Jump(
                        before.rows,
                        before.context,
                        (before.tokens, after.tokens),
                        (before.seconds, after.seconds),
                    )
                )
            level = isotonic(seconds[start:i], errors[start:i])
            self.levelled += int(np.sum(level != seconds[start:i]))
            seconds[start:i] = level
            start = i
        return _Line(np.array([float(p.tokens) for p in points]), seconds, errors)

    # -- asking ---------------------------------------------------------------------------------

    def seconds(self, rows: int, nodes: ArrayLike, context: float = 0.0) -> Floats:
        tokens = rows * np.asarray(nodes, dtype=np.float64)
        return self._blend(rows, context, lambda line: line.at(tokens))

    def relative_error(self, rows: int, nodes: ArrayLike, context: float = 0.0) -> Floats:
        tokens = rows * np.asarray(nodes, dtype=np.float64)
        error = self._blend(rows, context, lambda line: line.error_at(tokens))
        return error / self.seconds(rows, nodes, context)

    def covers(self, rows: int, nodes: float, context: float = 0.0) -> bool:
        """Whether this lies within what was measured; beyond it `seconds` goes on in a straight line."""
        contexts = sorted(self._lines)
        if not contexts[0] <= context <= contexts[-1] or not self.min_rows <= rows <= self.max_rows:
            return False
        lines = self._lines[min(contexts, key=lambda c: abs(c - context))]
        return bool(rows * nodes <= max(line.tokens[-1] for line in lines.values()))

    @property
    def min_rows(self) -> int:
        return min(p.rows for p in self.points)

    @property
    def max_rows(self) -> int:
        return max(p.rows for p in self.points)

    @property
    def contexts(self) -> list[int]:
        return sorted(self._lines)

    def _blend(self, rows: float, context: float, ask: Any) -> Floats:
        low, high, share = _around(sorted(self._lines), context, beyond=True)
        at_low = self._over_rows(self._lines[low], rows, ask)
        if low == high:
            return at_low
        at_high = self._over_rows(self._lines[high], rows, ask)
        # A longer context never costs less; beyond the longest the measured rise goes on.
        return at_low + share * np.maximum(at_high - at_low, 0.0)

    @staticmethod
    def _over_rows(lines: Mapping[int, _Line], rows: float, ask: Any) -> Floats:
        low, high, share = _around(sorted(lines), rows, beyond=False)
        return (1 - share) * ask(lines[low]) + share * ask(lines[high])  # type: ignore[no-any-return]

    # -- telling --------------------------------------------------------------------------------

    def jumps(self, context: int | None = None) -> list[Jump]:
        """Kinks: rises by 15 % or more, half as steep again as in proportion to the tokens, or more."""
        context = self.contexts[0] if context is None else context
        found = []
        for rows, line in self._lines[context].items():
            for i in range(1, len(line.tokens)):
                rise, step = line.seconds[i] - line.seconds[i - 1], line.tokens[i] - line.tokens[i - 1]
                proportional = line.seconds[i] / line.tokens[i]
                if rise >= _JUMP * line.seconds[i - 1] and rise / step >= _STEEP * proportional:
                    tokens = (int(line.tokens[i - 1]), int(line.tokens[i]))
                    times = (float(line.seconds[i - 1]), float(line.seconds[i]))
                    found.append(Jump(rows, context, tokens, times))
        return found

    def line(self, rows: int, context: int | None = None) -> tuple[Floats, Floats, Floats]:
        """Measured tokens, their seconds and standard errors, for a chart."""
        line = self._lines[self.contexts[0] if context is None else context][rows]
        return line.tokens, line.seconds, line.errors

    def rows_at(self, context: int | None = None) -> list[int]:
        return sorted(self._lines[self.contexts[0] if context is None else context])

    def to_json(self) -> list[dict[str, Any]]:
        return [{name: getattr(p, name) for name in Point.__slots__} for p in self.points]

    @classmethod
    def from_json(cls, points: Iterable[Mapping[str, Any]]) -> StepCurve:
        return cls(Point(**point) for point in points)


def isotonic(values: Floats, errors: Floats) -> Floats:
    """The closest non-decreasing values, squares weighted by 1/error² (pool adjacent violators)."""
    known = errors[errors > 0]
    # Repeats that happen to agree are no certainty, and weights must stay within the range of a float.
    floor = max(float(known.min()) if len(known) else 0.0, 1e-6 * float(values.mean()))
    blocks: list[tuple[float, float, int]] = []  # mean, weight, length
    for value, error in zip(values, errors, strict=True):
        mean, weight, length = float(value), (floor / max(float(error), floor)) ** 2, 1
        while blocks and blocks[-1][0] > mean:
            other, more, count = blocks.pop()
            mean = (mean * weight + other * more) / (weight + more)
            weight, length = weight + more, length + count
        blocks.append((mean, weight, length))
    return np.concatenate([np.full(length, mean) for mean, _, length in blocks])


def _around(known: Sequence[int], value: float, beyond: bool) -> tuple[int, int, float]:
    """The neighbours of a value among sorted ones and its share of the way; beyond: also past the last."""
    if value <= known[0] or len(known) == 1:
        return known[0], known[0], 0.0
    if value >= known[-1] and not beyond:
        return known[-1], known[-1], 0.0
    index = min(next((i for i, k in enumerate(known) if k >= value), len(known) - 1), len(known) - 1)
    low, high = known[index - 1], known[index]
    return low, high, (value - low) / (high - low)


class DraftTime(Protocol):
    """Seconds a drafter takes for all rows of a step."""

    def draft_seconds(self, rows: int, depth: int, nodes: int, context: float = 0.0) -> float:
        """Of drafts of `depth` levels and `nodes` tokens for each of `rows` rows; depth 0 costs nothing."""
        ...

    def draft_error(self, rows: int, depth: int, nodes: int) -> float:
        """Standard error of it, as a share of it."""
        ...


@dataclass(frozen=True, slots=True)
class DraftPoint:
    """A measured draft: median seconds and the standard error of it; nodes = depth is a chain."""

    rows: int
    depth: int
    nodes: int
    seconds: float
    error: float = 0.0


class DraftCurve:
    """Draft time interpolated: linear in depth from nothing at depth 0, in nodes at each depth, in rows.

    Beyond the longest measured draft the last slope goes on, so a parallel drafter (Medusa) whose cost
    does not depend on depth stays flat, and a chain of passes rises by a pass a token.
    """

    def __init__(self, points: Iterable[DraftPoint]) -> None:
        self.points = tuple(sorted(points, key=lambda p: (p.rows, p.depth, p.nodes)))
        if not self.points:
            raise ParameterError("there is no measured draft time; run `slipstream measure` with the drafter")
        self._lines: dict[int, dict[int, list[DraftPoint]]] = {}
        for point in self.points:
            if point.rows < 1 or not 1 <= point.depth <= point.nodes or not point.seconds >= 0:
                raise ParameterError(
                    f"a draft time needs rows of at least 1, 1 <= depth <= nodes and seconds, not {point}"
                )
            line = self._lines.setdefault(point.rows, {}).setdefault(point.depth, [])
            if line and line[-1].nodes == point.nodes:
                raise ParameterError(
                    f"the draft of {point.depth} levels and {point.nodes} tokens for {point.rows} rows is"
                    " there twice; join its seconds"
                )
            line.append(point)

    @property
    def max_depth(self) -> int:
        return max(p.depth for p in self.points)

    def draft_seconds(self, rows: int, depth: int, nodes: int, context: float = 0.0) -> float:
        return self._ask(rows, depth, nodes, 0)

    def draft_error(self, rows: int, depth: int, nodes: int) -> float:
        seconds = self.draft_seconds(rows, depth, nodes)
        return self._ask(rows, depth, nodes, 1) / seconds if seconds else 0.0

    def _ask(self, rows: int, depth: int, nodes: int, what: int) -> float:
        if depth < 1:
            return 0.0
        known = sorted(self._lines)
        low, high, share = _around(known, rows, beyond=len(known) > 1)
        at_low = self._over_depth(low, depth, nodes, what)
        return at_low + share * (self._over_depth(high, depth, nodes, what) - at_low) if share else at_low

    def _over_depth(self, rows: int, depth: int, nodes: int, what: int) -> float:
        lines = self._lines[rows]
        depths = sorted(lines)
        # A draft of another depth is compared at its own share of the nodes.
        values = [_over_nodes(lines[d], max(d, round(nodes * d / depth)), what) for d in depths]
        if depth > depths[-1] and len(depths) > 1 and what == 0:
            slope = (values[-1] - values[-2]) / (depths[-1] - depths[-2])
            return values[-1] + max(slope, 0.0) * (depth - depths[-1])
        if depth > depths[-1] and what == 0:
            return values[-1] * depth / depths[-1]
        return float(np.interp(depth, [0, *depths], [0.0, *values]))


def _over_nodes(points: Sequence[DraftPoint], nodes: int, what: int) -> float:
    values = [p.error if what else p.seconds for p in points]
    return float(np.interp(nodes, [p.nodes for p in points], values))
