"""Stop strings in streamed text: matches that straddle tokens, text held back, the same result whatever the cuts."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.decoding.stopping import StopMatcher
from headrace.text.tokenizer import IncrementalDetokenizer, Tokenizer
from tests.unit.vocabularies import byte_level


def run(stops: list[str], pieces: list[str], include: bool = False) -> tuple[list[str], str | None]:
    matcher = StopMatcher(stops, include)
    out = []
    for piece in pieces:
        matcher = matcher.copy()
        out.append(matcher.append(piece))
    return [*out, matcher.flush()], matcher.matched


def first_to_end(stops: list[str], text: str) -> tuple[str, str | None]:
    """The definition: read character by character; the first stop string that is complete (the longest) ends the text."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end - len(stop)], stop
    return text, None


STOPS = st.lists(st.text(alphabet="ab停止", min_size=1, max_size=5), min_size=1, max_size=4)
TEXT = st.text(alphabet="ab停止", max_size=30)


@settings(max_examples=1000)
@given(STOPS, TEXT, st.lists(st.integers(0, 30), max_size=8), st.booleans())
def test_a_stop_in_pieces_equals_the_definition(stops: list[str], text: str, cuts: list[int], include: bool) -> None:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    out, matched = run(stops, [text[a:b] for a, b in pairwise(edges)], include)
    want, stop = first_to_end(stops, text)
    assert matched == stop
    assert "".join(out) == (want + stop if include and stop else want)


@settings(max_examples=500)
@given(STOPS, TEXT)
def test_released_text_is_never_part_of_a_match_and_held_text_is_minimal(stops: list[str], text: str) -> None:
    matcher = StopMatcher(stops)
    given_out = ""
    for at, char in enumerate(text, 1):
        given_out += matcher.append(char)
        if matcher.matched is not None:
            break
        held = text[len(given_out) : at]
        assert text[:at] == given_out + held
        assert held == "" or any(stop.startswith(held) for stop in stops)
        assert not any(text[:at].endswith(stop[:k]) for stop in stops for k in range(len(held) + 1, len(stop)))


def test_a_stop_string_over_three_tokens() -> None:
    assert run(["<|end|>"], ["hello <", "|en", "d|> more"]) == (["hello ", "", "", ""], "<|end|>")
    assert run(["<|end|>"], ["hello <", "|en", "d|> more"], include=True) == (["hello ", "", "<|end|>", ""], "<|end|>")
    assert run(["<|end|>"], ["hello <", "|en", "glish"]) == (["hello ", "", "<|english", ""], None)


def test_chinese_stop_strings() -> None:
    assert run(["停止"], ["请停", "下，停", "止！"]) == (["请", "停下，", "", ""], "停止")
    assert run(["。"], ["你好", "。再见。"]) == (["你好", "", ""], "。")
    assert run(["用户：", "\n\n"], ["好的。\n", "\n用户"]) == (["好的。", "", ""], "\n\n")


def test_a_chinese_stop_string_split_within_characters() -> None:
    tokenizer = Tokenizer.from_gguf(byte_level(merges=[]))  # every token is one byte
    ids = tokenizer.encode("水轮，停止！水")
    assert len(ids) == len("水轮，停止！水".encode())
    detokenizer, matcher, out = IncrementalDetokenizer(tokenizer), StopMatcher(["停止！"]), ""
    used = 0
    for token in ids:
        out += matcher.append(detokenizer.append([token]))
        used += 1
        if matcher.matched is not None:
            break
    assert (out, matcher.matched, used) == ("水轮，", "停止！", len("水轮，停止！".encode()))


def test_held_text_is_released_at_the_end() -> None:
    assert run(["abc"], ["xab"]) == (["x", "ab"], None)
    assert run(["aab"], ["aaaa", "b"]) == (["aa", "", ""], "aab")


def test_after_a_match_no_text_is_released() -> None:
    matcher = StopMatcher(["x"])
    assert matcher.append("ax") == "a"
    assert matcher.append("bcd") == ""
    assert matcher.flush() == ""


def test_forks_do_not_share_state() -> None:
    parent = StopMatcher(["停止"])
    parent.append("停")
    child = parent.copy()
    assert child.append("止") == ""
    assert child.matched == "停止"
    assert parent.append("下") == "停下"
    assert parent.matched is None


def test_without_stop_strings_text_passes_through() -> None:
    assert run([], ["a", "停", ""]) == (["a", "停", "", ""], None)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        StopMatcher(["a", ""])


def test_separate_pieces_miss_a_straddling_match() -> None:
    """The control: without held text the straddling match of the tests above is missed."""
    assert not any("停止" in piece for piece in ["请停", "下，停", "止！"])
    assert run(["停止"], ["请停", "下，停", "止！"])[1] == "停止"
