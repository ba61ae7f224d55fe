"""What a proof found, and what follows from it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from slipstream.proof.identity import IdentityCheck
from slipstream.proof.law import LawCheck
from slipstream.proof.plan import Plan

Verdict = Literal["verified", "near-tie only", "broken"]


@dataclass(frozen=True)
class About:
    """What was put to the proof, where, and with which versions. created: UTC, ISO
    8601. fingerprints: `ModelParts.fingerprint`.

    lossy: the rule changes the output by design. fault: the one that was planted, None as it should be.
    """

    created: str
    model: str
    fingerprint: str
    dtype: str
    vocab_size: int
    drafter: str
    draft_fingerprint: str | None
    controller: str | None
    rule: str
    lossy: bool
    fault: str | None
    machine: str
    device: str
    threads: int
    versions: Mapping[str, str]


@dataclass(frozen=True)
class Proof:
    """verdict: "verified" (no difference at all), "near-tie only" (some, each where rounding may decide), or
    "broken". reasons: why, a sentence each. notes: what the proof does not cover. plan: how much was to be
    tried; the checks tell how much was. prompts: their names, which `Difference.prompt` counts. seconds: by
    part.
    """

    verdict: Verdict
    reasons: tuple[str, ...]
    notes: tuple[str, ...]
    about: About
    plan: Plan
    prompts: tuple[str, ...]
    identity: tuple[IdentityCheck, ...]
    laws: tuple[LawCheck, ...]
    seconds: Mapping[str, float]

    @property
    def exit_status(self) -> int:
        return int(self.verdict == "broken")

    def as_json(self) -> dict[str, Any]:
        """Everything, as JSON values, with what is derived."""
        told = asdict(self)
        for values, law in zip(told["laws"], self.laws, strict=True):
            values["broken"] = law.broken
        for values, same in zip(told["identity"], self.identity, strict=True):
            values |= {"identical": same.identical, "broken": same.broken}
            for inner, difference in zip(values["differences"], same.differences, strict=True):
                inner["near_tie"] = difference.near_tie
                if difference.margin == math.inf:  # which JSON cannot say
                    inner["margin"] = None
        return {"kind": "slipstream-verify", "version": 1, **told}


def conclude(
    about: About,
    plan: Plan,
    prompts: Sequence[str],
    same: Sequence[IdentityCheck],
    laws: Sequence[LawCheck],
    seconds: Mapping[str, float],
) -> Proof:
    """The verdict, from the checks alone; that a fault is known to be planted has no part in it."""
    reasons = _broken(about, same, laws)
    ties = sum(d.near_tie for check in same for d in check.differences)
    verdict: Verdict = "broken"
    if not reasons and ties:
        verdict = "near-tie only"
        reasons = [f"{ties} answers differ, each at two tokens so near that rounding decides"]
    elif not reasons:
        verdict = "verified"
        answers = sum(check.answers for check in same if check.promised)
        reasons = [
            f"{answers} of {answers} answers are the same tokens, and {len(laws)} laws are the target's"
        ]
    return Proof(
        verdict,
        tuple(reasons),
        tuple(_notes(about, same, laws)),
        about,
        plan,
        tuple(prompts),
        tuple(same),
        tuple(laws),
        seconds,
    )


def _broken(about: About, same: Sequence[IdentityCheck], laws: Sequence[LawCheck]) -> list[str]:
    found = []
    if about.lossy:
        found.append(f"broken by design: the rule {about.rule!r} is lossy, whatever is found below")
    for check in same:
        real = [d for d in check.differences if not d.near_tie]
        if real:
            what = f"{check.setting}, {check.drafter}{', alone' if check.alone else ''}"
            found.append(f"{what}: {len(real)} of {check.answers} answers are other tokens")
    for law in laws:
        if law.p_value < law.threshold:
            found.append(
                f"{law.setting}, {law.drafter}: not the target's law"
                f" (p = {law.p_value:.1e}, {law.samples} samples)"
            )
        if law.impossible > law.at_the_edge:
            number = law.impossible - law.at_the_edge
            found.append(f"{law.setting}, {law.drafter}: {number} outputs that the target can never give")
    return found


def _notes(about: About, same: Sequence[IdentityCheck], laws: Sequence[LawCheck]) -> list[str]:
    notes = []
    own: list[IdentityCheck | LawCheck] = [
        *(c for c in same if c.drafter == about.drafter),
        *(c for c in laws if c.drafter == about.drafter),
    ]
    if about.drafter == "none":
        notes.append("no drafter was named: only the built-in probes drafted")
    elif own and not any(c.drafted for c in own):
        notes.append(f"{about.drafter} drafted nothing on these prompts: nothing is shown about it")
    elif own and not any(c.accepted for c in own):
        notes.append(f"nothing that {about.drafter} drafted was accepted on these prompts")
    blind = [law for law in laws if not law.freedom]
    if blind:
        notes.append(f"{len(blind)} laws had too few samples to see anything: allow more --minutes")
    if any(not c.promised for c in same):
        notes.append("drafts drawn at random keep the law, not the tokens: their answers were not compared")
    return notes
