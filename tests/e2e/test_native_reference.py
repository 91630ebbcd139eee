"""The native core against its own arithmetic in torch, with no other difference allowed."""

import numpy as np
import pytest
import torch

from headrace.models.base import Model
from tests.models.feeding import feed
from tests.native_reference import bfloat16_attention, reference_of
from tests.tiny import VOCAB
from tests.tiny_native import Feeder, native_model, native_program, packed

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3_text", "gpt2")
BY_NUMBERS = ("granite", "smollm3", "phi3", "gemma2", "glm4", "olmo2", "exaone4", "arcee", "ministral3")
FORMS = ("", "int8", "int4")
# Of a row's spread. Sums in float32 leave the first; a value on the edge between two int8 or bfloat16 numbers may round the
# other way, and then the rows that see it are apart by the second at most.
NEAR, ROUNDED = 1e-5, 0.1


def prompts(seed: int, lengths: tuple[int, ...] = (1, 5, 17, 40)) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, length).tolist() for length in lengths]


def both(model: Model, quantize: str, texts: list[list[int]], patch: pytest.MonkeyPatch) -> list[tuple[np.ndarray, np.ndarray]]:
    """Logits of every row, native and reference."""
    got = Feeder(native_program(model, quantize=quantize), texts).whole()
    with bfloat16_attention(patch):
        wanted = feed(reference_of(model, packed(model, quantize)), texts, "whole", torch.float64)
    return [(ours, theirs.numpy()) for ours, theirs in zip(got, wanted, strict=True)]


def distances(pairs: list[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """Per row the largest difference of a logit, relative to the row's spread."""
    return np.concatenate([(np.abs(a - b) / b.std(-1, keepdims=True)).max(-1) for a, b in pairs])


@pytest.mark.parametrize("quantize", FORMS)
@pytest.mark.parametrize("architecture", ARCHITECTURES + BY_NUMBERS)
def test_logits_equal_those_of_the_same_arithmetic(architecture: str, quantize: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = both(native_model(architecture, head_dim=32), quantize, prompts(1), monkeypatch)
    apart = distances(pairs)
    name = f"{architecture} {quantize or 'bfloat16'}"
    print(f"{name}: median {np.median(apart):.1e}, largest {apart.max():.1e} of a row's spread")
    assert np.median(apart) < NEAR
    assert apart.max() < ROUNDED


def test_other_arithmetic_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a reference whose activations are not quantised is another model."""
    model = native_model("llama", head_dim=32)
    monkeypatch.setattr("tests.native_reference.int8_groups", lambda x: x)
    assert np.median(distances(both(model, "int8", prompts(1), monkeypatch))) > 100 * NEAR


@pytest.mark.parametrize("quantize", FORMS)
def test_greedy_text_is_the_references_token_for_token(quantize: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = native_model("llama")
    texts = prompts(2, (3, 9, 20))
    with bfloat16_attention(monkeypatch):
        reference = reference_of(model, packed(model, quantize))
        for _ in range(16):
            native = Feeder(native_program(model, quantize=quantize), texts).whole()
            wanted = feed(reference, texts, "whole", torch.float64)
            drawn = [int(rows[-1].argmax()) for rows in native]
            assert drawn == [int(rows[-1].argmax()) for rows in wanted]
            for text, token in zip(texts, drawn, strict=True):
                text.append(token)
