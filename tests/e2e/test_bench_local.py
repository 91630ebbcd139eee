"""bench local: every figure appears in the table and in the JSON file."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.bench import compare_builds
from headrace.bench.local import LOCAL, pick
from tests.cli_shell import Shell, check_bar

FIGURES = {"load_s", "peak_rss_mb", "bandwidth_gb_s", "machine", "commit", "cells", "model", "threads"}


def test_the_cells() -> None:
    asked = {"pp512", "pp2048", "b1", "b2", "b4", "b8", "b16", "b32", "b1_4k"}
    assert asked | {"b1_512", "b1_1k", "b1_2k", "b1_8k", "v5", "v8"} == set(LOCAL)
    assert [cell.name for cell in pick("b4, pp512")] == ["b4", "pp512"]
    with pytest.raises(ValueError, match="no cell 'b3'"):
        pick("b3")


def test_figures_of_a_tiny_model(shell: Shell, tiny_gguf: Path, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    options = ("--cells", "b1,b2,b1_8k,v5", "--rounds", "1", "--threads", "1", "--json", file)
    code, out, err = shell.watched("bench", "local", tiny_gguf, *options)
    assert code == 0, err
    check_bar(err, "measuring", "of 3 cells")
    assert "b1_8k is left out: the model knows 512 positions" in err
    figures = json.loads(file.read_text())
    assert set(figures) >= FIGURES
    assert "native" in figures["about"]
    assert list(figures["cells"]) == ["b1", "b2", "v5"]
    for cell in figures["cells"].values():
        assert cell["tokens_per_s"] > 0
        assert cell["bandwidth_gb_s"] > 0
    assert figures["peak_rss_mb"] > 50
    assert figures["cells"]["v5"]["cost"] == 5 * figures["cells"]["b1"]["tokens_per_s"] / figures["cells"]["v5"]["tokens_per_s"]
    assert "a step of 5 tokens to verify costs" in out
    assert "tokens/s" in out
    assert "b2" in out


def test_two_builds(shell: Shell, tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is printed of a comparison (tests/unit/test_compare_builds.py makes one), and too few pairs in one line."""
    code, _, err = shell("bench", "local", tiny_gguf, "--beside", tmp_path, "--rounds", "8")
    assert (code, err.splitlines()[-1]) == (1, "headrace: 8 pairs of a cell say too little; measure 9 or more")
    builds = {name: {"version": "1", "commit": name[:2], "file": f"/{name}/__init__.py"} for name in ("headrace", "other")}
    cell = {"tokens_per_s": 50.0, "peers": {"other": {"tokens_per_s": 100.0}}, "ratio": 0.5, "interval": [0.4, 0.6]}
    cells = {"b1": {**cell, "bandwidth_gb_s": 20.0, "others_cpu": 0.0}}
    result = {"builds": builds, "cells": cells, "verdict": compare_builds.verdict(cells)}

    def compare(
        model: str, other: Path, cells: object, *, pairs: int, done: Callable[[object], None], **more: object
    ) -> object:
        assert (other, pairs) == (tmp_path, 9)
        done(result)
        return result

    monkeypatch.setattr(compare_builds, "compare_builds", compare)
    file = tmp_path / "figures.json"
    code, out, err = shell("bench", "local", tiny_gguf, "--beside", tmp_path, "--json", file)
    assert code == 1, err
    assert "b1: 50.0 tokens/s, 0.500 of the other build" in err
    assert json.loads(file.read_text()) == result
    assert " ".join(out.splitlines()[1].split()) == "b1 50.0 100.0 0.500 0.400 to 0.600 20.0 0%"
    assert out.splitlines()[-3:] == [
        "this build: 1, commit he, /headrace/__init__.py",
        "other build: 1, commit ot, /other/__init__.py",
        "slower: the intervals of b1 lie wholly below 0.99, the geometric mean of the ratios is 0.500",
    ]
