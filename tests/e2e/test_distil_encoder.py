"""Distillation of encoders: a student of some of the layers comes closer to the teacher's rows, and opens as a model."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.llm import LLM
from headrace.startup.opening import open_model
from headrace.training.distil import DistilConfig, distil
from headrace.training.distil_encoder import EncoderReport, loss_of
from headrace.training.run import Budget
from headrace.training.students import student_of
from headrace.weights.loader import load_model
from tests.cli_shell import Shell
from tests.tiny_bert import write_tiny_bert

WORDS = "the mill race turns water wheel stone flour grain river bank house".split()


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_bert(tmp_path_factory.mktemp("encoder") / "bert")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(1)
    lines = [" ".join(rng.choice(WORDS, rng.integers(3, 9))) for _ in range(64)]
    path = tmp_path_factory.mktemp("texts") / "lines.txt"
    path.write_text("\n".join(lines))
    return path


def trained(teacher: Path, lines: Path, out: Path, steps: int = 30, **more: object) -> EncoderReport:
    given = {"losses": ("features", "cosine"), "texts": str(lines), "rate": 3e-3, "batch": 8, "threads": 1}
    report = distil(teacher, out, DistilConfig("layers:0", Budget(steps=steps), **given | more))  # type: ignore[arg-type]
    assert isinstance(report, EncoderReport)
    return report


def test_a_student_of_fewer_layers_comes_closer(teacher: Path, texts: Path, tmp_path: Path) -> None:
    """Control: with a rate at which nothing changes it stays where it was."""
    report = trained(teacher, texts, tmp_path / "out")
    assert report.after.cosine > report.before.cosine + 0.05
    assert report.weights[0] < report.weights[1]
    still = trained(teacher, texts, tmp_path / "still", rate=1e-12, steps=2)
    assert still.after.cosine == pytest.approx(still.before.cosine, abs=1e-4)
    assert open_model(tmp_path / "out").config.num_layers == 1
    with LLM(tmp_path / "out", threads=1) as llm, LLM(teacher, threads=1) as whole:
        pairs = [llm.embed(WORDS[:4]), whole.embed(WORDS[:4])]
    rows = [np.array([one.values for one in each]) for each in pairs]
    assert (rows[0] * rows[1]).sum(-1).mean() > 0.5
    assert json.loads((tmp_path / "out" / "distil.json").read_text())["steps"] == 30


def test_layers_are_paired_with_the_last_before_the_next(teacher: Path) -> None:
    """All of the teacher's layers lose nothing; a student of one layer reads the teacher's last rows."""
    opened = open_model(teacher)
    model, ids = load_model(opened.source), [[5, 6, 7], [8, 9]]
    both = student_of(f"depth={opened.config.num_layers}", opened)
    assert both.pairs == [*range(opened.config.num_layers)]
    with torch.no_grad():
        assert float(loss_of(model, both, ids, ("features", "cosine"))) == pytest.approx(0, abs=1e-6)
        assert float(loss_of(model, student_of("layers:0", opened), ids, ("features",))) > 1e-3


def test_invalid_distillations_of_encoders_are_refused(teacher: Path, texts: Path, tmp_path: Path, shell: Shell) -> None:
    for more, why in (
        ({"losses": ("kl",)}, "its losses are features and cosine, not kl"),
        ({"texts": "self"}, "an encoder writes no texts"),
        ({"as_draft": True}, "drafts no tokens"),
    ):
        with pytest.raises(ValueError, match=why):
            trained(teacher, texts, tmp_path / "refused", **more)
    few = tmp_path / "few.txt"
    few.write_text("the mill\n")
    with pytest.raises(ValueError, match="1 texts are too few"):
        trained(teacher, few, tmp_path / "refused")
    ask = ("distil", teacher, "-o", tmp_path / "out", "--texts", texts, "--steps", "2", "--loss", "features", "--threads", "1")
    code, _, err = shell(*ask, "--student", "width=8")
    assert code == 1
    assert "the student of an encoder is some of its layers" in err
    code, out, err = shell(*ask, "--student", "layers:0")
    assert code == 0, err
    assert "cosine with the teacher's" in out
