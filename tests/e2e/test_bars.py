"""Commands that take long show progress on a terminal, and clear it at the end."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import masks
from tests.cli_shell import ERASE, Shell, check_bar
from tests.tiny_bert import write_tiny_bert

ONE = ("--threads", "1")
SCHEMA = {"id": "a", "schema": {"type": "integer"}, "tests": [{"valid": True, "data": 5}]}


def lines(at: Path, *values: object) -> Path:
    at.write_text("".join(json.dumps(value) + "\n" for value in values))
    return at


def prompts(at: Path) -> Path:
    return lines(at / "prompts.jsonl", {"prompt": "The mill"}, {"prompt": "A wheel"})


def labelled(at: Path) -> Path:
    texts = [{"text": f"mill {place:02} {word}", "label": word} for place in range(12) for word in ("turns", "stands")]
    return lines(at / "labelled.jsonl", *texts)


# What is typed (of a model and a folder to write in), and what the bar must say: a word of what it is at, and of how much.
BARS: dict[str, tuple[Callable[[Path, Path], tuple[object, ...]], tuple[str, ...]]] = {
    "generate": (
        lambda m, at: ("generate", m, "-i", prompts(at), "-o", at / "out.jsonl", "-m", "2", *ONE),
        ("answering", "of 2 lines"),
    ),
    "embed": (lambda m, at: ("embed", m, "a", "b", "c", *ONE), ("embedding", "of 3 texts")),
    "perplexity": (
        lambda m, at: ("perplexity", m, _text(at), "--window", "16", "--limit", "64", *ONE),
        ("perplexity", "of 4 windows"),
    ),
    "compare": (
        lambda m, at: ("compare", m, "-i", prompts(at), "--modes", "greedy,sample", "-m", "2", *ONE),
        ("comparing", "of 4 answers"),
    ),
    "train-classifier": (
        lambda m, at: ("train-classifier", write_tiny_bert(at / "bert"), "-d", labelled(at), "-o", at / "exits", *ONE),
        ("reading", "of 17 texts", "training", "of 3 exits"),
    ),
    "compress": (lambda m, at: ("compress", m, "-o", at / "out.gguf", "--format", "Q8_0", *ONE), ("out.gguf", " kB")),
    "arithmetic": (lambda m, at: ("arithmetic", m, "--bandwidth", "1", "--no-errors"), ("measuring",)),
    "masks": (
        lambda m, at: (masks.main, lines(at / "schemas.jsonl", SCHEMA, SCHEMA), "--model", m),
        ("reading schemas", "of 2 schemas"),
    ),
    "bench sharing": (lambda m, at: ("bench", "sharing", m, "-i", prompts(at), "-m", "2"), ("measuring",)),
}


def _text(at: Path) -> Path:
    (at / "text.txt").write_text("the mill stands by the river " * 20)
    return at / "text.txt"


@pytest.mark.parametrize("name", BARS)
def test_a_long_command_has_a_bar_on_a_terminal(shell: Shell, tiny_gguf: Path, tmp_path: Path, name: str) -> None:
    make, said = BARS[name]
    code, _, seen = shell.watched(*make(tiny_gguf, tmp_path))
    assert code == 0, seen
    check_bar(seen, *said)


def test_through_a_pipe_nothing_moves(shell: Shell, tiny_gguf: Path, tmp_path: Path) -> None:
    """The control of the above: the same commands on no terminal draw nothing."""
    for name in ("compare", "masks"):
        code, _, err = shell(*BARS[name][0](tiny_gguf, tmp_path))
        assert code == 0, err
        assert ERASE not in err
        assert "━" not in err
