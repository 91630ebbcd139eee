"""Transcription with real weights against openai-whisper in float32: log-mel rows, languages, tokens and times."""

import io
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from headrace import LLM
from headrace.audio.decode import samples_of
from headrace.audio.mel import HOP, LogMel
from headrace.audio.text_formats import FORMATS, Layout
from headrace.audio.transcript import Transcript
from headrace.audio.transcription import Transcription
from headrace.decoding.speech_beams import SpeechBeamSearch
from headrace.runner import alignment
from headrace.startup.speech import speech_model
from headrace.weights.ctranslate2 import CTranslate2Folder
from tests.places import model_file
from tests.tiny_whisper import RATE, noise, renamed

pytestmark = pytest.mark.peers
whisper: Any = pytest.importorskip("whisper")


@pytest.fixture(scope="module")
def theirs() -> Any:
    """openai-whisper's model with the weights of whisper-base."""
    folder = CTranslate2Folder(model_file("whisper-base"))
    c = folder.config
    sizes = whisper.model.ModelDimensions(
        *(c["num_mel_bins"], c["max_source_positions"], c["d_model"], c["encoder_attention_heads"], c["encoder_layers"]),
        *(c["vocab_size"], c["max_target_positions"], c["d_model"], c["decoder_attention_heads"], c["decoder_layers"]),
    )
    model = whisper.model.Whisper(sizes)
    half = {name: folder.raw(name).view(np.float16).reshape(folder.info(name).shape) for name in folder.names()}
    model.load_state_dict({renamed(name): torch.from_numpy(value.astype(np.float32)) for name, value in half.items()})
    return model.eval()


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(model_file("whisper-base"), backend="torch", dtype="float32") as opened:
        yield opened


@pytest.fixture(scope="module")
def sound() -> np.ndarray:
    """A clip three times, with pauses: two windows and more."""
    clip = samples_of(model_file("speech.wav"))[:]
    return np.concatenate([clip, np.zeros(RATE, np.float32), clip, np.zeros(RATE // 2, np.float32), clip])


@pytest.mark.parametrize("bins", [80, 128])
def test_log_mel_rows_are_those_of_openai(bins: int) -> None:
    samples = noise(3.3) * np.linspace(0, 1, int(3.3 * RATE)).astype(np.float32)
    rows = LogMel(samples, bins).window(0, len(samples) // HOP)
    expected = whisper.audio.log_mel_spectrogram(torch.from_numpy(samples), bins, padding=480_000).numpy().T[: len(rows)]
    assert np.abs(rows - expected).max() < 2e-5


@pytest.mark.weights
def test_languages_are_those_of_openai(theirs: Any, llm: LLM, sound: np.ndarray) -> None:
    window = sound[: 30 * RATE]
    mel = whisper.audio.log_mel_spectrogram(torch.from_numpy(window), padding=480_000)
    with torch.inference_mode():
        _, expected = whisper.detect_language(theirs, whisper.audio.pad_or_trim(mel, 3000))
    found = llm.transcribe(window, temperatures=(0.0,), vad=False)
    assert found.language == max(expected, key=expected.get)
    assert found.language_probability == pytest.approx(expected[found.language], abs=1e-4)


def ours(llm: LLM, sound: np.ndarray) -> Transcript:
    return llm.transcribe(sound, language="en", temperatures=(0.0,), vad=False)


@pytest.mark.weights
def test_tokens_and_times_are_those_of_openai(
    theirs: Any, llm: LLM, sound: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    with torch.inference_mode():
        expected = whisper.transcribe(theirs, sound, language="en", temperature=0.0, fp16=False)["segments"]
    found = ours(llm, sound).segments
    assert len(found) >= 15
    assert [one.tokens for one in found] == [one["tokens"] for one in expected]
    assert [(one.start, one.end) for one in found] == [
        (pytest.approx(one["start"], abs=1e-3), pytest.approx(one["end"], abs=1e-3)) for one in expected
    ]
    for one, other in zip(found, expected, strict=True):
        assert one.avg_logprob == pytest.approx(other["avg_logprob"], abs=1e-3)
        assert one.no_speech_prob == pytest.approx(other["no_speech_prob"], abs=1e-3)
        assert one.compression_ratio == pytest.approx(other["compression_ratio"], abs=1e-6)
    cut = Transcription._cut

    def cut_all(self: Transcription, result: Any, seek: int, size: int, no_speech: float) -> Any:
        """A control: windows that move on by their whole length lose what comes after the last closed segment."""
        return cut(self, result, seek, size, no_speech)[0], size

    monkeypatch.setattr(Transcription, "_cut", cut_all)
    assert [one.tokens for one in ours(llm, sound).segments] != [one["tokens"] for one in expected]


@pytest.mark.weights
def test_beams_are_those_of_openai(theirs: Any, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a window. Control: the least likely hypothesis wins."""
    window = samples_of(model_file("speech.wav"))[:]
    rows = whisper.audio.log_mel_spectrogram(torch.from_numpy(window.copy()), padding=480_000)
    mel = whisper.audio.pad_or_trim(rows[:, : len(window) // HOP], 3000)
    options = whisper.DecodingOptions(language="en", beam_size=5, fp16=False)
    with torch.inference_mode():
        expected = whisper.decode(theirs, mel, options)
        greedy = whisper.decode(theirs, mel, replace(options, beam_size=None))
    windows: list[list[int]] = []
    cut = Transcription._cut

    def kept(self: Transcription, result: Any, *rest: Any) -> Any:
        windows.append(result.tokens)
        return cut(self, result, *rest)

    monkeypatch.setattr(Transcription, "_cut", kept)
    found = llm.transcribe(window, language="en", temperatures=(0.0,), vad=False, beams=5)
    assert windows[0] == expected.tokens
    assert found.segments[0].avg_logprob == pytest.approx(expected.avg_logprob, abs=1e-3)
    assert expected.avg_logprob >= greedy.avg_logprob
    rank = SpeechBeamSearch._rank
    monkeypatch.setattr(SpeechBeamSearch, "_rank", lambda self, seq: -rank(self, seq))
    windows.clear()
    llm.transcribe(window, language="en", temperatures=(0.0,), vad=False, beams=5)
    assert windows[0] != expected.tokens


@pytest.fixture(scope="module")
def timed(theirs: Any, llm: LLM, sound: np.ndarray) -> Any:
    """openai-whisper's transcript with times of words."""
    heads = torch.zeros(theirs.dims.n_text_layer, theirs.dims.n_text_head, dtype=torch.bool)
    for layer, head in speech_model(llm.opened)[1].alignment:
        heads[layer, head] = True
    theirs.register_buffer("alignment_heads", heads.to_sparse(), persistent=False)
    return whisper.transcribe(theirs, sound, language="en", temperature=0.0, fp16=False, word_timestamps=True)


def with_words(llm: LLM, sound: np.ndarray) -> Transcript:
    return llm.transcribe(sound, language="en", temperatures=(0.0,), vad=False, words=True)


@pytest.fixture(scope="module")
def worded(llm: LLM, sound: np.ndarray) -> Transcript:
    return with_words(llm, sound)


def times(transcript: Transcript) -> list[tuple[str, float, float]]:
    return [(word.word, word.start, word.end) for one in transcript.segments for word in one.words or ()]


@pytest.mark.weights
def test_times_of_words_are_those_of_openai(
    timed: Any, worded: Transcript, llm: LLM, sound: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = [word for one in timed["segments"] for word in one["words"]]
    found = worded
    assert len(theirs) > 100
    assert [one.tokens for one in found.segments] == [one["tokens"] for one in timed["segments"]]
    assert times(found) == [
        (one["word"], pytest.approx(one["start"], abs=1e-3), pytest.approx(one["end"], abs=1e-3)) for one in theirs
    ]
    ours = [word for one in found.segments for word in one.words or ()]
    assert [one.probability for one in ours] == pytest.approx([one["probability"] for one in theirs], abs=0.02)
    assert [(one.start, one.end) for one in found.segments] == [
        (pytest.approx(one["start"], abs=1e-3), pytest.approx(one["end"], abs=1e-3)) for one in timed["segments"]
    ]
    short = sound[: 12 * RATE]
    right = times(with_words(llm, short))
    # Controls: no median filter, positions that are one too late, and other heads.
    with monkeypatch.context() as slip:
        slip.setattr(alignment, "smoothed", lambda weights: weights)
        assert times(with_words(llm, short)) != right
    with monkeypatch.context() as slip:
        find = alignment.first_positions
        slip.setattr(alignment, "first_positions", lambda cost: find(cost) + 1)
        assert times(with_words(llm, short)) != right
    with monkeypatch.context() as slip:
        slip.setattr(alignment, "queries", lambda want: [f"cross.{layer}" for layer in range(6)])
        align = alignment.align
        slip.setattr(
            "headrace.runner.runner.align",
            lambda want, *rest: align(msgspec.structs.replace(want, heads=((0, 0), (1, 3))), *rest),
        )
        slip.setattr("headrace.runner.runner.queries", alignment.queries)
        assert times(with_words(llm, short)) != right


@pytest.mark.weights
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_line_width": 30, "max_line_count": 2},
        {"max_line_width": 24},
        {"max_words_per_line": 3},
        {"highlight_words": True},
    ],
)
def test_subtitles_by_words_are_those_of_openai(timed: Any, worded: Transcript, options: dict[str, Any]) -> None:
    names = {"max_line_width": "max_line", "max_line_count": "max_lines", "max_words_per_line": "max_words"}
    layout = Layout(**{names.get(name, "highlight"): value for name, value in options.items()})
    file = io.StringIO()
    whisper.utils.WriteSRT(".").write_result(timed, file, options)
    assert FORMATS["srt"](worded, layout).strip() == file.getvalue().strip()
