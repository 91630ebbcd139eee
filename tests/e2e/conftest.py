"""Fixtures of the command line tests: a shell, and a tiny model on disk."""

from pathlib import Path

import pytest

from headrace.llm import LLM
from tests.cli_shell import Shell
from tests.tiny_files import write_tiny_gguf


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a chat template and a context of 512 tokens."""
    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", context=512)


@pytest.fixture(scope="session")
def tiny_llm(tiny_gguf: Path) -> LLM:
    """The same model through the Python API, in float64: what the command line must say, too."""
    return LLM(tiny_gguf, dtype="float64", max_num_seqs=8, threads=1)


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(tmp_path, monkeypatch, capsys)
