"""Where an output ends, and which of its text is shown."""

import pytest

from headrace.data.params import SamplingParams
from headrace.data.types import Request, Sequence
from headrace.decoding.stopping import Stopping
from headrace.text.tokenizer import Tokenizer
from tests.unit.vocabularies import byte_level


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """One token a byte: no merges."""
    return Tokenizer.from_gguf({**byte_level(), "tokenizer.ggml.merges": []})


def grow(tokenizer: Tokenizer, text: str, params: SamplingParams, pieces: int = 1, extra: tuple[int, ...] = ()) -> tuple:
    """Feed a text's tokens `pieces` at a time; returns (shown text, sequence)."""
    prompt = tokenizer.encode("go", add_special=False)
    stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else tokenizer.eos_ids)
    request = Request("r", prompt, params, 0, None, 0, stop_ids=stop_ids)
    seq = Sequence(0, list(prompt), len(prompt))
    stopping = Stopping(tokenizer, 1000)
    stopping.begin(request, seq)
    tokens = [*tokenizer.encode(text, add_special=False), *extra]
    shown = ""
    while tokens and seq.text.finish_reason is None:
        delta = stopping.extend(request, seq, tokens[:pieces], [])
        shown += delta.text
        tokens = tokens[pieces:]
    return shown, seq


@pytest.mark.parametrize("pieces", [1, 2, 3, 7])
@pytest.mark.parametrize(
    ("text", "stop", "shown"),
    [
        ("hello world, good day", ("world",), "hello "),
        ("hello world, good day", ("d, g",), "hello worl"),
        ("一二三四五六七", ("三四",), "一二"),
        ("aabaabaac", ("abaac",), "aaba"),
    ],
)
def test_a_stop_string_over_several_tokens(tokenizer: Tokenizer, text: str, stop: tuple, shown: str, pieces: int) -> None:
    got, seq = grow(tokenizer, text, SamplingParams(stop=stop, max_tokens=100), pieces)
    assert (got, seq.text.finish_reason, seq.text.stop_reason) == (shown, "stop", stop[0])
    got, _ = grow(tokenizer, text, SamplingParams(stop=stop, include_stop_str_in_output=True, max_tokens=100), pieces)
    assert got == shown + stop[0]


def test_held_text_is_released_without_a_match(tokenizer: Tokenizer) -> None:
    got, seq = grow(tokenizer, "so wor", SamplingParams(stop=("world",), max_tokens=len("so wor")))
    assert (got, seq.text.finish_reason) == ("so wor", "length")


def test_half_a_character_is_never_shown(tokenizer: Tokenizer) -> None:
    got, seq = grow(tokenizer, "中", SamplingParams(max_tokens=2))
    assert (got, seq.text.finish_reason) == ("\ufffd", "length")
    assert grow(tokenizer, "中文", SamplingParams(max_tokens=6))[0] == "中文"


def test_the_end_token_ends_and_is_not_shown(tokenizer: Tokenizer) -> None:
    eos = min(tokenizer.eos_ids)
    got, seq = grow(tokenizer, "done", SamplingParams(max_tokens=50), extra=(eos, *tokenizer.encode("more")))
    assert (got, seq.text.finish_reason, seq.text.stop_reason) == ("done", "stop", None)
    assert seq.tokens[-1] == eos
    got, seq = grow(tokenizer, "done", SamplingParams(max_tokens=9, ignore_eos=True), extra=(eos, *tokenizer.encode("more")))
    assert (got, seq.text.finish_reason) == ("donemore", "length")


def test_a_stop_id_is_named(tokenizer: Tokenizer) -> None:
    (comma,) = tokenizer.encode(",", add_special=False)
    got, seq = grow(tokenizer, "a,b", SamplingParams(stop_token_ids=(comma,), max_tokens=50))
    assert (got, seq.text.finish_reason, seq.text.stop_reason) == ("a,", "stop", comma)


def test_min_tokens_comes_before_every_stop(tokenizer: Tokenizer) -> None:
    eos = min(tokenizer.eos_ids)
    params = SamplingParams(min_tokens=6, stop=("b",), max_tokens=50)
    assert grow(tokenizer, "abcabcabc", params)[0] == "abcabca"
    got, seq = grow(tokenizer, "ab", SamplingParams(min_tokens=4, max_tokens=50), extra=(eos,) * 5)
    assert (got, len(seq.output)) == ("ab", 5)


@pytest.mark.parametrize("pieces", [1, 4])
@pytest.mark.parametrize("least", range(7))
def test_min_tokens_is_one_number_for_ends_and_stop_strings(tokenizer: Tokenizer, least: int, pieces: int) -> None:
    """As in drawing, where no end may come before so many tokens are there: the first end is the one after them."""
    eos = min(tokenizer.eos_ids)
    _, seq = grow(tokenizer, "abcbcb", SamplingParams(min_tokens=least, stop=("b",), max_tokens=6), pieces)
    assert len(seq.output) == [2, 2, 4, 4, 6, 6, 6][least]
    assert seq.text.finish_reason == ("length" if least == 6 else "stop")
    _, seq = grow(tokenizer, "", SamplingParams(min_tokens=least, max_tokens=50), pieces, extra=(eos,) * 9)
    assert (len(seq.output), seq.text.finish_reason) == (least + 1, "stop")


def test_max_tokens_and_the_context_end_it(tokenizer: Tokenizer) -> None:
    assert grow(tokenizer, "abcdef", SamplingParams(max_tokens=3))[0] == "abc"
    request = Request("r", [1], SamplingParams(max_tokens=None), 0, None, 0)
    seq = Sequence(0, [1], 1)
    delta = Stopping(None, 4).extend(request, seq, [5, 6, 7, 8, 9], [])
    assert (delta.token_ids, delta.finish_reason) == ([5, 6, 7], "length")
