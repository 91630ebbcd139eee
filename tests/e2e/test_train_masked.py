"""Training of models that fill in blocks, the gain of more passes, and drafts by the same weights."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from benchmarks import refine as benchmark
from benchmarks.refine import measure, read_questions
from headrace.data.params import RefineParams, SamplingParams
from headrace.llm import LLM
from headrace.training.masked import MaskedConfig, block_causal, make_batch, train, train_masked
from headrace.training.masked_tasks import TASKS, Numbers, Reverse, TextFile, task_named
from headrace.weights.loader import load_model
from headrace.weights.safetensors import SafetensorsFolder
from tests.cli_shell import Shell
from tests.tiny_files import write_tiny_gguf
from tests.tiny_sources import logits

SMALL = MaskedConfig(block=4, layers=2, width=64, steps=350, batch=32, threads=1)


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("masked") / "numbers"
    train_masked(Numbers(2), SMALL, folder)
    return folder


def test_more_passes_give_more_right_answers(numbers: Path) -> None:
    """Tokens that are guessed without each other are of different answers."""
    questions = read_questions(numbers / "prompts.jsonl", 80)
    with LLM(numbers, threads=1, speculate=None) as llm:
        assert llm.model_config.mask_id == 0
        plain, once, four = measure(llm, questions, 4, (1, 4), 8, rounds=1)
    assert once.right is not None
    assert four.right is not None
    assert four.right > once.right + 0.15
    assert four.agree > once.agree
    assert once.tokens_per_step > 1.5 * four.tokens_per_step
    assert once.passes == 1
    assert plain.tokens_per_step == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 0.8, "seed": 5}])
def test_it_drafts_for_itself(numbers: Path, params: dict[str, float]) -> None:
    prompts = [question.prompt for question in read_questions(numbers / "prompts.jsonl", 12)]
    found = []
    for speculate in (None, "blocks"):
        with LLM(
            numbers, threads=1, backend="native", speculate=speculate, draft_tokens=None if speculate is None else 3
        ) as llm:
            found.append(llm.generate(prompts, SamplingParams(max_tokens=12, **params)))  # type: ignore[arg-type]
    plain, drafted = ([output.outputs[0].token_ids for output in outputs] for outputs in found)
    assert drafted == plain
    assert sum(output.metrics.accepted for output in found[1]) > 0


def test_an_answer_cut_short_is_the_beginning_of_the_answer(numbers: Path) -> None:
    with LLM(numbers, threads=1, speculate=None) as llm:
        refine = RefineParams(block=4, passes=3)
        whole, cut = (llm.generate("7 4 =", refine=refine, max_tokens=most)[0].outputs[0] for most in (8, 2))
    assert whole.finish_reason == "stop"
    assert cut.token_ids == whole.token_ids[:2]


def test_a_model_without_a_mask_drafts_no_blocks(tmp_path: Path, numbers: Path) -> None:
    for file in numbers.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "mask_token_id": None}))
    with pytest.raises(ValueError, match="has no mask token to draft blocks with"):
        LLM(tmp_path, speculate="blocks")
    (tmp_path / "config.json").write_text(json.dumps({**config, "mask_token_id": 4000}))
    with pytest.raises(ValueError, match="names mask_token_id 4000, and the vocabulary's ids are 0 to"):
        LLM(tmp_path)
    for name in ("llada", "Dream"):
        (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": name}))
        with pytest.raises(ValueError, match=f"{name} reads its whole text in both directions, so it has no cache to keep"):
            LLM(tmp_path)


def test_the_training_mask_is_block_causal() -> None:
    """Two known tokens, an answer of two blocks of two, and the blocks' copies."""
    assert block_causal(2, 4, 2).long().tolist() == [
        [1, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 1, 1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 1, 1, 0, 0],
        [1, 1, 0, 0, 0, 0, 1, 1, 0, 0],
        [1, 1, 1, 1, 0, 0, 0, 0, 1, 1],
        [1, 1, 1, 1, 0, 0, 0, 0, 1, 1],
    ]


def test_batch_targets_cover_known_and_masked_tokens() -> None:
    """At known tokens the next one of the answer; in copies what is masked, one of a block at least, and nothing else."""
    batch = make_batch(Reverse(), 4, 16, random.Random(1), torch.Generator().manual_seed(1))
    ids, wanted = batch.ids.view(16, -1), batch.wanted.view(16, -1)
    rows, answers = len(batch.seen), 8
    size = rows - 2 * answers
    known, copy = ids[:, : size + answers], ids[:, size + answers :]
    assert (wanted[:, : size - 1] == -1).all()
    assert torch.equal(wanted[:, size - 1 : size + answers - 1], known[:, size:])
    masked = copy == 0
    assert torch.equal(torch.where(masked, wanted[:, size + answers :], copy), known[:, size:])
    assert (wanted[:, size + answers :][~masked] == -1).all()
    assert masked.view(16, 2, 4).any(-1).all()
    assert not masked.all()


@pytest.mark.parametrize("name", TASKS)
def test_tasks_know_their_answers(name: str) -> None:
    task, rng = task_named(name), random.Random(2)
    for _ in range(50):
        prompt, answer = task.pair(rng, rng.choice(task.sizes))
        assert len(prompt) in task.sizes
        assert len(answer) <= task.longest
        assert task.tokenizer.decode(answer) in task.answers(task.tokenizer.decode(prompt))
    assert Numbers().answers("3 4 7 =") == ["three hundred forty seven", "three hundred seven and forty"]
    assert Numbers().answers("2 0 0 =") == ["two hundred"]
    assert Reverse().answers("a c b =") == ["b c a"]


@pytest.fixture(scope="module")
def translated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Numbers to words by an encoder-decoder of two and two layers."""
    folder = tmp_path_factory.mktemp("masked") / "translated"
    train_masked(Numbers(2), replace(SMALL, encoder=2, steps=450), folder)
    return folder


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_an_encoder_decoder_fills_in_blocks(translated: Path, backend: str) -> None:
    """One pass guesses tokens that do not fit; Jacobi's drafts change no answer."""
    questions = read_questions(translated / "prompts.jsonl", 80)
    settings: dict[str, Any] = {"threads": 1, "device": "cpu", "backend": backend}
    with (
        LLM(translated, speculate=None, **settings) as llm,
        LLM(translated, speculate="jacobi", draft_tokens=4, **settings) as drafts,
    ):
        assert llm.model_config.source is not None
        plain, once, four, jacobi = measure(llm, questions, 4, (1, 4), 8, 1, (), {"jacobi": drafts})
    assert once.right is not None
    assert four.right is not None
    assert four.right > once.right + 0.05
    assert plain.right is not None
    assert plain.right > 0.9
    assert (jacobi.right, jacobi.agree) == (plain.right, plain.agree)
    assert jacobi.steps <= plain.steps


def test_transformers_reads_the_encoder_decoder(translated: Path) -> None:
    """`transformers` computes its numbers from the same folder."""
    theirs = transformers.T5ForConditionalGeneration.from_pretrained(translated, dtype=torch.float64).eval()
    ours = load_model(SafetensorsFolder(translated), torch.float64)
    source, ids = [5, 9, 13], [1, 20, 21, 30]
    with torch.no_grad():
        expected = theirs(input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([ids])).logits[0]
    assert (logits(ours, source, ids) - expected).abs().max() < 1e-5


def test_a_training_is_the_same_twice(tmp_path: Path) -> None:
    config = MaskedConfig(layers=1, width=16, heads=2, steps=3, batch=4, threads=1)
    twins = [list(train(Reverse(), config, tmp_path / name).parameters()) for name in ("a", "b")]
    assert all(torch.equal(a, b) for a, b in zip(*twins, strict=True))


def test_from_a_text_to_figures(tmp_path: Path, shell: Shell) -> None:
    text, out, figures = tmp_path / "story.txt", tmp_path / "story", tmp_path / "figures.json"
    rng = random.Random(4)
    words = "the mill stands by a stream and its wheel turns when water comes down from hills".split()
    text.write_text("".join(f"{' '.join(rng.choices(words, k=9))}.\n" for _ in range(300)))
    small = ("--steps", "3", "--layers", "1", "--width", "16", "--batch", "2", "--threads", "1")
    code, _, err = shell("train-masked", text, "-o", out, *small)
    assert code == 0, err
    assert isinstance(task_named(str(text)), TextFile)
    arguments = (
        "-i",
        out / "prompts.jsonl",
        "--most",
        "3",
        "--passes",
        "1,8",
        "--rounds",
        "1",
        "--threads",
        "1",
        "-m",
        "8",
        "--shorter",
        "4",
    )
    code, printed, err = shell(benchmark.main, out, *arguments, "--json", figures)
    assert code == 0, err
    assert "tokens a step" in printed
    found = json.loads(figures.read_text())
    assert [(one["block"], one["passes"]) for one in found] == [(1, 0), (8, 1), (8, 8), (4, 1), (1, 0), (1, 0)]
    assert [one["way"] for one in found[-2:]] == ["jacobi, verified", "blocks, verified"]
    assert found[2]["agree"] == 1.0
    assert found[4]["agree"] == found[5]["agree"] == found[0]["agree"]
    assert all(one["right"] is None for one in found)
    code, printed, err = shell(
        "run", out, "the mill", "--raw", "--refine-block", "8", "--refine-passes", "2", "-m", "8", "--threads", "1"
    )
    assert code == 0, err
    assert "holds a model; name another folder" in shell("train-masked", text, "-o", out, *small)[2]
    assert "neither a task (reverse, numbers) nor a text file" in shell("train-masked", "poems", "-o", tmp_path / "no")[2]
    maskless = write_tiny_gguf(tmp_path / "tiny.gguf")
    assert "it fills in no blocks" in shell(benchmark.main, maskless, "-i", out / "prompts.jsonl", "--threads", "1")[2]
    assert "--passes takes numbers" in shell(benchmark.main, out, "-i", out / "prompts.jsonl", "--passes", "all")[2]
    assert (
        "--drafts takes both, jacobi, blocks, none"
        in shell(benchmark.main, out, "-i", out / "prompts.jsonl", "--drafts", "all")[2]
    )
    code, _, err = shell("run", out, "the mill", "--refine-passes", "2")
    assert "--refine-passes goes with --refine-block" in err
