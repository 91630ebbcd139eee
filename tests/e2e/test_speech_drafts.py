"""A speech model that drafts for another one: the same text, and models that cannot are refused when they are opened."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, SamplingParams
from headrace.cli.app import main
from headrace.data.frames import frames_of
from headrace.data.plan import Feed
from headrace.runner.runner import Runner
from headrace.startup.speech import speech_model
from tests.tiny_files import write_tiny_gguf
from tests.tiny_sources import write_tiny_marian
from tests.tiny_whisper import EOT, VOCAB, frames, noise, write_folder, write_wav

PROMPT = [EOT + 1, EOT + 2, EOT + 6]
WINDOWS = [frames(seed=seed) for seed in range(3)]
SMALL = {"encoder_layers": 1, "decoder_layers": 1}
SETTINGS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True),
    "sampled": SamplingParams(temperature=0.9, seed=5, n=2, max_tokens=30, ignore_eos=True),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def smaller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("smaller"), **SMALL)


def texts(folder: Path, settings: SamplingParams, timed: bool, **more: Any) -> tuple[list[list[list[int]]], int, int]:
    """Tokens of each window's outputs; how many tokens were drafted, and how many of them accepted."""
    made: dict[str, list[list[int]]] = {}
    with LLM(folder, **{"backend": "native", "device": "cpu", "threads": 1, "speculate": None, **more}) as llm:
        rules = {"timestamps": speech_model(llm.opened)[1].rules(50)} if timed else {}
        chosen = settings.replace(**rules)
        requests = [llm.engine.add(PROMPT, chosen, source=frames_of(rows)) for rows in WINDOWS]
        for request in requests:
            made[request.id] = [[] for _ in range(chosen.n)]
        while llm.engine.busy:
            for delta in llm.engine.step():
                assert delta.error is None, delta.error
                made[delta.request_id][delta.index] += delta.token_ids
        llm.engine.check()
    metrics = [request.metrics for request in requests]
    return list(made.values()), sum(one.drafted for one in metrics), sum(one.accepted for one in metrics)


def target_alone(runner: Runner, feeds: Sequence[Feed]) -> None:
    """A control: the draft model does not read the sound."""
    sources = [(feed.source, runner.slots[feed.slot].source_table) for feed in feeds if feed.source]
    runner.programs[0].encode(sources)


@pytest.mark.parametrize("backend", [{"backend": "native"}, {"backend": "torch", "dtype": "float64"}], ids=str)
@pytest.mark.parametrize("timed", [False, True])
@pytest.mark.parametrize("name", SETTINGS)
def test_drafts_change_no_token(folder: Path, smaller: Path, name: str, timed: bool, backend: dict[str, Any]) -> None:
    """Of a smaller model, and of the model itself, whose drafts are right."""
    plain, none, _ = texts(folder, SETTINGS[name], timed, **backend)
    assert not none
    assert len({str(one) for one in plain}) == len(WINDOWS)
    for draft in (folder, smaller):
        made, drafted, accepted = texts(
            folder, SETTINGS[name], timed, **backend, draft=draft, speculate="draft", draft_tokens=3
        )
        assert made == plain
        assert drafted > 20
        assert accepted > 0.9 * drafted or draft == smaller
        assert accepted < drafted or draft == folder


def test_a_draft_model_reads_the_sound(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Runner, "_encode", target_alone)
    _, drafted, accepted = texts(folder, SETTINGS["greedy"], False, draft=folder, speculate="draft", draft_tokens=3)
    assert accepted < 0.6 * drafted


def test_transcripts_are_equal_with_a_draft_model(
    folder: Path, smaller: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sound = str(write_wav(tmp_path / "a.wav", noise(2.3)))
    command = ["transcribe", str(folder), sound, "--language", "en", "--temperature", "0,0.7", "--format", "json"]
    texts = []
    for more in (["--speculate", "off"], ["--draft", str(smaller), "--speculate", "draft", "--draft-tokens", "3"]):
        assert main([*command, *more]) == 0
        texts.append(json.loads(capsys.readouterr().out))
    assert texts[0] == texts[1]
    assert texts[0]["segments"]


def bins(folder: Path) -> Path:
    return write_folder(folder, bins=128)


def positions(folder: Path) -> Path:
    return write_folder(folder, positions=40)


def tokens_of_the_table(folder: Path) -> Path:
    return write_folder(folder, vocab_size=VOCAB - 1)


def vocabulary(folder: Path) -> Path:
    path = write_folder(folder) / "tokenizer.json"
    path.write_text(path.read_text().replace("<|de|>", "<|it|>"))
    return folder


def text_model(folder: Path) -> Path:
    return write_tiny_gguf(folder / "tiny.gguf")


REFUSED: dict[str, Callable[[Path], Path]] = {
    "it reads 128 mel bins, and the target 80": bins,
    "its windows have 80 log-mel rows, and those of the target 100": positions,
    f"its vocabulary has {VOCAB - 1} tokens, and that of the target {VOCAB}": tokens_of_the_table,
    "their vocabularies differ": vocabulary,
    "has no encoder, and the target reads sound": text_model,
    "reads text, and the target reads sound": write_tiny_marian,
}


@pytest.mark.parametrize("message", REFUSED)
def test_models_that_cannot_draft_are_refused(
    folder: Path, tmp_path: Path, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other").mkdir()
    other = REFUSED[message](tmp_path / "other")
    for role in ("draft", "amateur", "cascade"):
        with pytest.raises(ValueError, match=message):
            LLM(folder, **{role: other})
    sound = str(write_wav(tmp_path / "a.wav", noise(0.3)))
    assert main(["transcribe", str(folder), sound, "--draft", str(other)]) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "cannot be the draft" in line]
    assert message in line


def test_a_speech_model_drafts_for_no_text_model(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="reads sound, and the target has no encoder"):
        LLM(text_model(tmp_path), draft=folder)
