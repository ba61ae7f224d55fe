"""A short measurement of the very session that is going to serve, for the controller `goodput`.

It takes some seconds and is kept in the cache folder, so the next start need not. It may be a little wrong:
the controller holds it against the steps it sees.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from slipstream.control import Goodput, GoodputConfig
from slipstream.control.curves import Curves, guessed_steps
from slipstream.core.draft import Drafter
from slipstream.cost.bundle import BUSY_SPREAD, Bundle, DraftSeconds, read_bundle
from slipstream.cost.curve import spread
from slipstream.cost.roofline import Free, spare_tokens
from slipstream.engine.inputs import question_ids
from slipstream.engine.session import Session
from slipstream.errors import ParameterError
from slipstream.model.pack import ROWS
from slipstream.model.parts import ModelParts
from slipstream.model.progress import Progress
from slipstream.model.store import Store, write_atomic
from slipstream.plan.here import load_reasons, processor, this_machine
from slipstream.plan.measure import bundle_of, kept_as, target_shape
from slipstream.plan.timing import draft_seconds, step_seconds
from slipstream.prompts.rows import read_prompts
from slipstream.version import __version__

LIMIT = 20.0  # seconds
LEARNED = "what steps take is learned on the way"
_STEPS, _DRAFTS = 0.6, 0.85  # shares of it after which no step, and no run of drafts, is begun
_NODES = (1, 2, 4, 8, 16)
_MOST_TOKENS = 128
_CONTEXT = 32  # caches are as wide as for some hundreds of tokens anyway
_PROMPT = 16
_ROUNDS = 3
_MOST_DRAFTING = 16  # rows; beyond, the time goes on in a straight line
_LONGEST = 8  # drafts, where the drafter itself sets no bound


@dataclass(frozen=True)
class Offer:
    """A drafter that requests can have: built, and as it was asked for."""

    drafter: Drafter
    spec: str

    @property
    def depth(self) -> int:
        """The longest draft that makes sense. Trees and heads were made for one depth."""
        drafter, needs = self.drafter, self.drafter.needs
        bound = drafter.draft_nodes or needs.hidden_layers or needs.last_hidden
        longest = drafter.num_speculative_tokens
        return longest if bound or not longest else max(longest, _LONGEST)

    @property
    def per_level(self) -> float:
        """Drafted tokens a level."""
        return max(self.drafter.draft_nodes / max(self.drafter.num_speculative_tokens, 1), 1.0)


@dataclass(frozen=True)
class Calibrated:
    """A controller for the rows of all drafters, and what its curves say, for a person."""

    controller: Goodput
    told: str


def corners(rows: int, block: int = ROWS) -> list[tuple[int, int]]:
    """(rows, nodes) that show every kink for up to so many rows.

    A step is padded to `block` tokens, so with drafts none below that is another one.
    """
    powers = [1 << i for i in range(rows.bit_length()) if 1 << i < rows]
    return [(r, n) for r in (*powers, rows) for n in _NODES if n == 1 or block <= r * n <= _MOST_TOKENS]


def calibrate(session: Session, offers: Mapping[str, Offer], rows: int, limit: float = LIMIT) -> Bundle:
    """Measure for up to `rows` rows, within about `limit` seconds: steps first, then the drafters in order.

    The session drafts plainly afterwards. What there was no time for is not in the measurement.
    """
    engine, began = session.engine, time.perf_counter()
    before, runner = load_reasons(), engine.runner
    engine.set_drafter(None)
    context = max(min(_CONTEXT, runner.context - max(_NODES) - 1), 1)
    grid = [(r, n, context) for r, n in corners(rows, runner.block)]
    steps = step_seconds(runner, grid, _ROUNDS, limit=_STEPS * limit)
    drafts, overhead = list[DraftSeconds](), list[float]()
    prompt = question_ids(session.tokenizer, read_prompts()[0].asked)[: min(_PROMPT, engine.context // 2)]
    try:
        for offer in offers.values():
            for at, depth in _draft_runs(offer, rows):
                if time.perf_counter() - began > _DRAFTS * limit:
                    break
                engine.set_drafter(offer.drafter)
                run = draft_seconds(session, [prompt], offer.spec, at, depth, _ROUNDS)
                drafts += run.drafts
                overhead += run.overhead
    finally:
        engine.set_drafter(None)
    return bundle_of(
        session,
        "target",
        machine=this_machine(runner.device),
        busy=bool(before),
        busy_because=before,
        steps=steps,
        drafts=drafts,
        overhead=overhead,
    )


def _draft_runs(offer: Offer, rows: int) -> list[tuple[int, int]]:
    """(rows, depth) to time a drafter at, what tells most first."""
    depth = offer.depth
    if not depth:
        return []
    rows, several = min(rows, _MOST_DRAFTING), min(depth, 4)
    runs = [(1, depth), (rows, several), (1, 1), (max(rows // 4, 1), several)]
    return list(dict.fromkeys(runs))


# -- kept from start to start -----------------------------------------------------------------------


def kept_at(session: Session, offers: Mapping[str, Offer], rows: int) -> Path:
    """The file of a calibration of just this: target, drafters, numbers, machine and versions."""
    runner = session.engine.runner
    key = {
        "target": ModelParts.of(session.info.model).fingerprint,
        "bytes": runner.weight_bytes,
        "dtype": kept_as(session),
        "drafters": [offer.spec for offer in offers.values()],
        "rows": rows,
        "block": runner.block,
        "device": runner.device.type,
        "machine": processor(runner.device),
        "threads": torch.get_num_threads(),
        "versions": [__version__, torch.__version__],
    }
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    return Store.default().root / "calibration" / f"{name}.json"


def read_kept(path: Path, rows: int) -> Bundle | None:
    """None where there is none, or one that is damaged or measures too little."""
    if not path.is_file():
        return None
    try:
        bundle = read_bundle(path)
    except ParameterError:
        return None
    return bundle if bundle.step_curve.covers(rows, 1, bundle.steps[0].context) else None


def keep(path: Path, bundle: Bundle) -> str:
    """Write it for the next start, unless the machine was too busy; what became of it, for a person."""
    if statistics.median(spread(step.seconds) for step in bundle.steps) > BUSY_SPREAD:
        return "not kept, for repeats differ: the machine is busy"
    try:
        write_atomic(path, bundle.model_dump_json(indent=1) + "\n")
    except OSError as error:
        return f"not kept, for {path} cannot be written ({error.strerror})"
    return f"kept in {path}"


# -- the controller ---------------------------------------------------------------------------------


def goodput_for(
    session: Session,
    offers: Mapping[str, Offer],
    config: GoodputConfig,
    rows: int,
    *,
    measure: bool = True,
    progress: Progress,
) -> Calibrated | None:
    """`goodput` for up to `rows` rows of these drafters, by name, the default first; None if none drafts.

    The curves are those of the file that the configuration names, or kept from an earlier start, or measured
    now, or, without `measure`, learned on the way. ParameterError for a file without the default drafter.
    """
    offers = {name: offer for name, offer in offers.items() if offer.depth}
    if not offers:
        return None
    if config.curve:
        bundle: Bundle | None = read_bundle(Path(config.curve))
        source = f"steps as measured in {config.curve}"
    elif measure:
        bundle, source = _measured(session, offers, rows, progress)
    else:
        bundle, source = None, LEARNED
    block = session.engine.runner.block
    curves = {name: _curves(bundle, offer, block) for name, offer in offers.items()}
    if bundle is not None and config.curve:
        name, offer = next(iter(offers.items()))
        known = config.drafter or (offer.spec if offer.spec in bundle.drafter_names else "")
        curves[name] = replace(Curves.read(Path(config.curve), known), per_level=offer.per_level)
    controller = Goodput(config, curves)
    told = source if bundle is None else f"{source}; {outlook(controller, curves, rows)}"
    return Calibrated(controller, f"goodput: {told}")


def _measured(
    session: Session, offers: Mapping[str, Offer], rows: int, progress: Progress
) -> tuple[Bundle | None, str]:
    """What is kept, else a new measurement; and its source for a person."""
    path = kept_at(session, offers, rows)
    bundle = read_kept(path, rows)
    if bundle is not None:
        return bundle, f"steps as measured on {bundle.created[:10]} ({path})"
    try:
        target_shape(session.engine.runner, "target")
    except ParameterError as error:
        return None, f"{LEARNED} ({error})"
    progress.stage(f"measuring steps and drafts for at most {LIMIT:.0f} s", 0)
    began = time.perf_counter()
    bundle = calibrate(session, offers, rows)
    return bundle, f"steps measured in {time.perf_counter() - began:.1f} s, {keep(path, bundle)}"


def _curves(bundle: Bundle | None, offer: Offer, block: int) -> Curves:
    """Of one drafter. One whose time is not known is taken to be free until its steps say otherwise.

    block: of steps, where none was measured.
    """
    if bundle is None:
        free = Curves(guessed_steps(), Free(), offer.depth, block=block, measured=False)
        return replace(free, per_level=offer.per_level)
    timed = offer.spec in {draft.drafter for draft in bundle.drafts}
    draft = bundle.draft_curve(offer.spec) if timed else Free()
    own = Curves(bundle.step_curve, draft, offer.depth, bundle.overhead_seconds, block=bundle.block)
    return replace(own, per_level=offer.per_level)


def outlook(controller: Goodput, curves: Mapping[str, Curves], rows: int) -> str:
    """What the curves mean for up to so many rows, for a person."""
    step = next(iter(curves.values())).step
    told = [
        f"{spare_tokens(step, at)} more tokens a row cost at most 10 % at {at} row{'s' if at > 1 else ''}"
        for at in sorted({1, rows})
    ]
    for name, own in curves.items():
        off = next((at for at in range(1, rows + 1) if not controller.depth_at(at, name)), None)
        till = "at every batch" if off is None else f"below {off} rows" if off > 1 else "at no batch"
        told.append(f"{name} pays {till} where {own.prior:.0%} of its tokens are accepted")
    return "; ".join(told)
