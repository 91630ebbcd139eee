"""Joint training of an encoder and its exits: losses, batches, and the written folder."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from headrace.compress.export import CONFIG
from headrace.data.progress import Progress
from headrace.llm import LLM
from headrace.ops.context import FeedRows
from headrace.runner.classifier import _pool
from headrace.startup.classifier import INFO
from headrace.startup.opening import open_model
from headrace.training import sequence_forward
from headrace.training.classifier import ClassifierConfig, exit_logits, read_labelled, train
from headrace.training.joint_classifier import WORK, JointConfig, JointModel, _batches, learn, loss_of, pooled
from headrace.weights.loader import load_model
from tests.cli_shell import Shell
from tests.killed import each_step, forgetful, killed_at
from tests.tiny_bert import HIDDEN, LAYERS, write_tiny_bert

TEXTS = [[2, 4, 5, 3], [2, 9, 3], [2, *range(4, 26), 3], [2, 7, 8, 9, 10, 3]]
QUIET = ("--threads", "1", "--delta", "0.2")


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_bert(tmp_path_factory.mktemp("bert"))


def write_pairs(path: Path, count: int, seed: int) -> Path:
    """Texts with two of two words, whose class is whether they are the same: no word tells it, and no place of one."""
    draw, lines = random.Random(seed), []
    for _ in range(count):
        words = draw.choices(["the", "stands", "by", "a", "."], k=draw.randrange(2, 7))
        pair = draw.choices(["water", "wheel"], k=2)
        for word, place in zip(pair, draw.sample(range(len(words)), 2), strict=True):
            words[place] = word
        lines.append(json.dumps({"text": " ".join(words), "label": "same" if pair[0] == pair[1] else "two"}))
    path.write_text("\n".join(lines) + "\n")
    return path


def test_texts_fed_together_equal_texts_fed_alone(bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: texts on the same blocks read each other's K and V."""
    model = load_model(open_model(bert).source)
    alone = torch.cat([sequence_forward.run_sequence(model, text, (0, 2)).after[0] for text in TEXTS])
    together = sequence_forward.run_sequences(model, TEXTS, (0, 2))
    assert len(together.after) == 2
    assert torch.allclose(together.after[0], alone, atol=1e-5)
    assert torch.equal(together.after[1], together.rows)
    monkeypatch.setattr(sequence_forward, "FeedRows", lambda tokens, blocks: FeedRows(tokens, range(len(blocks))))
    assert not torch.allclose(sequence_forward.run_sequences(model, TEXTS, (0, 2)).after[0], alone, atol=1e-3)


@pytest.mark.parametrize("pooling", ["first", "last", "mean", "both"])
def test_rows_are_pooled_as_the_engine_pools_them(pooling: str) -> None:
    rows, lengths = torch.randn(9, 4, generator=torch.Generator().manual_seed(1)), [2, 3, 4]
    expected = [_pool(part.numpy(), pooling) for part in rows.split(lengths)]
    assert np.allclose(pooled(rows, lengths, pooling).numpy(), np.stack(expected), atol=1e-6)


def test_later_exits_count_more(bert: Path) -> None:
    """1, 2 and 3 sixths of the exits' cross-entropies; and the layers below an exit get a gradient through it."""
    model = load_model(open_model(bert).source)
    random_, classes = torch.Generator().manual_seed(2), [0, 1, 1, 0]
    weight, bias = torch.randn(LAYERS, 2, HIDDEN, generator=random_), torch.randn(LAYERS, 2, generator=random_)
    each = []
    for exit in range(LAYERS):
        rows = [sequence_forward.run_sequence(model, text, (exit,)).after[0].mean(0) for text in TEXTS]
        each.append(cross_entropy(torch.stack(rows) @ weight[exit].T + bias[exit], torch.tensor(classes)))
    for x in model.parameters():
        x.requires_grad_()
    loss = loss_of(model, weight, bias, TEXTS, classes, (1, 2, 3), "mean")
    assert float(loss.detach()) == pytest.approx(float((each[0] + 2 * each[1] + 3 * each[2]) / 6), abs=1e-5)
    loss.backward()
    assert all(x.grad is not None and bool(x.grad.any()) for name, x in model.named_parameters() if name != "types.weight")


def test_every_text_once_an_epoch() -> None:
    texts = [[1] * (1 + at % 7) for at in range(50)]
    batches = _batches(texts, JointConfig(batch=8), 0)
    assert sorted(at for batch in batches for at in batch) == list(range(50))
    assert batches != _batches(texts, JointConfig(batch=8), 1)
    assert batches == _batches(texts, JointConfig(batch=8), 0)


def test_a_model_learns_with_its_exits(shell: Shell, bert: Path, tmp_path: Path) -> None:
    """What no exit over the frozen encoder finds as well; what is written is a model of its own, whose classifier fits no
    other."""
    data, dev, accuracy = write_pairs(tmp_path / "train.jsonl", 400, 1), write_pairs(tmp_path / "dev.jsonl", 150, 2), {}
    joint, learning = tmp_path / "joint", ("--joint", "--epochs", "4", "--rate", "0.003", "--batch", "16")
    for name, more in (("frozen", ("--layers", "3")), ("joint", learning)):
        code, _, err = shell("train-classifier", bert, "-d", data, "-o", tmp_path / name, "--check", dev, *QUIET, *more)
        assert code == 0, err
        accuracy[name] = json.loads((tmp_path / name / INFO).read_text())["trained"]["accuracy"]
    assert f"headrace classify {joint} -c {joint}" in err
    assert accuracy["frozen"] < 0.85
    assert accuracy["joint"] > accuracy["frozen"] + 0.1
    info = json.loads((joint / INFO).read_text())
    assert info["trained"]["parent"] == bert.name
    assert info["layers"] == [1, 2, 3]
    with pytest.raises(ValueError, match="is another model; train one for it"):
        LLM(bert, classifier=joint)
    texts = ["the water by a wheel .", "a wheel stands wheel"]
    said = []
    for backend in ("native", "torch"):
        with LLM(joint, classifier=joint, backend=backend, threads=1, device="cpu") as llm:
            said.append(np.array(exit_logits(llm, texts)))
            assert [one.label for one in llm.classify(texts, criterion="off")] == ["two", "same"]
    assert np.allclose(*said, atol=0.3)
    code, _, err = shell("train-classifier", bert, "-d", data, "-o", joint, *QUIET, "--joint")
    assert code == 1
    assert "holds a model; name another folder" in err


def learnt(
    bert: Path, work: Path, schedule: JointConfig, texts: list[list[int]] = TEXTS, layers: tuple[int, ...] = (3,)
) -> JointModel:
    return learn(open_model(bert), texts, [0, 1, 1, 0], 2, layers, "mean", schedule, Progress(), work, None)


def test_training_is_deterministic(bert: Path, tmp_path: Path) -> None:
    opened, schedule = open_model(bert), JointConfig(batch=2, rate=1e-3)
    made = [learnt(bert, tmp_path / name, schedule, layers=(1, 3)) for name in "ab"]
    assert np.array_equal(made[0].weight, made[1].weight)
    assert made[0].weight.shape == (2, 2, HIDDEN)
    before = dict(load_model(opened.source).named_parameters())
    moved = [name for name, x in made[0].model.named_parameters() if not torch.equal(x, before[name])]
    assert {"tokens.weight", "layers.0.qkv.weight", "layers.2.down.weight"} <= set(moved)


def test_a_killed_training_resumes_to_the_same_files(bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between checkpoints, with the weights written but no config.json, and with a model that has no classifier yet: nothing
    that is there is half of a model, and in the end all files are those of a run that nobody stopped. The control forgets the
    state of the optimiser, and comes elsewhere."""
    each_step(monkeypatch)
    data = read_labelled(write_pairs(tmp_path / "train.jsonl", 48, 1))
    config = ClassifierConfig(delta=0.4, threads=1, joint=JointConfig(batch=8, rate=1e-3))

    def trained(name: str) -> dict[str, bytes]:
        out = tmp_path / name / "model"
        train(str(bert), data, out, config)
        return {file.name: file.read_bytes() if file.is_file() else b"" for file in sorted(out.iterdir())}

    whole = trained("whole")
    for name, count in (("checkpoint.safetensors", 3), ("model.safetensors", 1), (CONFIG, 1), (INFO, 1)):
        killed_at(name, count, lambda: trained("out"))
        assert (tmp_path / "out/model" / CONFIG).exists() == (name == INFO)
        assert not (tmp_path / "out/model" / INFO).exists()
    assert trained("out") == whole
    assert WORK not in whole
    killed_at("checkpoint.safetensors", 3, lambda: trained("forgetful"))
    forgetful(monkeypatch)
    assert trained("forgetful")["model.safetensors"] != whole["model.safetensors"]


def test_invalid_training_settings_are_refused(bert: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a text has 65 tokens and the model takes 64"):
        learnt(bert, tmp_path, JointConfig(), [[2] * 65, *TEXTS[1:]])
    with pytest.raises(ValueError, match="epochs and batch are 1 or more"):
        learnt(bert, tmp_path, JointConfig(epochs=0))
    learnt(bert, tmp_path, JointConfig())
    with pytest.raises(ValueError, match=r"holds another training \(epochs: 1 then, 2 now\)"):
        learnt(bert, tmp_path, JointConfig(epochs=2))
