"""Planted faults: each changes what is drafted and nothing else, and none is ever there unseen."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import pytest

from slipstream.control import Fixed
from slipstream.control.fixed import FixedConfig
from slipstream.core.draft import Draft, Drafter, DraftRequest
from slipstream.core.fault import ENVIRONMENT, FAULTS, FaultWarning, planted_fault, warning_of
from slipstream.core.params import SamplingParams
from slipstream.core.tree import TokenTree
from slipstream.engine import engine as engine_module
from slipstream.engine import faults
from slipstream.engine.engine import Engine
from slipstream.errors import ParameterError
from slipstream.model.runner import Runner
from slipstream.testing.oracle import Request, run_all
from slipstream.testing.tiny import tiny_model

V = 48
REQUESTS = [
    Request((3, 4, 5, 3, 4), SamplingParams(max_tokens=14), 1),
    Request((9, 8), SamplingParams(max_tokens=14, temperature=1.0, repetition_penalty=1.4), 2),
    Request((20, 21, 22), SamplingParams(max_tokens=14, temperature=0.8, frequency_penalty=1.0), 3),
]


class Nothing(Drafter):
    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [Draft(TokenTree.root(r.root)) for r in requests]


def outputs(engine: Engine) -> list[list[int]]:
    return run_all(engine, REQUESTS)


def sound() -> Engine:
    return Engine(Runner(tiny_model(vocab_size=V, seed=3), pack=False), Nothing(), eos_ids={7})


def test_every_fault_has_its_place() -> None:
    assert len(FAULTS) == 10 and set(FAULTS) == {*faults.RULES, *faults._PARTS}
    assert not set(faults.RULES) & set(faults._PARTS)


@pytest.mark.parametrize("name", FAULTS)
def test_without_drafts_a_fault_changes_nothing_and_all_is_marked(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = outputs(sound())
    monkeypatch.setenv(ENVIRONMENT, name)
    with pytest.warns(FaultWarning, match=ENVIRONMENT):
        engine = sound()
    assert engine.fault == name and engine.lossy
    assert outputs(engine) == want
    engine.set_drafter(Nothing(), Fixed(FixedConfig(4)))
    engine.add((1, 2), SamplingParams(max_tokens=3), seed=1)
    assert all(event.lossy for event in engine.run())


def test_a_sound_engine_knows_nothing_of_faults() -> None:
    assert not {"faults", "plant"} & set(vars(engine_module))  # it is imported where one is asked for
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = sound()
    assert engine.fault is None and not engine.lossy
    for part in ("_propose", "_commit", "add"):
        assert part not in vars(engine)
    assert "_compute" not in vars(engine.runner)


def test_an_unknown_fault_is_refused_with_all_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, "treshold")
    with pytest.raises(ParameterError, match="did you mean threshold.*there are threshold, residual"):
        sound()
    monkeypatch.setenv(ENVIRONMENT, "")
    assert planted_fault() is None


def test_the_warning_says_what_is_wrong_and_what_to_do() -> None:
    for name, text in FAULTS.items():
        assert "\n" not in text and len(text) < 90
        told = warning_of(name)
        assert name in told and text in told and "WRONG ON PURPOSE" in told and "unset" in told
