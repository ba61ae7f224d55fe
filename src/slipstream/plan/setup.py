"""What advice is given about: a target, a machine, and ways of drafting, each measured or described."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from slipstream.cost.accept import Acceptance, Sample, add_all
from slipstream.cost.bundle import Bundle, busy_reasons
from slipstream.cost.curve import DraftTime, StepCurve, StepTime
from slipstream.cost.machines import Machine
from slipstream.cost.model import Costs
from slipstream.cost.roofline import Free, Roofline
from slipstream.cost.shape import ModelShape
from slipstream.errors import ParameterError

LONGEST = 16  # drafts considered where nothing was measured
LARGEST = 1024  # rows considered likewise
MOST = 10**9  # a larger batch, context, prompt or price is a slip of the keyboard
FREE = "ngram"
ALL = "all"

Prefill = Callable[[int], float | None]


@dataclass(frozen=True)
class Candidate:
    """One drafter. name: as --drafter takes it. samples: acceptance of chains by task.

    trees: by nodes and task, for drafters measured with trees. memory_bytes, kv_bytes: what its weights, and
    one token of its cache, add. parameters: 0 without weights. prefill: seconds to read so many tokens.
    """

    name: str
    draft: DraftTime
    samples: Mapping[str, Sample]
    longest: int
    parameters: float = 0.0
    memory_bytes: float = 0.0
    kv_bytes: float = 0.0
    same_vocabulary: bool | None = None
    trees: Mapping[int, Mapping[str, Sample]] = field(default_factory=dict)
    prefill: Prefill = lambda tokens: 0.0

    @property
    def together(self) -> Sample:
        """Of all tasks."""
        return Sample(tuple(p for sample in self.samples.values() for p in sample.prompts))

    @property
    def deepest(self) -> Mapping[str, Sample]:
        """By task, of the longest drafts that were measured: chains, where there are any."""
        return self.samples if self.longest or not self.trees else self.trees[max(self.trees)]

    @property
    def rate(self) -> Acceptance:
        return add_all(sample.total for sample in self.samples.values())


@dataclass(frozen=True)
class Setup:
    """Everything that advice needs. memory: bytes there are, 0: unknown. price: USD an hour, if known.

    smallest, largest: batch sizes between which it is looked where drafting stops to pay. given: the
    acceptance is what-if, not counted.
    """

    model: str
    machine: str
    dtype: str
    costs: Costs
    batches: tuple[int, ...]
    candidates: tuple[Candidate, ...]
    parameters: float
    weight_bytes: float
    kv_bytes: float
    memory: float
    price: float | None
    prompt_tokens: int
    prefill: Prefill
    estimate: bool
    given: bool
    largest: int
    bandwidth: float | None = None
    flops: float | None = None
    roofline: Roofline | None = None
    busy: tuple[str, ...] = ()
    spread: float | None = None
    assumptions: tuple[str, ...] = ()
    smallest: int = 1

    @property
    def step(self) -> StepTime:
        return self.costs.step

    @property
    def context(self) -> int:
        return int(self.costs.context)

    @property
    def curve(self) -> StepCurve | None:
        """The measured curve, None for an estimate."""
        return self.costs.step if isinstance(self.costs.step, StepCurve) else None

    @property
    def tasks(self) -> list[str]:
        return list(dict.fromkeys(task for c in self.candidates for task in c.samples))


def check_batches(batches: Sequence[int]) -> tuple[int, ...]:
    """Sorted and without doubles. ParameterError if there are none or one is no batch size."""
    if not batches:
        raise ParameterError("there is no batch size: give --batch 1,8,64")
    wrong = next((b for b in batches if b < 1), None)
    if wrong is not None:
        raise ParameterError(f"a batch size must be at least 1, not {wrong}")
    if max(batches) > MOST:
        raise ParameterError(f"a batch size must be at most {MOST}")
    return tuple(sorted(set(batches)))


def check_price(price: float | None) -> float | None:
    if price is not None and MOST < price < float("inf"):
        raise ParameterError(f"the price must be at most {MOST} USD an hour, not {price:g}")
    if price is not None and not 0 < price <= MOST:
        raise ParameterError(f"the price must be a positive number of USD an hour, not {price:g}")
    return price


def _check_tokens(context: int, prompt_tokens: int) -> None:
    for name, value in (("context", context), ("prompt tokens", prompt_tokens)):
        if value < 1:
            raise ParameterError(f"{name} must be at least 1, not {value}")
        if value > MOST:
            raise ParameterError(f"{name} must be at most {MOST}")


def described(
    machine: Machine,
    target: ModelShape,
    drafts: Sequence[ModelShape],
    acceptance: Sequence[Sequence[float]],
    batches: Sequence[int],
    *,
    price: float | None = None,
    context: int = 1024,
    prompt_tokens: int | None = None,
    trials: float = 200,
) -> Setup:
    """From data sheets and config.json files, by roofline: an estimate.

    acceptance: conditional rates by position, one list for all drafts or one each. Without drafts the
    candidate is a drafter without a model (`ngram`) with the one list's acceptance. trials: intervals are as
    if the acceptance had been counted over so many drafts.
    """
    rates = _one_each(acceptance, max(len(drafts), 1))
    line = Roofline(machine, target)
    candidates: list[Candidate] = []
    for draft, rate in zip(drafts, rates, strict=False):
        own = Roofline(machine, draft)
        same = _same_vocabulary(target.vocab, draft.vocab)
        kind = "crossvocab" if same is False else "draft_model"  # which translates between vocabularies
        name = f"{kind}:model={draft.name}"
        if name in (c.name for c in candidates):
            raise ParameterError(
                f"two drafts are called {draft.name}, and advice could not tell them apart: name each once,"
                " or give their folders other names"
            )
        candidates.append(
            Candidate(
                name=name,
                draft=own,
                samples={ALL: Sample((Acceptance.synthetic(rate, LONGEST, trials),))},
                longest=LONGEST,
                parameters=draft.parameters,
                memory_bytes=draft.weight_bytes,
                kv_bytes=draft.kv_bytes,
                same_vocabulary=same,
                prefill=_reading(own),
            )
        )
    if not drafts:
        sample = Sample((Acceptance.synthetic(rates[0], LONGEST, trials),))
        candidates.append(Candidate(FREE, Free(), {ALL: sample}, LONGEST, same_vocabulary=True))
    prompt_tokens = context if prompt_tokens is None else prompt_tokens
    _check_tokens(context, prompt_tokens)
    batches = check_batches(batches)
    return Setup(
        model=target.name,
        machine=machine.name,
        dtype=target.dtype,
        costs=Costs(line, context=context),
        batches=batches,
        candidates=tuple(candidates),
        parameters=target.parameters,
        weight_bytes=target.weight_bytes,
        kv_bytes=target.kv_bytes,
        memory=machine.memory,
        price=check_price(price) if price is not None else machine.price,
        prompt_tokens=prompt_tokens,
        prefill=_reading(line),
        estimate=True,
        given=True,
        largest=max(LARGEST, batches[-1]),
        bandwidth=machine.bandwidth * machine.reached_bandwidth,
        flops=machine.flops_of(target.dtype) * machine.reached_flops,
        roofline=line,
        assumptions=_assumptions(machine, price, trials, context, (target, *drafts)),
    )


def _one_each(acceptance: Sequence[Sequence[float]], wanted: int) -> list[Sequence[float]]:
    """Rates of every drafter, from one list for all or one each."""
    if len(acceptance) not in (1, wanted):
        raise ParameterError(
            f"{wanted} drafts need one --acceptance for all or {wanted} of them, not {len(acceptance)}"
        )
    return list(acceptance) * (wanted if len(acceptance) == 1 else 1)


def _reading(line: Roofline) -> Prefill:
    """Seconds to read a prompt: each token sees half of it on average."""
    return lambda tokens: float(line.seconds(1, tokens, tokens / 2))


def _same_vocabulary(target: int, draft: int) -> bool | None:
    """Heads padded to another multiple may still share a tokenizer, which a config does not tell."""
    if target == draft:
        return True
    return None if abs(target - draft) < 0.01 * target else False


def _assumptions(
    machine: Machine, price: float | None, trials: float, context: int, shapes: Sequence[ModelShape]
) -> tuple[str, ...]:
    told = [
        f"kernels reach {machine.reached_bandwidth:.0%} of the bandwidth and {machine.reached_flops:.0%} of"
        " the arithmetic of the data sheet",
        f"a layer costs {machine.layer_seconds * 1e6:g} µs beside that",
        f"acceptance is as given, for every task; intervals are as if it came from {trials:g} drafts, and"
        " hold no error of the data sheet",
    ]
    told += [
        f"{shape.name} works at context {context}, though its config says {shape.positions} positions"
        for shape in shapes
        if 0 < shape.positions < context
    ]
    if price is None and machine.price is not None:
        told.append(
            f"the price of {machine.price:g} USD/h is a rough middle of 2026: give yours with --price"
        )
    return tuple(told)


def measured(
    bundle: Bundle,
    batches: Sequence[int],
    *,
    price: float | None = None,
    context: int | None = None,
    prompt_tokens: int = 512,
    acceptance: Sequence[Sequence[float]] = (),
    trials: float = 200,
) -> Setup:
    """From what `slipstream measure` wrote. Drafters without counts or without times cannot be advised.

    acceptance: what-if, as to `described`; the times stay those that were measured. A drafter that was
    measured only as a tree keeps its counts.
    """
    curve = bundle.step_curve
    batches = check_batches(batches)
    if batches[-1] > curve.max_rows:
        raise ParameterError(
            f"batch {batches[-1]} was not measured, the most is {curve.max_rows} rows: ask for less, or"
            f" measure with --rows {batches[-1]}"
        )
    if batches[0] < curve.min_rows:
        raise ParameterError(
            f"batch {batches[0]} was not measured, the least is {curve.min_rows} rows: ask for more, or"
            f" measure with --rows {batches[0]}"
        )
    context = curve.contexts[0] if context is None else context
    _check_tokens(context, prompt_tokens)
    timed = {d.drafter for d in bundle.drafts}
    candidates = []
    for name in bundle.drafter_names:
        samples = bundle.samples(name)
        if name not in timed or not samples:
            continue
        draft, info = bundle.draft_curve(name), bundle.info(name)
        trees: dict[int, dict[str, Sample]] = {}
        for (task, nodes), sample in samples.items():
            trees.setdefault(nodes, {})[task] = sample
        chains = trees.pop(0, {})
        candidates.append(
            Candidate(
                name=name,
                draft=draft,
                samples=chains or next(iter(trees.values())),
                longest=min(draft.max_depth, max(s.total.depth for s in chains.values())) if chains else 0,
                parameters=info.parameters,
                memory_bytes=info.memory_bytes,
                kv_bytes=info.kv_bytes,
                same_vocabulary=info.same_vocabulary,
                trees=trees,
                prefill=lambda tokens, name=name: bundle.prefill_seconds(name, tokens),  # type: ignore[misc]
            )
        )
    if not candidates:
        raise ParameterError(
            "no drafter has both its time and its acceptance in the measurement: measure with --drafter and"
            " --prompts"
        )
    told: tuple[str, ...] = ()
    if acceptance:
        candidates, told = _what_if(candidates, acceptance, trials)
    machine = bundle.machine
    return Setup(
        model=bundle.model,
        machine=machine.name,
        dtype=bundle.dtype,
        costs=Costs(curve, bundle.overhead_seconds, context),
        batches=batches,
        candidates=tuple(candidates),
        parameters=bundle.parameters,
        weight_bytes=bundle.weight_bytes,
        kv_bytes=bundle.kv_bytes,
        memory=machine.memory_bytes,
        price=check_price(price),
        prompt_tokens=prompt_tokens,
        prefill=lambda tokens: bundle.prefill_seconds("target", tokens),
        estimate=False,
        given=bool(acceptance),
        largest=curve.max_rows,
        bandwidth=machine.bandwidth,
        flops=machine.flops.get(bundle.dtype),
        busy=tuple(busy_reasons(bundle)),
        spread=bundle.spread,
        smallest=curve.min_rows,
        assumptions=(*told, *_beyond(curve, context)),
    )


def _beyond(curve: StepCurve, context: int) -> tuple[str, ...]:
    """What is taken for granted of a context that was not measured."""
    first, last = curve.contexts[0], curve.contexts[-1]
    if context < first:
        return (f"a step at context {context} takes what one at {first} does, the shortest measured",)
    if context <= last:
        return ()
    how = "goes on rising as it did" if first < last else f"is no longer than at {last}, which it will be"
    return (
        f"a step at context {context} {how}: measured was up to {last} (slipstream measure --contexts"
        f" {','.join(map(str, [*curve.contexts, context]))})",
    )


def _what_if(
    candidates: Sequence[Candidate], acceptance: Sequence[Sequence[float]], trials: float
) -> tuple[list[Candidate], tuple[str, ...]]:
    """With these rates instead of what was counted, and what that assumes."""
    found = []
    for candidate, rate in zip(candidates, _one_each(acceptance, len(candidates)), strict=True):
        if candidate.longest:
            sample = Sample((Acceptance.synthetic(rate, candidate.longest, trials),))
            candidate = replace(candidate, samples={ALL: sample}, trees={})
        found.append(candidate)
    told = [
        "acceptance is as given, for every task, and something is drafted in every step; what was counted is"
        f" left out. Intervals are as if it came from {trials:g} drafts"
    ]
    kept = [c.name for c in found if c.trees]
    if kept:
        told.append(f"{', '.join(kept)}: as counted, since trees have no one rate a position")
    return found, tuple(told)
