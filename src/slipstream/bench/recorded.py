"""What drafters would have had accepted on the answers that a bench recorded: seconds, without the target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slipstream.bench.bundle import BenchBundle
from slipstream.control.fixed import fixed_spec, tree_nodes
from slipstream.core.draft import Drafter
from slipstream.core.stats import DraftCounts
from slipstream.errors import ParameterError
from slipstream.plan.page import drafted
from slipstream.plan.setup import ALL

Size = Callable[[Drafter], tuple[int, int]]  # depth and nodes of its drafts


@dataclass(frozen=True)
class Replayed:
    """A drafter on plain decoding's answers at one temperature. counts: by task, "all" among them."""

    drafter: str
    depth: int
    nodes: int
    temperature: float
    counts: dict[str, DraftCounts]

    @property
    def size(self) -> str:
        """For people."""
        return drafted(self.depth, self.nodes)


def replay_recorded(
    bundle: BenchBundle, spec: str, temperature: float, size: Size
) -> tuple[tuple[int, int], dict[int, DraftCounts]]:
    """The size of its drafts, and the counts of each prompt (by place), the drafter starting anew for each.

    Raises DrafterError for a drafter that needs the target's states or draws its drafts.
    """
    from slipstream.drafters import TargetInfo, build_drafter  # torch is needed for nothing else here
    from slipstream.plan.replay import Recorded, replay

    answers: dict[int, Sequence[int]] = {}
    for run in bundle.runs:
        made = bundle.of(run)
        if made.plain and made.temperature == temperature:
            answers.update({a.prompt: a.ids for a in run.answers if a.prompt not in answers})
    target = TargetInfo(bundle.target.vocab_size, 1 << 20)
    counts: dict[int, DraftCounts] = {}
    chosen = (0, 0)
    for place, ids in answers.items():  # a new one for each: here none has learned from others
        drafter = build_drafter(spec, target)
        try:
            chosen = size(drafter)
            record = Recorded(tuple(bundle.prompts[place].ids), tuple(ids), bundle.plan.tokens)
            (counts[place],) = replay(drafter, [record], fixed_spec(*chosen))
        finally:
            drafter.shutdown()
    return chosen, counts


def replay_all(bundle: BenchBundle, specs: Sequence[str], lengths: Sequence[int] = ()) -> list[Replayed]:
    """Every drafter at every length (none: its own) and temperature that plain decoding was measured at."""
    found = []
    warm = sorted({bundle.of(run).temperature for run in bundle.runs if bundle.of(run).plain})
    for spec in specs:
        for length in lengths or (0,):
            for temperature in warm:
                (depth, nodes), counts = replay_recorded(bundle, spec, temperature, _sized(length))
                if not depth:
                    raise ParameterError(f"{spec} drafts nothing, so there is nothing to replay")
                tasks = {ALL: DraftCounts()}
                for place, one in counts.items():
                    for task in (bundle.prompts[place].task, ALL):
                        tasks.setdefault(task, DraftCounts()).add(one)
                found.append(Replayed(spec, depth, nodes, temperature, tasks))
    return found


def _sized(length: int) -> Size:
    def size(drafter: Drafter) -> tuple[int, int]:
        depth = length or drafter.num_speculative_tokens
        return depth, tree_nodes(drafter, depth)

    return size
