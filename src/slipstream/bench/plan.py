"""What a bench measures: the settings, and the units of prompts that each of them answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest

from slipstream.bench.bundle import PLAIN, Plan, Setting, Unit
from slipstream.control import build_controller
from slipstream.control.fixed import tree_nodes
from slipstream.core.draft import Drafter
from slipstream.core.spec import parse_spec
from slipstream.drafters import check_spec
from slipstream.errors import ParameterError


def check_plan(plan: Plan) -> Plan:
    """With every drafter and controller known, so that a mistyped one is told before anything is loaded."""
    if not plan.drafters:
        raise ParameterError("there is no drafter to measure: give --drafter, see `slipstream drafters`")
    for spec in plan.drafters:
        if spec.strip() == PLAIN:
            raise ParameterError("plain decoding is always measured: leave out --drafter none")
        check_spec(spec)
    for name, values in (("drafter", plan.drafters), ("controller", plan.controllers)):
        twice = next((v for v in values if values.count(v) > 1), None)
        if twice is not None:
            raise ParameterError(f"--{name} {twice} is given twice: leave one out")
    for controller in plan.controllers:
        for spec in plan.drafters:
            build_controller(controller, 1, drafter=spec)
    return plan


def make_units(plan: Plan, tasks: Sequence[str]) -> list[Unit]:
    """tasks: of each prompt. Batches, temperatures and tasks take turns, so that a run that ends early has
    something of each."""
    by_task: dict[str, list[int]] = {}
    for i, task in enumerate(tasks):
        by_task.setdefault(task, []).append(i)
    columns = []
    for batch in sorted(set(plan.batches)):
        for temperature in sorted(set(plan.temperatures)):
            for task, places in by_task.items():
                filled = [places[i % len(places)] for i in range(-(-len(places) // batch) * batch)]
                groups = [filled[i : i + batch] for i in range(0, len(filled), batch)]
                columns.append(
                    [Unit(task=task, batch=batch, temperature=temperature, prompts=g) for g in groups]
                )
    return [unit for line in zip_longest(*columns) for unit in line if unit is not None]


def make_settings(plan: Plan, built: Mapping[str, Drafter]) -> list[Setting]:
    """Plain decoding, then every drafter at every length and with every controller, for each batch size and
    temperature. A drafter whose options say its length has that one."""
    found = []
    for batch in sorted(set(plan.batches)):
        for temperature in sorted(set(plan.temperatures)):
            here = Setting(drafter=PLAIN, batch=batch, temperature=temperature)
            found.append(here)
            for spec, drafter in built.items():
                own = "num_speculative_tokens" in parse_spec(spec)[1]
                lengths = [] if own else sorted(set(plan.lengths))
                for depth in lengths or [drafter.num_speculative_tokens]:
                    size = {"depth": depth, "nodes": tree_nodes(drafter, depth)}
                    found.append(here.model_copy(update={"drafter": spec, **size}))
                for controller in plan.controllers:
                    found.append(here.model_copy(update={"drafter": spec, "controller": controller}))
    return found
