"""What works beside an encoder-decoder: another one, which reads the same source from blocks of its own, and drafts that it
writes itself."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.backends.recipe import Recipe, Role
from headrace.data.outputs import RequestOutput
from headrace.data.params import SamplingParams
from headrace.data.plan import Feed
from headrace.data.settings import ModelSettings
from headrace.llm import LLM
from headrace.models.base import Model
from headrace.runner.runner import Runner
from headrace.startup.backend import start
from headrace.startup.opening import open_model
from tests.tiny_files import write_tiny_gguf
from tests.tiny_sources import PAD, loaded, logits, oracle, write_tiny_marian

TEXTS = ["a dog runs on the grass .", "un chien court sur l' herbe .", "la la la", "the dog ."]
GREEDY = SamplingParams(temperature=0.0, no_repeat_ngram=1, max_tokens=20)  # a tiny model would say one word for ever
DRAWN = SamplingParams(temperature=0.9, seed=5, n=2, max_tokens=12)
SMALL = {"encoder_layers": 1, "decoder_layers": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_marian(tmp_path_factory.mktemp("marian"))


@pytest.fixture(scope="module")
def smaller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_marian(tmp_path_factory.mktemp("smaller"), **SMALL)


def written(folder: Path, params: SamplingParams = GREEDY, backend: str = "native", **settings: Any) -> list[RequestOutput]:
    more = {"dtype": "float64"} if backend == "torch" else {}
    with LLM(folder, threads=1, device="cpu", backend=backend, **{"speculate": None, **more, **settings}) as llm:
        return llm.generate(TEXTS, params)


def tokens(outputs: Sequence[RequestOutput]) -> list[list[list[int]]]:
    return [[one.token_ids for one in output.outputs] for output in outputs]


def accepted(outputs: Sequence[RequestOutput]) -> tuple[int, int]:
    """Of drafted tokens."""
    return sum(one.metrics.accepted for one in outputs), sum(one.metrics.drafted for one in outputs)


def target_alone(runner: Runner, feeds: Sequence[Feed]) -> None:
    """The control: nobody else encodes a source."""
    sources = [(feed.source, runner.slots[feed.slot].source_table) for feed in feeds if feed.source]
    runner.programs[0].encode(sources)


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_drafts_change_no_token(folder: Path, smaller: Path, backend: str) -> None:
    """Of a smaller model, and of the model's own, all of which are right."""
    for params in (GREEDY, DRAWN):
        plain = written(folder, params, backend)
        for draft in (folder, smaller):
            made = written(folder, params, backend, draft=draft, speculate="draft", draft_tokens=3)
            assert tokens(made) == tokens(plain)
            right, drafted = accepted(made)
            assert drafted > 20
            assert right > 0.9 * drafted or draft == smaller  # what is drafted beyond the end counts as wrong


def test_a_draft_that_has_not_read_the_source_is_seen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Runner, "_encode", target_alone)
    right, drafted = accepted(written(folder, draft=folder, speculate="draft", draft_tokens=3))
    assert right < 0.6 * drafted


@pytest.mark.parametrize("method", ["jacobi", "lookahead"])
@pytest.mark.parametrize("backend", ["native", "torch"])
def test_a_model_that_drafts_for_itself_changes_no_token(folder: Path, method: str, backend: str) -> None:
    for params in (GREEDY, DRAWN):
        made = written(folder, params, backend, speculate=method, draft_tokens=4)
        assert tokens(made) == tokens(written(folder, params, backend))
        assert accepted(made)[1] > 50
        assert all(one.metrics.steps <= max(map(len, each)) + 1 for one, each in zip(made, tokens(made), strict=True))


def test_an_amateur_reads_the_source(folder: Path, smaller: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contrasted with itself a model says what it says; with another, or with one that has read nothing, something else."""
    plain, contrast = tokens(written(folder)), GREEDY.replace(contrastive_beta=0.5)
    assert tokens(written(folder, contrast, amateur=folder)) == plain
    assert tokens(written(folder, contrast, amateur=smaller)) != plain
    monkeypatch.setattr(Runner, "_encode", target_alone)
    assert tokens(written(folder, contrast, amateur=folder)) != plain


def greedy(model: Model, source: list[int], ids: list[int], count: int) -> list[int]:
    """`count` tokens behind `ids`, each from all before it, none twice."""
    made = list(ids)
    while len(made) < len(ids) + count:
        made.append(int(logits(model, source, made)[-1].index_fill(0, torch.tensor(made), -torch.inf).argmax()))
    return made[1:]


def test_a_smaller_model_writes_from_the_source(folder: Path, smaller: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cascade by token: never, always, and as its own model; the first token is the larger one's."""
    plain = written(folder, backend="torch")
    never = GREEDY.replace(cascade_threshold=1.01)
    assert tokens(written(folder, never, "torch", cascade=smaller)) == tokens(plain)
    always = GREEDY.replace(cascade_threshold=0.0, max_tokens=8, ignore_eos=True)
    model = loaded(oracle("marian", **SMALL).float().double())
    for output, whole in zip(written(folder, always, "torch", cascade=smaller), plain, strict=True):
        first = whole.outputs[0].token_ids[0]
        assert output.outputs[0].token_ids == greedy(model, output.prompt_token_ids, [PAD, first], 7)
    always = GREEDY.replace(cascade_threshold=0.0)
    native = tokens(written(folder))
    assert tokens(written(folder, always, cascade=folder)) == native
    monkeypatch.setattr(Runner, "_encode", target_alone)
    assert tokens(written(folder, always, cascade=folder)) != native


def test_a_decoder_with_an_encoder_decoder_is_refused(folder: Path, tmp_path: Path) -> None:
    decoder = open_model(write_tiny_gguf(tmp_path / "tiny.gguf"))
    roles = Role("target", open_model(folder)), Role("draft", decoder)
    for pair in (roles, (Role("target", decoder), Role("draft", roles[0].opened))):
        with pytest.raises(ValueError, match="an encoder-decoder works only with another one"):
            start(Recipe(pair, ModelSettings(device="cpu")))
