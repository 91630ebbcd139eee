"""GQA uptraining on real models: stories260K with one K/V head of four, mean-pooled as in the paper, recovers most of the loss;
SmolLM2 with one of three recovers a part of it.

Source: Ainslie et al., "GQA", arXiv 2305.13245, section 2.1.
"""

from pathlib import Path

import pytest
import torch

from headrace.compress.judge import Judgement
from headrace.compress.pipeline import Pipeline
from headrace.compress.write import compress
from headrace.training.distil import HEALING_LOSSES, DistilConfig, distil
from headrace.training.examples import batch_of, windows
from headrace.training.losses import DistillationLoss
from headrace.training.run import Budget, Run
from headrace.training.students import Student
from headrace.training.teacher_forward import TorchForward
from headrace.weights.loader import load_model
from tests.models.llama2c import read_checkpoint
from tests.models.test_stories import texts_of
from tests.models.zoo import MemorySource
from tests.places import data_path, default_model

LAYERS, HEADS, HEAD_DIM = 5, 4, 8
STEPS = 100


def original() -> MemorySource:
    return read_checkpoint(data_path("stories260K") / "stories260K.bin")


def pooled(seed: int | None = None) -> MemorySource:
    """One K/V head: the mean of four, or with a seed random weights of the mean's size (the control)."""
    source = original()
    for layer in range(LAYERS):
        for name in ("attn_k", "attn_v"):
            key = f"blk.{layer}.{name}.weight"
            mean = source.tensors[key].view(HEADS, HEAD_DIM, -1).mean(0)
            if seed is not None:
                generator = torch.Generator().manual_seed(seed)
                mean = torch.randn(mean.shape, generator=generator) * mean.std()
            source.tensors[key] = mean.contiguous()
    source.metadata["llama.attention.head_count_kv"] = 1
    return source


def healed(student: Student, place: Path, steps: int, seed: int) -> tuple[Judgement, Judgement]:
    """Loss on held-out texts of the original, before and after `steps` steps of four texts on its outputs."""
    teacher = load_model(original())
    items, held = (windows(texts_of(teacher, count, first)) for count, first in ((128, 1), (16, 10_001)))
    loss = DistillationLoss(TorchForward(teacher), student, HEALING_LOSSES, 2.0, 0.5)
    before = loss.judge(held)
    run = Run(loss.tensors, place, Budget(steps=steps), 2e-3)
    run.train(lambda step: loss.backward(batch_of(items, step, 4, seed)))
    return before, loss.judge(held)


def uptrained(source: MemorySource, place: Path, steps: int, seed: int) -> tuple[Judgement, Judgement]:
    """`healed` of a model of all layers."""
    student = Student(load_model(source), None, list(range(LAYERS)))  # type: ignore[arg-type]  # nothing is written
    return healed(student, place, steps, seed)


@pytest.mark.slow
def test_uptraining_takes_back_most_of_what_pooling_lost(tmp_path: Path) -> None:
    """KL to the original falls to less than half (measured: 0.45, three seeds), perplexity to less than a third. Control: heads
    of random weights end worse."""
    before, after = uptrained(pooled(), tmp_path / "mean", STEPS, 0)
    assert after.kl < 0.5 * before.kl
    assert after.perplexity < 0.3 * before.perplexity
    _, random = uptrained(pooled(0), tmp_path / "random", STEPS, 0)
    assert after.kl < 0.93 * random.kl


@pytest.mark.weights
@pytest.mark.slow
def test_smollm2_with_one_head_of_three_gains(tmp_path: Path) -> None:
    """Mean-pooled, then 24 steps of 256 tokens of wikitext-2: KL and perplexity on held-out texts fall, and stay above the
    original's. Control: steps that change nothing recover nothing."""
    texts = str(data_path("wikitext2") / "valid.txt")
    pooling = Pipeline(method=("kv-heads",), format="F16", kv_heads=1, pool="mean", calibrate=texts)
    compress(default_model(), tmp_path / "pooled.gguf", pooling)

    def judged(place: str, steps: int, rate: float) -> tuple[Judgement, Judgement]:
        student, budget = str(tmp_path / "pooled.gguf"), Budget(steps=steps)
        recipe = DistilConfig(student, budget, texts=texts, window=128, batch=2, rate=rate)
        report = distil(default_model(), tmp_path / place, recipe)
        print(f"{place}: {report.before} {report.after}")
        return report.before, report.after

    before, after = judged("uptrained", 24, 2e-4)
    assert after.kl < 0.9 * before.kl
    assert before.perplexity_before < after.perplexity < 0.9 * before.perplexity
    unchanged, control = judged("control", 1, 1e-12)
    assert control.kl > 0.99 * unchanged.kl
