"""What steps and drafts cost, as a controller is told: measured, or guessed until it has seen some."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from slipstream.cost.accept import add_all
from slipstream.cost.curve import DraftTime, Point, StepCurve, StepTime
from slipstream.errors import ParameterError


@dataclass(frozen=True)
class Curves:
    """What a step costs with one drafter. prior: measured acceptance of first tokens. max_depth: longest
    measured draft. per_level: drafted tokens of its trees a level, 0: as the configuration says. block: steps
    with drafts are computed in multiples of so many tokens. measured: whether `step` was, or is a guess
    without a unit (`guessed_steps`)."""

    step: StepTime
    draft: DraftTime
    max_depth: int
    overhead: float = 0.0
    prior: float = 0.6
    per_level: float = 0.0
    block: int = 1
    measured: bool = True

    @classmethod
    def read(cls, path: Path, drafter: str = "") -> Curves:
        """From a measurement. ParameterError where the drafter is not in it or not named among several."""
        from slipstream.cost.bundle import named, read_bundle  # pydantic is not needed for anything else here

        bundle = read_bundle(path)
        timed = list(dict.fromkeys(d.drafter for d in bundle.drafts))
        if not timed:
            raise ParameterError(f"{path} has measured no drafter: measure with --drafter NAME")
        if not drafter and len(timed) != 1:
            raise ParameterError(
                f"{path} has measured {len(timed)} drafters ({', '.join(timed)}): name one with"
                " goodput:drafter=NAME"
            )
        name = drafter or timed[0]
        with named(path):
            draft = bundle.draft_curve(name)
        seen = add_all(sample.total for sample in bundle.samples(name).values())
        prior = float(seen.conditional(1)[0]) if sum(seen.tested) else 0.6
        overhead, block = bundle.overhead_seconds, bundle.block
        return cls(bundle.step_curve, draft, draft.max_depth, overhead, prior, block=block)


def guessed_steps() -> StepCurve:
    """A step curve for a machine of which nothing is known: level up to 16 tokens, then in proportion."""
    return StepCurve([Point(1, 1, 0, 1.0), Point(1, 16, 0, 1.0), Point(1, 32, 0, 2.0)])
