"""The models and drafters that ship: whole, small, found by name, and worth what is said of them.

Held-out passages are of this Python's own library, from files that no house model was trained on.
"""

from __future__ import annotations

import hashlib
import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from typer.testing import CliRunner

import slipstream
from slipstream.cli.main import build_app
from slipstream.core.params import SamplingParams
from slipstream.core.stats import DraftCounts
from slipstream.engine.session import Completion
from slipstream.model.blueprint import Blueprint
from slipstream.model.house import house_drafter, house_models
from slipstream.model.load import local_folder
from tiny_models import MOST_BYTES, is_held_out, prompts, sources

HOUSE = Path(slipstream.__file__).parent / "house" / "tiny"
DRAFTERS = ("draft_model", "medusa", "eagle", "eagle:top_k=1")
FLOORS = {"medusa": 1.8, "eagle": 2.3}


@pytest.fixture(scope="module")
def answers() -> dict[str, list[Completion]]:
    """Greedy answers to eight passages by every drafter, in float32, where there are no near-ties."""
    texts = [text for name, text in sources() if is_held_out(name)]
    params = SamplingParams(temperature=0.0, max_tokens=40)
    found = {}
    with slipstream.load("tiny", dtype="float32", max_rows=8) as session:
        asked = [p["prompt"] for p in prompts(session.tokenizer, texts, 8, seed=7)]
        found["none"] = session.generate(asked, params)
        for spec in DRAFTERS:
            session.use(spec)
            found[spec] = session.generate(asked, params)
    return found


def counts_of(answers: list[Completion]) -> DraftCounts:
    total = DraftCounts()
    for answer in answers:
        total.add(answer.counts)
    return total


@pytest.mark.parametrize("spec", DRAFTERS)
def test_every_drafter_gives_plain_decodings_tokens(spec: str, answers: dict[str, list[Completion]]) -> None:
    assert [a.tokens for a in answers[spec]] == [a.tokens for a in answers["none"]]
    assert all(a.counts.accepted_tokens for a in answers[spec])


def test_the_drafters_have_learned(answers: dict[str, list[Completion]]) -> None:
    """Heads by tau, the distilled draft by what it accepts beyond the one it began as."""
    for spec, floor in FLOORS.items():
        assert counts_of(answers[spec]).tau >= floor, spec
    measured = json.loads((HOUSE / "report.json").read_text())["measured"]
    before = measured["draft_model, not distilled"]["acceptance"][0]
    assert counts_of(answers["draft_model"]).conditional_acceptance[0] >= before + 0.1


def test_eagles_tree_takes_no_more_passes_than_its_chain(answers: dict[str, list[Completion]]) -> None:
    assert counts_of(answers["eagle"]).passes <= counts_of(answers["eagle:top_k=1"]).passes


def test_nothing_was_damaged_and_all_of_it_is_small() -> None:
    files = {p for p in HOUSE.rglob("*") if p.is_file()}
    assert sum(p.stat().st_size for p in files) <= MOST_BYTES
    for folder in ("target", "draft", "medusa", "eagle"):
        note = json.loads((HOUSE / folder / "slipstream.json").read_text())
        there = {p.name for p in files if p.parent.name == folder} - {"slipstream.json"}
        assert note["sha256"].keys() == there
        for name, digest in note["sha256"].items():
            assert hashlib.sha256((HOUSE / folder / name).read_bytes()).hexdigest() == digest, name
        told = note["data"].get("data", {}).get("sources", [])
        assert not any(Path(source).is_absolute() for source in told)  # no folder of whoever made them
    for file in HOUSE.rglob("*.safetensors"):
        with safe_open(file, "pt") as stored:
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
        assert {t.dtype for t in tensors.values() if t.is_floating_point()} == {torch.bfloat16}
        assert file.parent.name in ("medusa", "eagle") or "lm_head.weight" not in tensors  # they are tied


def test_they_are_found_by_name() -> None:
    assert house_models()["tiny"] == local_folder("tiny") == HOUSE / "target"
    shape = Blueprint.of("tiny")
    find = partial(house_drafter, fingerprint=shape.fingerprint)
    assert [find(kind).name for kind in ("draft", "medusa", "eagle")] == ["draft", "medusa", "eagle"]


@pytest.mark.parametrize("drafter", ["draft_model", "medusa", "eagle"])
def test_run_needs_only_their_names(drafter: str) -> None:
    command = ["run", "--model", "tiny", "--drafter", drafter, "--json", "--max-tokens", "12", "def main("]
    got = CliRunner().invoke(build_app(), command, prog_name="slipstream")
    assert got.exit_code == 0, got.output
    told = json.loads(got.stdout)
    assert told["accepted_tokens"] > 0 and len(told["tokens"]) == 12
