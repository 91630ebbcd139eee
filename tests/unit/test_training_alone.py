"""Two trainings of one folder would write into each other: the second is told so in one line, before it opens a model."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.runner.heads import EXIT, HEADS
from headrace.training import classifier, distil, heads, masked
from headrace.training import exit_heads as exits
from headrace.training.classifier import Labelled
from headrace.training.masked_tasks import task_named
from headrace.training.run import Budget
from headrace.weights.atomic_file import file_lock

NOWHERE = "no-such-model.gguf"


def silent(*_: object) -> None:
    """No progress."""


def train_classifier(out: Path) -> None:
    classifier.train(
        NOWHERE, Labelled([f"text {place:02}" for place in range(16)], ["1", "0"] * 8), out, classifier.Recipe(), silent
    )


TRAININGS: dict[str, Callable[[Path], object]] = {
    "heads": lambda out: heads.distil(NOWHERE, out, heads.Recipe(HEADS), silent),
    "exits": lambda out: exits.distil_exits(NOWHERE, out, heads.Recipe(EXIT), silent),
    "distil": lambda out: distil.distil(NOWHERE, out, distil.Recipe("depth=1", Budget(steps=1))),
    "classifier": train_classifier,
    "masked": lambda out: masked.make(task_named("reverse"), masked.Recipe(steps=1), out, silent),
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
