"""bench compressed: compressed models compared with the original in tables, JSON and a page."""

import json
import math
import re
from pathlib import Path

import pytest

from headrace.bench import compressed_page as pages
from headrace.compress.pipeline import Pipeline
from headrace.compress.write import compress
from tests.cli_shell import Shell
from tests.tiny_files import write_tiny_gguf
from tests.unit.test_choices import ARC, PLAIN, write


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(" ".join(f"{number}" for number in range(1200)))
    return path


def test_three_models(shell: Shell, tiny_gguf: Path, text: Path, tmp_path: Path) -> None:
    """Eight bits lose less than four; against itself the first loses nothing. The page has all of it and asks nobody."""
    compress(tiny_gguf, tmp_path / "a.gguf", Pipeline(format="Q8_0"))
    compress(tiny_gguf, tmp_path / "b", Pipeline(format="int4-g32"))
    tasks = write(tmp_path / "some.jsonl", ARC, PLAIN, PLAIN)
    file, page = tmp_path / "figures.json", tmp_path / "page.html"
    options = ("--text", text, "--tokens", 1024, "--tasks", tasks, "--cells", "b1", "--rounds", 1, "--threads", 1)
    code, out, err = shell(
        *("bench", "compressed", tiny_gguf, tmp_path / "a.gguf", tmp_path / "b", *options, "--json", file, "--page", page)
    )
    assert code == 0, err
    result = json.loads(file.read_text())
    first, eight, four = result["models"].values()
    assert list(result["models"]) == ["tiny.gguf", "a.gguf", "b"]
    assert "float32" not in first
    assert 0 < eight["float32"]["kl"] < four["float32"]["kl"]
    assert first["bytes"] > four["bytes"] > eight["bytes"], "a folder's table of tokens stays floats"
    assert (first["bits"], eight["how"], four["how"]) == (32.0, "rtn Q8_0", "rtn int4-g32")
    for one in (first, eight, four):
        assert one["scored"] == 2 * 128 * 2
        assert one["cells"]["b1"]["tokens_per_s"] > 0
        assert one["peak_rss_mb"] > 50
        assert one["tasks"]["some"]["questions"] == 3
    for one, beside in ((first, "perplexity_before"), (four, "perplexity")):  # the core, and float32 in torch
        assert math.log(one["perplexity"]) == pytest.approx(math.log(four["float32"][beside]), abs=0.3)
    assert (first["cells"]["b1"]["ratio"], first["tasks"]["some"]["lost"]) == (1.0, 0.0)
    assert re.search(r"^2\ta\.gguf\trtn Q8_0\t", out, re.MULTILINE)
    html = page.read_text("utf-8")
    assert html.count("<svg") == 3
    assert html.count("<table>") == 2
    assert not re.search(r"<script|src=|href=|https?://(?!www\.w3\.org/2000/svg)", html)
    assert "rtn int4-g32" in html


def test_a_calibration_text_is_refused_for_evaluation(shell: Shell, tiny_gguf: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    compress(tiny_gguf, out, Pipeline(format="Q4_0", method=("gptq",), calibrate=str(text), tokens=1024, threads=1))
    code, said, err = shell("bench", "compressed", tiny_gguf, out, "--text", text, "--tokens", 100_000, "--cells", "b1")
    assert (code, said) == (1, "")
    assert re.search(r"the text to judge by has [\d,]+ passages of 32 tokens that out\.gguf was measured on", err)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("SELF",), "is named twice; leave one out"),
        (("OTHER",), "other.gguf has other tokens than"),
        (("OUT", "--cells", "b3"), "no cell 'b3'"),
        (("OUT", "--tasks", "TEXT"), "line 1 is not a question"),
    ],
)
def test_invalid_arguments_are_a_one_line_error(
    shell: Shell, tiny_gguf: Path, text: Path, tmp_path: Path, arguments: tuple[str, ...], line: str
) -> None:
    other = write_tiny_gguf(tmp_path / "other.gguf", control="<|extra|>")
    names = {"SELF": tiny_gguf, "OTHER": other, "OUT": other, "TEXT": text}
    code, said, err = shell("bench", "compressed", tiny_gguf, *(names.get(one, one) for one in arguments), "--text", text)
    assert (code, said) == (1, "")
    assert line in err.splitlines()[-1]


def test_losses_and_gains_have_the_same_columns_and_marks() -> None:
    """A model that loses has the same columns and marks as one that gains; far values have an axis of their own."""
    cell = {"tokens_per_s": 10.0, "least": 9.0, "most": 11.0, "ratio": 0.5, "ratio_least": 0.4, "ratio_most": 0.6}
    task = {"questions": 4, "right": 0.5, "error": 0.25, "lost": 0.25, "gained": 0.0, "p": 1.0}
    one = {"how": "x", "bytes": 1e6, "read_bytes": 1e6, "bits": 4.0, "perplexity": 10.0, "perplexity_error": 0.1, "scored": 9,
           "of_first": 1.0, "of_first_error": 0.0,
           "tasks": {"arc": task}, "cells": {"b1": cell}, "peak_rss_mb": 50.0, "load_s": 0.1}  # fmt: skip
    beside = {"kl": 0.5, "kl_error": 0.1, "same_choice": 0.9}
    worse, better = (
        {**one, "perplexity": value, "of_first": value / 10, "of_first_error": error, "float32": beside}
        for value, error in ((900.0, 0.02), (9.0, None))
    )
    models = {"first": one, "worse": worse, "better": better}
    result = {"model": "first", "models": models, "text": "t", "tokens": 9, "rounds": 1, "threads": 1, "bandwidth_gb_s": 0.02,
              "others_cpu": 0.0}  # fmt: skip
    rows = pages.tables(result)[0].cells()
    assert [row[6] for row in rows] == ["of the first", "+0.00%", "+8900.00% ± 2.00%", "-10.00%"]
    assert [row[-1] for row in rows[2:]] == ["50.0% ± 25.0% of 4 (−25.0% +0.0%, p 1)"] * 2
    assert len({len(row) for row in rows}) == 1
    size, read, rate = pages.pictures(result)
    assert [one.count("<circle") for one in (size, read, rate)] == [3, 3, 3]
    assert ">100</text>" in size
    assert "memory read" in read
    assert (rate.count("stroke-dasharray"), "as far as memory allows" in rate) == (3, True)
