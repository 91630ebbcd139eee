"""stories260K: a real model of 260 thousand parameters reproduces its golden greedy text, and learns to leave early."""

from pathlib import Path

import pytest
import torch

from headrace.data.params import SamplingParams
from headrace.models.base import Model
from headrace.runner.heads import EXIT, affine
from headrace.training.examples import batch_of, windows
from headrace.training.head_kinds import KINDS, initial_tensors
from headrace.training.losses import DistillationLoss
from headrace.training.run import Budget, Run
from headrace.training.sequence_forward import SequenceOutput, run_sequence
from headrace.training.students import Student
from headrace.training.teacher import Teacher, norm
from headrace.training.teacher_forward import TorchForward
from headrace.training.texts import Text
from headrace.weights.loader import load_model
from tests.models.feeding import greedy
from tests.models.llama2c import read_checkpoint, read_pieces
from tests.places import data_path
from tests.tiny import finish, tiny_engine, tokens_of

BOS = 1


def test_golden_text_of_200_tokens() -> None:
    folder = data_path("stories260K")
    source = read_checkpoint(folder / "stories260K.bin")
    model = load_model(source)
    layer = model.config.each_layer
    assert (layer.head_dim, layer.ffn, layer.kv_heads) == (8, 172, 4)
    tokens = greedy(model, [[BOS]], 200)[0]
    pieces = read_pieces(folder / "tok512.bin", model.config.vocab_size)
    text = b"".join(pieces[token] for token in tokens).decode(errors="replace")
    golden = (folder / "expected_greedy_200.txt").read_text()
    assert text.strip() == golden.strip()


def texts_of(model: Model, count: int, seed: int) -> list[list[int]]:
    """What the model writes of itself, drawn."""
    engine = tiny_engine(model, budget=256, blocks=512)
    requests = [engine.add([BOS], SamplingParams(temperature=1.0, seed=seed + at, max_tokens=80)) for at in range(count)]
    finish(engine)
    return [[BOS, *tokens_of(request)[0]] for request in requests]


@torch.no_grad()
def agreement(model: Model, texts: list[list[int]]) -> float:
    """How often the row after the first layer, through the model's own norm and head, has the token of the whole model."""
    same = [model.head(passed.after[0]).argmax(-1) == model.head(passed.rows).argmax(-1) for passed in passes(model, texts)]
    return float(torch.cat(same).float().mean())


def passes(model: Model, texts: list[list[int]]) -> list[SequenceOutput]:
    return [run_sequence(model, text, (0,)) for text in texts]


@torch.no_grad()
def fitted(model: Model, learned: list[list[int]], fresh: list[list[int]]) -> float:
    """The same of an exit that was fitted to a model which stays as it is."""
    table = model.tokens.weight  # type: ignore[attr-defined]
    teacher = Teacher(model.config, table, model.norm.weight, table)
    tensors = initial_tensors(EXIT, teacher, 1)
    rows = [torch.cat((passed.after[0], passed.rows), 1) for passed in passes(model, learned)]
    KINDS[EXIT].fit(tensors, teacher, [Text(torch.tensor(text), 1, x) for text, x in zip(learned, rows, strict=True)])
    same = []
    for passed in passes(model, fresh):
        made = norm(affine(tensors, 0, passed.after[0]), tensors["norm.weight"], model.config.norm_eps)
        same.append((made @ table.T).argmax(-1) == model.head(passed.rows).argmax(-1))
    return float(torch.cat(same).float().mean())


@pytest.mark.slow
def test_joint_training_raises_the_exit_rate(tmp_path: Path) -> None:
    """After one of its five layers, on fresh text: at least three tokens in ten, and one more in ten than a fitted exit of the
    model as it was."""
    source = read_checkpoint(data_path("stories260K") / "stories260K.bin")
    teacher = load_model(source)
    learned, fresh = texts_of(teacher, 128, 1), texts_of(teacher, 16, 10_001)
    student = Student(load_model(source), None, list(range(5)))  # type: ignore[arg-type]  # nothing is written
    loss = DistillationLoss(TorchForward(teacher), student, ["exits"], 1.0, 0.5, (1,))
    run = Run(loss.tensors, tmp_path, Budget(steps=80), 2e-3)
    items = windows(learned)
    run.train(lambda step: loss.backward(batch_of(items, step, 4, 0)))
    frozen, joint = fitted(teacher, learned, fresh), agreement(student.model, fresh)
    assert joint >= 0.30
    assert frozen <= joint - 0.1
