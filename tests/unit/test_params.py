"""SamplingParams: what cannot be meant is refused when it is made, in a line that says what to change."""

import math
from typing import Annotated, Any

import msgspec
import pytest

from headrace.data.explicit import GOES_WITH, params_of
from headrace.data.fields import BIASES, ID_LISTS, IDS, LARGEST, TEXTS, Declared, Field, check, declared
from headrace.data.params import ParamError, SamplingParams

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("n", [0, -1, 65, 1.5, True, None]),
        ("temperature", [-0.1, 101, NAN, INF, -INF, "hot", None, True, 10**400]),
        ("top_k", [-1, 2.5, NAN, None, 2**31]),
        ("top_p", [-0.5, 1.01, NAN, INF, None]),
        ("min_p", [-0.01, 1.01, NAN]),
        ("typical_p", [0, 2, NAN]),
        ("repetition_penalty", [0, -1, 11, NAN, INF]),
        ("presence_penalty", [-2.1, 2.1, NAN]),
        ("frequency_penalty", [-2.1, 2.1, NAN]),
        ("no_repeat_ngram", [-1, 65, 1.0]),
        ("logit_bias", [{1: 101}, {1: NAN}, {-1: 1.0}, {"1": 1.0}, {1: True}, [1], {1: "x"}]),
        ("bad_words", [[[]], [[1, -1]], [1], 5, ["word"], [[1.5]]]),
        ("allowed_token_ids", [[], [-1], 5, [True], ["1"]]),
        ("min_tokens", [-1, 17, None]),
        ("max_tokens", [0, -5, 1.0]),
        ("stop", [[""], [5], 5, {"a": 1}]),
        ("stop_token_ids", [[-1], 5, ["1"], "1", None]),
        ("include_stop_str_in_output", ["yes", None]),
        ("ignore_eos", [1]),
        ("skip_special_tokens", ["no"]),
        ("seed", [-1, 2**64, 1.5, True]),
        ("logprobs", [-1, 65, True]),
        ("prompt_logprobs", [-1, 65]),
        ("logprobs_mode", ["cooked", None]),
        ("priority", [1.5, None]),
    ],
)
def test_an_invalid_value_is_refused_by_name(name, values):
    for value in values:
        with pytest.raises(ParamError) as caught:
            SamplingParams(**{name: value})
        message = str(caught.value)
        assert "\n" not in message
        words = {"bad_words": ("bad word", "bad_words"), "stop": ("stop",)}.get(name, (name,))
        assert any(word in message for word in words), message


def test_min_tokens_above_max_tokens_names_both():
    with pytest.raises(ParamError, match=r"min_tokens \(9\) must not exceed max_tokens \(8\)"):
        SamplingParams(min_tokens=9, max_tokens=8)


def test_an_unknown_parameter_is_refused_by_name():
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=0.5)  # type: ignore[call-arg]
    with pytest.raises(msgspec.ValidationError, match="temprature"):
        msgspec.convert({"temprature": 0.5}, SamplingParams)


def test_decoded_parameters_are_checked():
    with pytest.raises(msgspec.ValidationError, match="temperature must be between 0 and 100"):
        msgspec.json.decode(b'{"temperature": -1}', type=SamplingParams)
    decoded = msgspec.json.decode(b'{"stop": ["a"], "bad_words": [[1, 2]], "logit_bias": {"5": 1.5}}', type=SamplingParams)
    assert decoded == SamplingParams(stop="a", bad_words=[[1, 2]], logit_bias={5: 1.5})


def test_lists_become_tuples_and_the_wire_keeps_all():
    params = SamplingParams(
        stop=["a", "b"], bad_words=[[1], (2, 3)], stop_token_ids=[4], allowed_token_ids=[1, 2], seed=2**64 - 1
    )
    assert params.bad_words == ((1,), (2, 3))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


def test_replace_checks_again_and_presets_are_valid():
    assert SamplingParams().replace(top_k=5).top_k == 5
    with pytest.raises(ParamError, match="top_k"):
        SamplingParams().replace(top_k=-5)
    assert SamplingParams.precise().greedy
    assert SamplingParams.balanced(top_k=7).top_k == 7
    assert not SamplingParams.creative().greedy
    with pytest.raises(ParamError, match="min_p"):
        SamplingParams.creative(min_p=3)


def test_temperatures_below_a_hundredth_are_greedy():
    assert [SamplingParams(temperature=t).greedy for t in (0, 0.009, 0.01, 1)] == [True, True, False, False]


@pytest.mark.parametrize(
    "changes",
    [
        {"stop_token_ids": [49152]},
        {"allowed_token_ids": [0, 49152]},
        {"bad_words": [[1, 49152]]},
        {"logit_bias": {49152: 1.0}},
    ],
)
def test_a_token_the_vocabulary_does_not_have_is_named(changes):
    params = SamplingParams(**changes)
    params.check_vocab(49153)
    with pytest.raises(ParamError, match=f"{next(iter(changes))} names token 49152, but the model's ids end at 49151"):
        params.check_vocab(49152)


def entries(one: Declared, count: int) -> Any:
    """So many of what a list holds."""
    return {BIASES: dict.fromkeys(range(count), 1.0), TEXTS: ["a"] * count, ID_LISTS: [[1]] * count}.get(one.kind, [1] * count)


@pytest.mark.parametrize("one", [one for one in declared(SamplingParams) if one.kind in (TEXTS, IDS, ID_LISTS, BIASES)])
def test_every_list_is_bounded(one: Declared) -> None:
    most = one.field.most
    assert 0 < most < LARGEST
    SamplingParams(**{one.name: entries(one, most)})
    with pytest.raises(ParamError, match=rf"^{one.name} may have {most} entries, not {most + 1}; leave some out$"):
        SamplingParams(**{one.name: entries(one, most + 1)})
    if one.kind == ID_LISTS:
        with pytest.raises(ParamError, match=rf"^each of {one.name} may have {one.field.each} tokens"):
            SamplingParams(**{one.name: [[1] * (one.field.each + 1)]})


def test_the_first_invalid_field_is_reported() -> None:
    """In the order of the struct, whatever came first; so a million cost no more than one."""
    for given in ({"seed": -1, "top_k": -1}, {"top_k": -1, "seed": -1}):
        with pytest.raises(ParamError, match="top_k must be 0"):
            SamplingParams(**given)


def test_every_default_is_a_valid_value() -> None:
    """Making parameters does not look at them."""
    for one in declared(SamplingParams):
        assert one.default is None if one.optional and one.default is None else one.check(one, one.default) == one.default

    class Wrong(msgspec.Struct):
        share: Annotated[float, Field("A share", ge=0, le=1)] = 2.0

    (one,) = declared(Wrong)
    check(Wrong())  # the control: nobody looks
    with pytest.raises(ParamError, match="share must be between 0 and 1, not 2"):
        one.check(one, one.default)


ALONE = {
    "exit_criterion": "margin",
    "exit_decay": 2.0,
    "exit_slope": 1.0,
    "exit_audit": True,
    "cascade_criterion": "margin",
    "cascade_audit": True,
    "defer_at": 0.1,
}


@pytest.mark.parametrize("name", GOES_WITH)
def test_a_field_that_does_nothing_alone_is_refused(name):
    other = GOES_WITH[name]
    with pytest.raises(ParamError, match=f"{name} goes with {other}; give that too, or leave it out"):
        params_of({name: ALONE[name]})
    params_of({name: ALONE[name], other: "opt" if other == "defer_rule" else 0.5})
    params_of({name: getattr(SamplingParams(), name)})
