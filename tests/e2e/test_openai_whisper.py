"""Transcription with real weights against openai-whisper in float32: log-mel rows, languages, tokens and times."""

import io
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from benchmarks.peers.speech import Clip, read_clips
from headrace import LLM
from headrace.audio import transcription
from headrace.audio.decode import samples_of
from headrace.audio.mel import HOP, LogMel
from headrace.audio.text_formats import FORMATS, Layout
from headrace.audio.transcript import Segment, Transcript
from headrace.audio.transcription import SpeechSettings, Transcription
from headrace.data.windows import WindowOutput
from headrace.decoding.speech_beams import SpeechBeamSearch
from headrace.ops import penalties
from headrace.runner import alignment
from headrace.startup.speech import speech_model
from headrace.weights.ctranslate2 import CTranslate2Folder
from tests.places import data_path, model_file
from tests.tiny_whisper import RATE, noise, renamed
from tests.unit.test_timestamps import END, FIRST, LATEST, NO_TIMES, cases, rules
from tests.unit.test_timestamps import ours as masked

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


def clips() -> list[Clip]:
    """Recordings in several languages, as `benchmarks.peers.speech` reads them."""
    return read_clips(data_path("clips/clips.json"))


@pytest.mark.parametrize("bins", [80, 128])
def test_log_mel_rows_of_recordings_are_those_of_openai(bins: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of whole files; closer to openai's steps in float64 than these are to float32. Control: rows that are normalised by the
    loudest value of their own window."""
    spectrogram, filters = whisper.audio.log_mel_spectrogram, whisper.audio.mel_filters
    found, single = [], []
    for clip in clips():
        samples = samples_of(clip.path)[:]
        found.append(LogMel(samples, bins).window(0, len(samples) // HOP))
        single.append(spectrogram(torch.from_numpy(samples.copy()), bins, padding=480_000).numpy().T)
    monkeypatch.setattr(whisper.audio, "mel_filters", lambda *given: filters(*given).double())
    monkeypatch.setattr(torch, "hann_window", lambda length: torch.signal.windows.hann(length, sym=False, dtype=torch.float64))
    slipped = 0.0
    for clip, rows, rounded in zip(clips(), found, single, strict=True):
        samples = samples_of(clip.path)[:]
        expected = spectrogram(torch.from_numpy(samples.astype(np.float64)), bins, padding=480_000).numpy().T[: len(rows)]
        assert np.abs(rows - expected).max() < 1e-6, clip.path.name
        assert np.abs(rows - rounded[: len(rows)]).max() < 1e-4, clip.path.name
        own = LogMel(samples[: 2 * RATE], bins).window(0, 190)
        slipped = max(slipped, np.abs(own - expected[:190]).max())
    assert slipped > 1e-2


def test_timestamp_rules_are_those_of_openai() -> None:
    """On random prefixes and logits. Control: the comparison of probabilities is left out."""
    made = rules()
    tokenizer = SimpleNamespace(no_timestamps=NO_TIMES, timestamp_begin=FIRST, eot=END)
    filters = whisper.decoding.ApplyTimestampRules(tokenizer, 1, LATEST)

    def filtered(logits: np.ndarray, output: list[int]) -> np.ndarray:
        row = torch.from_numpy(logits.copy())[None]
        filters.apply(row, torch.tensor([[1, *output]]))
        found: np.ndarray = row[0].numpy()
        return found

    several = cases()
    assert len(several) == 2000
    for logits, output in several:
        assert np.array_equal(masked(made, logits, output), filtered(logits, output)), output
    with pytest.MonkeyPatch.context() as slip:
        slip.setattr(penalties, "compare_mass", lambda z, firsts: z)
        assert any(not np.array_equal(masked(made, logits, output), filtered(logits, output)) for logits, output in several)


@pytest.mark.weights
def test_languages_of_recordings_are_those_of_openai(theirs: Any, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """30 s of the longest recording of each of five languages. Control: probabilities among all tokens."""
    longest = {clip.language: clip for clip in sorted(clips(), key=lambda clip: clip.path.stat().st_size)}
    assert len(longest) == 5
    likeliest, wrong = Transcription._likeliest, 0
    for clip in longest.values():
        samples = samples_of(clip.path)[: 30 * RATE]
        mel = whisper.audio.log_mel_spectrogram(torch.from_numpy(samples.copy()), padding=480_000)
        with torch.inference_mode():
            rows = whisper.audio.pad_or_trim(mel[:, : len(samples) // HOP], 3000)
            _, expected = whisper.detect_language(theirs, rows)
        found = detected(llm, samples)
        assert found[0] == max(expected, key=expected.get) == clip.language
        assert found[1] == pytest.approx(expected[clip.language], abs=1e-4)
        with monkeypatch.context() as slip:
            slip.setattr(
                Transcription, "_likeliest", lambda self, prompt, frames, ids, mode: likeliest(self, prompt, frames, ids, "raw")
            )
            wrong += abs(detected(llm, samples)[1] - expected[clip.language]) > 1e-4
    assert wrong


def detected(llm: LLM, samples: np.ndarray) -> tuple[str, float]:
    """The language of a sound, and its probability, without a transcript."""
    file = llm._transcription(samples, SpeechSettings(vad=False))
    steps = file.start()
    window = next(steps)
    params, frames = window.params, window.source
    engine = llm.engine
    request = engine.add(window.prompt, params, source=frames)
    choices: list[tuple[list[int], float]] = []
    while engine.busy:
        for delta in engine.step():
            assert delta.request_id == request.id
            if delta.token_ids:
                choices.append((list(delta.token_ids), delta.logprobs[0].logprob))
    with pytest.raises(StopIteration):
        steps.send(WindowOutput(choices))
    assert file.language_probability is not None
    return file.language, file.language_probability


FIRST_TIME = 50_364
PAIRS = [FIRST_TIME, 400, 500, FIRST_TIME + 600, FIRST_TIME + 600, 700, 701, FIRST_TIME + 1000, FIRST_TIME + 1000, 800]
# Tokens of windows and their mean log-probability, by temperature.
SCRIPT = [
    {0.0: (PAIRS, -0.3)},
    {0.0: ([FIRST_TIME, 900, FIRST_TIME + 5], -1.5), 0.4: ([FIRST_TIME, 410, 411, FIRST_TIME + 900], -0.4)},
    {0.0: ([FIRST_TIME, 77], -2.0), 0.4: ([FIRST_TIME, 78], -2.0), 0.6: ([FIRST_TIME, 420, 421, FIRST_TIME + 800], -0.5)},
    {0.0: ([FIRST_TIME, 430, 431, FIRST_TIME + 700, FIRST_TIME + 700], -0.2)},
    {0.0: ([FIRST_TIME, 440, 441, 442], -0.2)},
]


@pytest.mark.weights
def test_the_text_before_a_window_is_that_of_openai(theirs: Any, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows with a scripted output: the text before each of them, and where it begins. After a window at temperature 0.6
    nothing is given on. Control: the text of such a window is given on."""
    temperatures, silence = (0.0, 0.4, 0.6), np.zeros(100 * RATE, np.float32)
    seen: list[tuple[list[int], float]] = []
    played = iter(SCRIPT)
    script: dict[float, tuple[list[int], float]] = {}

    def decode(rows: Any, options: Any) -> Any:
        nonlocal script
        if not options.temperature:
            script = next(played, {0.0: ([FIRST_TIME, 450], -0.1)})
            seen.append((list(options.prompt), 0.0))
        tokens, logprob = script[options.temperature]
        given = {"tokens": tokens, "avg_logprob": logprob, "temperature": options.temperature}
        return whisper.DecodingResult(rows, "en", **given, no_speech_prob=0.0, compression_ratio=1.0)

    monkeypatch.setattr(theirs, "decode", decode)
    segments = whisper.transcribe(theirs, silence, language="en", temperature=temperatures, fp16=False)["segments"]

    def ours() -> tuple[list[list[int]], list[tuple[float, list[int]]]]:
        """The text before each window, and the segments."""
        settings = SpeechSettings(language="en", temperatures=temperatures, vad=False)
        running = llm._transcription(silence, settings).run()
        played, prompts, found = iter(SCRIPT), [], []
        script: dict[float, tuple[list[int], float]] = {}
        answer: WindowOutput | None = None
        while True:
            try:
                event = running.send(answer) if answer else next(running)
            except StopIteration:
                return prompts, found
            answer = None
            if isinstance(event, Segment):
                found.append((event.start, event.tokens))
            elif event.params.allowed_token_ids:  # the probability of no speech
                answer = WindowOutput([([event.params.allowed_token_ids[0]], -20.0)])
            else:
                if not event.params.temperature:
                    script = next(played, {0.0: ([FIRST_TIME, 450], -0.1)})
                    start = event.prompt.index(50_258)
                    prompts.append(event.prompt[1:start])
                tokens, logprob = script[event.params.temperature]
                answer = WindowOutput([(tokens, logprob * (len(tokens) + 1))])

    expected = [prompt for prompt, _ in seen], [(one["start"], one["tokens"]) for one in segments if one["text"].strip()]
    assert ours() == expected
    assert [bool(prompt) for prompt in expected[0][:5]] == [False, True, True, False, True]
    monkeypatch.setattr(transcription, "CONDITIONED", 1.0)
    assert ours()[1] == expected[1]
    assert ours()[0] != expected[0]


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
