"""What a person sees: plain lines without a terminal, a bar on one; tables that fit."""

import io

import pytest
from rich.cells import cell_len

from headrace.cli.output import print_table
from headrace.weights.progress import Bar, Lines, for_stream, human_size


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_plain_lines_say_the_size_and_every_quarter() -> None:
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


def test_a_terminal_gets_a_bar_that_goes_away() -> None:
    out = Terminal()
    progress = for_stream(out)
    assert isinstance(progress, Bar)
    progress.start("[model].gguf", 1000)
    progress.advance(1000)
    progress.finish()
    progress.note("a line")
    assert "[model].gguf" in out.getvalue(), "names are not markup"
    assert out.getvalue().endswith("a line\n")


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
    assert lines[2] == "model  a long description\\x1b[2J that d…"
    assert cell_len(lines[2]) == 40
