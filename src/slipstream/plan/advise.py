"""Advice: which drafter, how long, from which batch on not at all, what it saves, and what it rests on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from slipstream.cost.accept import Sample
from slipstream.cost.model import Prediction, best_length, expect, predict, simple_rule, speedup
from slipstream.cost.roofline import extra_cost, measured_regime, spare_tokens
from slipstream.plan.rules import Check, Rule, check_rules, checklist
from slipstream.plan.setup import ALL, FREE, Candidate, Setup

# A smaller predicted gain is within what a prediction may be wrong by.
WORTH = 1.02


@dataclass(frozen=True)
class Option:
    """One drafter at its best for one batch size. cost: USD a million tokens; memory: bytes it adds.

    classic: what theorem 3.8 says for the same length with one α and c; simple: what γ/(1+(1−α)γ) says.
    """

    drafter: str
    prediction: Prediction
    memory: float
    cost: float | None
    classic: float
    simple: float
    second_token_wait: float | None

    @property
    def pays(self) -> bool:
        return self.prediction.speedup >= WORTH

    @property
    def sure(self) -> bool:
        """Whether the whole interval is a gain."""
        return self.prediction.low > 1.0

    @property
    def flags(self) -> str:
        """The options of `slipstream run` that set it."""
        nodes = f",nodes={self.prediction.nodes}" if self.prediction.nodes > self.prediction.depth else ""
        length = self.prediction.depth
        return f"--drafter {self.drafter} --controller fixed:num_speculative_tokens={length}{nodes}"


@dataclass(frozen=True)
class BatchAdvice:
    """One batch size. best: None where nothing pays.

    extra: what verifying 1, 4, 8, 16 more tokens a row adds, as a share of the plain step. spare: how many
    more add at most 10 %. first_token: seconds to it, which waits for no drafter. tasks: the best of each.
    """

    batch: int
    regime: str
    intensity: float | None
    extra: dict[int, float]
    spare: int
    plain: Prediction
    cost: float | None
    memory: float
    fits: bool | None
    first_token: float | None
    best: Option | None
    options: tuple[Option, ...]
    tasks: dict[str, Option | None]


@dataclass(frozen=True)
class Scenario:
    """A default for a way of use: the options that set it, and why these."""

    name: str
    flags: str
    speedup: float | None
    why: str


@dataclass(frozen=True)
class Advice:
    """off_from: the smallest batch from which nothing pays any more, up to `looked_to`; None: it pays as far
    as was looked. lengths: predictions by drafter, batch and length; by_batch: the best speed-up by drafter
    and batch; both for charts."""

    setup: Setup
    batches: tuple[BatchAdvice, ...]
    off_from: int | None
    looked_to: int
    rules: dict[str, tuple[Rule, ...]]
    checks: tuple[Check, ...]
    scenarios: tuple[Scenario, ...]
    lengths: dict[str, dict[int, list[Prediction]]] = field(repr=False)
    by_batch: dict[str, list[tuple[int, float]]] = field(repr=False)

    @property
    def verdict(self) -> str:
        """One sentence."""
        word = "estimated" if self.setup.estimate else "predicted"
        paying = [b for b in self.batches if b.best]
        if not paying:
            asked = ", ".join(str(b.batch) for b in self.batches)
            return f"Speculation does not pay here at batch {asked}: decode plainly."
        best = max(paying, key=lambda b: b.best.prediction.speedup if b.best else 0.0)
        assert best.best is not None
        tight = ", ".join(str(b.batch) for b in self.batches if b.fits is False)
        short = f" It does not fit in memory at batch {tight}." if tight else ""
        said = (
            f"Speculation pays: {word} {best.best.prediction.speedup:.2f} times as fast at batch {best.batch}"
            f" with {best.best.drafter}, {best.best.prediction.depth} tokens"
        )
        if self.off_from is None:
            return f"{said}; it pays at every batch up to {self.looked_to}.{short}"
        return f"{said}; from batch {self.off_from} on it does not pay.{short}"


def advise(setup: Setup) -> Advice:
    """See `Advice`."""
    batches = tuple(_batch(setup, batch) for batch in setup.batches)
    grid = batch_grid(setup.largest, setup.smallest, setup.batches)
    by_batch = {c.name: [(b, _best(setup, c, c.together, b).speedup) for b in grid] for c in setup.candidates}
    rules = {c.name: check_rules(setup, c, setup.batches[0]) for c in setup.candidates}
    return Advice(
        setup=setup,
        batches=batches,
        off_from=_off_from(setup, by_batch, grid),
        looked_to=grid[-1],
        rules=rules,
        checks=checklist(setup, batches, rules),
        scenarios=_scenarios(setup, batches),
        lengths={c.name: {b: _lengths(setup, c, b) for b in setup.batches} for c in setup.candidates},
        by_batch=by_batch,
    )


def batch_grid(largest: int, smallest: int = 1, asked: Sequence[int] = ()) -> list[int]:
    """Every batch up to 16, then a fifth more each time, up to and with the largest; and those asked for."""
    grid = list(range(smallest, min(largest, 16) + 1)) or [smallest]
    while grid[-1] < largest:
        grid.append(min(max(grid[-1] * 6 // 5, grid[-1] + 1), largest))
    return sorted({*grid, *asked})


def _best(setup: Setup, candidate: Candidate, sample: Sample, batch: int, task: str = ALL) -> Prediction:
    """The best chain or measured tree, no interval."""
    found = best_length(setup.costs, candidate.draft, sample, batch, candidate.longest)
    for nodes, samples in candidate.trees.items():
        if task != ALL and task not in samples:
            continue
        counted = samples[task] if task != ALL else _together(samples)
        tree = expect(setup.costs, candidate.draft, counted, batch, len(counted.total.drafted), nodes)
        found = max(found, tree, key=lambda p: p.speedup)
    return found


def _together(samples: Mapping[str, Sample]) -> Sample:
    return Sample(tuple(p for sample in samples.values() for p in sample.prompts))


def _option(setup: Setup, candidate: Candidate, batch: int, task: str = ALL) -> Option:
    """The best of a drafter with its interval. Plain decoding is no option: at least one token is drafted."""
    chains = candidate.together if task == ALL else candidate.samples[task]
    found = _best(setup, candidate, chains, batch, task)
    sample = chains
    if found.depth == 0:  # it never pays: shown is what its shortest draft would cost
        found = expect(setup.costs, candidate.draft, chains, batch, 1)
    elif found.nodes > found.depth:
        trees = candidate.trees[found.nodes]
        sample = _together(trees) if task == ALL else trees[task]
    found = predict(setup.costs, candidate.draft, sample, batch, found.depth, found.nodes)
    alpha = sample.total.rate
    c = candidate.draft.draft_seconds(batch, 1, 1, setup.context) / found.plain_seconds
    return Option(
        candidate.name,
        found,
        extra_memory(setup, candidate, batch, found.nodes),
        _cost(setup, found.rate),
        speedup(alpha, found.depth, c),
        simple_rule(alpha, found.depth),
        candidate.prefill(setup.prompt_tokens),
    )


def extra_memory(setup: Setup, candidate: Candidate, batch: int, nodes: int) -> float:
    """Bytes beside plain decoding: the drafter's weights and cache, the target's keys of drafted tokens."""
    cache = batch * (setup.context + nodes) * candidate.kv_bytes
    return candidate.memory_bytes + cache + batch * nodes * setup.kv_bytes


def _cost(setup: Setup, rate: float) -> float | None:
    """USD a million tokens at so many tokens a second."""
    return None if setup.price is None else setup.price / 3600 / rate * 1e6


def _batch(setup: Setup, batch: int) -> BatchAdvice:
    plain = setup.costs.plain(batch)
    options = sorted(
        (_option(setup, c, batch) for c in setup.candidates), key=lambda o: -o.prediction.speedup
    )
    memory = setup.weight_bytes + batch * setup.context * setup.kv_bytes
    best = options[0] if options[0].pays else None
    needed = memory + (best.memory if best else 0.0)
    tasks: dict[str, Option | None] = {}
    for task in setup.tasks:
        own = max(
            (_option(setup, c, batch, task) for c in setup.candidates if task in c.samples),
            key=lambda o: o.prediction.speedup,
        )
        tasks[task] = own if own.pays else None
    line = setup.roofline
    reading = setup.prefill(setup.prompt_tokens)
    return BatchAdvice(
        batch=batch,
        regime=line.regime(batch, 1, setup.context)
        if line
        else measured_regime(setup.step, batch, setup.context),
        intensity=line.intensity(batch, 1, setup.context) if line else None,
        extra=extra_cost(setup.step, batch, setup.context),
        spare=spare_tokens(setup.step, batch, setup.context),
        plain=plain,
        cost=_cost(setup, plain.rate),
        memory=memory,
        fits=needed <= setup.memory if setup.memory else None,
        first_token=None if reading is None else reading + plain.step_seconds,
        best=best,
        options=tuple(options),
        tasks=tasks,
    )


def _off_from(setup: Setup, by_batch: Mapping[str, list[tuple[int, float]]], grid: list[int]) -> int | None:
    best = [max(points[i][1] for points in by_batch.values()) for i in range(len(grid))]
    if best[-1] >= WORTH:
        return None
    last = max((i for i, value in enumerate(best) if value >= WORTH), default=-1)
    if last < 0:
        return grid[0]
    pays, off = grid[last], grid[last + 1]
    while off - pays > 1:
        middle = (pays + off) // 2
        found = max(_best(setup, c, c.together, middle).speedup for c in setup.candidates)
        pays, off = (middle, off) if found >= WORTH else (pays, middle)
    return off


def _lengths(setup: Setup, candidate: Candidate, batch: int) -> list[Prediction]:
    """Chains of every length; of a drafter without chains the trees that were measured."""
    drafts = [(depth, 0, candidate.together) for depth in range(1, candidate.longest + 1)]
    if not drafts:
        trees = [(nodes, _together(samples)) for nodes, samples in sorted(candidate.trees.items())]
        drafts = [(len(sample.total.drafted), nodes, sample) for nodes, sample in trees]
    return [
        predict(setup.costs, candidate.draft, sample, batch, depth, nodes) for depth, nodes, sample in drafts
    ]


def _scenarios(setup: Setup, batches: tuple[BatchAdvice, ...]) -> tuple[Scenario, ...]:
    first, last = batches[0], batches[-1]
    middle = batches[len(batches) // 2]

    def chosen(name: str, option: Option | None, why: str, off: str) -> Scenario:
        if option is None or not option.pays:
            return Scenario(name, "--drafter none", 1.0, off)
        return Scenario(name, option.flags, option.prediction.speedup, why)

    light = [o for o in first.options if o.memory <= 0.05 * setup.weight_bytes and o.pays]
    weightless = {c.name for c in setup.candidates if not c.parameters}
    quick = next((o for o in first.options if o.drafter in weightless), None)
    safest = max(first.options, key=lambda o: o.prediction.low)
    rows = f"batch {last.batch}"
    return (
        chosen(
            "quick start",
            quick,
            "no second model to load, and next to no cost where it is wrong",
            f"what drafts here without a model does not pay at batch {first.batch}",
        )
        if quick is not None
        else Scenario(
            "quick start",
            f"--drafter {FREE}",
            None,
            "no second model to load; not measured here, try --compare",
        ),
        chosen(
            "general",
            middle.best,
            f"best at batch {middle.batch}; with a measured curve, --controller goodput:curve=FILE adapts it",
            f"nothing pays at batch {middle.batch}",
        ),
        chosen(
            "high throughput",
            last.best,
            f"still pays at {rows}",
            f"nothing pays at {rows}: the machine has no idle arithmetic left to check drafts with",
        ),
        chosen("memory-poor", light[0], "adds less than 5 % of the target's memory", "")
        if light
        else Scenario(
            "memory-poor", f"--drafter {FREE}", None, "every drafter here adds more than 5 % of the target"
        ),
        chosen(
            "chat latency",
            safest,
            f"the largest lower bound at batch {first.batch}, where each token is waited for",
            f"nothing pays at batch {first.batch}",
        ),
    )
