"""Two trainings of one folder would write into each other: the second is told so in one line, before it opens a model."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.runner.heads import EXIT, HEADS
from headrace.training import classifier, distil, exit_heads, heads, masked
from headrace.training.classifier import LabelledTexts
from headrace.training.masked_tasks import task_named
from headrace.training.run import Budget
from headrace.weights.atomic_file import file_lock

NOWHERE = "no-such-model.gguf"


def train_classifier(out: Path) -> None:
    classifier.train(
        NOWHERE, LabelledTexts([f"text {place:02}" for place in range(16)], ["1", "0"] * 8), out, classifier.ClassifierConfig()
    )


TRAININGS: dict[str, Callable[[Path], object]] = {
    "heads": lambda out: heads.train_heads(NOWHERE, out, heads.HeadsConfig(HEADS)),
    "exits": lambda out: exit_heads.train_exits(NOWHERE, out, heads.HeadsConfig(EXIT)),
    "distil": lambda out: distil.distil(NOWHERE, out, distil.DistilConfig("depth=1", Budget(steps=1))),
    "classifier": train_classifier,
    "masked": lambda out: masked.train_masked(task_named("reverse"), masked.MaskedConfig(steps=1), out),
}


@pytest.mark.parametrize("name", TRAININGS)
def test_only_one_trains_into_a_folder(name: str, tmp_path: Path) -> None:
    """Control: once the folder is free, it comes as far as the model."""
    out = tmp_path / "new" / "out"
    out.parent.mkdir()
    with file_lock(out), pytest.raises(ValueError, match=f"^{re.escape(str(out))} is being written by another command; wait"):
        TRAININGS[name](out)
    if name == "masked":
        TRAININGS[name](out)
    else:
        with pytest.raises(ValueError, match=NOWHERE):
            TRAININGS[name](out)
    assert [path.name for path in out.parent.iterdir()] in ([], ["out"]), "no lock is left"
