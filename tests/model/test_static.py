"""Steps of fixed shape over a static cache, recorded or not, against the runner that goes row by row."""

from __future__ import annotations

import gc
import json
import random
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.core.draft import Needs
from slipstream.core.params import SamplingParams
from slipstream.drafters.base import TargetInfo
from slipstream.drafters.draft_model import DraftModelConfig, ModelDrafter
from slipstream.drafters.none import NoConfig, NoDrafter
from slipstream.engine.engine import Engine
from slipstream.engine.faults import _FamilySpan
from slipstream.errors import CapacityError
from slipstream.model.cache import WIDTH
from slipstream.model.cuts import cuts_agree
from slipstream.model.graphs import RecordError
from slipstream.model.pack import NODES, PackRow, Span, build_pack, tree_depths
from slipstream.model.runner import Runner
from slipstream.model.skip import SkipSet, Thinnable
from slipstream.model.static import bucket
from slipstream.model.static_cache import StaticCache
from slipstream.model.static_runner import StaticRunner, open_runner
from slipstream.testing.adversaries import FunctionDrafter, RandomBudgets, any_of, random_tree, right_until
from slipstream.testing.oracle import Request, plain_decode, run_all
from slipstream.testing.tape import OpTape
from slipstream.testing.tiny import tiny_model

VOCAB = 50
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"tie": True},
    "qwen3": {},
    "mistral": {"sliding_window": 4},
    "gemma3_text": {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
}
TREE = [-1, 0, 0, 1, 1, 2, -1, 6]


def make(kind: str = "llama", **config: Any) -> Any:
    return tiny_model(kind, vocab_size=VOCAB, **{**KINDS[kind], **config})


def close(got: torch.Tensor | None, want: torch.Tensor | None) -> None:
    assert got is not None and want is not None
    torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)


class Twins:
    """A runner of each kind with the same model, told the same, and held against each other."""

    def __init__(self, kind: str = "llama", tape: OpTape | None = None, **options: Any) -> None:
        self.plain = Runner(make(kind), pack=False)
        self.static = StaticRunner(make(kind), pack=False, recorder=tape, **options)
        self.both = (self.plain, self.static)

    def cache(self, name: str, *args: Any) -> None:
        for runner in self.both:
            getattr(runner.cache, name)(*args)

    def start(self, slot: int, tokens: list[int]) -> None:
        self.cache("open", slot)
        for runner in self.both:
            runner.extend(slot, tokens)

    def forward(self, rows: list[PackRow], logits: str = "all", taps: bool = True) -> None:
        want, got = (runner.forward(rows, logits=logits, taps=taps) for runner in self.both)
        if logits == "none":
            assert got.logits is None
        else:
            close(got.logits, want.logits)
        assert set(got.features) == set(want.features)
        for key, value in want.features.items():
            close(got.features[key], value)
        assert got.pack.spans == want.pack.spans

    def same_columns(self, slot: int) -> None:
        """Ends the slot."""
        length = self.plain.cache.length(slot)
        assert self.static.cache.length(slot) == length
        assert self.static.cache.in_order(slot) == self.plain.cache.in_order(slot)
        if not length:  # then a slot of the other kind may have no layers yet
            return self.cache("close", slot)
        (want,), (got,) = (runner.cache.release(slot, [range(length)]) for runner in self.both)
        assert set(got) == set(want)
        for layer, pair in want.items():
            for one, other in zip(got[layer], pair, strict=True):
                close(one, other)


def path_to(node: int, parents: list[int]) -> list[int]:
    return [] if node < 0 else [*path_to(parents[node], parents), node]


def play(twins: Twins, rng: random.Random, turns: int) -> None:
    """Whatever an engine and its drafters do to a runner, in any order."""

    def draw(count: int) -> list[int]:
        return [rng.randrange(VOCAB) for _ in range(count)]

    slots = [-9]
    twins.start(-9, draw(WIDTH - 4))
    twins.forward([PackRow(-9, draw(9))])  # the columns of one block no longer suffice
    twins.cache("commit", -9, range(9))
    for turn in range(turns):
        chance = rng.random()
        if not slots or (len(slots) < 6 and chance < 0.2):
            slots.append(turn)
            twins.start(turn, draw(rng.choice((1, 2, 7, 40, 90))))
        elif chance < 0.3:
            twins.same_columns(slots.pop(rng.randrange(len(slots))))
        elif chance < 0.4:
            slot = rng.choice(slots)
            twins.cache("rollback", slot, twins.plain.cache.length(slot) * 3 // 4)
        elif chance < 0.5:
            source = rng.choice(slots)
            twins.cache("open", turn)
            twins.cache("copy_prefix", source, turn, twins.plain.cache.length(source) // 2)
            slots.append(turn)
        else:
            rows, kept = [], {}
            for slot in rng.sample(slots, rng.randint(1, min(4, len(slots)))):
                count = rng.randint(1, 9)
                parents = [rng.randint(-1, node - 1) for node in range(count)]
                chain = rng.random() < 0.4
                rows.append(PackRow(slot, draw(count), None if chain else parents))
                kept[slot] = path_to(rng.randrange(count), list(range(-1, count - 1)) if chain else parents)
            twins.forward(rows, rng.choice(("all", "all", "last", "none")))
            for slot, keep in kept.items():
                if rng.random() < 0.8:
                    twins.cache("commit", slot, keep)
    for slot in slots:
        twins.same_columns(slot)


@pytest.mark.parametrize("recorded", [False, True], ids=["computed", "recorded"])
@pytest.mark.parametrize("kind", KINDS)
def test_any_steps_give_what_the_runner_gives_that_goes_row_by_row(kind: str, recorded: bool) -> None:
    tape = OpTape() if recorded else None
    twins = Twins(kind, tape)
    play(twins, random.Random(kind), 12 if recorded else 40)
    assert twins.static.not_recorded is None
    cache = twins.static.cache
    assert isinstance(cache, StaticCache) and cache.epoch > 1  # it had to grow both ways
    assert cache.rows > 1 and cache.tokens > WIDTH
    if tape is not None:
        assert tape.replayed >= tape.recorded > 5


def test_a_shape_is_recorded_once_until_the_cache_must_move() -> None:
    tape = OpTape()
    twins = Twins(tape=tape, rows=2)
    twins.start(0, [1, 2, 3])
    twins.forward([PackRow(0, [4])])
    before = tape.recorded
    for token in range(5):
        twins.forward([PackRow(0, [token])])
        twins.cache("commit", 0, [0])
    assert tape.recorded == before
    twins.forward([PackRow(0, [1, 2, 3])])
    twins.forward([PackRow(0, [1, 2, 3, 4])])  # four tokens wide as the last
    assert tape.recorded == before + 1
    twins.start(1, [7, 8])  # there is room
    twins.forward([PackRow(0, [4])])
    assert tape.recorded == before + 2  # what 1 began with
    twins.start(2, [9])
    twins.forward([PackRow(0, [4])])
    assert tape.recorded > before + 2
    for slot in range(3):
        twins.same_columns(slot)


def test_a_tree_may_come_level_by_level() -> None:
    twins = Twins("mistral", OpTape())
    twins.start(0, [3, 1, 4, 1, 5])
    tokens, at = [5, 9, 2, 6, 5, 3, 5, 8], 0
    for end in (1, 3, 6, 8):
        twins.forward([PackRow(0, tokens[at:end], TREE[:end])])
        twins.cache("commit", 0, range(end - at))
        at = end
    twins.same_columns(0)


@pytest.mark.parametrize("count", [NODES - 1, NODES, NODES + 1, 200])
@pytest.mark.parametrize("tree", [False, True])
def test_rows_of_any_length_are_computed(count: int, tree: bool) -> None:
    tape = OpTape()
    twins = Twins("gemma3_text", tape)
    twins.start(0, [3, 1, 4])
    before = tape.recorded
    parents = [max(-1, node - 1 - node % 3) for node in range(count)]
    twins.forward([PackRow(0, [i % VOCAB for i in range(count)], parents if tree else None)])
    assert (tape.recorded > before) == (count <= NODES)
    twins.cache("commit", 0, path_to(count - 1, parents) if tree else range(count))
    twins.same_columns(0)


def test_padding_leaves_the_drafts_of_other_rows_alone() -> None:
    """They lie behind their slot's length, and may be committed after others were computed."""
    twins = Twins(tape=OpTape())
    for slot in range(3):
        twins.start(slot, [slot, 5, 6])
    twins.forward([PackRow(1, list(range(8)), TREE)])
    for _ in range(2):
        twins.forward([PackRow(0, [1, 2, 3]), PackRow(2, [1])])
    twins.cache("commit", 1, [0, 2, 5])
    for slot in range(3):
        twins.same_columns(slot)


def test_a_slot_behind_many_that_have_ended_comes_to_the_front() -> None:
    twins = Twins(rows=8)
    twins.cache("open", 0)
    for slot in range(1, 8):
        twins.start(slot, [slot, 2, 3])
    cache = twins.static.cache
    assert isinstance(cache, StaticCache)
    twins.forward([PackRow(7, list(range(8)), TREE)])
    assert cache.settle([7]) == (7, 1)  # it lies alone, and nothing in front is free
    assert cache.settle([1, 2]) == (0, 4) and cache.settle([6, 7]) == (6, 2)
    for slot in range(5):
        twins.same_columns(slot)
    assert cache.settle([5, 7]) == (0, 2)
    twins.cache("commit", 7, [0, 2, 5])
    twins.forward([PackRow(7, [1]), PackRow(5, [2, 3])])
    for slot in (5, 6, 7):
        twins.same_columns(slot)


def test_features_are_those_of_the_step_also_where_it_is_replayed() -> None:
    twins = Twins(tape=OpTape())
    for needs in (Needs(hidden_layers=(0, 2), last_hidden=True), Needs()):
        for runner in twins.both:
            runner.tap(needs)
        for slot in (0, 1):
            twins.start(slot, [1, 2, 3 + slot])
        for token in (4, 5):
            twins.forward([PackRow(1, [token]), PackRow(0, [token, 9])])
            twins.forward([PackRow(0, [token])], taps=False)
            twins.forward([PackRow(0, [token, 3])], logits="none")
        for slot in (0, 1):
            twins.same_columns(slot)


def test_what_a_forward_gave_outlives_the_next() -> None:
    runner = StaticRunner(make(), pack=False, recorder=OpTape())
    runner.tap(Needs(last_hidden=True))
    runner.cache.open(0)
    kept = [runner.forward([PackRow(0, [token])]) for token in (1, 1, 2)]
    logits = [out.logits for out in kept]
    assert all(one is not None for one in logits)
    assert torch.equal(logits[0], logits[1]) and not torch.equal(logits[1], logits[2])  # type: ignore[arg-type]
    assert not torch.equal(kept[1].features["last"], kept[2].features["last"])


def test_a_model_without_some_sublayers_is_not_replayed_as_the_whole_one() -> None:
    twins = Twins(tape=OpTape())
    twins.start(0, [1, 2, 3])
    thin = [Thinnable(runner) for runner in twins.both]
    thin += [Thinnable(runner) for runner in twins.both]  # a second one must run its hooks as well
    skips = (SkipSet(frozenset({0}), frozenset({1})), SkipSet(frozenset({1}), frozenset({1})))
    for _ in range(2):
        twins.forward([PackRow(0, [4, 5])])
        for skip in skips:
            with thin[0].without(skip), thin[1].without(skip):
                twins.forward([PackRow(0, [4, 5])])
    assert cuts_agree(twins.static) in (True, False)
    twins.forward([PackRow(0, [4, 5])])


def test_a_draft_model_that_drafts_fewer_tokens_is_recorded_anew(tmp_path: Path) -> None:
    (tmp_path / "ids.json").write_text(json.dumps(list(range(1, VOCAB))))
    config = DraftModelConfig("tiny", 3, draft_vocab=str(tmp_path / "ids.json"))
    found = []
    for recorder in (None, OpTape()):
        runner = StaticRunner(make(), pack=False, recorder=recorder)  # the probe has recorded steps
        drafter = ModelDrafter(config, TargetInfo(VOCAB, 2048), runner)
        with Engine(Runner(make(), pack=False), drafter, prefix_tokens=256) as engine:
            prompts = [(*range(1, 40), *range(end)) for end in (3, 4, 5)]
            requests = [Request(prompt, SamplingParams(max_tokens=30), 1) for prompt in prompts]
            found.append(([run_all(engine, [request]) for request in requests], engine.counts))
        assert runner.not_recorded is None
    assert found[0] == found[1] and found[0][1].accepted_tokens > 20


def test_the_context_ends_where_it_ends() -> None:
    runner = StaticRunner(make(max_position_embeddings=20), pack=False)
    runner.cache.open(0)
    runner.extend(0, list(range(19)))
    runner.forward([PackRow(0, [1])])
    with pytest.raises(CapacityError, match="21 tokens do not fit"):
        runner.forward([PackRow(0, [1, 2])])


def test_on_a_cpu_the_runner_stays_what_it_was() -> None:
    assert type(open_runner(make())) is Runner


@pytest.mark.parametrize("kind", KINDS)
def test_the_engine_says_what_plain_decoding_says(kind: str) -> None:
    twin = make(kind, seed=1)
    requests = [
        Request(tuple(range(1 + i, 5 + 7 * i)), SamplingParams(max_tokens=24, temperature=t), 20 + i)
        for i, t in enumerate((0.0, 0.0, 0.8, 0.0, 0.8))
    ]
    known = {r.seed: plain_decode(twin, r, vocab_size=VOCAB) for r in requests}
    draft = any_of((random_tree(known, VOCAB), right_until(known, VOCAB)))
    tape = OpTape()
    with Engine(
        StaticRunner(make(kind, seed=1), pack=False, recorder=tape),
        FunctionDrafter(draft),
        controller=RandomBudgets(6),
        max_rows=3,
        chunk=16,
        prefix_tokens=256,
    ) as engine:
        told = run_all(engine, requests, arrive=2)
        assert engine.counts.accepted_tokens > 20
    assert told == list(known.values()) and tape.replayed > tape.recorded > 5


def test_no_more_is_admitted_than_rows_as_long_as_the_longest_have_memory_for() -> None:
    runner = StaticRunner(make(max_position_embeddings=8192), pack=False)
    cache = runner.cache
    assert isinstance(cache, StaticCache)
    assert cache.held([]) == 0 and cache.held([WIDTH]) == WIDTH
    assert cache.held([WIDTH] * 3) == 4 * WIDTH and cache.held([3 * WIDTH, WIDTH]) == 2 * 4 * WIDTH
    with Engine(runner, NoDrafter(NoConfig(), None), max_rows=8, cache_tokens=4 * WIDTH) as engine:  # type: ignore[arg-type]
        short = SamplingParams(max_tokens=6, ignore_eos=True)
        ids = [engine.add(prompt, short) for prompt in ([1, 2], [3], [4], [5])]
        ids += [engine.add([3] * (WIDTH - 2), short), engine.add([9], short)]
        engine.step()
        assert len(engine.load.admitted) == 4 and engine.load.reserved == 4 * WIDTH
        with pytest.raises(CapacityError, match="may need 4096 cached tokens, there is memory for 2048"):
            engine.add([1], SamplingParams(max_tokens=4 * WIDTH, ignore_eos=True))
        ended: dict[int, int] = {}
        while engine.has_work:
            for event in engine.step():
                ended[event.seq_id] = ended.get(event.seq_id, 0) + len(event.tokens)
                assert cache.rows * cache.tokens <= 4 * WIDTH
        assert cache.epoch > 2 and cache.tokens == 2 * WIDTH  # rows made room for columns
    assert set(ended) == set(ids) and [ended[i] for i in ids] == [5] * 4 + [6] * 2  # of four one came before


def test_the_cache_ends_with_its_engine() -> None:
    runner = StaticRunner(make(), pack=False, recorder=OpTape())
    with Engine(runner, NoDrafter(NoConfig(), None), cache_tokens=4 * WIDTH) as engine:  # type: ignore[arg-type]
        assert len(run_all(engine, [Request((1, 2, 3), SamplingParams(max_tokens=4), 1)])[0]) == 4
        cache = weakref.ref(runner.cache)
    gc.collect()
    assert cache() is None and engine.load.reserved == 0


# -- what a step is told --------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [False, True], ids=["sound", "planted"])
def test_ancestors_are_what_the_mask_shows(family: bool) -> None:
    rng = random.Random(0)
    for count in (1, 2, 7, 33, NODES):
        parents = [rng.randint(-1, node - 1) for node in range(count)]
        earlier = rng.randrange(count)
        kind: Callable[..., Span] = _FamilySpan if family else Span
        span = kind(0, 0, count - earlier, 20 + earlier, WIDTH, parents, tree_depths(parents), earlier)
        shown = span.mask(span.count, None, torch.float32, torch.device("cpu"))[0, 0] == 0.0
        assert shown[:, : span.trunk].all() and not shown[:, span.trunk + count :].any()
        bits = [[bool(seen >> node & 1) for node in range(count)] for seen in span.ancestors()]
        assert torch.equal(shown[:, span.trunk : span.trunk + count], torch.tensor(bits))
        assert all(-(1 << 63) <= seen < 1 << 63 for seen in span.ancestors())


def test_ancestors_of_a_chain_are_all_before() -> None:
    pack = build_pack([(PackRow(0, [0] * NODES), 5, WIDTH)], torch.device("cpu"))
    assert pack.spans[0].ancestors() == [*((2 << i) - 1 for i in range(NODES - 1)), -1]


def test_a_bucket_of_columns_is_little_more_than_is_needed_and_fits() -> None:
    for blocks in range(1, 300):
        need = blocks * WIDTH
        got = bucket(need)
        assert need <= got <= need * 5 / 4 and got % WIDTH == 0
        assert got <= WIDTH << (blocks - 1).bit_length()  # the cache's capacity
    assert len({bucket(blocks * WIDTH) for blocks in range(1, 257)}) < 32


# -- the tape -------------------------------------------------------------------------------------------


def test_a_tape_runs_operators_and_no_python() -> None:
    x, length = torch.zeros(4), [1]

    def by_tensor() -> torch.Tensor:
        return x.cumsum(0)[1:] * 2

    def by_python() -> torch.Tensor:
        return x[: length[0]].clone()

    replays = [OpTape().record(work) for work in (by_tensor, by_python)]
    x.copy_(torch.arange(4.0))
    length[0] = 3
    assert replays[0]().tolist() == [2.0, 6.0, 12.0] == by_tensor().tolist()
    assert replays[1]().tolist() == [0.0] != by_python().tolist()
    with pytest.raises(RecordError, match="ask for a value"):
        OpTape().record(lambda: float(x.sum()))


def test_a_step_that_cannot_be_recorded_is_computed() -> None:
    class Refuses(OpTape):
        def record(self, work: Callable[[], Any]) -> Callable[[], Any]:
            raise RecordError("not this one")

    twins = Twins(tape=Refuses())
    assert twins.static.not_recorded == "not this one"
    twins.start(0, [1, 2])
    twins.forward([PackRow(0, [3])])
