"""Terminal width: Chinese takes two cells a character, and cutting never leaves half of one."""

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.cli.output import crop, print_table, width, wrapped


def test_width_in_cells() -> None:
    assert width("hello") == 5
    assert width("水渠") == 4
    assert width("水a，") == 5
    assert width("e\u0301") == 1
    assert width("ﾊﾝ") == 2
    assert width("") == 0


def test_crop() -> None:
    assert crop("水渠里的水", 10) == "水渠里的水"
    assert crop("水渠里的水", 9) == "水渠里的…"
    assert crop("水渠里的水", 8) == "水渠里…"  # the fourth character would need two cells and one is left
    assert crop("水渠", 1) == "…"
    assert crop("水渠", 0) == ""
    assert crop("hello", 4) == "hel…"


@given(st.text(alphabet="ab 水渠，🦙", max_size=20), st.integers(0, 30))
def test_crop_never_exceeds_its_cells(text: str, cells: int) -> None:
    assert width(crop(text, cells)) <= cells
    assert crop(text, cells) == text or width(text) > cells


@given(st.text(alphabet="ab 水渠，🦙", max_size=40), st.integers(2, 12))
def test_wrapped_loses_nothing_and_no_line_is_wider(text: str, cells: int) -> None:
    lines = wrapped(text, cells)
    assert all(width(line) <= cells for line in lines)
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")


def test_wrapped_text_breaks_between_words() -> None:
    assert wrapped("", 5) == [""]
    assert wrapped("the mill by the river", 8) == ["the mill", "by the", "river"]
    assert wrapped("a headrace 水渠里的水", 5) == ["a", "headr", "ace", "水渠", "里的", "水"]


def test_a_table_on_a_terminal_loses_no_word(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere a row is a line."""
    rows = [("mill", "1 GB", "A model that grinds words to flour"), ("lamp", "2 GB", "Light")]
    print_table(("NAME", "SIZE", "DESCRIPTION"), rows)
    assert capsys.readouterr().out.splitlines()[1] == "mill\t1 GB\tA model that grinds words to flour"
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    print_table(("NAME", "SIZE", "DESCRIPTION"), rows)
    found = capsys.readouterr().out.splitlines()
    assert found[1:4] == ["mill  1 GB  A model that", "            grinds words to", "            flour"]
    assert found[4] == "lamp  2 GB  Light"


def test_counting_characters_is_not_enough() -> None:
    """The control: Chinese cut by characters is twice as wide as it may be."""
    assert width("水渠里的水"[:4]) > 4
