"""`bench speculate` on a tiny model: the grid of cells in which auto must not be slower, the sweep over batches."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace.bench import grid
from headrace.bench.grid import GridCell, Pairs, Texts, cells, measure, random_texts
from headrace.drafting.draft_model import DraftModel
from headrace.drafting.heads import TrainedHeads
from headrace.drafting.speculation import Speculation
from headrace.llm import LLM
from tests.cli_shell import Shell, check_bar


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "copies.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("once upon a time", "the end of it", "a b a b a")))
    return path


def test_the_grid_has_every_batch_task_and_drafter() -> None:
    names = [cell.name for cell in cells(["edit", "chat"], True)]
    assert len(names) == len(set(names)) == 20
    assert names[0] == "b1-edit-none"
    assert "b32-chat-draft" in names
    assert [cell.name for cell in cells(["edit", "chat"], False, "b1-*, *-chat-none", (1, 4))] == [
        "b1-edit-none",
        "b1-chat-none",
        "b4-chat-none",
    ]
    with pytest.raises(ValueError, match="no cell is called 'b3-'"):
        cells(["edit"], False, "b1-*,b3-")


def measured(ratios: Sequence[float]) -> Pairs:
    return Pairs(plain=[100.0] * len(ratios), auto=[100.0 * one for one in ratios], others_cpu=[0.0] * len(ratios))


def test_a_cell_near_the_limit_needs_many_pairs() -> None:
    assert not measured([1.5] * 4).enough(5, 15)
    assert measured([1.5] * 5).enough(5, 15)
    assert measured([0.8] * 5).enough(5, 15), "as far below"
    assert not measured([1.0] * 14).enough(5, 15)
    assert measured([1.0] * 15).enough(5, 15)


def test_the_figure_is_the_median_of_the_pairs_with_its_interval() -> None:
    figures = measured([0.9, 0.96, 1.0, 1.1, 0.95]).figures()
    assert (figures["ratio"], figures["interval"]) == (pytest.approx(0.96), [pytest.approx(0.9), pytest.approx(1.1)])
    assert figures["reached"] is False
    assert measured([0.97]).figures()["reached"] is True


def test_batches_cycle_through_the_prompts() -> None:
    texts = Texts([[1], [2], [3]])
    assert texts.batch(2, 0) == [[1], [2]]
    assert texts.batch(2, 1) == [[3], [1]]
    assert texts.batch(4, 0) == [[1], [2], [3], [1]]
    assert random_texts(1000).prompts != random_texts(1001).prompts


def test_an_output_that_changes_is_an_error(tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(str(tiny_gguf), speculate="ngram", threads=1)
    honest = grid.timed

    def wrong(*arguments: Any) -> Any:
        found, outputs = honest(*arguments)
        return found, outputs if arguments[3] is None else [[*each[:-1], -1] for each in outputs]

    ours = llm.engine.speculation
    monkeypatch.setattr(grid, "timed", wrong)
    with pytest.raises(RuntimeError, match="b1-t-none: speculation changed an output"):
        measure(llm, {"t": Texts([[5, 6, 5, 6]])}, cells(["t"], False, "b1-*"), few=1, many=1)
    assert llm.engine.speculation is ours
    llm.close()


def test_cells_without_a_draft_use_no_model_drafter(tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(str(tiny_gguf), speculate="ngram", threads=1)
    ours = llm.engine.speculation
    assert ours is not None
    lookup = ours.drafters[0]
    llm.engine.speculation = Speculation([lookup, DraftModel("exit", group=None), TrainedHeads(2)], 256)
    asked: dict[str, list[str]] = {}

    def cell(llm: LLM, one: GridCell, texts: Texts, speculation: Speculation, *_: Any) -> Pairs:
        asked[one.name] = [drafter.name for drafter in speculation.drafters]
        return measured([1.0])

    monkeypatch.setattr(grid, "measure_cell", cell)
    measure(llm, {"t": Texts([[5, 6]])}, cells(["t"], True, "b1-*"))
    assert asked == {"b1-t-none": [lookup.name], "b1-t-draft": [lookup.name, "exit", "heads"]}
    llm.engine.speculation = ours
    llm.close()


def test_the_command_measures_the_grid(shell: Shell, tiny_gguf: Path, prompts: Path, tmp_path: Path) -> None:
    figures = tmp_path / "grid.json"
    options = ["--draft", tiny_gguf, "--threads", 1, "--json", figures, "--pairs", 2]
    code, out, err = shell.watched(
        "bench", "speculate", tiny_gguf, "-i", prompts, "--grid", "--cells", "b1-*,b4-random-draft", *options
    )
    assert code == 0, err
    check_bar(err, "measuring", "of 5 cells")
    found = json.loads(figures.read_text())["cells"]
    assert list(found) == ["b1-copies-none", "b1-random-none", "b1-copies-draft", "b1-random-draft", "b4-random-draft"]
    for name, cell in found.items():
        assert name in out
        assert cell["pairs"] == len(cell["ratios"]) == 2
        assert cell["interval"][0] <= cell["ratio"] <= cell["interval"][1]
        assert cell["plain_tokens_per_s"] > 0
        assert cell["accepted"] <= cell["drafted"]
        assert cell["steps"] > 0
    code, _, err = shell("bench", "speculate", tiny_gguf, "-i", prompts, "--cells", "b1-*")
    assert code != 0
    assert "give --grid" in err


def test_the_command_sweeps_over_batches_and_draws(shell: Shell, tiny_gguf: Path, prompts: Path, tmp_path: Path) -> None:
    figures, drawing = tmp_path / "sweep.json", tmp_path / "gain.svg"
    options = ["--speculate", "ngram", "--threads", 1, "--rounds", 1, "-m", 6, "--json", figures, "--plot", drawing]
    code, out, err = shell("bench", "speculate", tiny_gguf, "-i", prompts, "--sweep", *options)
    assert code == 0, err
    rows = json.loads(figures.read_text())
    assert [(row["batch"], row["gamma"]) for row in rows] == [(b, g) for b in (1, 2, 4, 8, 16, 32) for g in (0, 2, 4)]
    assert len(out.splitlines()) == 1 + len(rows)
    for row in rows:
        assert row["predicted"] > 0
        assert row["measured"] > 0
        assert 0 <= row["acceptance"] <= 1
        assert row["drafted"] <= (row["gamma"] or 16)
    assert drawing.read_text().count('stroke-dasharray="5 4"') == 1
