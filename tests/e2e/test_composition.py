"""The page's table of methods and features is what the engine does, on both back ends."""

from pathlib import Path

import pytest

from headrace.llm import LLM
from tests.composition import MASK, PART, refusal, table
from tests.leaving import write_exits
from tests.pages import written
from tests.tiny_files import write_tiny_gguf
from tests.tiny_sources import write_tiny_marian


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_the_table_is_not_stale(backend: str, tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", mask=MASK)
    more = {"dtype": "float64"} if backend == "torch" else {}
    exits = write_exits(tmp_path / "exits", path)
    llm = LLM(path, amateur=path, exits=exits, backend=backend, threads=1, device="cpu", **more)
    with LLM(write_tiny_marian(tmp_path / "marian"), dtype="float64", threads=1, device="cpu") as sources:
        found = table(llm, sources)
    assert found == written(PART), "docs/decoding.md is stale: python -m tests.composition"
    assert "no 1" in found
    assert "beam search" in refusal(llm, {"beam_width": 2}, {"top_p": 0.5})
    llm.close()
