"""What a person sees: plain lines without a terminal, a bar on one; tables that fit."""

import io
import time

import pytest
from rich.cells import cell_len

from headrace.cli.output import print_table
from headrace.data.progress import Lines, Moving, counted, for_stream, human_size


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_plain_lines_show_the_size_and_every_quarter() -> None:
    out = io.StringIO()
    progress = for_stream(out)
    assert isinstance(progress, Lines)
    progress.start("model.gguf", 1000, 300)
    for _ in range(7):
        progress.advance(100)
    progress.finish()
    assert out.getvalue().splitlines() == [
        "model.gguf (1.0 kB), 300 B already here",
        "model.gguf: 50 %",
        "model.gguf: 75 %",
        "model.gguf: 100 %",
    ]


def test_a_terminal_bar_is_erased_at_the_end() -> None:
    out = Terminal()
    progress = for_stream(out)
    assert isinstance(progress, Moving)
    progress.start("[model].gguf", 1000)
    progress.advance(1000)
    progress.finish()
    progress.note("a line")
    assert "[model].gguf ────" in out.getvalue()
    assert out.getvalue().endswith("\x1b[2Ka line\n")
    assert screen(out.getvalue()) == ["a line", ""]


def screen(written: str) -> list[str]:
    """What is left of lines that were written over."""
    return [line.rpartition("\x1b[2K")[2] for line in written.split("\n")]


def test_a_bar_shows_the_count_and_the_remaining_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    out = Terminal()
    progress = for_stream(out)
    progress.start("scoring", 1200, 200, unit="windows")
    now[0] += 10
    progress.advance(500, "fast")
    assert screen(out.getvalue()) == ["scoring ━━━━━━━━━━━━━━────────── 58% of 1,200 windows, 0:10 left, fast"[:79]]
    progress.note("a remark")
    assert screen(out.getvalue())[0] == "a remark"
    assert "1,200 windows" in screen(out.getvalue())[1], "the bar goes on below it"
    progress.finish()
    assert screen(out.getvalue()) == ["a remark", ""]


def test_progress_without_a_total_shows_a_spinner() -> None:
    out = Terminal()
    progress = for_stream(out)
    progress.start("loading")
    end = time.monotonic() + 600
    while out.getvalue().count("loading") < 3:
        assert time.monotonic() < end
        time.sleep(0.01)
    progress.finish()
    before = out.getvalue()
    assert screen(before) == [""]
    time.sleep(0.3)
    assert out.getvalue() == before, "nothing is written once it is over"


def test_a_terminal_without_unicode_gets_signs_it_has() -> None:
    class Latin(Terminal):
        encoding = "latin-1"

    out = Latin()
    progress = for_stream(out)
    progress.start("loading", 4, 2, unit="tensors")
    progress.finish()
    assert "############............" in out.getvalue()
    assert out.getvalue().encode("latin-1")


def test_progress_without_a_terminal_prints_one_line() -> None:
    out = io.StringIO()
    progress = for_stream(out)
    progress.start("perplexity", 8, unit="windows")
    for _ in range(8):
        progress.advance(1)
    progress.finish()
    assert out.getvalue() == "perplexity (8 windows)\n"


@pytest.mark.parametrize(("count", "text"), [(1, "1 query"), (0, "0 queries"), (12345, "12,345 queries")])
def test_nouns_agree_with_their_numbers(count: int, text: str) -> None:
    assert counted(count, "queries") == text
    assert (counted(1, "tokens"), counted(2, "tokens")) == ("1 token", "2 tokens")


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (None, "unknown size"),
        (0, "0 B"),
        (999, "999 B"),
        (98362432, "98.4 MB"),
        (999_960_000, "1.0 GB"),
        (2 * 10**12, "2.0 TB"),
    ],
)
def test_sizes(nbytes: int | None, text: str) -> None:
    assert human_size(nbytes) == text


def test_a_table_fits_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    out = Terminal()
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setenv("COLUMNS", "40")
    print_table(("NAME", "WHAT"), [("模型", "short"), ("model", "a long description\x1b[2J that does not fit")])
    lines = out.getvalue().splitlines()
    assert lines[:2] == ["NAME   WHAT", "模型   short"]
    assert lines[2:] == ["model  a long description\\x1b[2J that", "       does not fit"], "nothing of it is cut off"
    assert max(map(cell_len, lines)) <= 40
