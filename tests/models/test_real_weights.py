"""Real models: greedy tokens equal `transformers` on the same dequantised float32 weights.

The transformers model is built from our dequantised tensors under the names of the `gguf` package, so what is compared is
everything above the dequantiser. It is run once over prompt and answer: its choice at each place equals ours if and only if
its own greedy text is ours.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.text.tokenizer import Tokenizer
from headrace.weights.gguf import GGUFFile
from headrace.weights.loader import load_model
from tests.models.feeding import greedy
from tests.models.real import PROMPTS, transformers_model
from tests.places import model_file

COUNT = 64
TIE = 1e-4  # a top-2 gap below this may go either way


@torch.no_grad()
def differences(theirs: Any, prompt: list[int], answer: list[int]) -> list[float]:
    """How far the oracle prefers another token, wherever it does."""
    logits = theirs(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
    return [float(gap) for gap in logits.max(-1).values - chosen if gap > 0]


def check(path: Path, texts: list[str]) -> None:
    with GGUFFile(path) as source:
        tokenizer = Tokenizer.from_gguf(source.metadata)
        prompts = [tokenizer.encode(text) for text in texts]
        answers = greedy(load_model(source), prompts, COUNT)
        theirs = transformers_model(source)
    gaps = {text: differences(theirs, *pair) for text, *pair in zip(texts, prompts, answers, strict=True)}
    different = {text: found for text, found in gaps.items() if found}
    print(f"{path.name}: {len(texts)} x {COUNT} tokens, not the oracle's first choice: {different or 'none'}")
    assert all(gap < TIE for found in gaps.values() for gap in found), different
    # Negative control: an answer with one token changed is caught.
    wrong = [*answers[0][:10], (answers[0][10] + 1) % 1000, *answers[0][11:]]
    assert any(gap > TIE for gap in differences(theirs, prompts[0], wrong))


@pytest.mark.weights
@pytest.mark.parametrize("count", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_smollm2(count: int) -> None:
    check(model_file("SmolLM2-135M-Instruct.Q4_1.gguf"), PROMPTS[:count])


@pytest.mark.weights
@pytest.mark.slow
def test_qwen_coder_8_prompts() -> None:
    check(model_file("Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf"), PROMPTS[:8])
