"""The command distil on a tiny model: written files, resuming, and refusals."""

import json
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from headrace.compress.export import CONFIG
from headrace.data.params import SamplingParams
from headrace.llm import LLM
from headrace.training.distil import DistilConfig, distil
from headrace.training.run import Budget, Interrupt
from tests.cli_shell import Shell, check_bar
from tests.killed import command_killed_at, forgetful, killed_at
from tests.tiny_files import Tensors, write_tiny_gguf

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
SHORT = ("--window", "24", "--batch", "2", "--threads", "1")


def as_bfloat16(tensors: Tensors) -> None:
    """Numbers that bfloat16 holds exactly, as a student is written in it."""
    for name, x in tensors.items():
        tensors[name] = (x.view(np.uint32) & 0xFFFF0000).view(np.float32)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", layers=3, edit=as_bfloat16)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, rng = tmp_path_factory.mktemp("text") / "story.txt", random.Random(4)
    words = "the mill stands by a stream and its wheel turns when water comes down from hills".split()
    path.write_text("".join(f"{' '.join(rng.choices(words, k=9))}.\n" for _ in range(60)))
    return path


def test_a_student_is_trained_and_runs(shell: Shell, model: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    args = ("distil", model, "-o", out, "--loss", "kl,ce", "--texts", text, "--as-draft", *SHORT)
    code, table, said = shell.watched(*args, "--student", "layers:0,2", "--steps", "2")
    assert code == 0, said
    check_bar(said, "training")
    assert "first choice as its" in table
    assert "drafts accepted" in table
    assert "96 tokens seen, 96 of them different" in said
    assert "as a draft model it " in said
    report = json.loads((out / "distil.json").read_text())
    assert (report["steps"], report["tokens"], report["losses"][0] > 0) == (2, 96, True)
    code, _, said = shell(*args, "--student", "layers:0,2", "--steps", "3")
    assert code == 0, said
    assert json.loads((out / "distil.json").read_text())["steps"] == 3
    made = []
    for backend in ("native", "torch"):
        with LLM(out, backend=backend, threads=1, speculate=None) as llm:
            assert llm.model_config.num_layers == 2
            made.append(llm.score("the mill stands")[0].logprobs)
    assert made[0][1:] == pytest.approx(made[1][1:], abs=0.5)
    code, _, said = shell(*args, "--student", "layers:1,2", "--steps", "3")
    assert code == 1
    assert "another training (student: layers:0,2 then, layers:1,2 now)" in said
    code, _, said = shell(*args, "--student", "layers:0,2", "--steps", "3", "--backend", "torch")
    assert code == 1
    assert "another training (backend: native then, torch now)" in said
    code, _, said = shell("distil", model, "-o", tmp_path / "healed", "--student", out, "--texts", text, "--steps", "1", *SHORT)
    assert code == 0, said
    code, _, said = shell("distil", model, "-o", tmp_path / "x", "--student", "depth=9", "--steps", "1", *SHORT)
    assert code == 1
    assert "has 1 to 3 of them, not 9" in said


def test_a_student_that_is_its_teacher_is_always_accepted(model: Path, text: Path, tmp_path: Path) -> None:
    more = {"as_draft": True, "rate": 1e-7, "threads": 1, "backend": "torch"}
    recipe = DistilConfig("depth=3", Budget(steps=1), texts=str(text), window=24, batch=1, **more)
    result = distil(model, tmp_path / "same", recipe)
    assert result.losses == [0.0]
    assert result.drafting is not None
    assert (result.drafting.before, result.drafting.after, result.drafting.cost) == (1.0, 1.0, 1.0)
    assert result.weights[0] == result.weights[1]
    folder = tmp_path / "same"
    plain, drafted = (LLM(path, speculate=None, threads=1).generate("A wheel", GREEDY)[0] for path in (model, folder))
    assert plain.outputs[0].token_ids == drafted.outputs[0].token_ids


def test_a_stopped_training_ends_in_the_same_model(model: Path, text: Path, tmp_path: Path) -> None:
    config = DistilConfig(
        "layers:0,2", Budget(steps=4), texts=str(text), window=24, batch=1, losses=("features", "kl"), threads=1
    )

    @contextmanager
    def after_two() -> Iterator[Callable[[], bool]]:
        asked = iter((False, True))
        yield lambda: next(asked)

    def weights(name: str, interrupt: Interrupt | None = None) -> bytes:
        distil(model, tmp_path / name, config, interrupt=interrupt)
        return (tmp_path / name / "model.safetensors").read_bytes()

    whole = weights("whole")
    with pytest.raises(KeyboardInterrupt):
        weights("stopped", after_two())
    assert not (tmp_path / "stopped/config.json").exists()
    assert weights("stopped") == whole
    for name, count in (("examples.json", 1), ("model.safetensors", 1), (CONFIG, 1)):
        killed_at(name, count, lambda: weights("killed"))
        assert not (tmp_path / "killed" / CONFIG).exists()
    assert weights("killed") == whole
    assert LLM(tmp_path / "killed", threads=1).model_config.num_layers == 2


def test_kill_9_within_the_training(
    shell: Shell, model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same command then comes to the same bytes; the control forgets the optimiser's state, and comes to others."""
    more = ("--student", "layers:0,2", "--steps", "4", "--texts", text, *SHORT)
    assert shell("distil", model, "-o", tmp_path / "whole", *more)[0] == 0
    whole = (tmp_path / "whole/model.safetensors").read_bytes()
    command_killed_at("checkpoint.safetensors", 3, "distil", model, "-o", tmp_path / "killed", *more)
    assert not (tmp_path / "killed" / CONFIG).exists()
    shutil.copytree(tmp_path / "killed", tmp_path / "forgetful")
    assert shell("distil", model, "-o", tmp_path / "killed", *more)[0] == 0
    assert (tmp_path / "killed/model.safetensors").read_bytes() == whole
    forgetful(monkeypatch)
    assert shell("distil", model, "-o", tmp_path / "forgetful", *more)[0] == 0
    assert (tmp_path / "forgetful/model.safetensors").read_bytes() != whole


def test_other_texts_and_losses(shell: Shell, model: Path, tmp_path: Path) -> None:
    words = "mill wheel stream water hill sluice weir race".split()
    (tmp_path / "prompts.txt").write_text("".join(f"Say {word}\n" for word in words))
    line = {"prompt": "What turns?", "rationale": "Water falls.", "answer": "The wheel"}
    (tmp_path / "why.jsonl").write_text("".join(json.dumps(line) + "\n" for _ in range(6)))
    short = ("--steps", "1", "--batch", "1", "--threads", "1", "--window", "64", "--count", "8")
    for name, more in {
        "answers": ("--student", "depth=1,width=16", "--loss", "sequence,kl", "--texts", tmp_path / "prompts.txt"),
        "reasons": ("--student", "layers:0-1", "--loss", "steps", "--texts", tmp_path / "why.jsonl"),
        "early": ("--student", "depth=3", "--loss", "exits", "--exits", "1,2"),
        "own": ("--student", "layers:0-1", "--loss", "attention,cosine,kl"),
    }.items():
        code, _, said = shell("distil", model, "-o", tmp_path / name, *more, *short)
        assert code == 0, said
        LLM(tmp_path / name, threads=1).close()


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (("--steps", "1", "--loss", "kl,dull"), "losses are some of kl, ce"),
        (("--steps", "1", "--loss", "ce,sequence"), "ce, sequence learn from different texts"),
        (("--steps", "1", "--loss", "steps"), "the loss steps reads a file of prompts"),
        (("--steps", "1", "--loss", "exits"), "the loss exits needs the layers of the exits"),
        (("--steps", "1", "--exits", "1"), "the loss exits needs the layers of the exits"),
        (("--steps", "1", "--loss", "exits", "--exits", "1,x"), "--exits takes numbers, as in 10,20,25"),
        (("--steps", "1", "--loss", "exits", "--exits", "1"), "exits stand after different layers of this model"),
        (("--steps", "1", "--minutes", "1"), "give --steps or --minutes"),
        ((), "give --steps or --minutes"),
    ],
)
def test_conflicting_options_are_refused(
    shell: Shell, model: Path, tmp_path: Path, args: tuple[str, ...], expected: str
) -> None:
    code, _, said = shell("distil", model, "-o", tmp_path / "out", "--student", "layers:0", *args)
    assert code != 0
    assert expected in said
    assert not (tmp_path / "out/work").exists()
