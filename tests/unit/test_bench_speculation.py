"""What `bench speculate` draws, and what `run --show-speculation` writes."""

import io
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from rich.console import Console

from headrace.bench.plots import draw
from headrace.bench.speculation import SpeedUp, lines, theory
from headrace.cli.token_colours import OriginPrinter
from headrace.data.types import Delta
from headrace.drafting.policy import expected_tokens
from headrace.workflows.prompts import read_prompts


def row(task: str, gamma: int, measured: float) -> SpeedUp:
    return SpeedUp(task, 1, gamma, 0.8, gamma, 2.0, 0.1, 1.2, 1.5, measured, 1.0)


def test_the_drawing_has_a_measured_and_a_predicted_line_for_each_task() -> None:
    rows = [row("edits", 0, 3.0), row("edits", 1, 1.2), row("edits", 4, 2.0), row("chat", 4, 0.9)]
    drawing = draw("", "", "", lines(rows))
    drawn = ElementTree.fromstring(drawing)
    paths = [each for each in drawn.iter() if each.get("class", "").startswith("line")]
    assert len(paths) == 4
    assert [each.get("stroke-dasharray") for each in paths] == [None, "5 4"] * 2
    heights = [float(point.split()[1]) for point in str(paths[0].get("d"))[1:].split("L")]
    assert len(heights) == 3, "from no draft over 1 to 4"
    assert heights == sorted(heights, reverse=True), "faster is higher"


def test_the_theory_is_that_of_the_card() -> None:
    """With a draft in every step and v = 1: E / (gamma c + 1); where half the steps have none, half of its gain and cost."""
    rows = [SpeedUp("t", 1, gamma, 0.8, gamma, 2.0, 0.1, 1.0, 1.5, 1.5, 1.0) for gamma in (4, 1)]
    line = theory(rows)
    assert [gamma for gamma, _ in line] == [0, 1, 2, 3, 4]
    assert line[0][1] == 1.0
    for gamma, gain in line[1:]:
        assert gain == pytest.approx(expected_tokens(0.8, gamma) / (0.1 * gamma + 1))
    half = [SpeedUp("t", 1, 2, 0.5, 1.0, 1.4, 0.1, 1.2, 1.0, 1.0, 1.0)]
    assert theory(half)[1][1] == pytest.approx((1 + 0.5 * 0.5) / (0.5 * 0.1 + 1.1))
    assert theory(half)[2][1] == pytest.approx((1 + 0.5 * 0.75) / (0.5 * 2 * 0.1 + 1.2))


def test_the_choice_of_the_controller_is_not_drawn() -> None:
    with pytest.raises(ValueError, match="nothing to draw"):
        lines([row("edits", 0, 3.0)])


class Letters:
    special_ids = frozenset({9})

    def token_bytes(self, token: int) -> bytes:
        return [b"a", b"b", b"c", "é".encode()[:1], "é".encode()[1:]][token]


def test_tokens_are_coloured_by_their_origin() -> None:
    out = io.StringIO()
    origins = OriginPrinter(Letters(), Console(file=out, force_terminal=True, color_system="standard", highlight=False))
    origins.write(Delta("r", 0, token_ids=[0]))
    origins.write(Delta("r", 0, token_ids=[1, 3, 4, 2], drafter="ngram", accepted=3, drafted=5))
    origins.write(Delta("r", 0, token_ids=[1, 0], drafter="ngram", accepted=1, drafted=1))
    origins.write(Delta("r", 0, token_ids=[9]))
    origins.close()
    shown = out.getvalue()
    assert "\x1b[32mb\x1b[0m" in shown
    assert "\x1b[32mé\x1b[0m" in shown, "a character of two tokens"
    assert "\x1b[31mc\x1b[0m" in shown, "in a rejected draft's place"
    assert "ngram: 4 tokens accepted of 6 drafted" in shown
    assert "corrected: 1 token\x1b" in shown
    assert "bonus: 1 token\n" in shown, "after a draft that was right to its end"
    assert "plain: 2 tokens" in shown


def test_prompts_that_are_not_utf8_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF\xac\xff")
    with pytest.raises(ValueError, match=r"model.gguf is not UTF-8 text; give prompts, one per line"):
        read_prompts(tmp_path / "model.gguf")
    (tmp_path / "prompts.txt").write_text("The mill\n\nstands\n")
    assert read_prompts(tmp_path / "prompts.txt") == ["The mill", "stands"]
