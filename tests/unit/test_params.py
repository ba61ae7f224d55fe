"""`SamplingParams`: every bad value is refused in one line that names the parameter."""

from __future__ import annotations

import pytest

from slipstream.core.params import SamplingParams
from slipstream.errors import ParameterError

NAN, INF = float("nan"), float("inf")

BAD: dict[str, list[object]] = {
    "max_tokens": [0, -1, 2.5, "9", True, NAN],
    "temperature": [-0.1, NAN, INF, "hot", None, True, 10**400],
    "top_k": [-1, 1.5, "3", None],
    "top_p": [0, -0.5, 1.01, NAN, "x", None],
    "min_p": [-0.1, 1.1, NAN, None],
    "repetition_penalty": [0, -1, NAN, INF, None, 1e-40, 1e-7, 1e7, 1e40, "1"],
    "presence_penalty": [-2.1, 2.1, NAN, None],
    "frequency_penalty": [-2.1, 2.1, NAN, "1"],
    "logit_bias": [
        {1: NAN},
        {1: INF},
        {-1: 1.0},
        {"a": 1.0},
        {1: "b"},
        {1: None},
        [1, 2],
        5,
        {1: 1e31},
        {1: 10**400},
        {1.5: 1},
    ],
    "bad_words": [((),), ((-1,),), (("a",),), (1, 2), 5, ((1.5,),), ("12",)],
    "min_tokens": [-1, 1.5, "1", None],
    "grammar": ["a+", 5, {"kind": "regex", "source": "a+"}],
    "stop": [("",), ("a", ""), (1,), 5],
    "stop_token_ids": [(-1,), ("a",), (None,), 7, (1.5,), "12", ("12",)],
    "logprobs": [-1, 1001, 1.5, "3"],
    "n": [0, -1, 1.5, None],
    "seed": [1.5, "1", True],
}


@pytest.mark.parametrize(("name", "value"), [(name, v) for name, values in BAD.items() for v in values])
def test_bad_value_is_refused(name: str, value: object) -> None:
    with pytest.raises(ParameterError) as error:
        SamplingParams().with_(**{name: value})
    message = str(error.value)
    assert name in message and "\n" not in message


def test_min_tokens_above_max_tokens_is_refused() -> None:
    with pytest.raises(ParameterError, match=r"min_tokens \(5\) is above max_tokens \(4\)"):
        SamplingParams(max_tokens=4, min_tokens=5)
    with pytest.raises(ParameterError, match="max_tokens must be"):
        SamplingParams(max_tokens="4", min_tokens=5)  # type: ignore[arg-type]


def test_values_at_their_limits_are_taken() -> None:
    SamplingParams(max_tokens=1, min_tokens=1, temperature=0.0, top_p=1.0, min_p=1.0, logprobs=0)
    SamplingParams(presence_penalty=-2.0, frequency_penalty=2.0, logprobs=1000, seed=-5, top_k=10**9)
    SamplingParams(logit_bias={3: float("-inf"), 4: 1e30, 5: -1e39}, temperature=1)
    SamplingParams(repetition_penalty=1e-6, temperature=5e-324)
    SamplingParams(repetition_penalty=1e6, temperature=1e308)


def test_values_are_brought_into_one_form() -> None:
    params = SamplingParams(
        stop="END",  # type: ignore[arg-type]
        stop_token_ids=[1, 2],  # type: ignore[arg-type]
        bad_words=[[1, 2], [3]],  # type: ignore[arg-type]
        logit_bias={"7": 1},  # type: ignore[dict-item]
    )
    assert params.stop == ("END",) and params.stop_token_ids == (1, 2)
    assert params.bad_words == ((1, 2), (3,)) and params.logit_bias == {7: 1.0}
    assert params == params.with_() and params.with_(top_k=3).top_k == 3


def test_every_parameter_has_refusals_here() -> None:
    unlimited = {"ignore_eos"}
    assert set(BAD) == set(SamplingParams.__dataclass_fields__) - unlimited


def test_bad_words_are_ids_not_digits_of_a_string() -> None:
    with pytest.raises(ParameterError, match="Session.bad_words"):
        SamplingParams(bad_words=("12",))  # type: ignore[arg-type]
