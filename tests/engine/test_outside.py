"""Drafters and controllers that break or talk nonsense: they are told by name, and cost nobody a token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

import slipstream
from slipstream.control import Controller, RowState
from slipstream.core.draft import Budget, Draft, Drafter, DraftRequest
from slipstream.core.params import SamplingParams
from slipstream.core.sequence import Event
from slipstream.core.tree import TokenTree
from slipstream.engine.engine import Engine
from slipstream.errors import DrafterError, ParameterError
from slipstream.model.load import load as load_model
from slipstream.model.runner import Runner
from slipstream.testing.adversaries import FunctionDrafter, nothing, random_chain, wrong_root
from slipstream.testing.oracle import Request, plain_decode, run_all
from slipstream.testing.tiny import save_tiny, tiny_model

V = 48
REQUESTS = [
    Request((3, 4, 5), SamplingParams(max_tokens=9), 1),
    Request((9, 8), SamplingParams(max_tokens=6, temperature=1.0), 2),
    Request((20, 21, 22, 23), SamplingParams(max_tokens=12, temperature=0.8), 3),
]


def make_model() -> Any:
    return tiny_model("llama", vocab_size=V, layers=1, seed=3)


@lru_cache
def target() -> Runner:
    return Runner(make_model(), pack=False)


@lru_cache
def expected() -> list[list[int]]:
    return [plain_decode(make_model(), r, vocab_size=V) for r in REQUESTS]


class Clumsy(FunctionDrafter):
    """Drafts at random and fails in one of its methods: at every call, or at those that `when` counts."""

    name = "clumsy"

    def __init__(self, where: str, when: Callable[[int], bool] = lambda call: True) -> None:
        super().__init__(random_chain(V))
        self.where, self.when, self.calls = where, when, Counter[str]()

    def _called(self, where: str) -> None:
        self.calls[where] += 1
        if where == self.where and self.when(self.calls[where]):
            raise IndexError(f"no {where} today")

    def open(self, seq_id: int, prompt: Sequence[int]) -> None:
        self._called("open")

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        self._called("propose")
        return super().propose(requests)

    def observe(self, observations: Any) -> None:
        self._called("observe")

    def close(self, seq_id: int) -> None:
        self._called("close")

    def keep_prefixes(self, tokens: int) -> None:
        self._called("keep_prefixes")

    @property
    def memory_bytes(self) -> int:
        self._called("memory_bytes")
        return 0

    def shutdown(self) -> None:
        self._called("shutdown")


class Careless(Controller):
    """Plans drafts of three tokens, and fails to be told anything."""

    name = "careless"

    def __init__(self, where: str) -> None:
        self.where = where

    def plan(self, rows: Sequence[RowState]) -> list[Budget]:
        return [Budget.chain(3) for _ in rows]

    def record(self, outcomes: Any, seconds: float) -> None:
        if self.where == "record":
            raise KeyError("outcome")

    def forget(self, seq_id: int) -> None:
        if self.where == "forget":
            raise KeyError(seq_id)


def finish(engine: Engine) -> tuple[list[Event], list[DrafterError]]:
    """All events of what the engine has to do, and the errors on the way: whoever meets one goes on."""
    events: list[Event] = []
    faults: list[DrafterError] = []
    while engine.has_work:
        try:
            events.extend(engine.turn())
        except DrafterError as error:
            faults.append(error)
            assert len(faults) < 100
    return events, faults


def assert_whole(engine: Engine, ids: Sequence[int], events: Sequence[Event]) -> None:
    """Every token was told once, and so was every end; nothing is left."""
    for seq_id, want in zip(ids, expected(), strict=True):
        own = [e for e in events if e.seq_id == seq_id]
        assert [t for e in own for t in e.tokens] == want
        assert [e.finish_reason for e in own if e.finish_reason] == ["length"]
    assert len(engine.runner.cache) == 0 and engine.load.admitted == () and engine.untold() == []


def add_all(engine: Engine) -> list[int]:
    return [engine.add(r.prompt, r.params, seed=r.seed) for r in REQUESTS]


@pytest.mark.parametrize("where", ["propose", "observe", "close", "keep_prefixes", "memory_bytes"])
@pytest.mark.parametrize("every", [2, 3])
def test_no_token_is_lost_with_the_step_of_a_drafter_that_fails(where: str, every: int) -> None:
    engine = Engine(target(), Clumsy(where, lambda call: call % every == 0), max_rows=2)
    ids = add_all(engine)
    events, faults = finish(engine)
    assert_whole(engine, ids, events)
    assert faults
    for fault in faults:
        assert f"drafter 'clumsy' (Clumsy) failed in {where}: IndexError: no {where} today" in str(fault)
        assert "(test_outside.py, line " in str(fault) and isinstance(fault.__cause__, IndexError)


@pytest.mark.parametrize("where", ["observe", "close", "keep_prefixes"])
def test_what_fails_every_time_still_costs_no_token(where: str) -> None:
    drafter = Clumsy(where, lambda call: where != "keep_prefixes" or call > 1)  # an engine begins with a call
    engine = Engine(target(), drafter, max_rows=2)
    ids = add_all(engine)
    events, faults = finish(engine)
    assert_whole(engine, ids, events)
    assert len(faults) >= 3


@pytest.mark.parametrize("where", ["record", "forget"])
def test_no_token_is_lost_with_the_step_of_a_controller_that_fails(where: str) -> None:
    engine = Engine(target(), FunctionDrafter(random_chain(V)), controller=Careless(where), max_rows=2)
    ids = add_all(engine)
    events, faults = finish(engine)
    assert_whole(engine, ids, events)
    assert all(f"controller 'careless' (Careless) failed in {where}: KeyError" in str(f) for f in faults)
    assert faults


def test_the_next_step_gives_what_a_step_that_raised_had_added() -> None:
    engine = Engine(target(), Clumsy("observe", lambda call: call == 2), controller=Careless(""))
    seq_id = engine.add(REQUESTS[0].prompt, REQUESTS[0].params, seed=REQUESTS[0].seed)
    told: list[int] = []
    faults = 0
    while engine.has_work:
        try:
            told += [t for e in engine.step() if e.seq_id == seq_id for t in e.tokens]
        except DrafterError:
            faults += 1
    assert (told, faults) == (expected()[0], 1)


def test_a_row_that_cannot_be_opened_is_told_and_the_others_go_on() -> None:
    engine = Engine(target(), Clumsy("open", lambda call: call in (2, 3)), max_rows=3)
    ids = add_all(engine)
    for _ in range(2):  # who does not end the row meets the error again
        with pytest.raises(DrafterError, match="failed in open") as told:
            engine.step()
        assert told.value.seq_ids == {ids[1]}
    assert len(engine.runner.cache) == 3
    engine.abandon([ids[1]])
    events, faults = finish(engine)
    assert faults == []
    assert [[t for e in events if e.seq_id == i for t in e.tokens] for i in (ids[0], ids[2])] == [
        expected()[0],
        expected()[2],
    ]
    assert len(engine.runner.cache) == 0 and not engine.has_work


def test_another_drafter_is_set_whatever_the_one_before_it_says_to_that() -> None:
    engine = Engine(target(), Clumsy("keep_prefixes", lambda call: call > 1))
    with pytest.raises(DrafterError, match="failed in keep_prefixes"):
        engine.set_drafter(FunctionDrafter(nothing))
    assert run_all(engine, REQUESTS) == expected()


def test_abandoning_and_closing_free_everything_whatever_fails() -> None:
    model = make_model()
    engine = Engine(Runner(model, pack=False), Clumsy("close"), max_rows=3)
    add_all(engine)
    engine.step()
    with pytest.raises(DrafterError, match="failed in close"):
        engine.abandon()
    assert len(engine.runner.cache) == 0 and not engine.has_work
    add_all(engine)
    engine.step()
    with pytest.raises(DrafterError, match="failed in close"):
        engine.close()
    model(input_ids=torch.tensor([[1, 2]]))  # it has its own attention back
    broken = Engine(Runner(model, pack=False), Clumsy("shutdown"))
    with pytest.raises(DrafterError, match="failed in shutdown"):
        broken.close()
    model(input_ids=torch.tensor([[1, 2]]))


# -- in a session -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("outside") / "target", kind="llama", layers=1, seed=1)


def test_a_stream_gets_its_tokens_before_the_error(folder: Path) -> None:
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    drafter = Clumsy("observe", lambda call: call == 6)  # two prompts, and four verifications
    drafter._draft_for = nothing
    with slipstream.load(folder) as session:
        want = session.generate("abc", params).tokens
        session.use(drafter)
        one, other = session.stream("abc", params), session.stream("abc", params)
        got, others = [*next(one).tokens], [*next(other).tokens]
        with pytest.raises(DrafterError, match="failed in observe"):
            for event in one:
                got += event.tokens
        assert tuple(got) == want[:4]
        assert (*others, *(t for e in other for t in e.tokens)) == want
        assert not session.engine.has_work


def test_an_error_of_one_stream_ends_that_stream_alone(folder: Path) -> None:
    """Whoever asked for the step: the other stream learns of it when it is asked for more."""
    params = SamplingParams(max_tokens=8, ignore_eos=True)

    def draft(request: DraftRequest) -> Draft:
        late = len(request.tokens) > 5 and request.tokens[0] == ord("x")
        return wrong_root(request) if late else nothing(request)

    with slipstream.load(folder) as session:
        want, whole = (session.generate(text, params).tokens for text in ("abc", "xyz"))
        session.use(FunctionDrafter(draft))
        one, other = session.stream("abc", params), session.stream("xyz", params)
        got, others = [*next(one).tokens], [*next(other).tokens]
        assert (*got, *(t for e in one for t in e.tokens)) == want
        with pytest.raises(DrafterError, match="rooted its draft"):
            for event in other:
                others += event.tokens
        assert tuple(others) == whole[:3]
        assert not session.engine.has_work and len(session.engine.runner.cache) == 0


def test_a_drafter_that_cannot_shut_down_leaves_no_engine_open(folder: Path) -> None:
    loaded = load_model(str(folder), dtype="float32")
    session = slipstream.load(loaded, Clumsy("shutdown"))
    session.use("ngram")
    with pytest.raises(DrafterError, match="'clumsy' .*failed in shutdown"):
        session.close()
    loaded.model(input_ids=torch.tensor([[1, 2]]))
    session.close()


# -- nonsense -----------------------------------------------------------------------------------------


def _uniform() -> torch.Tensor:
    return torch.ones(V) / V


NONSENSE: dict[str, tuple[Callable[[int], Any], str]] = {
    "nothing": (lambda root: None, "must give a list of drafts, not NoneType"),
    "one draft": (lambda root: Draft(TokenTree.root(root)), "must give a list of drafts, not Draft"),
    "too few": (lambda root: [], "gave 0 drafts for 1 requests"),
    "no draft": (lambda root: [None], "gave NoneType where a Draft belongs"),
    "no tree": (lambda root: [Draft((root, 1))], "whose tree is tuple, not a TokenTree"),  # type: ignore[arg-type]
    "half a token": (lambda root: [Draft(TokenTree.chain(root, (1.5,)))], r"holds 1.5 \(float\)"),  # type: ignore[arg-type]
    "a word": (lambda root: [Draft(TokenTree.chain(root, ("a",)))], r"holds 'a' \(str\)"),  # type: ignore[arg-type]
    "a parent": (lambda root: [Draft(TokenTree((root, 1), (-1, 0.0)))], r"holds 0.0 \(float\)"),  # type: ignore[arg-type]
    "another root": (lambda root: [Draft(TokenTree.root(root + 1))], "rooted its draft at token"),
    "a list for q": (
        lambda root: [Draft(TokenTree.chain(root, (1,)), q=([0.5], None))],  # type: ignore[arg-type]
        "gave a q row of type list for node 0",
    ),
    "a narrow q": (
        lambda root: [Draft(TokenTree.chain(root, (1,)), q=(torch.ones(3) / 3, None))],
        rf"gave a q row of shape \[3\] for node 0: it must be a tensor \[{V}\]",
    ),
    "a flat q": (
        lambda root: [Draft(TokenTree.chain(root, (1,)), q=(_uniform()[None], None))],
        rf"of shape \[1, {V}\]",
    ),
    "a drawn token that is none": (
        lambda root: [Draft(TokenTree.chain(root, (V + 3,)), q=(_uniform(), None))],
        "drew a token outside the target's vocabulary",
    ),
    "a negative one": (
        lambda root: [Draft(TokenTree.chain(root, (-1,)), q=(_uniform(), None))],
        "drew a token outside the target's vocabulary",
    ),
    "scores": (lambda root: [Draft(TokenTree.root(root), scores=("a",))], "scores that are not numbers"),  # type: ignore[arg-type]
    "a source": (lambda root: [Draft(TokenTree.root(root), source=5)], "sources are not names: 5"),  # type: ignore[arg-type]
}


class Speaker(Drafter):
    name = "speaker"
    num_speculative_tokens = 2

    def __init__(self, says: Callable[[int], Any]) -> None:
        self.says = says

    def propose(self, requests: Sequence[DraftRequest]) -> Any:
        return self.says(requests[0].root)


class Planner(Controller):
    name = "planner"

    def __init__(self, plan: Any) -> None:
        self.planned = plan

    def plan(self, rows: Sequence[RowState]) -> Any:
        return self.planned


@pytest.fixture
def used() -> Iterator[Runner]:
    """The target; whoever used it leaves it sound."""
    yield target()
    assert len(target().cache) == 0
    assert run_all(Engine(target(), None), REQUESTS) == expected()  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", NONSENSE)
def test_a_drafter_that_gives_nonsense_is_named(kind: str, used: Runner) -> None:
    says, message = NONSENSE[kind]
    engine = Engine(used, Speaker(says))
    engine.add((1, 2), SamplingParams(max_tokens=5), seed=1)
    with pytest.raises(DrafterError, match=rf"drafter 'speaker' \(Speaker\) .*{message}"):
        list(engine.run())
    engine.abandon()


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (None, "must give a list of budgets, not NoneType"),
        ([], "gave 0 budgets for 1 rows"),
        ([Budget()] * 2, "gave 2 budgets for 1 rows"),
        ([3], "gave int where a Budget belongs"),
        ([Budget(-1, 2)], r"gave Budget\(depth=-1, .*whole numbers of 0 or more"),
        ([Budget(2, -1)], "nodes=-1"),
        ([Budget("2", 2)], "depth='2'"),  # type: ignore[arg-type]
        ([Budget(2, 1.5)], "nodes=1.5"),  # type: ignore[arg-type]
        ([Budget(2, 2, None)], "stop_below=None"),  # type: ignore[arg-type]
    ],
)
def test_a_controller_that_gives_nonsense_is_named(plan: Any, message: str, used: Runner) -> None:
    engine = Engine(used, FunctionDrafter(nothing), controller=Planner(plan))
    engine.add((1, 2), SamplingParams(max_tokens=5), seed=1)
    with pytest.raises(DrafterError, match=rf"controller 'planner' \(Planner\) .*{message}"):
        list(engine.run())
    engine.abandon()


def test_what_is_no_drafter_or_declares_nonsense_is_refused(used: Runner) -> None:
    for name, value in (("needs", None), ("num_speculative_tokens", -1), ("draft_nodes", "4")):
        odd = FunctionDrafter(nothing)
        setattr(odd, name, value)
        with pytest.raises(DrafterError, match=rf"drafter 'function' \(FunctionDrafter\) has {name}"):
            Engine(used, odd)
    with pytest.raises(DrafterError, match="object is not derived from"):
        Engine(used, object())  # type: ignore[arg-type]
    for controller, message in ((5, "not int"), (Planner, "the class Planner: make one of it")):
        with pytest.raises(ParameterError, match=f"built Controller, .*{message}"):
            Engine(used, FunctionDrafter(nothing), controller=controller)  # type: ignore[arg-type]
