"""Real models on the native core: a golden text, and row by row. tests/models/test_gates.py compares them with float32."""

from pathlib import Path

import numpy as np
import pytest

from headrace.text.tokenizer import Tokenizer
from headrace.weights.gguf import GGUFFile
from tests.models.gates import generate, program_of
from tests.models.llama2c import read_checkpoint, read_pieces
from tests.models.real import PROMPTS
from tests.places import data_path, model_file
from tests.tiny_native import Feeder

NAMES = (
    "SmolLM2-135M-Instruct.Q4_1.gguf",
    "Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf",
    "Qwen2.5-Coder-1.5B-Instruct.Q4_K_M.gguf",
)


def test_stories_generates_its_golden_text() -> None:
    """Head size 8, FFN 172, float32 weights held as bfloat16: the 200 tokens are those of float32."""
    folder = data_path("stories260K")
    source = read_checkpoint(folder / "stories260K.bin")
    tokens = generate(program_of(source, threads=1), [1], 200)
    pieces = read_pieces(folder / "tok512.bin", 512)
    golden = (folder / "expected_greedy_200.txt").read_text().strip()
    assert b"".join(pieces[token] for token in tokens).decode().strip() == golden


def check_rows(path: Path, rows: range) -> None:
    """The last row, alone after the rest and together with up to 32 before it: the same bits."""
    with GGUFFile(path) as source:
        feeder = Feeder(program_of(source), [Tokenizer.from_gguf(source.metadata).encode(" ".join(PROMPTS))[:40]])
        (whole,) = feeder.whole()
        for count in rows:
            feeder.feed((0, 0, 40 - count))
            (last,) = feeder.feed((0, 40 - count, count))
            assert np.array_equal(last, whole[-count:]), f"{count} rows"


@pytest.mark.weights
def test_smollm2_rows_of_one_to_33() -> None:
    check_rows(model_file(NAMES[0]), range(1, 34))


@pytest.mark.weights
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES[1:])
def test_qwen_rows_of_one_to_33(name: str) -> None:
    check_rows(model_file(name), range(1, 34))
