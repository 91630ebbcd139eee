"""Cross-layer attention on a real model: stories260K with K and V of each second layer shared, trained on its own outputs.

Source: Brandon et al., "Reducing Transformer Key-Value Cache Size with Cross-Layer Attention", arXiv 2405.12981.
"""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from headrace.compress.judge import Judgement
from headrace.training.students import student_of
from headrace.weights.loader import load_model
from tests.models.test_uptraining import LAYERS, STEPS, healed, original

SHARE = 2


def trained(place: Path, steps: int, seed: int, random: int | None = None) -> tuple[Judgement, Judgement]:
    """Loss on held-out texts of the original, before and after `steps` steps of four texts on its outputs.

    random: seed of random K and V weights, of the size of the original's, in the layers that compute them (the control).
    """
    config, source = load_model(original()).config, original()
    for layer in range(0, LAYERS, SHARE) if random is not None else ():
        for name in ("attn_k", "attn_v"):
            weight = source.tensors[f"blk.{layer}.{name}.weight"]
            drawn = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1000 * (random or 0) + layer))
            source.tensors[f"blk.{layer}.{name}.weight"] = drawn * weight.std()
    student = student_of(f"share={SHARE}", SimpleNamespace(config=config, source=source))  # type: ignore[arg-type]
    assert student.model.config.kv_share == SHARE
    return healed(student, place, steps, seed)


@pytest.mark.slow
def test_shared_kv_is_learned(tmp_path: Path) -> None:
    """KL to the original falls to less than 0.4 of that of sharing alone (measured: 0.29 to 0.30, three seeds), perplexity to
    less than a third. Control: K and V that begin random end three times as far away."""
    before, after = trained(tmp_path / "shared", STEPS, 0)
    assert after.kl < 0.4 * before.kl
    assert after.perplexity < 0.33 * before.perplexity
    _, control = trained(tmp_path / "random", STEPS, 0, random=0)
    assert control.kl > 2 * after.kl
