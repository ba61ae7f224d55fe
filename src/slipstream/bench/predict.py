"""What the cost model would have said of every cell, beside what was measured.

The step and draft times are those of `slipstream measure`. What is accepted comes from this bundle: a chain's
conditional acceptance is counted over the longest drafts that this drafter made at this temperature (a
shorter chain is a front part of a longer one), a tree's over trees of its own shape; where nothing was
counted, a drafter that needs no target is replayed on plain decoding's answers. Compared are steady steps,
which is what `cost.model` is about: the batch is full, prompts are read, no draft is cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slipstream.bench.bundle import PLAIN, Setting
from slipstream.bench.recorded import replay_recorded
from slipstream.bench.summary import Cell, Summary
from slipstream.cost.accept import Acceptance, Sample
from slipstream.cost.bundle import AcceptanceCounts, Bundle, MachineInfo
from slipstream.cost.model import Costs, Prediction, predict
from slipstream.errors import ParameterError, SlipstreamError
from slipstream.plan.setup import ALL

CLOSE = 0.10  # a prediction within this share of what was measured is right


@dataclass(frozen=True)
class Compared:
    """A cell with its prediction. predicted: None for the reason in `why`; measured: of steady steps, None
    where there were too few."""

    cell: Cell
    predicted: Prediction | None
    measured: float | None
    why: str = ""

    @property
    def error(self) -> float | None:
        """predicted / measured − 1."""
        if self.predicted is None or not self.measured:
            return None
        return self.predicted.speedup / self.measured - 1

    @property
    def close(self) -> bool | None:
        return None if self.error is None else abs(self.error) <= CLOSE


def require_same_model(measurement: Bundle, model: str, dtype: str) -> None:
    """ParameterError where the measurement is of another model."""
    for name, then, now in (("model", measurement.model, model), ("dtype", measurement.dtype, dtype)):
        if then != now:
            raise ParameterError(
                f"the measurement is of {name} {then}, this bench of {now}: measure the same one with"
                f" `slipstream measure --model {model}`"
            )


def other_place(measurement: Bundle, machine: MachineInfo) -> list[str]:
    """What of the machine is not alike."""
    then = measurement.machine
    pairs = (
        ("machine", then.name, machine.name),
        ("device", then.device, machine.device),
        ("threads", then.threads, machine.threads),
    )
    return [f"{name} {was} there, {now} here" for name, was, now in pairs if was != now]


class Predictor:
    """Predicts cells of one bench from one measurement."""

    def __init__(self, summary: Summary, measurement: Bundle) -> None:
        bundle = summary.bundle
        require_same_model(measurement, bundle.model, bundle.target.dtype)
        self.notes = other_place(measurement, bundle.sessions[-1].machine)
        self._summary = summary
        self._measurement = measurement
        self._curve = measurement.step_curve
        self._known: dict[tuple[str, float, tuple[int, int] | None], dict[int, Acceptance]] = {}
        self._replayed: dict[tuple[str, float, int], dict[int, Acceptance]] = {}

    def compare(self, cell: Cell) -> Compared:
        found = None if cell.steady is None else cell.steady.value
        try:
            return Compared(cell, self.predict(cell.setting, cell.task), found)
        except ParameterError as error:
            return Compared(cell, None, found, str(error))

    def cells(self) -> list[Compared]:
        """Every cell of a setting that drafts by a fixed length."""
        return [self.compare(cell) for cell in self._summary.cells if cell.setting.fixed]

    def predict(self, setting: Setting, task: str = ALL) -> Prediction:
        """ParameterError says what is lacking for it."""
        costs = Costs(self._curve, self._measurement.overhead_seconds, self._context(setting, task))
        if setting.plain:
            return costs.plain(setting.batch)
        if setting.controller:
            raise ParameterError("a controller decides how much is drafted, the model is of fixed lengths")
        if setting.batch > self._curve.max_rows:
            raise ParameterError(
                f"batch {setting.batch} was not measured, the most is {self._curve.max_rows} rows"
            )
        draft = self._measurement.draft_curve(setting.drafter)
        sample = self._sample(setting, task)
        nodes = setting.nodes if setting.tree else 0
        return predict(costs, draft, sample, setting.batch, setting.depth, nodes)

    def planned(self, setting: Setting) -> Prediction:
        """What a plan made from the measurement alone says of all tasks together; with this bundle's counts
        where the measurement has none of the drafter."""
        known = self._measurement.samples(setting.drafter)
        nodes = setting.nodes if setting.tree else 0
        prompts = tuple(p for (_, n), sample in known.items() if n == nodes for p in sample.prompts)
        if setting.plain or not prompts or setting.batch > self._curve.max_rows:
            return self.predict(setting)
        costs = Costs(self._curve, self._measurement.overhead_seconds, self._curve.contexts[0])
        draft = self._measurement.draft_curve(setting.drafter)
        return predict(costs, draft, Sample(prompts), setting.batch, setting.depth, nodes)

    def _context(self, setting: Setting, task: str) -> float:
        """Mean length of the rows in steady steps."""
        cell = self._summary.of(setting, task)
        runs = [run for run, _ in cell.pairs] if cell else []
        steps = sum(run.steady.steps for run in runs)
        if not steps:
            return float(self._curve.contexts[0])
        return sum(run.steady.context * run.steady.steps for run in runs) / steps

    # -- what is accepted -----------------------------------------------------------------------

    def _sample(self, setting: Setting, task: str) -> Sample:
        found = self._counted(setting) or self._replay(setting)
        wanted = [a for i, a in found.items() if task in (ALL, self._summary.bundle.prompts[i].task)]
        if not wanted:
            raise ParameterError(
                f"no steady step of {setting.drafter} was counted on {task}: answers need more tokens"
                " (--tokens), or the batch more prompts"
            )
        return Sample(tuple(wanted))

    def _counted(self, setting: Setting) -> dict[int, Acceptance]:
        """Steady counts by prompt, once a prompt: other rounds and batch sizes say the same again."""
        size = (setting.depth, setting.nodes) if setting.tree else None
        key = (setting.drafter, setting.temperature, size)
        if key not in self._known:
            source = {
                place: s
                for place, s in enumerate(self._summary.bundle.settings)
                if s.fixed and (s.drafter, s.temperature) == key[:2]
                if ((s.depth, s.nodes) if s.tree else None) == size
            }
            self._known[key] = self._count(source)
        return self._known[key]

    def _count(self, source: Mapping[int, Setting]) -> dict[int, Acceptance]:
        """Of each prompt the counts with the longest drafts, the smallest batch, the first round."""
        found: dict[int, tuple[tuple[int, int, int], Acceptance]] = {}
        for run in self._summary.bundle.runs:
            made = source.get(run.setting)
            if made is None:
                continue
            rank = (-made.depth, made.batch, run.round)
            for answer in run.answers:
                known = found.get(answer.prompt)
                if answer.steady.passes and (known is None or rank < known[0]):
                    found[answer.prompt] = (rank, answer.steady.acceptance(made.depth))
        return {prompt: counts for prompt, (_, counts) in found.items()}

    def _replay(self, setting: Setting) -> dict[int, Acceptance]:
        """Counts of a drafter without a model on plain decoding's answers; none where that cannot be."""
        key = (setting.drafter, setting.temperature, setting.depth)
        if key not in self._replayed:
            try:
                self._replayed[key] = self._replay_now(setting)
            except SlipstreamError:
                self._replayed[key] = {}
        return self._replayed[key]

    def _replay_now(self, setting: Setting) -> dict[int, Acceptance]:
        _, counts = replay_recorded(
            self._summary.bundle,
            setting.drafter,
            setting.temperature,
            lambda drafter: (setting.depth, setting.nodes),
        )
        spec = {"drafter": setting.drafter, "task": PLAIN, "depth": setting.depth, "nodes": setting.nodes}
        return {
            i: AcceptanceCounts.of(c, **spec).acceptance  # type: ignore[arg-type]
            for i, c in counts.items()
            if c.passes
        }
