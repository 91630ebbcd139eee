"""A student of a real model as its draft: what thirty steps bring."""

from pathlib import Path

import pytest

from headrace.training.distil import DistilConfig, distil
from headrace.training.run import Budget
from tests.places import data_path, default_model

pytestmark = [pytest.mark.weights, pytest.mark.slow]


@pytest.mark.parametrize(
    ("student", "rate", "times", "more", "least"),
    [
        ("depth=8", 1e-3, 4.0, 0.0, 0.12),  # 0.153 was seen on 1,536 tokens, whose error is 0.009
        ("depth=20", 3e-4, 1.0, 0.1, 0.0),
    ],
)
def test_a_student_learns_to_draft(student: str, rate: float, times: float, more: float, least: float, tmp_path: Path) -> None:
    """Of SmolLM2's layers, on wikitext-2: so many times what is accepted before, so much more, and at least so much."""
    texts = str(data_path("wikitext2") / "valid.txt")
    recipe = DistilConfig(student, Budget(steps=30), texts=texts, batch=2, rate=rate, as_draft=True, threads=1)
    drafting = distil(default_model(), tmp_path / "out", recipe).drafting
    assert drafting is not None
    assert drafting.after >= max(times * drafting.before, drafting.before + more, least)
