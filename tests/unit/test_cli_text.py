"""What the command line does to text: what is typed, what is written, line by line."""

import io
import sys

import pytest
from rich.cells import cell_len

from headrace.cli.message_input import MessageReader, TypedMessage
from headrace.cli.options import as_options
from headrace.cli.terminal import AnswerWriter, Wrap, fold
from headrace.data.progress import threshold_text

TEXTS = [
    "The headrace brings water to the wheel, and the wheel turns the stones.",
    "水渠里的水推动水轮，水轮推动磨盘。今天天气很好！",
    "mixed 中文 and English，with「quotes」 and emoji 🦙🚀 here",
    "a\n\nb  c\td " + "x" * 50 + " end",
    "👩\u200d👩\u200d👧\u200d👦 e\u0301e\u0301 flags",
]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("width", [7, 20, 33])
@pytest.mark.parametrize("piece", [1, 3, 1000])
def test_wrapped_lines_fit_and_lose_nothing(text: str, width: int, piece: int) -> None:
    wrap = Wrap(width)
    out = "".join(wrap.write(text[at : at + piece]) for at in range(0, len(text), piece)) + wrap.close()
    assert "".join(out.split()) == "".join(text.split())
    for line in out.split("\n"):
        words = line.split()
        assert cell_len(line.replace("\t", " ")) <= width or len(words) == 1, line
    whole = Wrap(width)
    assert whole.write(text) + whole.close() == out, "the pieces do not matter"


def test_a_threshold_below_1_is_not_shown_as_1() -> None:
    shown = [threshold_text(value) for value in (1, 0.99999, 0.999999, 1 - 1e-8, 0.5, 1e-6, 0.123456, 3.0)]
    assert shown == ["1", "0.99999", "0.999999", "0.99999999", "0.5", "1e-06", "0.1235", "3"]


def test_messages_for_python_name_options() -> None:
    names = ("max_model_len", "kv_cache_memory", "stop_token_id", "dtype", "amateur", "n")
    for message, said in (
        ("use max_model_len=32 or kv_cache_memory=1024", "use --max-model-len 32 or --kv-cache-memory 1024"),
        ("take dtype='bfloat16'; or amateur=MODEL.", "take --dtype bfloat16; or --amateur MODEL."),
        ("lower n, or raise kv_cache_memory", "lower n, or raise --kv-cache-memory"),
        ("stop_token_ids names token 9", "--stop-token-id names token 9"),
        ("unknown dtype 'x'", "unknown dtype 'x'"),
        ("no file /max_model_len/a, max_model_len_2, x=n", "no file /max_model_len/a, max_model_len_2, x=n"),
    ):
        assert as_options(message, names) == said


def test_where_lines_break() -> None:
    def wrapped(text: str, width: int) -> list[str]:
        wrap = Wrap(width)
        return (wrap.write(text) + wrap.close()).split("\n")

    assert wrapped("one two three", 7) == ["one two", "three"]
    assert wrapped("水渠里的水", 4) == ["水渠", "里的", "水"]
    assert wrapped("水渠里。的", 6) == ["水渠", "里。的"], "closing punctuation does not begin a line"
    assert wrapped("abc水de", 5) == ["abc水", "de"]


@pytest.mark.parametrize("columns", [24, 40, 80])
def test_notes_break_between_words(columns: int) -> None:
    line = "model.gguf: bfloat16 on cpu (native, bitwise), KV cache of at most 4.0 MiB for 16,384 tokens, context 8,192"
    lines = fold(line, columns).split("\n")
    assert " ".join(one.strip() for one in lines) == line
    assert all(len(one) <= columns for one in lines)


def test_a_list_keeps_its_column() -> None:
    line = "/set [NAME VALUE]   the settings and what they do; change one: /set temperature 0.5"
    lines = fold(line, 48).split("\n")
    assert len(lines) > 1
    assert all(one.startswith(" " * 20) for one in lines[1:])
    assert " ".join(" ".join(lines).split()) == " ".join(line.split())
    assert fold("short", 40) == "short"


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_an_answer_cannot_steer_the_terminal() -> None:
    screen, file = Screen(), io.StringIO()
    for out in (screen, file):
        writer = AnswerWriter(out)
        writer.write("a\x1b[2Jb\r\x07\x9b")
        writer.write("\u3000中")
        writer.close()
    assert screen.getvalue() == "a\\x1b[2Jb\\x0d\\x07\\x9b\u3000中\n"
    assert file.getvalue() == "a\x1b[2Jb\r\x07\x9b\u3000中\n", "a file gets what the model wrote"


def test_an_answer_ends_in_one_newline() -> None:
    for text in ("a", "a\n"):
        file = io.StringIO()
        writer = AnswerWriter(file, wrapped=True)
        writer.write(text)
        writer.close()
        writer.close()
        assert file.getvalue() == "a\n"


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("hi\n", [TypedMessage("hi", False)]),
        ("", []),
        ("no newline", [TypedMessage("no newline", False)]),
        ("a\\\nb\\\n\nc\n", [TypedMessage("a\nb\n", False), TypedMessage("c", False)]),
        ("a\\", [TypedMessage("a", False)]),
        ('"""one line"""\n', [TypedMessage("one line", False)]),
        ('"""\nfirst\n\n/last"""\nx\n', [TypedMessage("first\n\n/last", False), TypedMessage("x", False)]),
        ('"""/not a command"""\n', [TypedMessage("/not a command", False)]),
        ('"""never closed\nx\n', [TypedMessage("never closed\nx", False)]),
        ("/set x 1\n /x\n", [TypedMessage("/set x 1", True), TypedMessage(" /x", False)]),
    ],
)
def test_messages_of_one_line_and_of_several(typed: str, expected: list[TypedMessage], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    lines, found = MessageReader([]), []
    while (message := lines.read()) is not None:
        found.append(message)
    assert found == expected
