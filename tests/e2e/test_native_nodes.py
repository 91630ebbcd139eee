"""Several memory nodes in one process: pretended nodes change where items and threads are, and no bit of an output."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace import core
from headrace.data.params import SamplingParams
from headrace.llm import LLM
from tests.tiny_files import write_tiny_gguf

PROMPTS = ["The mill stands by the river, and the wheel turns. " * 3, "a b a b", "x"]
PARAMS = SamplingParams(max_tokens=8, temperature=0.0, logprobs=2)
THREADS = range(1, 17)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("nodes") / "tiny.gguf")


def outputs(model: Path, threads: int) -> Any:
    """Tokens and log-probabilities, as JSON values."""
    with LLM(model, backend="native", threads=threads, kv_cache_memory="4MiB") as llm:
        found = llm.generate(PROMPTS, PARAMS)
    return json.loads(
        json.dumps([[one.token_ids, [score.logprob for score in one.logprobs]] for (one,) in (each.outputs for each in found)])
    )


def main(model: str) -> None:
    """In a process of its own, as the core reads HEADRACE_NODES once."""
    found = {threads: outputs(Path(model), threads) for threads in THREADS}
    print(json.dumps([core.module().cpu_info()["nodes"], found]))


def test_pretended_nodes_change_no_bit(tiny: Path) -> None:
    """1 to 16 threads on 2 nodes, against one node."""
    code = f"from tests.e2e.test_native_nodes import main; main({str(tiny)!r})"
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "HEADRACE_NODES": "2", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    pretended, found = json.loads(ran.stdout)
    assert pretended == 2, "the nodes were not pretended, so nothing was compared"
    expected = outputs(tiny, 1)
    assert len(found) == len(THREADS)
    assert [threads for threads, each in found.items() if each != expected] == []


def test_the_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADRACE_NODES", raising=False)
    before = core.module().cpu_info()["nodes"]
    monkeypatch.setenv("HEADRACE_NODES", "4")
    assert core.module().cpu_info()["nodes"] == 4
    for text in ("", "1", "many"):
        monkeypatch.setenv("HEADRACE_NODES", text)
        assert core.module().cpu_info()["nodes"] == before
