"""bench local: every figure is there, in the table and in the JSON."""

import json
from pathlib import Path

import pytest

from headrace.bench.local import LOCAL, pick
from tests.cli_shell import Shell

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
    code, out, err = shell("bench", "local", tiny_gguf, *options)
    assert code == 0, err
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
