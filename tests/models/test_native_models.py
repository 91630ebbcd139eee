"""Real models on the native core: against torch in float32 on the same weights, teacher-forced, and row by row."""

from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.models.registry import describe, read_config
from headrace.native.runner import NativeRunner
from headrace.text.tokenizer import Tokenizer
from headrace.weights.gguf import GGUFFile
from headrace.weights.loader import load_model
from headrace.weights.source import WeightSource
from tests.models.data import data_folder, model_file
from tests.models.feeding import feed
from tests.models.llama2c import read_checkpoint, read_pieces
from tests.models.test_real_weights import PROMPTS
from tests.tiny_native import Feeder

COUNT = 64
NAMES = (
    "SmolLM2-135M-Instruct.Q4_1.gguf",
    "Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf",
    "Qwen2.5-Coder-1.5B-Instruct.Q4_K_M.gguf",
)


def runner_of(source: WeightSource, blocks: int = 128, **options: object) -> NativeRunner:
    model = describe(read_config(source))
    settings = {"num_blocks": blocks, "block_size": 16, "max_positions": 2048, "threads": 2, **options}
    return NativeRunner(model, source, **settings)  # type: ignore[arg-type]


def generate(runner: NativeRunner, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens, each fed alone."""
    tokens = list(prompt)
    (rows,) = Feeder(runner, [tokens]).whole()
    while len(tokens) < len(prompt) + count:
        tokens.append(int(rows[-1].argmax()))
        (rows,) = Feeder(runner, [tokens]).feed((0, len(tokens) - 1, 1))
    return tokens[len(prompt) :]


def test_stories_tells_its_golden_text() -> None:
    """Head size 8, FFN 172, float32 weights held as bfloat16: the 200 tokens are those of float32."""
    folder = data_folder("stories260K")
    source = read_checkpoint(folder / "stories260K.bin")
    tokens = generate(runner_of(source, threads=1), [1], 200)
    pieces = read_pieces(folder / "tok512.bin", 512)
    golden = (folder / "expected_greedy_200.txt").read_text().strip()
    assert b"".join(pieces[token] for token in tokens).decode().strip() == golden


def check_against_float32(path: Path, texts: list[str]) -> None:
    """Teacher-forced on greedy text: top-1 agrees, and always where the gap is clear."""
    torch.set_num_threads(2)
    with GGUFFile(path) as source:
        tokenizer = Tokenizer.from_gguf(source.metadata)
        prompts = [tokenizer.encode(text) for text in texts]
        native = runner_of(source)
        whole = [prompt + generate(native, prompt, COUNT) for prompt in prompts]
        ours = [Feeder(native, [text]).whole()[0] for text in whole]
        theirs = [rows.numpy() for rows in feed(load_model(source), whole, "whole")]
    agree, gaps, errors, missed = [], [], [], []
    for a, b in zip(ours, theirs, strict=True):
        order = np.argsort(b, -1)[:, -2:]
        second, first = (np.take_along_axis(b, order[:, i : i + 1], -1)[:, 0] for i in (0, 1))
        gap = first - second
        own = np.take_along_axis(a, order[:, 1:], -1) - np.take_along_axis(a, order[:, :1], -1)
        right = a.argmax(-1) == order[:, 1]
        agree.append(right)
        gaps.append(gap)
        errors.append(own[:, 0] - gap)
        missed.append(np.where(right, 0.0, gap))
    rms = float(np.sqrt(np.mean(np.concatenate(errors) ** 2)))
    top1, worst = float(np.concatenate(agree).mean()), float(np.concatenate(missed).max())
    print(f"{path.name}: top-1 agreement {top1:.1%}, RMS error of the top-2 gap {rms:.3f}, largest gap missed {worst:.3f}")
    assert top1 >= 0.95
    assert worst < 4 * rms
    # Negative control: the other way round nothing agrees.
    assert np.mean(np.concatenate([(-a).argmax(-1) for a in ours]) == np.concatenate([b.argmax(-1) for b in theirs])) < 0.05


@pytest.mark.weights
def test_smollm2_agrees_with_float32() -> None:
    check_against_float32(model_file(NAMES[0]), PROMPTS[:4])


@pytest.mark.weights
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_20_prompts_agree_with_float32(name: str) -> None:
    check_against_float32(model_file(name), PROMPTS)


def check_rows(path: Path, rows: range) -> None:
    """The last row, alone after the rest and together with up to 32 before it: the same bits."""
    with GGUFFile(path) as source:
        feeder = Feeder(runner_of(source), [Tokenizer.from_gguf(source.metadata).encode(" ".join(PROMPTS))[:40]])
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
