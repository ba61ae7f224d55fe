"""What a prefix cache gives is, bit for bit, what reading the prompt would have given."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import pytest
import torch

from slipstream.core.draft import Drafter, DraftRequest, Needs, Observation
from slipstream.core.params import SamplingParams
from slipstream.core.sequence import Sequence as Row
from slipstream.drafters.base import Draft
from slipstream.engine import reading
from slipstream.engine.engine import Engine
from slipstream.engine.reading import PromptReader
from slipstream.errors import DrafterError, ParameterError
from slipstream.model.cache import Columns, SlotCache, cut
from slipstream.model.cuts import cuts_agree
from slipstream.model.packed import can_pack
from slipstream.model.prefix import BLOCK, PrefixCache
from slipstream.model.runner import Output, Runner
from slipstream.testing.adversaries import (
    FunctionDrafter,
    RandomBudgets,
    any_of,
    nothing,
    random_tree,
    right_until,
)
from slipstream.testing.oracle import Request, plain_decode
from slipstream.testing.tiny import tiny_model

VOCAB, CHUNK = 60, 48
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"tie": True},
    "qwen3": {},
    "mistral": {"sliding_window": 20},
    "gemma3_text": {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]},
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SYSTEM = tuple((7 * i + i // 5) % VOCAB for i in range(2 * BLOCK))  # whole blocks: one token more is wrong
USER = tuple(range(30, 46))
PARAMS = SamplingParams(max_tokens=20, temperature=1.0, logprobs=2)
Drafts = Callable[[DraftRequest], Draft]


def ask(*more: int, seed: int, first: Sequence[int] = SYSTEM) -> Request:
    return Request((*first, *more), PARAMS, seed)


@lru_cache
def target(kind: str = "llama", dtype: str = "float32", seed: int = 1) -> Runner:
    model = tiny_model(kind, vocab_size=VOCAB, seed=seed, **KINDS[kind]).to(DTYPES[dtype])
    if not can_pack(model):
        pytest.skip(f"this CPU has no packed {dtype} kernels")
    return Runner(model, pack=True)


@lru_cache
def minds_cuts(runner: Runner) -> bool:
    return not cuts_agree(runner)


@dataclass
class Seen:
    """Of every sequence: its answer, raw log-probabilities, and the prompt's keys when it began to decode."""

    rows: list[Row] = field(default_factory=list)
    keys: dict[int, Columns] = field(default_factory=dict)
    computed: int = 0  # prompt tokens

    @property
    def tokens(self) -> list[list[int]]:
        return [row.output for row in self.rows]

    @property
    def cached(self) -> list[int]:
        return [row.cached_tokens for row in self.rows]


@contextmanager
def watched(engine: Engine) -> Iterator[Seen]:
    seen, runner, forward = Seen(), engine.runner, engine.runner.forward

    def spy(rows: Any, **options: Any) -> Output:
        if options.get("logits") == "none":
            seen.computed += sum(len(row.tokens) for row in rows)
        for row in rows if options.get("logits") != "none" else ():
            if row.slot not in seen.keys:
                length = runner.cache.length(row.slot)
                layers = cut(runner.cache._slots[row.slot].layers, 0, length)
                seen.keys[row.slot] = {i: (k.clone(), v.clone()) for i, (k, v) in layers.items()}
        return forward(rows, **options)

    runner.forward = spy  # type: ignore[method-assign, assignment]
    try:
        yield seen
    finally:
        del runner.forward  # type: ignore[method-assign]


def follow_up(row: Row, *more: int, seed: int) -> Request:
    """The next turn: it begins with what was said, the answer included."""
    return Request((*row.tokens, *more), PARAMS, seed)


def converse(engine: Engine) -> Seen:
    """A chat of three turns; strangers with the same beginning, some at once; the same again, and others."""
    with watched(engine) as seen:

        def wave(*requests: Request) -> Row:
            ids = [engine.add(r.prompt, r.params, seed=r.seed) for r in requests]
            rows = [row for i in ids if (row := engine.find(i)) is not None]
            seen.rows += rows
            list(engine.run())
            return rows[0]

        first = wave(ask(*USER, seed=1), ask(6, seed=9))
        wave(ask(4, seed=2), ask(*range(20), seed=3), ask(*USER, seed=4), ask(seed=5, first=SYSTEM[:50]))
        second = wave(follow_up(first, *range(50, 58), seed=6))
        wave(
            follow_up(second, 7, seed=7),
            ask(*USER, seed=1),
            ask(5, seed=8, first=(*SYSTEM[BLOCK:], *SYSTEM[:BLOCK])),
            ask(5, seed=10, first=(*SYSTEM[:-1], (SYSTEM[-1] + 1) % VOCAB)),
        )
        assert len(first.tokens) > 3 * BLOCK and len(second.tokens) == 4 * BLOCK
        seen.keys = {row.id - first.id: seen.keys[row.id] for row in seen.rows}
    return seen


def engine_for(runner: Runner, drafter: Drafter | None = None, **options: Any) -> Engine:
    options = {"controller": RandomBudgets(5), **options} if drafter is not None else options
    return Engine(runner, drafter, vocab_size=VOCAB, max_rows=4, chunk=CHUNK, **options)  # type: ignore[arg-type]


def differences(seen: Seen, want: Seen, logprobs: bool = True) -> list[str]:
    found = ["tokens"] if seen.tokens != want.tokens else []
    if logprobs and [row.logprobs for row in seen.rows] != [row.logprobs for row in want.rows]:
        found.append("log-probabilities")
    for i, keys in want.keys.items():
        same = keys.keys() == seen.keys[i].keys() and all(
            a.shape == b.shape and torch.equal(a, b)
            for layer in keys
            for a, b in zip(keys[layer], seen.keys[i][layer], strict=True)
        )
        found += [] if same else [f"keys of {i}"]
    return found


@lru_cache
def without(kind: str = "llama", dtype: str = "float32") -> Seen:
    """The same conversation, every prompt read whole, nothing drafted."""
    return converse(engine_for(target(kind, dtype)))


def adversary(dtype: str = "float32") -> FunctionDrafter:
    """Chains that are often right; in float32, where no two tokens are nearly as likely, trees as well."""
    known = {row.seed: row.output for row in without(dtype=dtype).rows}
    chains = right_until(known, VOCAB)
    return FunctionDrafter(any_of((random_tree(known, VOCAB), chains)) if dtype == "float32" else chains)


FINE, COARSE = "any cut", "whole chunks"


def use_cuts(cuts: str, runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to be exact: where kernels do not mind the number of rows, and where they do."""
    if cuts == COARSE:
        monkeypatch.setattr(reading, "cuts_agree", lambda runner: False)
    elif minds_cuts(runner):
        pytest.skip("kernels of this machine mind the number of rows")


@pytest.mark.parametrize(
    ("kind", "dtype", "cuts"),
    [
        *((kind, "float32", FINE) for kind in KINDS),
        *((kind, "bfloat16", FINE) for kind in ("qwen2", "gemma3_text")),
        ("llama", "float32", COARSE),
        ("gemma3_text", "bfloat16", COARSE),
    ],
)
def test_keys_and_answers_are_those_of_reading_everything(
    kind: str, dtype: str, cuts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = target(kind, dtype)
    use_cuts(cuts, runner, monkeypatch)
    want = without(kind, dtype)
    engine = engine_for(runner, prefix_tokens=2000)
    seen = converse(engine)
    assert differences(seen, want) == []
    # In blocks of 32 tokens, the answers' too; or in chunks of 48 of the prompts alone.
    fine, coarse = [0, 64, 64, 64, 64, 32, 96, 96, 64, 0, 32], [0, 48, 48, 48, 48, 48, 48, 96, 48, 0, 48]
    assert seen.cached == (fine if cuts == FINE else coarse)
    assert want.computed - seen.computed == sum(seen.cached) == engine.prefix_counts.hits
    assert engine.prefix_counts.queries == sum(len(row.prompt) for row in seen.rows)


@pytest.mark.parametrize(("dtype", "cuts"), [("float32", FINE), ("bfloat16", FINE), ("float32", COARSE)])
def test_after_drafts_that_were_refused_as_well(
    dtype: str, cuts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = target("llama", dtype)
    use_cuts(cuts, runner, monkeypatch)
    engine = engine_for(runner, adversary(dtype), prefix_tokens=2000)
    seen = converse(engine)
    assert differences(seen, without(dtype=dtype), logprobs=False) == []
    assert engine.counts.accepted_tokens > 30 < engine.counts.draft_tokens - engine.counts.accepted_tokens
    assert engine.counts.branched == (dtype == "float32")


def test_the_answers_are_the_references() -> None:
    twin = tiny_model("llama", vocab_size=VOCAB, seed=1)
    for row in converse(engine_for(target(), prefix_tokens=2000)).rows[::5]:
        assert row.output == plain_decode(twin, Request(row.prompt, PARAMS, row.seed), vocab_size=VOCAB)


def test_long_prompts_are_the_same_across_the_width_of_attention() -> None:
    """Beginnings that end before, at and behind a multiple of 512, and an answer that crosses it."""
    runner = target("gemma3_text")
    base = [(i * i + 3 * i) % VOCAB for i in range(1030)]
    requests = [Request(tuple(base[:n]), PARAMS.with_(max_tokens=16), n) for n in (500, 540, 1030)]

    def run(**options: Any) -> Seen:
        engine = Engine(runner, None, vocab_size=VOCAB, **options)  # type: ignore[arg-type]
        with watched(engine) as seen:
            for r in requests:
                row = engine.find(engine.add(r.prompt, r.params, seed=r.seed))
                assert row is not None
                seen.rows.append(row)
                list(engine.run())
        return seen

    seen = run(prefix_tokens=4000)
    assert differences(seen, run()) == []
    assert seen.cached[0] == 0 and seen.cached[2] == 512


def test_strangers_that_come_at_once_compute_what_they_share_once() -> None:
    engine = engine_for(target(), prefix_tokens=1)  # nothing is kept: they run at the same time
    with watched(engine) as seen:
        for i in range(4):
            engine.add((*SYSTEM, i), PARAMS.with_(max_tokens=4), seed=i)
        list(engine.run())
    size = engine._reader._prefixes.block
    shared = len(SYSTEM) // size * size
    assert seen.computed == 4 * len(SYSTEM) - 3 * shared and engine.load.parked == 0


# -- faults that this finds ---------------------------------------------------------------------------------


def one_too_many(patch: pytest.MonkeyPatch) -> None:
    """What running sequences share is taken to be a token longer."""
    shared = PromptReader._shared

    def fault(self: PromptReader, one: Row, other: Row, limit: int) -> int:
        length = shared(self, one, other, limit)
        return length + (0 < length < limit)

    patch.setattr(PromptReader, "_shared", fault)


def last_of_a_block_not_compared(patch: pytest.MonkeyPatch) -> None:
    find = PrefixCache.find

    def fault(self: PrefixCache, tokens: Sequence[int], limit: int) -> Any:
        blocks = find(self, tokens, limit)
        at, before = len(blocks) * self.block, blocks[-1].number if blocks else 0
        wanted = tuple(tokens[at : at + self.block])
        for (number, held), block in self._blocks.items():
            if at + self.block <= limit and number == before and held[:-1] == wanted[:-1]:
                return [*blocks, block]
        return blocks

    patch.setattr(PrefixCache, "find", fault)


def slots_share_memory(patch: pytest.MonkeyPatch) -> None:
    """A running sequence goes on writing into what another one was given."""

    def fault(self: SlotCache, source: int, target: int, length: int) -> None:
        old, new = self._slots[source], self._slots[target]
        new.layers, new.capacity = dict(old.layers), old.capacity
        new.length = new.in_order = length

    patch.setattr(SlotCache, "copy_prefix", fault)


def a_block_is_handed_out(patch: pytest.MonkeyPatch) -> None:
    """Not a copy: its next owner writes to it."""
    fill = PrefixCache.fill

    def fault(self: PrefixCache, cache: SlotCache, slot: int, blocks: Any) -> None:
        fill(self, cache, slot, blocks)
        with torch.inference_mode():
            for keys, _ in blocks[-1].columns.values():
                keys[:, -1] = 0

    patch.setattr(PrefixCache, "fill", fault)


def the_root_is_kept(patch: pytest.MonkeyPatch) -> None:
    """Its column is there, but nobody has computed it."""

    def fault(self: PromptReader, sequence: Row) -> None:
        cache = self._runner.cache
        self._prefixes.keep(cache, sequence.id, sequence.tokens, self._room())

    patch.setattr(PromptReader, "close", fault)


def wrong_place(patch: pytest.MonkeyPatch) -> None:
    """Blocks are found wherever they stand in a text."""
    keep = PrefixCache.keep

    def fault(self: PrefixCache, cache: SlotCache, slot: int, tokens: Sequence[int], room: int) -> None:
        keep(self, cache, slot, tokens, room)
        for (_, held), block in list(self._blocks.items()):
            self._blocks[0, held] = block

    patch.setattr(PrefixCache, "keep", fault)


@pytest.mark.parametrize(
    "fault",
    [
        one_too_many,
        last_of_a_block_not_compared,
        slots_share_memory,
        a_block_is_handed_out,
        the_root_is_kept,
        wrong_place,
    ],
)
def test_a_planted_fault_is_found(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "cuts_agree", lambda runner: True)  # faults of the finer way as well
    want = without()
    fault(monkeypatch)
    assert differences(converse(engine_for(target(), prefix_tokens=2000)), want)


def test_keys_of_another_model_would_be_found() -> None:
    other = engine_for(target(seed=2), prefix_tokens=2000)
    converse(other)
    engine = engine_for(target(), prefix_tokens=2000)
    assert engine.load.parked == 0  # nothing is shared between engines by itself
    engine._reader._prefixes = other._reader._prefixes
    assert differences(converse(engine), without())


def test_what_a_tree_moved_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "cuts_agree", lambda runner: True)
    monkeypatch.setattr(SlotCache, "in_order", SlotCache.length)
    seen = converse(engine_for(target(), adversary(), prefix_tokens=2000))
    assert any(d.startswith("keys") for d in differences(seen, without()))


# -- ends ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 2, 9])
def test_of_a_cancelled_sequence_what_was_committed_is_kept(steps: int) -> None:
    engine = engine_for(target(), adversary(), prefix_tokens=2000)
    row = engine.find(engine.add(ask(*USER, seed=1).prompt, PARAMS, seed=1))
    assert row is not None
    for _ in range(steps):
        engine.step()
    engine.cancel(row.id)
    engine.apply_cancels()
    size = engine._reader._prefixes.block
    kept = min(steps * CHUNK, len(row.prompt) - 1) // size * size
    assert engine.load.parked >= kept > 0 and len(engine.runner.cache) == 0
    again = converse(engine)
    assert again.rows[0].cached_tokens >= kept
    assert differences(again, without(), logprobs=False) == []


@pytest.mark.parametrize("where", ["draft", "forward", "prompt"])
def test_of_a_failed_step_what_was_committed_is_kept(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step has written behind the lengths by then."""
    runner = target()
    engine = engine_for(runner, adversary(), prefix_tokens=2000)
    ids = [engine.add(r.prompt, r.params, seed=r.seed) for r in (ask(*USER, seed=1), ask(4, seed=2))]
    for _ in range(1 if where == "prompt" else 3):
        engine.step()

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("broken")

    with monkeypatch.context() as patch:
        if where == "draft":
            patch.setattr(engine.drafter, "propose", broken)
        else:
            forward = runner.forward
            patch.setattr(runner, "forward", lambda *a, **o: broken(forward(*a, **o)))
        kind = DrafterError if where == "draft" else RuntimeError
        with pytest.raises(kind, match="broken"):
            for _ in range(3):
                engine.step()
    engine.abandon(ids)
    assert len(runner.cache) == 0 and engine.load.parked > 0
    assert differences(converse(engine), without(), logprobs=False) == []


def test_after_a_lossy_answer_the_keys_are_those_of_its_tokens() -> None:
    engine = engine_for(target(), adversary(), prefix_tokens=2000, rule="typical", lossy=True)
    said = engine.find(engine.add(ask(*USER, seed=1).prompt, PARAMS, seed=1))
    list(engine.run())
    assert said is not None and said.lossy
    nexts = [follow_up(said, 5, seed=2), ask(9, 9, seed=3)]

    def run(engine: Engine) -> Seen:
        with watched(engine) as seen:
            ids = [engine.add(r.prompt, r.params.with_(max_tokens=1), seed=r.seed) for r in nexts]
            list(engine.run())
        seen.keys = {i: seen.keys[seq_id] for i, seq_id in enumerate(ids)}
        return seen

    assert differences(run(engine), run(engine_for(target()))) == [] and engine.prefix_counts.hits > 0


def test_a_closed_engine_holds_nothing() -> None:
    runner = Runner(tiny_model("llama", vocab_size=VOCAB, seed=1), pack=False)
    with Engine(runner, None, chunk=CHUNK, prefix_tokens=500) as engine:  # type: ignore[arg-type]
        before = engine.memory_bytes
        engine.add(SYSTEM, PARAMS, seed=1)
        list(engine.run())
        each = sum(2 * 8 * 2 * 4 for _ in range(2))  # k and v, head_dim, kv heads, float32; layers
        assert engine.load.parked > 0 and engine.memory_bytes - before == engine.load.parked * each
        engine.limit_prefixes(0)
        assert engine.load.parked == 0 and engine.memory_bytes == before
        engine.limit_prefixes(500)
        engine.add(SYSTEM, PARAMS, seed=1)
        engine.step()
    assert engine.load.parked == 0 and len(engine.runner.cache) == 0
    with pytest.raises(ParameterError, match="prefix_tokens"):
        Engine(runner, None, prefix_tokens=-1)  # type: ignore[arg-type]


# -- memory -------------------------------------------------------------------------------------------------


def test_what_is_kept_never_exceeds_the_budget_and_changes_nothing() -> None:
    budget = 3 * 512
    brief = PARAMS.with_(max_tokens=3)
    # It may come to need 1024 tokens, and ends long before.
    long = PARAMS.with_(max_tokens=480, min_tokens=9, stop_token_ids=tuple(range(0, VOCAB, 2)))

    def run(prefix_tokens: int) -> tuple[Seen, Engine]:
        engine = engine_for(target(), prefix_tokens=prefix_tokens, cache_tokens=budget)
        with watched(engine) as seen:
            for i in range(14):
                prompt = (i, *SYSTEM, *SYSTEM[:40]) if i % 3 == 2 else (*SYSTEM, *range(i))
                row = engine.find(engine.add(prompt, long if i % 3 == 1 else brief, seed=i))
                assert row is not None
                seen.rows.append(row)
            while engine.has_work:
                engine.step()
                held = sum(s.capacity for s in engine.runner.cache._slots.values())
                assert held + engine.load.parked <= budget
                most[prefix_tokens] = max(most.get(prefix_tokens, 0), engine.load.parked)
        return seen, engine

    most: dict[int, int] = {}
    (want, _), (seen, engine) = run(0), run(budget)
    assert differences(seen, want) == [] and most[0] == 0 < most[budget]
    assert engine.prefix_counts.hits > 0


def test_what_is_kept_is_no_reason_to_wait() -> None:
    engine = engine_for(target(), prefix_tokens=2000, cache_tokens=1024)
    for i in range(6):
        engine.add((*SYSTEM[i:], *SYSTEM), PARAMS.with_(max_tokens=2), seed=i)
        list(engine.run())
    assert engine.load.parked > 500
    for i in range(2):
        engine.add(SYSTEM, PARAMS, seed=i)
    engine.step()
    load = engine.load
    assert (len(load.admitted), load.waiting, load.reserved, load.parked) == (2, 0, 1024, 0)
    engine.abandon()


# -- drafters -----------------------------------------------------------------------------------------------


class Fed(FunctionDrafter):
    """Is given hidden states, and remembers of which positions."""

    def __init__(self, needs: Needs) -> None:
        super().__init__(nothing)
        self.needs = needs
        self.told: dict[int, list[int]] = {}

    def observe(self, observations: Sequence[Observation]) -> None:
        for seen in observations:
            assert seen.features["last"].shape[0] == len(seen.tokens)
            self.told.setdefault(seen.seq_id, []).extend(range(seen.start, seen.start + len(seen.tokens)))


@pytest.mark.parametrize("last_only", [False, True])
def test_a_drafter_that_is_fed_hidden_states_gets_those_it_needs(last_only: bool) -> None:
    drafter = Fed(Needs(last_hidden=True, last_only=last_only))
    engine = engine_for(target(), drafter, prefix_tokens=2000)
    seen = converse(engine)
    assert differences(seen, without()) == []
    for row in seen.rows:
        told = drafter.told[row.id]
        assert told == list(range(row.cached_tokens, len(row.tokens) - 1))
        assert len(row.prompt) - 2 in told  # the state that the first draft starts from
    assert (engine.prefix_counts.hits > 0) == last_only
    engine.set_drafter(None)


def test_answers_of_one_request_share_the_prompt_with_and_without() -> None:
    for tokens in (0, 2000):
        engine = engine_for(target(), prefix_tokens=tokens)
        with watched(engine) as seen:
            ids = [engine.add(SYSTEM[:41], PARAMS, seed=i, group=0) for i in range(3)]
            rows = [row for i in ids if (row := engine.find(i)) is not None]
            list(engine.run())
        assert seen.computed == 40 and [row.cached_tokens for row in rows] == [0, 40, 40]
        assert engine.prefix_counts.hits == (80 if tokens else 0)
