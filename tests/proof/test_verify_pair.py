"""Every planted fault is found, and nothing is found where there is none."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import slipstream
from slipstream.core.fault import ENVIRONMENT, FAULTS, FaultWarning
from slipstream.core.params import SamplingParams
from slipstream.engine.inputs import question_ids
from slipstream.errors import ParameterError
from slipstream.model.pack import Pack
from slipstream.model.runner import Runner
from slipstream.prompts.rows import Row, read_prompts
from slipstream.proof import pair
from slipstream.proof.plan import Plan
from slipstream.proof.report import Proof
from slipstream.testing.tiny import save_tiny, tiny_model

QUICK = Plan(prompts=2, tokens=14, samples=100, minutes=10.0)
HUNT = Plan(prompts=4, tokens=16, samples=500, minutes=10.0, fail_fast=True)


@contextmanager
def planted(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(ENVIRONMENT, name)
    with pytest.warns(FaultWarning, match=f"{name}.*WRONG ON PURPOSE"):
        yield


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with planted(fault, monkeypatch):
        proof = slipstream.verify_pair(folder, "ngram", plan=HUNT)
    assert (proof.verdict, proof.exit_status, proof.about.fault) == ("broken", 1, fault)
    assert proof.reasons
    found = [check for check in (*proof.identity, *proof.laws) if check.broken]
    in_law = {"residual", "noise", "draft-temperature"}
    assert (found[-1] in proof.laws) == (fault in in_law), found[-1]


def assert_verified(proof: Proof) -> None:
    assert (proof.verdict, proof.exit_status, proof.about.fault) == ("verified", 0, None), proof.reasons
    assert len(proof.identity) == 6 * 3 + 3 and len(proof.laws) == 8
    for check in proof.identity:
        assert check.identical == check.answers and check.promised
    tried = [c for c in proof.identity if c.drafter.startswith("replayed")]
    assert all(0 < c.accepted < c.drafted for c in tried) and any(c.branched for c in tried)
    for law in proof.laws:
        assert law.samples == proof.plan.samples and law.p_value > law.threshold == 1e-4 / 8
        assert law.drawn == law.drafter.startswith("drawn")
        if law.drafter != proof.about.drafter:
            assert 0 < law.accepted < law.drafted and law.freedom > 1
            assert 0.0 < law.detectable < 1.0


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_correct_engine_is_verified(seed: int, folder: Path) -> None:
    assert_verified(slipstream.verify_pair(folder, "ngram", plan=replace(QUICK, seed=seed)))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 120))
def test_twenty_of_twenty_correct_runs_are_verified(seed: int, folder: Path) -> None:
    assert_verified(slipstream.verify_pair(folder, "ngram", plan=Plan(seed=seed, minutes=30.0)))


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_the_defaults_find_every_fault(fault: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with planted(fault, monkeypatch):
        assert slipstream.verify_pair(folder, "ngram").verdict == "broken"


def test_a_drafter_with_a_model_and_a_rule_of_its_own(folder: Path, tmp_path: Path) -> None:
    """A drawn draft keeps the law: at T > 0 its tokens are not compared. Block verification is tried too."""
    draft = save_tiny(tmp_path / "draft", model=tiny_model("qwen2", layers=1, seed=2))
    spec = f"draft_model:model={draft},sampled=true,num_speculative_tokens=2"
    progress = Recording()
    proof = slipstream.verify_pair(folder, spec, plan=QUICK, rule="block", progress=progress)
    assert proof.verdict == "verified", proof.reasons
    own = [c for c in proof.identity if c.drafter == spec]
    assert {c.promised for c in own if c.setting.startswith("greedy")} == {True}
    assert {c.promised for c in own if c.setting.startswith("T=")} == {False}
    assert any("law, not the tokens" in note for note in proof.notes)
    assert all(law.drawn for law in proof.laws if law.drafter == spec)
    assert proof.about.draft_fingerprint not in (None, proof.about.fingerprint)
    assert progress.stages[-2:] == [("comparing with plain decoding", "runs"), ("drawing samples", "samples")]
    assert progress.seen == 8 * QUICK.samples


class Recording:
    def __init__(self) -> None:
        self.stages: list[tuple[str, str]] = []
        self.seen = 0

    def stage(self, text: str, total: int, unit: str = "") -> None:
        self.stages.append((text, unit))

    def at(self, done: int) -> None:
        self.seen = done

    def note(self, text: str) -> None:
        pass


def test_a_lossy_rule_is_broken_by_design(folder: Path) -> None:
    proof = slipstream.verify_pair(folder, "none", plan=HUNT, rule="typical")
    assert proof.verdict == "broken" and proof.about.lossy
    assert "broken by design" in proof.reasons[0]
    assert len(proof.reasons) > 1  # and it is found, too
    assert any("only the built-in probes" in note for note in proof.notes)


def test_differences_that_rounding_explains_are_told_and_pass(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two tokens with the same weights in the head; drafts lift one of them by less than rounding might."""
    model = tiny_model("qwen2", seed=1)
    with slipstream.load(str(folder)) as session:
        asked = [question_ids(session.tokenizer, p.asked) for p in read_prompts(None)[:4]]
        told = session.generate(asked, SamplingParams(max_tokens=32))
    # The lower id wins a tie, so plain decoding goes on as before.
    low = Counter(t for answer in told for t in answer.tokens if t < 250).most_common(1)[0][0]
    high = low + 1
    with torch.no_grad():
        head = model.get_output_embeddings().weight
        head[high] = head[low]
    ties = save_tiny(tmp_path / "ties", model=model)
    compute = Runner._compute

    def nudged(self: Runner, pack: Pack, logits: str) -> torch.Tensor | None:
        out = compute(self, pack, logits)
        if out is not None and any(span.parents is not None for span in pack.spans):
            out = out.clone()
            out[:, high] += 2e-6
        return out

    monkeypatch.setattr(Runner, "_compute", nudged)
    monkeypatch.setattr(pair, "LAWS", {})
    proof = slipstream.verify_pair(ties, "none", plan=replace(QUICK, prompts=4, tokens=32))
    assert (proof.verdict, proof.exit_status) == ("near-tie only", 0), proof.reasons
    found = [d for check in proof.identity for d in check.differences]
    assert found and all(d.near_tie for d in found)
    for one in found:
        assert {one.plain, one.drafted} == {low, high}
        assert one.margin is not None and one.spacing is not None and one.margin <= 256 * one.spacing


def test_a_short_time_leaves_the_least_of_everything_and_all_of_it_is_in_the_json(folder: Path) -> None:
    prompts = [Row(({"role": "user", "content": "abcabcabcabc"},), "here", name="mine:1")]
    plan = replace(QUICK, minutes=1e-4, samples=5000)
    proof = slipstream.verify_pair(folder, "ngram", prompts=prompts, plan=plan)
    assert {law.samples for law in proof.laws} == {128} and len(proof.laws) == 8
    assert max(c.tokens for c in proof.identity) <= 12
    told = json.loads(json.dumps(proof.as_json()))
    assert told["kind"] == "slipstream-verify" and told["verdict"] == "verified"
    assert set(told["about"]["versions"]) == {"slipstream", "torch", "transformers", "python"}
    assert len(told["about"]["fingerprint"]) == 32 and told["about"]["machine"]
    assert told["plan"]["samples"] == 5000 and told["about"]["created"].startswith("20")
    assert told["prompts"] == ["mine:1"] and set(told["seconds"]) == {"identity", "law"}
    first = told["identity"][0]
    assert (first["setting"], first["identical"], first["broken"]) == ("greedy", 1, False)
    assert {"p_value", "statistic", "detectable", "power", "threshold", "broken"} <= set(told["laws"][0])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompts": 0}, "prompts must be at least 1, not 0"),
        ({"samples": 10}, "samples must be at least 100, not 10"),
        ({"tokens": 1}, "tokens must be at least 4"),
        ({"minutes": 0.0}, "minutes must be above 0, not 0"),
        ({"alpha": 1.0}, "alpha must be between 0 and 1"),
        ({"seed": -1}, "the seed must be 0 or more"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ParameterError, match=words):
        Plan(**change)


def test_no_prompts_and_no_such_rule_are_refused(folder: Path) -> None:
    with pytest.raises(ParameterError, match="no prompts"):
        slipstream.verify_pair(folder, prompts=[], plan=QUICK)
    with pytest.raises(ParameterError, match="rule must be one of"):
        slipstream.verify_pair("no-such-model", rule="nothing")


def test_prompts_at_the_end_of_the_context(folder: Path) -> None:
    """Whatever is drawn has room for the whole horizon, or is refused: a law cut short has other cells."""
    row = Row(({"role": "user", "content": "ab" * 10},), "p.txt, line 1")
    with slipstream.load(folder) as session:
        length = len(question_ids(session.tokenizer, row.asked))
    plan = replace(QUICK, prompts=1)
    proof = slipstream.verify_pair(folder, "ngram", prompts=[row], plan=plan, context=length + plan.horizon)
    assert proof.verdict == "verified" and all(law.horizon == plan.horizon for law in proof.laws)
    with pytest.raises(ParameterError, match="p.txt, line 1: the prompt has"):
        slipstream.verify_pair(folder, "ngram", prompts=[row], plan=plan, context=length + plan.horizon - 1)
