"""Where an answer ends, and what ids, text, log-probabilities, counts and cache say there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import pytest
import torch

from slipstream.core.draft import Drafter, Needs
from slipstream.core.params import SamplingParams
from slipstream.core.sequence import Event
from slipstream.core.sequence import Sequence as Row
from slipstream.drafters.base import TargetInfo
from slipstream.drafters.draft_model import DraftModelConfig, ModelDrafter
from slipstream.engine.engine import Engine
from slipstream.engine.session import Session
from slipstream.errors import CapacityError, DrafterError, ParameterError
from slipstream.model.runner import Output, Runner
from slipstream.testing.adversaries import FunctionDrafter, any_of, nothing, random_chain, right, right_until
from slipstream.testing.oracle import Request, plain_decode, run_all
from slipstream.testing.tiny import tiny_model, tiny_tokenizer

VOCAB = 258
LETTERS = {i: 40.0 for i in range(ord("a"), ord("z") + 1)}  # nothing but a to z is ever chosen
PROMPT = (84, 104, 101, 32, 99)
FREE = SamplingParams(max_tokens=24, temperature=1.0, logit_bias=LETTERS, logprobs=2)
SEED = 17
# Every token at most once, so that any text can be given to them.
VARIED = SamplingParams(max_tokens=10, temperature=1.0, presence_penalty=2.0, frequency_penalty=2.0)


def make_model() -> Any:
    return tiny_model("llama", vocab_size=VOCAB, layers=1, seed=5)


@lru_cache
def target() -> Runner:
    return Runner(make_model(), pack=False)


@lru_cache
def tokenizer() -> Any:
    return tiny_tokenizer(VOCAB)


def decode(ids: Sequence[int]) -> str:
    return str(tokenizer().decode(list(ids), skip_special_tokens=True))


@lru_cache
def expected(seed: int = SEED, prompt: tuple[int, ...] = PROMPT) -> tuple[int, ...]:
    """24 tokens of plain decoding, no end but the limit."""
    return tuple(plain_decode(make_model(), Request(prompt, FREE, seed), vocab_size=VOCAB))


def knowing(gamma: int) -> FunctionDrafter:
    return FunctionDrafter(right({SEED: expected()}), gamma)


def make(drafter: Drafter | None = None, **options: Any) -> Engine:
    return Engine(target(), drafter, vocab_size=VOCAB, decode=decode, **options)  # type: ignore[arg-type]


def finish(engine: Engine, params: SamplingParams, seed: int = SEED) -> tuple[Row, list[Event], int]:
    """The finished row, its events, and the length of its cache just before the slot was freed."""
    seq_id = engine.add(PROMPT, params, seed=seed)
    row = engine.find(seq_id)
    assert row is not None
    lengths: list[int] = []
    cache, close = engine.runner.cache, engine.runner.cache.close

    def spy(slot: int) -> None:
        lengths.append(cache.length(slot))
        close(slot)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "close", spy)
        events = list(engine.run())
    assert seq_id not in cache
    return row, events, lengths[-1]


def assert_ends_at(row: Row, events: list[Event], cached: int, count: int, text: str, reason: str) -> None:
    """Everything ends at output token `count`."""
    assert row.output == list(expected()[:count])
    assert [t for e in events for t in e.tokens] == row.output
    assert (row.text, "".join(e.text for e in events)) == (text, text)
    assert row.finish_reason == reason and [e.finish_reason for e in events[:-1]] == [None] * len(events[:-1])
    assert [x.token for x in row.logprobs] == row.output
    assert [x for e in events for x in e.logprobs] == row.logprobs
    assert len(row.drafted) == count and row.counts.emitted == count
    assert sum(row.drafted) == row.counts.accepted_tokens
    assert cached == len(PROMPT) + count - 1  # the last token never entered the cache


@pytest.mark.parametrize("gamma", [0, 1, 4, 8])
def test_an_answer_has_exactly_max_tokens(gamma: int) -> None:
    for limit in (1, 2, gamma or 3, gamma + 1, gamma + 2):
        row, events, cached = finish(make(knowing(gamma)), FREE.with_(max_tokens=limit))
        assert_ends_at(row, events, cached, limit, decode(expected()[:limit]), "length")


def test_the_last_token_is_never_drafted_for() -> None:
    """γ tokens and the bonus: a draft longer than what remains would be wasted work."""
    row, _, _ = finish(make(knowing(8)), FREE.with_(max_tokens=4))
    assert (row.counts.passes, row.counts.draft_tokens, row.counts.accepted_tokens) == (1, 3, 3)


@pytest.mark.parametrize("gamma", [0, 1, 3, 8])
def test_an_end_token_inside_an_accepted_block_ends_everything_there(gamma: int) -> None:
    for at in range(1, 12):
        if expected().index(expected()[at]) != at:
            continue
        engine = make(knowing(gamma), eos_ids={expected()[at]})
        row, events, cached = finish(engine, FREE)
        assert_ends_at(row, events, cached, at + 1, decode(expected()[:at]), "stop")
        engine = make(knowing(gamma))
        row, events, cached = finish(engine, FREE.with_(stop_token_ids=(expected()[at],)))
        assert_ends_at(row, events, cached, at + 1, decode(expected()[:at]), "stop")


@pytest.mark.parametrize("gamma", [0, 1, 2, 3, 5, 8])
def test_a_stop_string_over_token_and_block_borders_ends_everything_there(gamma: int) -> None:
    text = decode(expected())
    for at in range(12):
        stop = text[at : at + 3]
        if text.index(stop) != at:
            continue
        row, events, cached = finish(make(knowing(gamma)), FREE.with_(stop=("nowhere", stop)))
        assert_ends_at(row, events, cached, at + 3, text[:at], "stop")


def test_a_stop_string_that_begins_but_does_not_come_is_given_out() -> None:
    text = decode(expected())
    row, events, _ = finish(make(knowing(3)), FREE.with_(stop=(text[4:8] + "~", text[-1] + "~")))
    assert row.text == text == "".join(e.text for e in events) and row.finish_reason == "length"


@pytest.mark.parametrize("gamma", [0, 8])
def test_what_comes_first_in_token_order_wins(gamma: int) -> None:
    text, ids = decode(expected()), expected()
    at = next(i for i in range(3, 12) if ids.index(ids[i]) == i and text.index(text[i - 2 : i]) == i - 2)
    both = FREE.with_(stop=(text[at - 2 : at],), stop_token_ids=(ids[at],))
    row, events, cached = finish(make(knowing(gamma)), both)  # the string ends one token before
    assert_ends_at(row, events, cached, at, text[: at - 2], "stop")
    late = FREE.with_(stop=(text[at : at + 2],), stop_token_ids=(ids[at],))
    row, events, cached = finish(make(knowing(gamma)), late)  # the end token is the string's first
    assert_ends_at(row, events, cached, at + 1, text[:at], "stop")
    tight = FREE.with_(stop=(text[at - 2 : at],), max_tokens=at)
    row, events, cached = finish(make(knowing(gamma)), tight)  # at the limit's own token
    assert_ends_at(row, events, cached, at, text[: at - 2], "stop")


def test_logprobs_are_those_of_plain_decoding() -> None:
    plain, _, _ = finish(make(), FREE)
    fast, _, _ = finish(make(knowing(5)), FREE)
    for one, other in zip(plain.logprobs, fast.logprobs, strict=True):
        assert one.token == other.token and [t for t, _ in one.top] == [t for t, _ in other.top]
        assert one.logprob == pytest.approx(other.logprob, abs=1e-5)


@pytest.mark.parametrize("gamma", [0, 1, 4, 8])
def test_generation_stops_where_the_context_is_full(gamma: int) -> None:
    for room in (1, 2, 5, 9):
        engine = make(knowing(gamma), context=len(PROMPT) + room)
        row, events, cached = finish(engine, FREE.with_(max_tokens=None))
        assert_ends_at(row, events, cached, room, decode(expected()[:room]), "length")


def test_generation_stops_at_the_models_own_last_position() -> None:
    small = Runner(tiny_model("llama", vocab_size=48, layers=1, max_position_embeddings=32), pack=False)
    drafter = FunctionDrafter(random_chain(48), 8)
    engine = Engine(small, drafter)
    seq_id = engine.add(tuple(range(20)), SamplingParams())
    row = engine.find(seq_id)
    list(engine.run())
    assert row is not None and len(row.tokens) == 32 and row.finish_reason == "length"


@pytest.mark.parametrize("gamma", [0, 1, 3, 8])
def test_characters_split_over_tokens_come_out_whole(gamma: int) -> None:
    written = "né😀 ü"
    data = written.encode()
    ids = tuple(plain_decode(make_model(), Request(PROMPT, VARIED, 22), vocab_size=VOCAB))
    assert len(set(ids)) == len(data) == VARIED.max_tokens
    byte_of = dict(zip(ids, data, strict=True))

    def bytewise(tokens: Sequence[int]) -> str:
        return bytes(byte_of[t] for t in tokens).decode(errors="replace")

    drafter = FunctionDrafter(right({22: ids}), gamma)
    engine = Engine(target(), drafter, vocab_size=VOCAB, decode=bytewise)
    row, events, _ = finish(engine, VARIED, seed=22)
    assert row.text == written and "".join(e.text for e in events) == written
    assert not any("\ufffd" in e.text for e in events)
    engine = Engine(target(), drafter, vocab_size=VOCAB, decode=bytewise)
    row, events, _ = finish(engine, VARIED.with_(stop=("😀",)), seed=22)
    assert row.text == "né" == "".join(e.text for e in events) and row.num_output == 7
    engine = Engine(target(), drafter, vocab_size=VOCAB, decode=bytewise)
    row, events, _ = finish(engine, VARIED.with_(max_tokens=5), seed=22)
    assert row.text == "né\ufffd" == "".join(e.text for e in events)  # cut inside the third character


# -- draft models that do not quite fit ---------------------------------------------------------------


def draft_model(gamma: int = 4, **tiny: Any) -> ModelDrafter:
    model = tiny_model("llama", layers=1, **{"vocab_size": VOCAB, "seed": 6, **tiny})
    return ModelDrafter(
        DraftModelConfig("tiny", gamma), TargetInfo(VOCAB, 2048), runner=Runner(model, pack=False)
    )


def test_a_row_beyond_the_drafts_context_goes_on_undrafted() -> None:
    drafter = draft_model(max_position_embeddings=24)
    engine = make(drafter)
    long = tuple((7 * i) % 250 for i in range(30))
    ids = [engine.add(p, FREE, seed=SEED) for p in (long, PROMPT)]
    rows = [engine.find(i) for i in ids]
    list(engine.run())
    for row, prompt in zip(rows, (long, PROMPT), strict=True):
        assert row is not None and row.output == list(expected(SEED, prompt))
    assert rows[0] is not None and rows[0].counts.draft_tokens == 0
    assert rows[1] is not None and rows[1].counts.draft_tokens > 0
    assert drafter.runner.cache.memory_bytes == 0


@pytest.mark.parametrize("width", [200, 258, 320])
def test_a_draft_with_another_head_width_gives_the_same_tokens(width: int) -> None:
    engine = make(draft_model(vocab_size=width))
    row, _, _ = finish(engine, FREE)
    assert row.output == list(expected()) and row.counts.draft_tokens > 0


@pytest.mark.parametrize("width", [200, 258, 320])
def test_a_sampled_draft_with_another_head_width_has_q_of_the_targets_width(width: int) -> None:
    drafter = draft_model(vocab_size=width)
    sampled = ModelDrafter(DraftModelConfig("tiny", 3, sampled=True), TargetInfo(VOCAB, 2048), drafter.runner)
    row, _, _ = finish(make(sampled), FREE)
    assert row.num_output == 24 and row.counts.draft_tokens > 0


def test_the_first_token_is_out_before_the_draft_model_reads_the_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drafter = draft_model()
    order: list[str] = []
    forward = drafter.runner.forward

    def spy(*args: Any, **options: Any) -> Output:
        order.append("draft")
        return forward(*args, **options)

    monkeypatch.setattr(drafter.runner, "forward", spy)
    engine = make(drafter)
    engine.add(PROMPT, FREE)
    while engine.has_work:
        events = engine.step()
        order.extend("token" for e in events for _ in e.tokens)
    assert order[0] == "token" and "draft" in order


def test_one_token_is_answered_without_the_draft_model() -> None:
    drafter = draft_model()
    row, _, _ = finish(make(drafter), FREE.with_(max_tokens=1))
    assert row.num_output == 1 and len(drafter.runner.cache) == 0


# -- several answers, several engines -----------------------------------------------------------------


def count_prompt_tokens(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    counted: list[int] = []
    forward = runner.forward

    def spy(rows: Any, **options: Any) -> Output:
        if options.get("logits") == "none":
            counted.append(sum(len(r.tokens) for r in rows))
        return forward(rows, **options)

    monkeypatch.setattr(runner, "forward", spy)
    return counted


@pytest.mark.parametrize("chunk", [4, 7, 512])
@pytest.mark.parametrize("length", [1, 2, 8, 15])
def test_n_answers_read_the_prompt_once_and_have_seeds_in_a_row(
    chunk: int, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = [(11 * i) % 250 for i in range(length)]
    engine = make(FunctionDrafter(random_chain(VOCAB)), chunk=chunk)
    session = Session(engine, tokenizer(), TargetInfo(VOCAB, 2048), SamplingParams())
    params = SamplingParams(max_tokens=6, temperature=1.0, seed=50)
    alone = [session.generate(prompt, params.with_(seed=50 + i)) for i in range(4)]
    counted = count_prompt_tokens(engine.runner, monkeypatch)
    together = session.generate(prompt, params.with_(n=4))
    assert [a.tokens for a in together] == [a.tokens for a in alone]
    assert [a.seed for a in together] == [50, 51, 52, 53]
    assert len({a.tokens for a in together}) == 4
    assert sum(counted) == length - 1
    assert len(engine.runner.cache) == 0


def test_a_drafter_that_is_fed_features_sees_every_copy_of_the_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: dict[int, list[int]] = {}

    class Reader(FunctionDrafter):
        needs = Needs(hidden_layers=(0,))

        def observe(self, observations: Any) -> None:
            for o in observations:
                assert o.features[0].shape[0] == len(o.tokens)
                assert len(seen.setdefault(o.seq_id, [])) == o.start
                seen[o.seq_id].extend(o.tokens)

    engine = make(Reader(random_chain(VOCAB)), chunk=4)
    session = Session(engine, tokenizer(), TargetInfo(VOCAB, 2048), SamplingParams())
    answers = session.generate(list(range(10)), SamplingParams(max_tokens=5, n=3, seed=1, temperature=1.0))
    assert [tuple(s) for s in seen.values()] == [(*range(10), *a.tokens[:-1]) for a in answers]
    engine.set_drafter(None)


def test_every_row_has_its_own_parameters() -> None:
    kinds = [FREE, FREE.with_(temperature=0.0), FREE.with_(max_tokens=3), FREE.with_(top_k=2, seed=3)]
    requests = [Request(PROMPT, p, SEED + i) for i, p in enumerate(kinds)]
    want = [plain_decode(make_model(), r, vocab_size=VOCAB) for r in requests]
    known = {r.seed: w for r, w in zip(requests, want, strict=True)}
    drafter = FunctionDrafter(any_of((right_until(known, VOCAB), nothing)), 5)
    assert run_all(make(drafter), requests) == want


def test_two_engines_side_by_side_do_not_meet() -> None:
    other = Runner(make_model(), pack=False)
    engines = [make(knowing(4)), Engine(other, knowing(2), vocab_size=VOCAB)]
    outputs: list[list[int]] = [[], []]
    for engine in engines:
        engine.add(PROMPT, FREE, seed=SEED)  # both rows have the id 0
    while any(e.has_work for e in engines):
        for engine, output in zip(engines, outputs, strict=True):
            output.extend(t for e in engine.step() for t in e.tokens)
    assert outputs == [list(expected())] * 2
    other.close()
    assert run_all(make(knowing(3)), [Request(PROMPT, FREE, SEED)]) == [list(expected())]


def test_a_drafter_can_be_changed_only_while_nothing_runs() -> None:
    engine = make(knowing(4))
    engine.add(PROMPT, FREE, seed=SEED)
    with pytest.raises(ParameterError, match="while requests are running"):
        engine.set_drafter(None)
    list(engine.run())
    engine.set_drafter(None)
    assert engine.drafter.name == "none"
    assert run_all(engine, [Request(PROMPT, FREE, SEED)]) == [list(expected())]


def test_a_drafter_that_does_not_fit_leaves_the_one_before() -> None:
    class Deep(FunctionDrafter):
        needs = Needs(hidden_layers=(99,))

    first = knowing(4)
    engine = make(first)
    with pytest.raises(Exception, match="after layer 99"):
        engine.set_drafter(Deep(nothing))
    assert engine.drafter is first
    assert run_all(engine, [Request(PROMPT, FREE, SEED)]) == [list(expected())]


# -- what cannot be asked -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "options", "error", "message"),
    [
        ((), {}, ParameterError, "prompt is empty"),
        ((1, 258), {}, ParameterError, "258 is outside"),
        ((-1,), {}, ParameterError, "-1 is outside"),
        (tuple(range(40)), {}, CapacityError, "40 tokens and the context holds 40"),
        (PROMPT, {"logit_bias": {300: 1.0}}, ParameterError, "300"),
        (PROMPT, {"stop_token_ids": (999,)}, ParameterError, "999"),
        (PROMPT, {"bad_words": ((1, 400),)}, ParameterError, "400"),
    ],
)
def test_a_request_that_cannot_be_run_is_refused_and_leaves_nothing(
    prompt: tuple[int, ...], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    engine = make(context=40)
    with pytest.raises(error, match=message):
        engine.add(prompt, SamplingParams(max_tokens=2, **options))
    assert not engine.has_work and engine._pipelines == {}


def test_stop_strings_need_a_tokenizer() -> None:
    engine = Engine(target(), knowing(2))
    with pytest.raises(ParameterError, match="tokenizer"):
        engine.add(PROMPT, SamplingParams(stop=("x",)))


# -- the end of an engine -------------------------------------------------------------------------------


def test_close_frees_everything_and_gives_the_model_its_attention_back() -> None:
    model = make_model()
    ids = torch.tensor([PROMPT])
    arguments: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    before = model.generate(ids, attention_mask=torch.ones_like(ids), **arguments)
    implementation = model.config._attn_implementation
    drafter = draft_model()
    with Engine(Runner(model, pack=False), drafter, vocab_size=VOCAB, max_rows=2) as engine:
        for _ in range(3):
            engine.add(PROMPT, FREE)
        for _ in range(3):
            engine.step()
        assert len(engine.runner.cache) == 2 and len(drafter.runner.cache) == 2
        with pytest.raises(Exception, match="held by a Slipstream engine"):
            model(input_ids=ids)
    assert len(engine.runner.cache) == len(drafter.runner.cache) == 0 and not engine.has_work
    assert model.config._attn_implementation == implementation
    after = model.generate(ids, attention_mask=torch.ones_like(ids), **arguments)
    assert after.tolist() == before.tolist()
    engine.close()  # again


def sizes(*objects: Any) -> dict[str, int]:
    """Length of every container that these objects hold."""
    return {
        f"{type(o).__name__}.{name}": len(value)
        for o in objects
        for name, value in vars(o).items()
        if hasattr(value, "__len__")
    }


@pytest.mark.parametrize("controller", ["fixed", "additive"])
def test_nothing_grows_with_the_number_of_requests(controller: str) -> None:
    drafter = draft_model()
    engine = make(drafter, controller=controller, max_rows=4)
    objects = (engine, engine._scheduler, engine.runner, engine.runner.cache, engine.controller)
    objects = (*objects, drafter, drafter.runner, drafter.runner.cache)
    before, memory = sizes(*objects), engine.memory_bytes
    session = Session(engine, tokenizer(), TargetInfo(VOCAB, 2048), SamplingParams())
    for i in range(10):
        params = FREE.with_(max_tokens=4, seed=i, n=1 + i % 3)
        session.generate([list(PROMPT), list(PROMPT[:1]), list(range(9))], params)
        stream = session.stream(list(PROMPT), params.with_(n=1))
        next(stream)
        stream.close()
    assert sizes(*objects) == before and engine.memory_bytes == memory


@pytest.mark.parametrize("where", ["open", "propose", "observe", "close", "shutdown"])
def test_an_error_of_a_drafter_surfaces_and_the_model_can_be_had_back(where: str) -> None:
    class Breaks(FunctionDrafter):
        pass

    def fail(*_: Any) -> Any:
        raise RuntimeError(f"broken {where}")

    setattr(Breaks, where, fail)
    model = make_model()
    implementation = model.config._attn_implementation
    engine = Engine(Runner(model, pack=False), Breaks(random_chain(VOCAB)), vocab_size=VOCAB)
    engine.add(PROMPT, FREE)
    engine.add(PROMPT, FREE.with_(max_tokens=2))

    def use(end: Callable[[], object]) -> None:
        for _ in range(6):
            engine.step()
        end()

    with pytest.raises(DrafterError, match=rf"\(Breaks\) failed in .*RuntimeError: broken {where}") as told:
        use(engine.close)
    assert isinstance(told.value.__cause__, RuntimeError)
    try:
        engine.close()
    except DrafterError as error:
        assert where in ("close", "shutdown"), error
    assert model.config._attn_implementation == implementation and len(engine.runner.cache) == 0
    model(input_ids=torch.tensor([PROMPT]))


def test_an_error_of_a_drafter_costs_its_step_only() -> None:
    """What a caller may do after it: go on."""
    known = right({SEED: expected()})
    calls: list[int] = []

    def draft(request: Any) -> Any:
        calls.append(len(request.tokens))
        if len(calls) == 2:
            raise RuntimeError("once")
        return known(request)

    engine = make(FunctionDrafter(draft, 3))
    seq_id = engine.add(PROMPT, FREE, seed=SEED)
    row = engine.find(seq_id)
    with pytest.raises(DrafterError, match="once"):
        list(engine.run())
    list(engine.run())
    assert row is not None and row.output == list(expected())
