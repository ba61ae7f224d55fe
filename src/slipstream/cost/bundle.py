"""The file that `slipstream measure` writes and `plan`, `bench` and the goodput controller read. Version 1.

Everything is raw: seconds of every repeat, counts of every position. Rates, medians and curves are derived
here, when asked for. Unknown fields are refused, so a typing error cannot pass for a measurement.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from slipstream.core.stats import DraftCounts
from slipstream.cost.accept import Acceptance, Sample
from slipstream.cost.curve import DraftCurve, DraftPoint, Point, StepCurve, median, spread
from slipstream.errors import ParameterError

VERSION = 1
_PLACE = ("machine.name", "machine.device", "machine.threads")
# Beyond this interquartile range, as a share of the median, a measurement is of a busy machine.
BUSY_SPREAD = 0.15

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]
AtLeastOne = Annotated[int, Field(ge=1)]
Repeats = Annotated[list[Positive], Field(min_length=1)]


class Raw(BaseModel):
    """A value that goes into a file as it is. Unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class MachineInfo(Raw):
    """Where it was measured. bandwidth: bytes a second read; flops: operations a second of a matrix product
    by dtype; both measured."""

    name: str
    device: str = "cpu"
    threads: AtLeastOne = 1
    memory_bytes: Count = 0
    bandwidth: Positive | None = None
    flops: dict[str, Positive] = Field(default_factory=dict)


class StepSeconds(Raw):
    """Repeats of one step: rows sequences of nodes tokens each (the root is one), context tokens cached."""

    rows: AtLeastOne
    nodes: AtLeastOne
    context: Count
    seconds: Repeats


class DraftSeconds(Raw):
    """Repeats of drafting for rows at once, `depth` levels and `nodes` tokens a row (a chain: as many)."""

    drafter: str
    rows: AtLeastOne
    depth: AtLeastOne
    nodes: AtLeastOne
    seconds: Repeats


class AcceptanceCounts(Raw):
    """Raw counts of a run over one prompt (or several as one), in which every pass was asked to draft."""

    drafter: str
    task: str
    prompt: str = ""
    depth: AtLeastOne
    nodes: AtLeastOne
    passes: Count
    emitted: Count
    drafted_at: list[Count]
    tested_at: list[Count]
    accepted_at: list[Count]

    @classmethod
    def of(
        cls, counts: DraftCounts, *, drafter: str, task: str, prompt: str = "", depth: int, nodes: int = 0
    ) -> AcceptanceCounts:
        """From the counters of a run with drafts of at most `depth` tokens, or trees of `nodes`."""
        return cls(
            drafter=drafter,
            task=task,
            prompt=prompt,
            depth=depth,
            nodes=max(nodes, depth),
            passes=counts.passes,
            emitted=counts.emitted,
            drafted_at=counts.drafted_at,
            tested_at=counts.tested_at,
            accepted_at=counts.accepted_at,
        )

    @property
    def acceptance(self) -> Acceptance:
        """With a count of nothing for every level that was asked for and never drafted."""

        def padded(counts: list[int]) -> tuple[int, ...]:
            return (*counts, *[0] * (self.depth - len(counts)))

        return Acceptance(
            self.passes, padded(self.drafted_at), padded(self.tested_at), padded(self.accepted_at)
        )


class PrefillSeconds(Raw):
    """Repeats of reading a prompt; model: "target" or a drafter."""

    model: str
    tokens: AtLeastOne
    seconds: Repeats


class DrafterInfo(Raw):
    """memory_bytes: weights it adds. kv_bytes: of one token, 0 without a cache. parameters: 0: no weights."""

    drafter: str
    parameters: Count = 0
    memory_bytes: Count = 0
    kv_bytes: Count = 0
    same_vocabulary: bool | None = None


class Bundle(Raw):
    """One measurement of one target on one machine. block: steps compute multiples of so many tokens."""

    kind: Literal["slipstream-measure"]
    version: Literal[1]
    created: str
    model: str
    dtype: str
    parameters: AtLeastOne
    weight_bytes: AtLeastOne
    kv_bytes: Count
    block: AtLeastOne = 1
    machine: MachineInfo
    versions: dict[str, str]
    busy: bool
    busy_because: list[str] = Field(default_factory=list)
    steps: list[StepSeconds] = Field(min_length=1)
    drafts: list[DraftSeconds] = Field(default_factory=list)
    acceptance: list[AcceptanceCounts] = Field(default_factory=list)
    prefill: list[PrefillSeconds] = Field(default_factory=list)
    drafters: list[DrafterInfo] = Field(default_factory=list)
    overhead: list[Annotated[float, Field(ge=0, allow_inf_nan=False)]] = Field(default_factory=list)

    # -- derived --------------------------------------------------------------------------------

    @property
    def spread(self) -> float:
        """The widest interquartile range of a step time, as a share of its median."""
        return max(spread(s.seconds) for s in self.steps)

    @property
    def step_curve(self) -> StepCurve:
        return StepCurve(Point.of(s.rows, s.nodes, s.context, s.seconds) for s in self.steps)

    @property
    def drafter_names(self) -> list[str]:
        """Every drafter that has draft times or counts, in order of appearance."""
        named = [d.drafter for d in self.drafts] + [a.drafter for a in self.acceptance]
        return list(dict.fromkeys(named))

    def draft_curve(self, drafter: str) -> DraftCurve:
        """Raises ParameterError where the drafter's time was not measured."""
        points = [
            DraftPoint(d.rows, d.depth, d.nodes, *median(d.seconds))
            for d in self.drafts
            if d.drafter == drafter
        ]
        if not points:
            raise ParameterError(
                f"the time of drafter {drafter!r} was not measured; measured are"
                f" {', '.join(self.drafter_names) or 'none'}"
            )
        return DraftCurve(points)

    def samples(self, drafter: str) -> dict[tuple[str, int], Sample]:
        """Counts by (task, nodes of a tree; 0 for chains). Of chains, those with the longest drafts count."""
        grouped: dict[tuple[str, int], list[AcceptanceCounts]] = {}
        for counts in self.acceptance:
            if counts.drafter == drafter:
                nodes = counts.nodes if counts.nodes > counts.depth else 0
                grouped.setdefault((counts.task, nodes), []).append(counts)
        longest = {key: max(c.depth for c in group) for key, group in grouped.items()}
        return {
            key: Sample(tuple(c.acceptance for c in group if c.depth == longest[key]))
            for key, group in grouped.items()
        }

    def info(self, drafter: str) -> DrafterInfo:
        return next((d for d in self.drafters if d.drafter == drafter), DrafterInfo(drafter=drafter))

    @property
    def overhead_seconds(self) -> float:
        """The loop's own time a step, outside target and drafter."""
        return sorted(self.overhead)[len(self.overhead) // 2] if self.overhead else 0.0

    def prefill_seconds(self, model: str, tokens: int) -> float | None:
        """Of a prompt of so many tokens, in proportion between the measured ones; None: not measured."""
        known = sorted((p.tokens, median(p.seconds)[0]) for p in self.prefill if p.model == model)
        if not known:
            return None
        before = (0, 0.0)
        for point in known:
            if tokens <= point[0]:
                share = (tokens - before[0]) / (point[0] - before[0])
                return before[1] + share * (point[1] - before[1])
            before = point
        return known[-1][1] * tokens / known[-1][0]


R = TypeVar("R", bound=Raw)


def read_bundle(path: Path) -> Bundle:
    """From a file. ParameterError names the file and the field."""
    bundle = read_raw(path, Bundle, f"a measurement of version {VERSION}", "slipstream measure")
    with named(path):
        for counts in bundle.acceptance:
            counts.acceptance  # noqa: B018 - counts that contradict each other are told now
        bundle.step_curve  # noqa: B018 - as is a step that is there twice …
        for drafter in dict.fromkeys(d.drafter for d in bundle.drafts):
            bundle.draft_curve(drafter)  # … and a draft
    return bundle


def read_raw(path: Path, kind: type[R], what: str, command: str) -> R:
    """A value out of its JSON file. ParameterError names the file and the field; command: what writes it."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ParameterError(f"{path} cannot be read ({reason}): check the path") from None
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
        raise ParameterError(
            f"{path} is not {what}: {where + ': ' if where else ''}"
            f"{first['msg']}{more}; write it with `{command}`"
        ) from None


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Errors about a file's content name the file."""
    try:
        yield
    except ParameterError as error:
        raise ParameterError(f"{path}: {error}") from None


def merge(bundles: Sequence[Bundle]) -> Bundle:
    """Several measurements of one model on one machine as one; ParameterError if of different ones."""
    first, *others = bundles
    for other in others:
        for name in ("model", "dtype", "weight_bytes", "block", *_PLACE):
            mine, theirs = (_field(b, name) for b in (first, other))
            if mine != theirs:
                raise ParameterError(
                    f"the measurements differ in {name}: {mine} and {theirs}; plan with one at a time"
                )
    if not others:
        return first
    steps: dict[tuple[int, int, int], list[float]] = {}
    drafts: dict[tuple[str, int, int, int], list[float]] = {}
    for bundle in bundles:
        for s in bundle.steps:
            steps.setdefault((s.rows, s.nodes, s.context), []).extend(s.seconds)
        for d in bundle.drafts:
            drafts.setdefault((d.drafter, d.rows, d.depth, d.nodes), []).extend(d.seconds)
    return first.model_copy(
        update={
            "busy": any(b.busy for b in bundles),
            "busy_because": [reason for b in bundles for reason in b.busy_because],
            "steps": [StepSeconds(rows=r, nodes=n, context=c, seconds=v) for (r, n, c), v in steps.items()],
            "drafts": [
                DraftSeconds(drafter=k, rows=r, depth=d, nodes=n, seconds=v)
                for (k, r, d, n), v in drafts.items()
            ],
            "acceptance": _once(a for b in bundles for a in b.acceptance),
            "prefill": [p for b in bundles for p in b.prefill],
            "drafters": list({d.drafter: d for b in bundles for d in b.drafters}.values()),
            "overhead": [o for b in bundles for o in b.overhead],
        }
    )


def _once(found: Iterable[AcceptanceCounts]) -> list[AcceptanceCounts]:
    """Each but once: greedy answers to one prompt are the same each time, which tells nothing new."""
    return list({a.model_dump_json() if a.prompt else id(a): a for a in found}.values())


def _field(bundle: Bundle, path: str) -> object:
    value: object = bundle
    for name in path.split("."):
        value = getattr(value, name)
    return value


def busy_reasons(bundle: Bundle) -> list[str]:
    """Why these numbers should not be trusted: repeats that scatter, on whatever was measured."""
    reasons = list(bundle.busy_because)
    if bundle.spread > BUSY_SPREAD:
        reasons.append(
            f"repeats of a step differ by {bundle.spread:.0%} of its time (quiet: below {BUSY_SPREAD:.0%})"
        )
    return list(dict.fromkeys(reasons))


def read_bundles(paths: Iterable[Path]) -> Bundle:
    """All of them as one. ParameterError where a file is named twice, and would count twice."""
    paths = list(paths)
    places = [path.absolute() for path in paths]
    twice = next((path for path, place in zip(paths, places, strict=True) if places.count(place) > 1), None)
    if twice is not None:
        raise ParameterError(f"{twice} is given twice, and would count twice: leave one out")
    return merge([read_bundle(path) for path in paths])
