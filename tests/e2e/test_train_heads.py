"""The command train-heads on a tiny model: written files, resuming, and refusal of other models' heads."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from headrace.cli.train_heads import _agreement
from headrace.data.params import SamplingParams
from headrace.llm import LLM
from headrace.runner.heads import affine
from headrace.startup import heads as files
from headrace.startup.opening import open_model
from headrace.training.exit_heads import unchecked_exit
from headrace.training.head_kinds import KINDS, initial_tensors
from headrace.training.heads import HeadsConfig
from headrace.training.overlap import hashes
from headrace.training.run import record_job
from headrace.training.teacher import Teacher
from headrace.training.texts import Shards, Text, open_writer, write_texts
from tests.cli_shell import Shell, check_bar
from tests.tiny_files import write_tiny_gguf

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
QUICK = ("--texts", "34", "--max-tokens", "12", "--batch", "4", "--threads", "1", "--tokens", "2", "--vocab", "256")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(params=["heads", "feature"])
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def reached(out: Path) -> dict[str, str]:
    """How far a training has come."""
    with safe_open(out / "work/checkpoint.safetensors", "pt") as file:
        return dict(file.metadata())


def test_heads_are_trained_and_draft(shell: Shell, model: Path, tmp_path: Path, kind: str) -> None:
    out = tmp_path / "out"
    code, table, said = shell.watched("train-heads", model, "--out", out, "--kind", kind, "--minutes", "0.01", *QUICK)
    assert code == 0, said
    check_bar(said, "loading tiny.gguf", "of 34 texts", "generating", "training")
    assert "all agree with the model" in table
    assert "of drafted tokens accepted" in said
    state = reached(out)
    info = json.loads((out / "heads.json").read_text())
    assert (info["kind"], info["count"], info["hidden_size"]) == (kind, 2, 32)
    assert 1 <= info["trained"]["tokens_per_step"] <= 3
    assert len(load_file(out / "heads.safetensors")["vocab"]) == 256
    texts = Shards(out / "work/texts").read()
    assert 30 <= len(texts) <= 34
    assert all(text.hidden.shape == (len(text.tokens), 32) and text.answer < len(text.tokens) for text in texts)
    # More minutes: the texts stay, the training goes on.
    written = Shards(out / "work/texts").path(0).stat().st_mtime_ns
    longer = ("--minutes", float(state["spent"]) / 60 + 0.01)
    code, _, said = shell("train-heads", model, "--out", out, "--kind", kind, *longer, *QUICK)
    assert code == 0, said
    assert Shards(out / "work/texts").path(0).stat().st_mtime_ns == written
    assert int(reached(out)["steps"]) > int(state["steps"])
    other = "heads" if kind == "feature" else "feature"
    code, _, said = shell("train-heads", model, "--out", out, "--kind", other, *longer, *QUICK)
    assert code == 1
    assert f"holds another training (heads: {kind} then, {other} now)" in said
    twin = write_tiny_gguf(tmp_path / "twin.gguf", seed=5)  # of the same shape: its rows are others
    code, _, said = shell("train-heads", twin, "--out", out, "--kind", kind, *longer, *QUICK)
    assert code == 1
    assert "holds another training (model: tiny.gguf" in said
    (tmp_path / "asked.txt").write_text("What turns?")
    code, _, said = shell("train-heads", model, "--out", out, "--kind", kind, *longer, *QUICK, "-i", tmp_path / "asked.txt")
    assert "holds another training (prompts: its own then" in said
    plain = LLM(model, speculate=None).generate(["A wheel", "Hello"], GREEDY)
    for method in ("heads", "auto"):
        made = LLM(model, draft=out, speculate=method, draft_tokens=2).generate(["A wheel", "Hello"], GREEDY)
        assert [one.outputs[0].token_ids for one in made] == [one.outputs[0].token_ids for one in plain]
        assert sum(one.metrics.drafted for one in made) > 0
    code, shown, said = shell("run", model, "Hello", "--raw", "--draft", out, "-t", "0", "-m", "24", "--quiet")
    assert code == 0, said
    assert shown == shell("run", model, "Hello", "--raw", "-t", "0", "-m", "24", "--quiet")[1]
    with pytest.raises(ValueError, match="trained heads were given and speculation is off"):
        LLM(model, draft=out, speculate=None)
    with pytest.raises(ValueError, match="trained heads were given and suffix does not use that"):
        LLM(model, draft=out, speculate="suffix")


def test_exits_after_other_layers_are_another_training(tmp_path: Path) -> None:
    """As many, after other layers: the texts that are there have the rows of those."""
    opened = open_model(write_tiny_gguf(tmp_path / "deep.gguf", layers=4))
    first, other = (HeadsConfig("exit", exits=exits).job(opened) for exits in ((1, 2), (1, 3)))
    record_job(tmp_path / "work", first)
    record_job(tmp_path / "work", first)
    with pytest.raises(ValueError, match=r"holds another training \(exits: \[1, 2\] then, \[1, 3\] now\)"):
        record_job(tmp_path / "work", other)


def test_exits_are_trained_and_draft(shell: Shell, tmp_path: Path) -> None:
    model = write_tiny_gguf(tmp_path / "deep.gguf", layers=3)
    out = tmp_path / "out"
    args = ("train-heads", model, "--out", out, "--kind", "exit", "--minutes", "0.01", *QUICK)
    code, table, said = shell(*args, "--exits", "1,2")
    assert code == 0, said
    assert "exit agrees" in table
    assert "share of tokens" in table
    assert "nan" not in table
    assert "tokens of fresh answers; training had seen" in said
    info = json.loads((out / "heads.json").read_text())
    assert (info["kind"], info["count"], info["layers"]) == ("exit", 2, [1, 2])
    assert info["drafts"] in (1, 2)
    assert f"the exit after {info['drafts']} layers drafts" in said
    texts = Shards(out / "work/texts").read()
    assert all(text.hidden.shape == (len(text.tokens), 3 * 32) for text in texts)
    with LLM(model, exits=out, speculate=None) as llm:  # each exit has learnt when to trust itself
        params = GREEDY.replace(exit_threshold=1.01, exit_criterion="classifier")
        sure = [one.confidence for one in llm.generate("A wheel", params)[0].outputs[0].exits or ()][1:]
    assert len({round(one, 3) for one in sure if one is not None}) > 3
    plain = LLM(model, speculate=None).generate(["A wheel", "Hello"], GREEDY)
    for drafts in (1, 2):  # a reader may choose
        (out / files.HEADS_INFO).write_text(json.dumps(info | {"drafts": drafts}))
        for method in ("heads", "auto"):
            made = LLM(model, draft=out, speculate=method, draft_tokens=2).generate(["A wheel", "Hello"], GREEDY)
            assert [one.outputs[0].token_ids for one in made] == [one.outputs[0].token_ids for one in plain]
            assert sum(one.metrics.drafted for one in made) > 0
    drafted = ("--draft", out, "--speculate", "heads", "--draft-tokens", "2", "--show-speculation")
    code, shown, said = shell("run", model, "Hello", "--raw", "-m", "24", *drafted)
    assert code == 0, said
    assert re.search(r"heads: \d+ tokens? accepted of \d+ drafted", shown), shown
    code, _, said = shell(*args, "--exits", "2")
    assert code == 1
    assert "holds another training (tokens: 2 then, 1 now; exits: [1, 2] then, [2] now)" in said
    for exits, match in (("2,1", "ascending, 1 to 2"), ("1,3", "ascending, 1 to 2"), ("one", "takes numbers, as in 10,20,25")):
        code, _, said = shell(*args[:3], tmp_path / "other", *args[4:], "--exits", exits)
        assert code != 0
        assert match in said
    code, _, said = shell("train-heads", model, "--out", tmp_path / "other", "--kind", "heads", "--exits", "1", *QUICK)
    assert code != 0
    assert "--exits is for --kind exit" in said
    for change, match in (
        ({"drafts": 3}, "no exit stands after 3 layers, only after 1, 2"),
        ({"layers": [1]}, "ascending, 1 to 2"),
        ({"layers": [1, 3]}, "ascending, 1 to 2"),
        ({"layers": []}, "ascending, 1 to 2"),
        ({"kind": "heads"}, "ascending, 1 to 2"),
        ({"count": 3, "layers": [0, 1, 2]}, "ascending, 1 to 2"),
        ({"fits": "another"}, "is another model; train heads for it"),
    ):
        (out / files.HEADS_INFO).write_text(json.dumps(info | change))
        with pytest.raises(ValueError, match=match) as error:
            LLM(model, draft=out)
        assert "\n" not in str(error.value)


def test_an_exit_that_no_token_takes_has_no_agreement() -> None:
    none, both = torch.zeros(4, dtype=torch.bool), torch.tensor([True, False, True, False])
    right = torch.tensor([True, True, False, True])
    assert _agreement(unchecked_exit(0.99, none, right, 0.5, 0.1)) == "no token"
    assert _agreement(unchecked_exit(0.99, both, right, 0.5, 0.1)) == "50.0%"


def test_a_ridge_finds_the_map(tmp_path: Path) -> None:
    """Rows after the last layer are an affine function of those before: what is fitted is that function."""
    random = torch.Generator().manual_seed(3)
    config = open_model(write_tiny_gguf(tmp_path / "one.gguf")).config
    width = config.hidden_size
    before = torch.nn.functional.rms_norm(torch.randn(400, width, generator=random), (width,))
    true, shift = torch.randn(width, width, generator=random) * width**-0.5, torch.randn(width, generator=random) * 0.1
    after = torch.nn.functional.rms_norm(before @ true.T + shift, (width,))
    teacher = Teacher(config, torch.zeros(1, width), torch.ones(width), torch.zeros(1, width))
    tensors = initial_tensors("exit", teacher, 1)
    text = Text(torch.zeros(400, dtype=torch.int64), 1, torch.cat((before, after), 1))

    def error() -> float:
        made = torch.nn.functional.rms_norm(affine(tensors, 0, before), (width,))
        return float((made - after).square().mean())

    lens = error()
    KINDS["exit"].fit(tensors, teacher, [text])
    assert error() < 0.01 < lens


def test_reading_hidden_rows_leaves_the_engine_unchanged(model: Path) -> None:
    """Whichever slot was freed last is still to be freed by the next plan."""
    llm = open_writer(open_model(str(model)), 1)
    for _ in range(2):
        (text,) = write_texts(llm, [[5, 6, 7]], 8, seed=1)
    assert text.hidden.shape == (11, 32)
    llm.close()


def test_a_failed_answer_is_not_learned_from(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = open_writer(open_model(str(model)), 1)
    monkeypatch.setattr(llm.runner, "execute", lambda plan: 1 / 0)
    with pytest.raises(RuntimeError, match="an answer to learn from failed: the step failed: division by zero"):
        write_texts(llm, [[5, 6, 7]], 8, seed=1)
    llm.close()


def test_prompts_come_from_a_file(shell: Shell, model: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("One\nTwo\nThree\n", "utf-8")
    code, _, said = shell("train-heads", model, "--out", tmp_path / "out", "-i", prompts, "--minutes", "0.01", *QUICK)
    assert code == 0, said
    openings = {tuple(text.tokens[: text.answer].tolist()) for text in Shards(tmp_path / "out/work/texts").read()}
    assert len(openings) == 3
    assert files.trained_on(tmp_path / "out") == tuple(hashes(["three", " One", "Two"]))


def heads_of(model: Path, folder: Path, **changes: torch.Tensor) -> Path:
    """Heads without training, some tensors changed."""
    from headrace.runner.heads import Heads
    from headrace.startup.opening import open_model
    from headrace.training.teacher import read_teacher

    opened = open_model(model)
    vocab = torch.arange(64, dtype=torch.int32)
    tensors = initial_tensors("heads", read_teacher(opened, vocab.long()), 2)
    files.save(folder, Heads("heads", 2, tensors | {"vocab": vocab}), opened, {})
    if changes:
        stored = load_file(folder / files.WEIGHTS)
        save_file(stored | changes, folder / files.WEIGHTS)
    return folder


def test_heads_of_another_model_are_a_one_line_error(model: Path, tmp_path: Path) -> None:
    made = heads_of(model, tmp_path / "made")
    LLM(model, draft=made).close()
    info = json.loads((made / files.HEADS_INFO).read_text())

    def refused(match: str) -> None:
        with pytest.raises(ValueError, match=match) as error:
            LLM(model, draft=made)
        assert "\n" not in str(error.value)

    for change, match in (
        ({"hidden_size": 64}, "64 hidden values.* has 32"),
        ({"vocab_size": 5}, "5 tokens"),
        ({"fits": "another"}, "is another model; train heads for it"),
        ({"version": 2}, "unknown; train them again"),
        ({"kind": "feature"}, "is missing or not of the shape"),
        ({"kind": 3}, "cannot be read"),
    ):
        (made / files.HEADS_INFO).write_text(json.dumps(info | change))
        refused(match)
    for name, tensor, match in (
        ("norm.weight", torch.full((32,), torch.nan, dtype=torch.bfloat16), "NaN or infinite"),
        ("norm.weight", torch.ones(31, dtype=torch.bfloat16), "not of the shape"),
        ("vocab", torch.tensor([3, 2], dtype=torch.int32), "vocabulary is damaged"),
        ("vocab", torch.tensor([3, 402], dtype=torch.int32), "vocabulary is damaged"),
        ("more", torch.ones(3, dtype=torch.bfloat16), "should be their vocabulary"),
    ):
        heads_of(model, made, **{name: tensor})
        refused(match)
    (made / files.WEIGHTS).write_bytes(b"no such thing")
    refused("cannot be read")
    with pytest.raises(ValueError, match="speculation by heads needs trained ones"):
        LLM(model, speculate="heads")
