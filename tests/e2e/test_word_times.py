"""Times of words with a tiny random model: against the attention weights of transformers, in batches, and by the command."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace import LLM, SamplingParams
from headrace.audio.transcript import Transcript
from headrace.cli.app import main
from headrace.data.frames import frames_of
from headrace.data.plan import Align
from headrace.decoding.prompts import Aligning
from headrace.engine.admission import AdmissionError
from headrace.runner.alignment import first_positions, normalised, smoothed
from headrace.startup.opening import open_model
from headrace.startup.speech import alignment_heads, speech_model
from tests.tiny_whisper import EOT, POSITIONS, frames, noise, oracle, write_ctranslate2, write_folder, write_wav

HEADS = ((1, 2), (2, 0), (2, 3))
PROMPT = [EOT + 1, EOT + 2, EOT + 6, EOT + 10, *b"the mill wheel", EOT]
FIRST = 3
SETTINGS: dict[str, Any] = {"language": "en", "temperatures": (0.0,), "words": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, kv_dtype="float32") as opened:
        yield opened


def aligned(llm: LLM, want: Align, windows: list[np.ndarray], prompt: list[int] = PROMPT) -> list[list[float]]:
    """Numbers of an alignment for each window, run together."""
    params = SamplingParams(max_tokens=1)
    requests = [llm.engine.add(prompt, params, strategy=Aligning(want, EOT), source=frames_of(rows)) for rows in windows]
    while llm.engine.busy:
        assert all(delta.error is None for delta in llm.engine.step())
    llm.engine.check()
    return [request.pooled for request in requests]


def expected(rows: np.ndarray, heads: tuple[tuple[int, int], ...], positions: int) -> tuple[np.ndarray, list[float]]:
    """Mean weights [tokens, positions] of transformers in float64, and log-probabilities of the text's tokens."""
    model = oracle()
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        made = model(
            input_features=torch.from_numpy(rows.T.copy())[None].double(),
            decoder_input_ids=torch.tensor([PROMPT]),
            output_attentions=True,
        )
    total = np.zeros((len(PROMPT), positions))
    for layer, head in heads:
        weights = made.cross_attentions[layer][0, head, :, :positions].numpy()
        # Softmax over the first positions alone.
        total += smoothed(normalised(np.log(weights)))
    chances = torch.softmax(made.logits[0], -1)
    text = range(FIRST, len(PROMPT) - 2)
    logprobs = [float(torch.log(chances[at, PROMPT[at + 1]] / (1 - chances[at, EOT]))) for at in text]
    return total[FIRST:-1] / len(heads), logprobs


@pytest.mark.parametrize("positions", [POSITIONS, 31])
def test_tokens_begin_where_the_weights_of_transformers_say(llm: LLM, positions: int) -> None:
    rows = frames()
    cost, logprobs = expected(rows, HEADS, positions)
    starts = first_positions(-cost).tolist()
    (numbers,) = aligned(llm, Align(HEADS, FIRST, positions), [rows])
    assert numbers[: len(starts)] == starts
    assert len(numbers) == len(starts) + len(logprobs)
    # The end of a text is found among the likeliest tokens only, and is rarely one of them here.
    assert numbers[len(starts) :] == pytest.approx(logprobs, abs=0.3)
    # Controls: other heads, other positions.
    assert aligned(llm, Align(((0, 0), (0, 1)), FIRST, positions), [rows])[0][: len(starts)] != starts
    assert aligned(llm, Align(HEADS, FIRST, positions - 12), [rows])[0][: len(starts)] != starts


def test_a_window_is_aligned_alike_alone_in_a_batch_and_again(folder: Path) -> None:
    windows = [frames(seed=seed) for seed in range(6)]
    want = Align(HEADS, FIRST, POSITIONS)
    with LLM(folder, max_num_batched_tokens=60) as llm:
        assert llm.backend == "native"
        alone = [aligned(llm, want, [rows])[0] for rows in windows]
        assert len({tuple(one) for one in alone}) == len(windows)
        assert aligned(llm, want, windows) == alone
        # A prompt of more rows than a step has is fed in one step all the same.
        long = [*PROMPT[:-1], *b" and the river, and the weir below it, as of today", EOT]
        assert len(long) > 60
        assert len(aligned(llm, want, windows[:2], long)[0]) == 2 * len(long) - 2 * FIRST - 3


def test_alignments_that_do_not_fit_are_refused(llm: LLM) -> None:
    for want in (Align((), FIRST, 10), Align(HEADS, len(PROMPT) - 1, 10), Align(HEADS, FIRST, POSITIONS + 1)):
        with pytest.raises(AdmissionError, match="an alignment takes heads"):
            aligned(llm, want, [frames()])
    assert alignment_heads(llm.opened.config, None, "a") == tuple((layer, head) for layer in (1, 2) for head in range(4))
    assert alignment_heads(llm.opened.config, [[2, 1]], "a") == ((2, 1),)
    for wrong in ([[3, 0]], [[0, 4]], [[-1, 0]], [[1]], "ab", 7):
        with pytest.raises(ValueError, match="not pairs of a layer and a head"):
            alignment_heads(llm.opened.config, wrong, "a")


def test_words_are_the_text_of_their_segments(llm: LLM) -> None:
    sounds = [noise(1.3), noise(0.7, 1)]
    alone = [llm.transcribe(sound, **SETTINGS) for sound in sounds]
    for transcript in alone:
        assert transcript.segments
        for segment in transcript.segments:
            assert segment.words
            assert "".join(word.word for word in segment.words) == segment.text
            spans = [(word.start, word.end) for word in segment.words]
            assert all(start <= end for start, end in spans)
            assert (segment.start, segment.end) == (spans[0][0], spans[-1][1])
    together = {number: event for number, event in llm.transcribe_all(sounds, **SETTINGS) if isinstance(event, Transcript)}
    assert [together[number] for number in range(2)] == alone
    plain = llm.transcribe(sounds[1], **SETTINGS | {"words": False})
    assert all(not segment.words for segment in plain.segments)
    chunked = llm.transcribe(sounds[1], **SETTINGS, long="chunked")
    assert all(segment.words for segment in chunked.segments)
    assert speech_model(llm.opened)[1].alignment


def test_the_command_writes_words_and_lays_out_subtitles(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sound = str(write_wav(tmp_path / "a.wav", noise(0.7)))
    command = ["transcribe", str(folder), sound, "--temperature", "0", "--language", "en", "--word-times"]
    assert main([*command, "--format", "json"]) == 0
    words = [word for one in json.loads(capsys.readouterr().out)["segments"] for word in one["words"]]
    assert words
    assert set(words[0]) == {"word", "start", "end", "probability"}
    assert main([*command, "--format", "srt", "--max-words", "1"]) == 0
    assert capsys.readouterr().out.count(" --> ") == len(words)
    assert main([*command, "--format", "vtt", "--highlight"]) == 0
    assert capsys.readouterr().out.count("<u>") == len(words)
    refused = {
        "add --word-times and --format srt or vtt": ["--max-line", "20"],
        "--max-lines counts lines": ["--max-lines", "2", "--format", "srt"],
        "exclude each other": ["--max-line", "20", "--max-words", "2", "--format", "srt"],
    }
    for message, options in refused.items():
        assert main([*command, *options]) == 2
        assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_ctranslate2_folders_name_their_alignment_heads(tmp_path: Path) -> None:
    folder = write_ctranslate2(tmp_path, oracle())
    (folder / "config.json").write_text(json.dumps({"suppress_ids": [5], "alignment_heads": [[2, 1], [1, 3]]}))
    assert speech_model(open_model(folder))[1].alignment == ((2, 1), (1, 3))
    (folder / "config.json").write_text(json.dumps({"alignment_heads": [[9, 9]]}))
    with pytest.raises(ValueError, match="not pairs of a layer and a head"):
        speech_model(open_model(folder))
