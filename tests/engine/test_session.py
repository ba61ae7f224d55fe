"""`slipstream.load` and `Session`: what a program sees."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import slipstream
from slipstream import SamplingParams, Session
from slipstream.errors import DrafterError, ModelError, ParameterError
from slipstream.testing.tiny import save_tiny

CHAT = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "target"
    save_tiny(path, kind="qwen2", seed=1)
    return path


@pytest.fixture(scope="module")
def draft_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "draft"
    save_tiny(path, kind="llama", layers=1, seed=2)
    return path


@pytest.fixture
def session(folder: Path) -> Iterator[Session]:
    with slipstream.load(str(folder), "ngram") as loaded:
        yield loaded


def test_text_chat_and_ids_are_prompts(session: Session) -> None:
    params = SamplingParams(max_tokens=5)
    text = session.generate("abc", params)
    ids = session.generate(list(b"abc"), params)
    chat = session.generate(CHAT, params)
    assert text.tokens == ids.tokens and text.prompt_tokens == 3
    assert chat.prompt_tokens > 3
    assert len(chat.tokens) == 5 and chat.finish_reason == "length"


def test_many_prompts_give_what_each_gives_alone(session: Session) -> None:
    prompts = ["abc", list(b"some ids"), CHAT]
    params = [SamplingParams(max_tokens=n, temperature=t, seed=5) for n, t in ((4, 0.0), (9, 0.8), (7, 1.5))]
    together = session.generate(prompts, params)
    alone = [session.generate(p, one) for p, one in zip(prompts, params, strict=True)]
    assert [a.tokens for a in together] == [a.tokens for a in alone]


def test_n_answers_have_seeds_in_a_row(session: Session) -> None:
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=40, n=3)
    answers = session.generate("abc", params)
    assert [a.seed for a in answers] == [40, 41, 42]
    for i, answer in enumerate(answers):
        assert answer.tokens == session.generate("abc", params.with_(n=1, seed=40 + i)).tokens
    nested = session.generate(["abc", "x"], [params, params.with_(n=1)])
    assert [a.tokens for a in nested[0]] == [a.tokens for a in answers]


def test_stream_gives_the_same_text_in_pieces(session: Session) -> None:
    params = SamplingParams(max_tokens=20, logprobs=2)
    whole = session.generate("abcabc", params)
    events = list(session.stream("abcabc", params))
    assert "".join(e.text for e in events) == whole.text
    assert tuple(t for e in events for t in e.tokens) == whole.tokens
    assert events[-1].finish_reason == whole.finish_reason
    assert whole.logprobs is not None
    assert tuple(x for e in events for x in e.logprobs) == whole.logprobs


def test_a_stream_that_is_closed_is_cancelled(session: Session) -> None:
    stream = session.stream("abc", SamplingParams(max_tokens=500))
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert not session.engine.has_work
    assert len(session.engine.runner.cache) == 0


def test_counters_add_up(session: Session) -> None:
    answer = session.generate("ababababab", SamplingParams(max_tokens=30))
    counts = answer.counts
    assert counts.emitted == len(answer.tokens) == len(answer.drafted)
    assert counts.accepted_tokens == sum(answer.drafted)
    assert counts.passes == counts.emitted - counts.accepted_tokens
    assert answer.tau == pytest.approx(counts.emitted / counts.passes)
    assert answer.seconds.target > 0


def test_drafters_can_be_changed_between_calls(session: Session, draft_folder: Path) -> None:
    params = SamplingParams(max_tokens=24, temperature=0.7, seed=3)
    first = session.generate("abcabc", params)
    for spec in ("none", f"draft_model:model={draft_folder}", "ngram:min_n=1,max_n=2"):
        session.use(spec)
        assert session.generate("abcabc", params).tokens == first.tokens
    with pytest.raises(DrafterError, match="did you mean 'ngram'"):
        session.use("ngramm")
    with pytest.raises(ParameterError, match="num_speculative_tokens"):
        session.use("ngram", controller="fixed:num_speculative_tokens=-1")


def test_the_checkpoints_own_generation_config_is_the_default(tmp_path: Path) -> None:
    path = tmp_path / "model"
    save_tiny(path, kind="llama", seed=4)
    config = {"do_sample": True, "temperature": 0.6, "top_k": 7, "top_p": 0.9, "eos_token_id": [257, 65]}
    (path / "generation_config.json").write_text(json.dumps(config))
    with slipstream.load(str(path)) as session:
        assert session.defaults.temperature == 0.6
        assert session.defaults.top_k == 7 and session.defaults.top_p == 0.9
        assert session.engine.eos_ids == {257, 65}
        ended = session.generate("q", session.defaults.with_(seed=1, logit_bias={65: 1e4}, max_tokens=9))
        assert ended.tokens == (65,) and ended.finish_reason == "stop" and ended.text == ""


def test_an_impossible_generation_config_is_named_with_its_file(tmp_path: Path) -> None:
    path = save_tiny(tmp_path / "model", kind="llama", seed=4)
    for values, message in (
        ({"do_sample": True, "top_p": 1.5}, "top_p must be in"),
        ({"repetition_penalty": -1.0}, "repetition_penalty must be"),
        ({"top_k": "many"}, "top_k must be a whole number"),
    ):
        (path / "generation_config.json").write_text(json.dumps(values))
        with pytest.raises(ModelError, match=rf"{path}/generation_config\.json: {message}"):
            slipstream.load(path)


def test_bad_words_are_never_said(session: Session) -> None:
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=1)
    text = session.generate("abc", params).text
    word = next(c for c in text if c.isalpha())
    banned = params.with_(bad_words=session.bad_words([word]))
    assert word not in session.generate("abc", banned).text


@pytest.mark.parametrize("prompt", ["", [], [[]], [""]], ids=["text", "list", "ids", "one of many"])
def test_an_empty_prompt_is_refused(session: Session, prompt: object) -> None:
    with pytest.raises(ParameterError, match="prompt"):
        session.generate(prompt, SamplingParams(max_tokens=2))
    assert not session.engine.has_work


def test_params_must_match_the_prompts(session: Session) -> None:
    with pytest.raises(ParameterError, match="2 prompts need 2"):
        session.generate(["a", "b"], [SamplingParams()])
    with pytest.raises(ParameterError, match="n must be 1"):
        next(session.stream("a", SamplingParams(n=2)))


def test_two_sessions_side_by_side_do_not_meet(folder: Path, draft_folder: Path) -> None:
    params = SamplingParams(max_tokens=16)
    with slipstream.load(str(folder)) as one, slipstream.load(str(draft_folder)) as other:
        expected = one.generate("abc", params).tokens, other.generate("abc", params).tokens
        first, second = one.stream("abc", params), other.stream("abc", params)
        mixed: tuple[list[int], list[int]] = ([], [])
        for a, b in zip(first, second, strict=False):
            mixed[0].extend(a.tokens)
            mixed[1].extend(b.tokens)
        assert (tuple(mixed[0]), tuple(mixed[1])) == expected


def test_nothing_is_printed(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with slipstream.load(str(folder), "ngram") as session:
        session.generate("abcabc", SamplingParams(max_tokens=8))
    out, err = capfd.readouterr()
    assert out == "" and err == ""


@pytest.mark.parametrize("drafter", ["none", "ngram", "recycle"])
def test_a_closed_session_says_so(folder: Path, drafter: str) -> None:
    """Its model has its own attention back and would compute other tokens."""
    session = slipstream.load(folder, drafter)
    session.close()
    session.close()
    for use in (
        lambda: session.generate("ab", SamplingParams(max_tokens=3)),
        lambda: next(session.stream("ab", SamplingParams(max_tokens=3))),
        lambda: session.submit("ab"),
        lambda: session.use("ngram"),
    ):
        with pytest.raises(ParameterError, match="session is closed"):
            use()


def test_a_stream_ends_when_its_session_is_closed(folder: Path) -> None:
    session = slipstream.load(folder, "ngram")
    stream = session.stream("ab", SamplingParams(max_tokens=30, ignore_eos=True))
    first = next(stream)
    session.close()
    assert first.tokens and list(stream) == []


def test_streams_and_answers_side_by_side_lose_nothing(session: Session) -> None:
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    prompts = ("ab", "the same again the same again", "xyz")
    alone = [session.generate(p, params).tokens for p in prompts]
    one, two = session.stream(prompts[0], params), session.stream(prompts[1], params)
    got: list[list[int]] = [list(next(one).tokens), list(next(two).tokens)]
    between = session.generate(prompts[2], params).tokens
    for event in one:
        got[0] += event.tokens
        for other in two:
            got[1] += other.tokens
            break
    for event in two:
        got[1] += event.tokens
    assert [tuple(g) for g in got] == alone[:2] and between == alone[2]
    assert not session.engine.has_work


def test_a_model_is_a_name_or_a_path(folder: Path) -> None:
    with slipstream.load(folder) as loaded:
        assert loaded.generate("ab", SamplingParams(max_tokens=2)).tokens
    with pytest.raises(ParameterError, match="not int"):
        slipstream.load(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (None, "a prompt is text, token ids or a chat, not NoneType"),
        (7, "not int"),
        ([None], "not NoneType"),
        ([1.5, 2], "not float"),
        ([[1, 2.5]], "prompt token 2.5 is float, not a whole number"),
        ([["1"]], "prompt token '1' is str"),
        ([[True]], "prompt token True is bool"),
    ],
)
def test_a_prompt_of_the_wrong_type_is_refused(session: Session, prompt: object, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        session.generate(prompt, SamplingParams(max_tokens=2))
    assert not session.engine.has_work


def test_whole_numbers_of_numpy_are_token_ids(session: Session) -> None:
    params, ids = SamplingParams(max_tokens=5), np.array([97, 98, 97, 98])
    want = session.generate([97, 98, 97, 98], params).tokens
    assert session.generate(list(ids), params).tokens == want
    row = session.engine.find(session.engine.add(list(ids), params))
    list(session.engine.run())
    assert row is not None and tuple(row.output) == want and {*map(type, row.tokens)} == {int}


def test_what_is_submitted_or_added_of_the_wrong_type_is_refused(session: Session) -> None:
    params = SamplingParams(max_tokens=2)
    for prompt in (None, 7, [1.5]):
        with pytest.raises(ParameterError, match="prompt"):
            session.submit(prompt, params)  # type: ignore[arg-type]
        with pytest.raises(ParameterError, match="prompt"):
            next(session.stream(prompt, params))  # type: ignore[arg-type]
        with pytest.raises(ParameterError, match="prompt"):
            session.engine.add(prompt, params)  # type: ignore[arg-type]
    for odd in (7, "greedy", {"max_tokens": 3}, [3]):
        for use in (
            session.generate,
            session.submit,
            lambda *a: next(session.stream(*a)),
            session.engine.add,
        ):
            with pytest.raises(ParameterError, match="params must be SamplingParams"):
                use([1, 2], odd)  # type: ignore[arg-type, operator]
    assert not session.engine.has_work


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_rows": "8"}, "max_rows must be a whole number, not '8'"),
        ({"max_rows": True}, "max_rows must be a whole number, not True"),
        ({"context": 2.5}, "context must be a whole number or None, not 2.5"),
        ({"prefix_tokens": None}, "prefix_tokens must be a whole number, not None"),
        ({"dtype": 5}, "dtype must be auto, .*not 5"),
        ({"device": 5}, "device must be cpu, .*not 5"),
        ({"weights": 5}, "weights must be"),
        ({"rule": 5}, "rule must be"),
        ({"controller": 5}, "a controller is a name .*not int"),
        ({"drafter": 5}, "a drafter is a name .*not int"),
        ({"drafter": None}, "a drafter is a name .*not NoneType"),
        ({"drafter": Session}, "a drafter is a name .*not the class Session"),
    ],
)
def test_options_of_load_are_checked_before_anything_is_read(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        slipstream.load("/no/such/model", **options)
