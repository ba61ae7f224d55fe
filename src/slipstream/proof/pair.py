"""`verify_pair`: the whole proof for a model and a drafter on this machine, within a time limit."""

from __future__ import annotations

import itertools
import os
import platform
import time
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from importlib.metadata import version
from typing import Any

import torch

from slipstream.api import load
from slipstream.control import Controller
from slipstream.core.draft import Drafter
from slipstream.core.params import SamplingParams
from slipstream.drafters.draft_model import ModelDrafter
from slipstream.drafters.none import NoDrafter
from slipstream.engine.session import Completion, Session
from slipstream.errors import ParameterError
from slipstream.model.load import LoadedModel
from slipstream.model.parts import ModelParts
from slipstream.model.progress import Progress, Silent
from slipstream.plan.here import machine_name
from slipstream.plan.measure import questions
from slipstream.prompts.rows import Row, read_prompts
from slipstream.proof import identity
from slipstream.proof.exact import enumerate_law
from slipstream.proof.identity import IdentityCheck, Setting
from slipstream.proof.law import LAWS, Drawing, LawCheck, check_law, undecided_text
from slipstream.proof.plan import SHORTEST, Plan
from slipstream.proof.probes import Drawn, Likeliest, Replay
from slipstream.proof.reference import Reference
from slipstream.proof.report import About, Proof, conclude
from slipstream.verify import check_rule
from slipstream.version import __version__

_ALONE = 2  # prompts that are also decoded alone
_SETTINGS = 7  # that answers are compared under; the last decodes a few prompts alone
_RUNS = (_SETTINGS - 1) * 4 + 3
_SHARE = 0.5  # of the time, for the identity checks


def verify_pair(
    model: str | os.PathLike[str] | LoadedModel,
    drafter: str | Drafter = "ngram",
    *,
    prompts: Sequence[Row] | None = None,
    plan: Plan | None = None,
    controller: Controller | str | None = None,
    rule: str = "auto",
    progress: Progress | None = None,
    **options: Any,
) -> Proof:
    """Try to find a difference between plain decoding and speculation with this drafter.

    model, drafter, controller, rule and options as `slipstream.load` takes them; a rule that is lossy by
    design is tried too, and never verified. prompts: None is the small set that ships with Slipstream
    (`prompts.rows.read_prompts` reads a file). `Proof.verdict` says what came of it.
    """
    plan = plan or Plan()
    lossy = check_rule(rule, lossy=True)
    asked = read_prompts(None) if prompts is None else prompts
    with load(
        model, drafter, max_rows=plan.rows, rule=rule, lossy=lossy, progress=progress, **options
    ) as session:
        spec = drafter if isinstance(drafter, str) else drafter.name
        about = _about(session, model, spec, controller, rule, lossy)
        return _Prover(session, spec, asked, plan, controller, progress or Silent()).prove(about)


class _Prover:
    """The checks of one session, in order, and what they found."""

    def __init__(
        self,
        session: Session,
        spec: str,
        asked: Sequence[Row],
        plan: Plan,
        controller: Controller | str | None,
        progress: Progress,
    ) -> None:
        if not asked:
            raise ParameterError("there are no prompts: give at least one")
        self.session, self.plan, self.controller, self.progress = session, plan, controller, progress
        self.drafter = session.drafter
        plain = isinstance(self.drafter, NoDrafter)
        self.own: list[tuple[str, Drafter]] = [] if plain else [(spec, self.drafter)]
        self.asked = asked[: plan.prompts]
        self.prompts = questions(session, self.asked, plan.horizon)
        self.began = time.monotonic()
        self.deadline = self.began + 60.0 * plan.minutes
        self.numbers: Iterator[int] = itertools.count(plan.seed << 32)
        self.seeds = [next(self.numbers) for _ in self.prompts]
        self.same: list[IdentityCheck] = []
        self.laws: list[LawCheck] = []
        self.done = 0

    @property
    def enough(self) -> bool:
        """A reason to stop."""
        broken = any(check.broken for check in self.same) or any(law.broken for law in self.laws)
        return self.plan.fail_fast and broken

    def prove(self, about: About) -> Proof:
        reference = Reference(self.session.engine)
        try:
            greedy = self._identities(reference)
            told = time.monotonic()
            if not self.enough:
                self._laws(reference, greedy)
        finally:
            reference.close()
        names = [p.name for p in self.asked]
        seconds = {"identity": told - self.began, "law": time.monotonic() - told}
        return conclude(about, self.plan, names, self.same, self.laws, seconds)

    # -- the same tokens ------------------------------------------------------------------------------

    def _identities(self, reference: Reference) -> list[Completion]:
        """Gives the greedy answers of plain decoding."""
        first = identity.first_settings(self.seeds, self._tokens())
        self.progress.stage("comparing with plain decoding", _RUNS, "runs")
        told: dict[str, list[Completion]] = {}
        for setting in first:
            told[setting.name] = self._compare(reference, setting)
            if self.enough:
                return told[first[0].name]
        for setting in identity.later_settings(first[1], told[first[1].name]):
            if not self.enough:
                self._compare(reference, setting)
        if not self.enough:
            self._alone(reference, first[0], told[first[0].name])
        return told[first[0].name]

    def _tokens(self) -> int:
        """Tokens of each answer, as many as the time allows; short runs tell how long steps take."""
        warm = SamplingParams(max_tokens=4, ignore_eos=True)
        setting = Setting("warm-up", tuple(warm.with_(seed=seed) for seed in self.seeds))
        known = identity.known(self.seeds, identity.plainly(self.session, self.prompts, setting))
        reading = deciding = 0.0
        # Of a setting: plain decoding, two drafters whose chains give two tokens a pass or so, and a tree.
        for share, drafter in (
            (1.0, None),
            (1.0, Replay(known, tree=False)),
            (0.25, Replay(known, tree=True)),
        ):
            before = self.session.engine.seconds.copy()
            got = identity.answers(self.session, drafter, self.prompts, setting.params)
            took = self.session.engine.seconds - before
            reading = took.prefill
            deciding += share * (took.target + took.drafter + took.other) / max(c.counts.passes for c in got)
        time_for_each = _SHARE * 60.0 * self.plan.minutes / _SETTINGS - 4 * reading
        return min(self.plan.tokens, max(SHORTEST, int(time_for_each / deciding)))

    def _compare(self, reference: Reference, setting: Setting) -> list[Completion]:
        """One setting, with the user's drafter and with the probes; gives plain decoding's answers."""
        plain = identity.plainly(self.session, self.prompts, setting)
        self._tick()
        known = identity.known(self.seeds, plain)
        probes = (Replay(known, tree=False), Replay(known, tree=True))
        for name, drafter in (*self.own, *((p.name, p) for p in probes)):
            self._hold_against(reference, setting, plain, name, drafter)
            if self.enough:
                break
        return plain

    def _alone(self, reference: Reference, setting: Setting, plain: Sequence[Completion]) -> None:
        """A few prompts one after the other, against the batch."""
        some = Setting(setting.name, setting.params[:_ALONE])
        probe = Replay(identity.known(self.seeds[:_ALONE], plain[:_ALONE]), tree=True)
        for name, drafter in (("none", None), *self.own, (probe.name, probe)):
            self._hold_against(reference, some, plain[:_ALONE], name, drafter, alone=True)

    def _hold_against(
        self,
        reference: Reference,
        setting: Setting,
        plain: Sequence[Completion],
        name: str,
        drafter: Drafter | None,
        alone: bool = False,
    ) -> None:
        prompts = self.prompts[: len(plain)]
        controller = self.controller if drafter is self.drafter else None
        got = identity.answers(
            self.session, drafter, prompts, setting.params, controller=controller, alone=alone
        )
        check = identity.compare(self.session, reference, prompts, setting, plain, got, name, alone=alone)
        self.same.append(check)
        self._tick()

    def _tick(self) -> None:
        self.done += 1
        self.progress.at(min(self.done, _RUNS))

    # -- the same law -----------------------------------------------------------------------------------

    def _laws(self, reference: Reference, greedy: Sequence[Completion]) -> None:
        plan, outputs = self.plan, [answer.tokens for answer in greedy]
        planned = len(LAWS) * (3 + len(self.own))
        self.progress.stage("drawing samples", planned * plan.samples, "samples")
        seen = 0
        for setting, params in LAWS.items():
            longest = self.session.engine.context - plan.horizon
            text = undecided_text(reference, self.prompts, outputs, params.temperature, plan.samples, longest)
            law = enumerate_law(reference, text, params, plan.horizon)
            probes = (Drawn(law, tree=False), Drawn(law, tree=True), Likeliest(law))
            for name, drafter in (*((p.name, p) for p in probes), *self.own):
                if self.enough:
                    return
                now = time.monotonic()
                share = max(self.deadline - now, 0.0) / (planned - seen)
                self.laws.append(
                    check_law(
                        self.session,
                        reference,
                        law,
                        setting,
                        (name, drafter),
                        Drawing(plan.samples, now + share, self.numbers, plan.rows),
                        threshold=plan.alpha / planned,
                        power=plan.power,
                        controller=self.controller if drafter is self.drafter else None,
                        progress=self.progress,
                        done=seen * plan.samples,
                    )
                )
                seen += 1


def _about(
    session: Session,
    model: str | os.PathLike[str] | LoadedModel,
    spec: str,
    controller: Controller | str | None,
    rule: str,
    lossy: bool,
) -> About:
    engine, info = session.engine, session.info
    target, drafter = ModelParts.of(engine.runner.model), session.drafter
    draft = ModelParts.of(drafter.runner.model).fingerprint if isinstance(drafter, ModelDrafter) else None
    return About(
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        model=model.name if isinstance(model, LoadedModel) else os.fspath(model),
        fingerprint=target.fingerprint,
        dtype=info.dtype,
        vocab_size=engine.vocab_size,
        drafter=spec,
        draft_fingerprint=draft,
        controller=controller if isinstance(controller, str) else controller.name if controller else None,
        rule=rule,
        lossy=lossy,
        fault=engine.fault,
        machine=machine_name(engine.runner.device),
        device=str(engine.runner.device),
        threads=torch.get_num_threads(),
        versions={
            "slipstream": __version__,
            "torch": torch.__version__,
            "transformers": version("transformers"),
            "python": platform.python_version(),
        },
    )
