"""Arguments of `LLM`: prompts of every accepted type give the same ids; other types are refused in one line."""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from headrace.data.explicit import as_batch, as_conversations, as_prompt, template_variables
from headrace.data.params import BeamSearchParams, ParamError, RefineParams, SamplingParams

IDS = [5, 6, 7]


class Index:
    """A number of a library that is not known here."""

    def __index__(self) -> int:
        return 5

    def __repr__(self) -> str:  # names the test case, in every process alike
        return "Index()"


@pytest.mark.parametrize(
    "prompt",
    [
        IDS,
        tuple(IDS),
        range(5, 8),
        np.array(IDS),
        np.array(IDS, np.uint8),
        torch.tensor(IDS),
        [np.int64(5), 6, np.uint16(7)],
        [torch.tensor(5), np.array(6), 7],
        [Index(), 6, 7],
        {"prompt_token_ids": IDS},
        {"prompt_token_ids": np.array(IDS)},
        {"prompt_token_ids": torch.tensor(IDS)},
    ],
    ids=repr,
)
def test_token_ids_of_every_type(prompt: Any) -> None:
    for found in (as_batch(prompt), as_batch([prompt]), [as_prompt(prompt)]):
        assert found == [IDS]
        assert {type(token) for token in found[0]} == {int}


@pytest.mark.parametrize("prompt", ["The mill", np.str_("The mill"), {"prompt": "The mill"}], ids=repr)
def test_texts_of_every_type(prompt: Any) -> None:
    for found in (as_batch(prompt), as_batch([prompt]), as_batch(one for one in [prompt]), [as_prompt(prompt)]):
        assert found == ["The mill"]
        assert type(found[0]) is str


def test_batches_of_every_type() -> None:
    assert as_batch([]) == []
    assert as_batch(np.array([[5, 6], [7, 8]])) == as_batch(torch.tensor([[5, 6], [7, 8]])) == [[5, 6], [7, 8]]
    assert as_batch([torch.tensor([5]), torch.tensor([6])]) == [[5], [6]], "rows of one token are prompts, not ids"
    assert as_batch(["a", [5], {"prompt": "b"}, np.array([6])]) == ["a", [5], "b", [6]]  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        (None, "a prompt must be a text, token ids, .* not None"),
        (5, "a prompt must be .* not 5"),
        (np.int64(5), "a prompt must be .* not 5"),
        (torch.tensor(5), "a prompt must be .* not 5"),
        (True, "a prompt must be .* not True"),
        (b"The mill", "a prompt must be .* not b'The mill'"),
        ([True, False], "token ids must be integers, not True"),
        ([5, np.True_], "token ids must be integers, not True"),
        (np.array([True]), "token ids must be integers, not True"),
        (np.array([1.5]), "a prompt must be .* not 1.5"),
        ([[5, 6.0]], "token ids must be integers, not 6.0"),
        ([5, "The mill"], "token ids must be integers, not 'The mill'"),
        ([5, None], "token ids must be integers, not None"),
        ([None], "a prompt must be .* not None"),
        (memoryview(b"The mill"), "a prompt must be .* not <memory"),
        ([memoryview(b"The mill")], "a prompt must be .* not <memory"),
        ([b"The mill"], "a prompt must be .* not b'The mill'"),
        ({}, r"a prompt dict has one key, prompt or prompt_token_ids, not \[\]"),
        ({"text": "The mill"}, r"a prompt dict has one key, .* not \['text'\]"),
        ({"prompt": "a", "cache_salt": "b"}, r"a prompt dict has one key, .* not \['prompt', 'cache_salt'\]"),
        ({"prompt": IDS}, r"prompt of a prompt dict must be text, not \[5, 6, 7\]"),
        ({"prompt_token_ids": "The mill"}, "prompt_token_ids of a prompt dict must be token ids, not 'The mill'"),
        ({"prompt_token_ids": None}, "a prompt must be .* not None"),
    ],
)
def test_other_prompts_are_refused_in_one_line(prompt: Any, says: str) -> None:
    with pytest.raises(TypeError, match=says) as raised:
        as_batch(prompt)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("messages", [None, 5, b"hello", {"role": "user", "content": "hello"}])
def test_other_conversations_are_refused_in_one_line(messages: Any) -> None:
    with pytest.raises(TypeError, match=r"messages must be a text, a list of \{role, content\}, or a list of these, not "):
        as_conversations(messages)


@pytest.mark.parametrize(
    ("given", "plain"),
    [
        ({"seed": np.int64(3), "max_tokens": np.uint8(9)}, {"seed": 3, "max_tokens": 9}),
        ({"temperature": np.float32(0.5), "top_p": Fraction(1, 2)}, {"temperature": 0.5, "top_p": 0.5}),
        ({"temperature": torch.tensor(0.5), "seed": torch.tensor(3)}, {"temperature": 0.5, "seed": 3}),
        ({"ignore_eos": np.True_, "n": np.array(2)}, {"ignore_eos": True, "n": 2}),
        ({"stop_token_ids": np.array([4, 5])}, {"stop_token_ids": (4, 5)}),
        (
            {"stop_token_ids": [np.int32(4)], "allowed_token_ids": torch.tensor([4])},
            {"stop_token_ids": (4,), "allowed_token_ids": (4,)},
        ),
        ({"bad_words": np.array([[4, 5]])}, {"bad_words": ((4, 5),)}),
        ({"bad_words": [np.array([4]), [np.int8(5)]]}, {"bad_words": ((4,), (5,))}),
        ({"logit_bias": {np.int64(4): np.float64(1.5), 5: torch.tensor(2)}}, {"logit_bias": {4: 1.5, 5: 2.0}}),
        ({"stop": np.array(["a", "b"])}, {"stop": ("a", "b")}),
        ({"exit_criterion": np.str_("margin"), "exit_threshold": 1}, {"exit_criterion": "margin", "exit_threshold": 1}),
    ],
    ids=repr,
)
def test_parameters_of_numpy_and_torch_are_pythons_own(given: dict[str, Any], plain: dict[str, Any]) -> None:
    made = SamplingParams(**given)
    assert made == SamplingParams(**plain)
    for name in plain:
        assert type(getattr(made, name)) in (int, float, bool, str, tuple, dict)
        if isinstance(getattr(made, name), tuple):
            assert {type(one) for one in getattr(made, name)} <= {int, str, tuple}


def test_other_structs_accept_numpy_values() -> None:
    beams = BeamSearchParams(beam_width=np.int64(3), early_stopping=np.True_, stop_token_ids=np.array([4]))  # type: ignore[arg-type]
    assert beams == BeamSearchParams(beam_width=3, early_stopping=True, stop_token_ids=(4,))
    assert RefineParams(block=np.int64(4)) == RefineParams(block=4)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "given",
    [
        {"seed": np.float64(3)},
        {"seed": np.True_},
        {"temperature": np.True_},
        {"temperature": np.array([0.5])},
        {"temperature": np.float32("nan")},
        {"ignore_eos": np.int64(1)},
        {"stop_token_ids": np.array([1.5])},
        {"stop_token_ids": np.array([True])},
        {"stop_token_ids": np.int64(4)},
        {"logit_bias": {4: np.True_}},
    ],
    ids=repr,
)
def test_parameters_of_the_wrong_kind_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ParamError, match=next(iter(given))):
        SamplingParams(**given)


@pytest.mark.parametrize(
    ("struct", "name", "says"),
    [
        (SamplingParams, "temprature", r"SamplingParams has no field 'temprature'; did you mean temperature\?"),
        (SamplingParams, "max_new_tokens", r"did you mean max_tokens\?"),
        (SamplingParams, "guided_json", r"did you mean structured_outputs\?"),
        (SamplingParams, "zzz", r"no field 'zzz'; help\(headrace.SamplingParams\) lists the fields"),
        (BeamSearchParams, "beam_witdh", r"BeamSearchParams has no field 'beam_witdh'; did you mean beam_width\?"),
        (RefineParams, "pases", r"RefineParams has no field 'pases'; did you mean passes\?"),
    ],
)
def test_an_unknown_field_is_refused_with_the_nearest(struct: type, name: str, says: str) -> None:
    with pytest.raises(TypeError, match=says):
        struct(**{name: 1})


def test_keywords_are_settings_or_variables_of_the_template() -> None:
    given = {"max_tokens": 5, "enable_thinking": False}
    assert template_variables(given, lambda name: name == "enable_thinking") == {"enable_thinking": False}
    for name, says in (
        ("response_format", r"did you mean structured_outputs\?"),
        ("guided_json", r"did you mean structured_outputs\?"),
        ("system", "chat_template_kwargs passes other variables"),
        ("temprature", r"did you mean temperature\?"),
        ("tool_choices", r"did you mean tool_choice\?"),
        ("parallel_tools_calls", r"did you mean parallel_tool_calls"),
    ):
        with pytest.raises(TypeError, match=f"'{name}' is neither a setting nor a variable of the template; {says}"):
            template_variables({name: 1}, lambda name: False)
