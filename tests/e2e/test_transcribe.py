"""Transcription with a tiny random model: windows, seeking, fallbacks, languages, the command; and with whisper-base."""

import io
import json
import wave
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from headrace import LLM
from headrace.audio import transcription
from headrace.audio.decode import samples_of
from headrace.audio.mel import Samples
from headrace.audio.text_formats import FORMATS
from headrace.audio.transcript import Reset, Segment, Transcript
from headrace.audio.transcription import Decoded, SpeechSettings, Transcription, Window, compression_ratio
from headrace.audio.vad import FRAME
from headrace.audio.vocabulary import LanguageError
from headrace.audio.wav import AudioError
from headrace.cli.app import main
from headrace.data.windows import WindowOutput
from headrace.startup.opening import open_model
from headrace.startup.speech import speech_model
from headrace.weights.ctranslate2 import CTranslate2Folder
from tests.places import model_file
from tests.tiny_whisper import EOT, LANGUAGES, POSITIONS, RATE, noise, write_folder, write_wav


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder) as opened:
        yield opened


def test_a_file_is_cut_into_windows_that_reach_its_end(llm: LLM) -> None:
    transcript = llm.transcribe(noise(1.3), temperatures=(0.0,))
    assert transcript.duration == pytest.approx(1.3)
    assert transcript.language in LANGUAGES
    assert 0 < (transcript.language_probability or 0) <= 1
    assert transcript.segments or transcript.skipped
    times = [(one.start, one.end) for one in transcript.segments]
    assert times == sorted(times)
    assert all(0 <= start < end for start, end in times)
    assert all(fallback.exhausted for fallback in transcript.fallbacks)


def test_equal_calls_give_equal_transcripts_alone_and_together(llm: LLM) -> None:
    sounds = [noise(0.6, seed) for seed in range(2)]
    alone = [llm.transcribe(sound, temperatures=(1.0,), language="en") for sound in sounds]
    together: dict[int, Transcript] = {}
    for number, event in llm.transcribe_all(sounds, together=2, temperatures=(1.0,), language="en"):
        if isinstance(event, Transcript):
            together[number] = event
    assert [together[number] for number in range(2)] == alone
    streamed = list(llm.transcribe_stream(sounds[0], temperatures=(1.0,), language="en"))
    assert streamed == alone[0].segments


def test_an_error_ends_its_file_alone(llm: LLM) -> None:
    events = list(llm.transcribe_all([b"no sound", noise(0.5)], together=2, language="en", temperatures=(0.0,)))
    ends = {number: event for number, event in events if not isinstance(event, Segment)}
    assert isinstance(ends[0], AudioError)
    assert isinstance(ends[1], Transcript)
    assert not llm.engine.busy


def test_closing_the_iterator_ends_its_windows(llm: LLM) -> None:
    events = llm.transcribe_all([noise(20.0), noise(20.0, 1)], language="en", temperatures=(0.0,))
    next(events)
    events.close()  # type: ignore[attr-defined]
    assert not llm.engine.busy
    llm.engine.check()


def test_arguments_that_the_model_does_not_take(llm: LLM) -> None:
    with pytest.raises(LanguageError, match="choose auto, en, fr, de"):
        llm.transcribe(noise(0.5), language="xx")
    with pytest.raises(LanguageError, match="choose transcribe or translate"):
        llm.transcribe(noise(0.5), task="sing")
    with pytest.raises(ValueError, match="from 0 to 2"):
        llm.transcribe(noise(0.5), temperatures=())
    assert llm.transcribe(np.zeros(100, np.int16), language="en").text == ""


def speech_and_silence() -> np.ndarray:
    """1.5 s of noise, 4 s of silence, 1 s of noise."""
    return np.concatenate([noise(1.5), np.zeros(4 * RATE, np.float32), noise(1.0, 1)])


@pytest.mark.parametrize("long", ["sequential", "chunked"])
def test_silence_is_not_decoded(llm: LLM, long: str) -> None:
    transcript = llm.transcribe(speech_and_silence(), language="en", temperatures=(0.0,), long=long)
    assert (transcript.way, transcript.vad) == (long, "energy")
    (silence,) = [one for one in transcript.skipped if one.reason == "silence"]
    assert (silence.start, silence.end) == (pytest.approx(1.9, abs=0.05), pytest.approx(5.1, abs=0.05))
    assert transcript.segments
    assert all(one.start <= 1.95 or one.start >= 5.0 for one in transcript.segments)
    everything = llm.transcribe(speech_and_silence(), language="en", temperatures=(0.0,), long=long, vad=False)
    assert everything.vad == ""
    assert any(one.start >= 1.95 and one.end <= 5.0 for one in (*everything.segments, *everything.skipped))  # type: ignore[attr-defined]
    nothing = llm.transcribe(np.zeros(RATE, np.float32), long=long)
    assert nothing.text == ""
    assert [(one.start, one.end, one.reason) for one in nothing.skipped] == [(0.0, 1.0, "silence")]


def test_chunks_are_decoded_side_by_side_with_the_same_result(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    sound = np.concatenate([np.concatenate([noise(0.7, seed), np.zeros(4 * RATE, np.float32)]) for seed in range(3)])
    settings: dict[str, Any] = {"temperatures": (0.8,), "long": "chunked", "seed": 3}
    alone = llm.transcribe(sound, **settings)
    serial = [event for _, event in llm.transcribe_all([sound], together=1, **settings)]
    widths: list[int] = []
    step = llm.callers.step
    monkeypatch.setattr(llm.callers, "step", lambda: (widths.append(llm.callers.open), step())[1])
    together = list(llm.transcribe_all([sound, sound], together=5, **settings))
    assert serial[-1] == alone
    for number in range(2):
        events = [event for at, event in together if at == number]
        assert events[-1] == alone
        assert events[:-1] == alone.segments
    assert max(widths) == 5
    file = llm._transcription(sound, SpeechSettings(**settings))
    starts = [segment.start for segment in alone.segments]
    assert starts == sorted(starts)
    assert len(file._sections(sound)) == 3


def test_languages_are_chosen_from_a_list_and_in_each_window(llm: LLM) -> None:
    sound = noise(1.3)
    for code in LANGUAGES:
        transcript = llm.transcribe(sound, languages=(code,), temperatures=(0.0,))
        assert (transcript.language, transcript.language_probability) == (code, pytest.approx(1.0))
        assert {segment.language for segment in transcript.segments} == {code}
    several = llm.transcribe(sound, multilingual=True, temperatures=(0.0,))
    assert several.language_probability is None
    assert all(segment.language in LANGUAGES for segment in several.segments)
    with pytest.raises(ValueError, match="leave languages and multilingual out"):
        llm.transcribe(sound, language="en", multilingual=True)
    with pytest.raises(ValueError, match="sequential or chunked"):
        llm.transcribe(sound, long="whole")


def test_hotwords_come_before_every_window(llm: LLM) -> None:
    settings: dict[str, Any] = {"language": "en", "temperatures": (0.0,), "vad": False, "hotwords": "mill", "prompt": "river"}
    file = llm._transcription(noise(2.5), SpeechSettings(**settings))
    prompts = []
    running = file.run()
    event = next(running)
    known = llm.tokenizer.encode(" mill", add_special=False), llm.tokenizer.encode(" river", add_special=False)
    while not prompts or len(prompts) < 4:
        if isinstance(event, Window):
            prompts.append(event.prompt)
            event = running.send(WindowOutput([([EOT], -9.0)]))
        else:
            event = next(running)
    previous = file.tokens.previous
    assert all(prompt[: 1 + len(known[0])] == [previous, *known[0]] for prompt in prompts)
    assert prompts[0][1 + len(known[0]) :][: len(known[1])] == known[1]


def scripted(llm: LLM, texts: list[str], **settings: Any) -> tuple[list[list[int]], Transcript]:
    """Transcribe one window of 1 s for each text, which is its only segment. Returns the prompts of the windows, without those
    that measure silence."""
    given = {"language": "en", "vad": False, "temperatures": (0.0,), **settings}
    running = llm._transcription(noise(float(len(texts))), SpeechSettings(**given)).run()
    prompts: list[list[int]] = []
    times = EOT + 11, EOT + 11 + POSITIONS
    try:
        event = next(running)
        while True:
            if not isinstance(event, Window):
                event = next(running)
            elif event.params.timestamps is None:
                event = running.send(WindowOutput([([EOT], -9.0)]))
            else:
                text = llm.tokenizer.encode(texts[len(prompts)], add_special=False)
                prompts.append(event.prompt)
                event = running.send(WindowOutput([([times[0], *text, times[1], EOT], 0.0)]))
    except StopIteration as end:
        transcript: Transcript = end.value
        return prompts, transcript


def test_a_loop_ends_the_text_before_and_is_reported(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: without the guard the text of all windows is given on, and nothing is reported."""

    def given_on(prompts: list[list[int]]) -> list[bool]:
        return [prompt[0] == EOT + 8 for prompt in prompts]  # <|startofprev|>

    prompts, transcript = scripted(llm, ["mill"] * 4 + ["wheel", "river"])
    assert given_on(prompts) == [False, True, True, True, False, True]
    assert transcript.resets == [Reset(3.0, "loop")]
    assert json.loads(FORMATS["json"](transcript))["resets"] == [{"start": 3.0, "reason": "loop"}]
    for texts in (["mill"] * 3 + ["wheel"] * 2, ["mill", "wheel"] * 3):
        prompts, transcript = scripted(llm, texts)
        assert given_on(prompts) == [False, *[True] * (len(texts) - 1)]
        assert not transcript.resets
    prompts, transcript = scripted(llm, ["mill", "wheel"], temperatures=(0.6,))
    assert given_on(prompts) == [False, False]
    assert [(one.start, one.reason) for one in transcript.resets] == [(0.0, "temperature"), (1.0, "temperature")]
    for more in ({"condition": False}, {"long": "chunked"}):
        assert not scripted(llm, ["mill"] * 5, **more)[1].resets  # no text is given on
    monkeypatch.setattr(transcription, "REPEATS", 99)
    prompts, transcript = scripted(llm, ["mill"] * 6)
    assert given_on(prompts) == [False, *[True] * 5]
    assert not transcript.resets


def cut(llm: LLM, tokens: list[int], size: int = 100) -> tuple[list[tuple[float, float, str]], int]:
    """Segments (start, end, text) and rows to move on, of a window's tokens."""
    file = llm._transcription(noise(1.0), _settings())
    made, moved = file._cut(Decoded(tokens, "", 0.0, 0.0, 1.0), 0, size, 0.0)
    return [(one.start, one.end, one.text) for one in made], moved


def _settings() -> Any:
    return SpeechSettings(language="en")


def test_windows_move_to_their_last_closed_segment(llm: LLM) -> None:
    first = EOT + 11
    a, b = (llm.tokenizer.encode(text, add_special=False)[0] for text in "ab")
    pairs = [first, a, first + 10, first + 10, b, first + 20]
    assert cut(llm, [*pairs, first + 20, a]) == ([(0.0, 0.2, "a"), (0.2, 0.4, "b")], 40)
    assert cut(llm, pairs) == ([(0.0, 0.2, "a"), (0.2, 0.4, "b")], 100)  # a single last time: the window is done
    assert cut(llm, [first, a, b]) == ([(0.0, 1.0, "ab")], 100)
    assert cut(llm, [first, a, b, first + 5]) == ([(0.0, 0.1, "ab")], 100)
    assert cut(llm, [first, first]) == ([], 100)  # nothing that would move it forward


def test_faults_of_a_window() -> None:
    file = object.__new__(Transcription)
    good, looping = Decoded([], "", 0.0, -0.5, 1.5), Decoded([], "", 0.0, -0.5, 3.0)
    assert file._fault(good, 0.0) == ""
    assert file._fault(looping, 0.9) == "compression_ratio"
    assert file._fault(Decoded([], "", 0.0, -1.5, 1.5), 0.3) == "avg_logprob"
    assert file._fault(Decoded([], "", 0.0, -1.5, 3.0), 0.7) == ""  # silence is skipped, not decoded again
    assert compression_ratio("la " * 60) > 2.4 > compression_ratio("The quick brown fox jumps over the lazy dog.")


def test_formats() -> None:
    segments = [Segment(0, 0.0, 1.5, " One --> two."), Segment(1, 3661.25, 3662.0, " Three\tfour.")]
    transcript = Transcript("One --> two. Three\tfour.", "en", 0.9, 3662.0, segments, [], [])
    assert FORMATS["txt"](transcript) == "One --> two.\nThree\tfour.\n"
    assert FORMATS["srt"](transcript) == (
        "1\n00:00:00,000 --> 00:00:01,500\nOne -> two.\n\n2\n01:01:01,250 --> 01:01:02,000\nThree\tfour.\n"
    )
    assert FORMATS["vtt"](transcript).startswith("WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nOne -> two.\n\n")
    assert FORMATS["tsv"](transcript) == "start\tend\ttext\n0\t1500\tOne --> two.\n3661250\t3662000\tThree four.\n"
    assert json.loads(FORMATS["json"](transcript))["segments"][1]["start"] == 3661.25


def test_the_command_writes_resumes_and_reports(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sounds, out = tmp_path / "sounds", tmp_path / "texts"
    sounds.mkdir()
    for number in range(2):
        write_wav(sounds / f"{number}.wav", noise(0.8, number))
    (sounds / "cut.wav").write_bytes((sounds / "0.wav").read_bytes()[:1000])
    command = ["transcribe", str(folder), str(sounds), "-o", str(out), "--format", "json", "--temperature", "0"]
    assert main(command) == 1
    assert "cut.wav is cut" in capsys.readouterr().err
    first = {path.name: path.read_bytes() for path in out.iterdir()}
    assert set(first) == {"0.json", "1.json"}
    assert json.loads(first["0.json"])["duration"] == pytest.approx(0.8)
    (out / "1.json").unlink()
    (sounds / "cut.wav").unlink()
    stamp = (out / "0.json").stat().st_mtime_ns
    assert main(command) == 0
    assert {path.name: path.read_bytes() for path in out.iterdir()} == first
    assert (out / "0.json").stat().st_mtime_ns == stamp
    capsys.readouterr()
    assert main(command) == 0
    assert "all files are done" in capsys.readouterr().err


def test_the_command_refuses_before_loading(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sound = str(write_wav(tmp_path / "a.wav", noise(0.2)))
    (tmp_path / "empty").mkdir()
    cases = {
        "choose auto, en": ["transcribe", str(folder), sound, "--language", "xx"],
        "takes numbers": ["transcribe", str(folder), sound, "--temperature", "warm"],
        "has no sound files": ["transcribe", str(folder), str(tmp_path / "empty")],
        "--word-times: txt shows no times; add --format json": ["transcribe", str(folder), sound, "--word-times"],
        "would both be written": ["transcribe", str(folder), sound, sound, "-o", str(tmp_path / "out")],
    }
    for message, arguments in cases.items():
        assert main(arguments) in (1, 2)
        assert message in capsys.readouterr().err


def test_text_commands_refuse_a_speech_model(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = tmp_path / "in.jsonl"
    lines.write_text('{"prompt": "a"}\n')
    for arguments, message in (
        (["generate", str(folder), "-i", str(lines), "-o", str(tmp_path / "out.jsonl")], "is a speech model and reads no text"),
        (["fit", str(folder), "--check"], "--check measures answers to text"),
    ):
        assert main(arguments) == 1
        assert message in capsys.readouterr().err


def test_a_short_file_is_encoded_by_its_length(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(transcription, "SHORT_SPARE", 3)
    monkeypatch.setattr(transcription, "SHORT_LEAST", 12)
    settings: dict[str, Any] = {"language": "en", "vad": False, "temperatures": (0.0,), "words": True}
    with LLM(folder) as llm:
        full, short = (llm.transcribe(noise(0.5), **settings, short_context=chosen) for chosen in (False, True))
        assert full.audio_context is msgspec.UNSET
        assert short.audio_context == 31  # 1.1 * 25 + 3 positions of 50
        assert short.segments
        assert short != full
        assert llm.transcribe(noise(0.05), **settings, short_context=True).audio_context == 12  # the least
        for sound in (noise(0.99), noise(2.5)):  # nearly one window, and more
            assert llm.transcribe(sound, **settings, short_context=True) == llm.transcribe(sound, **settings)
    sound = str(write_wav(tmp_path / "a.wav", noise(0.5)))
    command = ["transcribe", str(folder), sound, "--language", "en", "--temperature", "0", "--no-vad", "--format", "json"]
    assert main([*command, "--audio-context", "auto"]) == 0
    assert json.loads(capsys.readouterr().out)["audio_context"] == 31
    assert main(command) == 0
    assert "audio_context" not in json.loads(capsys.readouterr().out)


def test_models_with_a_cut_decoder_do_not_translate(folder: Path) -> None:
    opened = open_model(folder)
    speech_model(opened)[1].check("fr", "translate")
    opened.config = replace(opened.config, layers=opened.config.layers[:1])
    tokens = speech_model(opened)[1]
    tokens.check("fr", "transcribe")
    with pytest.raises(LanguageError, match="was not trained to translate"):
        tokens.check("fr", "translate")


def test_models_of_english_alone_take_no_other_language_and_do_not_translate(folder: Path) -> None:
    tokens = replace(speech_model(open_model(folder))[1], languages={})
    tokens.check(None, "transcribe")
    for language, task in (("fr", "transcribe"), ("en", "translate")):
        with pytest.raises(LanguageError, match="this model knows English alone; open a multilingual one"):
            tokens.check(language, task)


@pytest.mark.weights
def test_tiny_en_writes_the_words_of_speech() -> None:
    with LLM(model_file("whisper-tiny.en"), quantize="int8") as llm:
        assert share_of_words(llm.transcribe(model_file("speech.wav")).text) >= 0.9
        with pytest.raises(LanguageError, match="knows English alone"):
            llm.transcribe(model_file("speech.wav"), language="fr")


@pytest.fixture(scope="module")
def base() -> Iterator[LLM]:
    with LLM(model_file("whisper-base"), quantize="int8") as opened:
        yield opened


def share_of_words(text: str) -> float:
    """Share of the words of `speech.txt` that a text has."""
    wanted = model_file("speech.txt").read_text("utf-8").split()
    heard = text.replace(",", "").replace(".", "").lower().split()
    return sum(word in heard for word in wanted) / len(wanted)


@pytest.mark.weights
def test_whisper_base_writes_the_words_of_speech(base: LLM) -> None:
    transcript = base.transcribe(model_file("speech.wav"))
    assert transcript.language == "en"
    assert share_of_words(transcript.text) >= 0.9
    assert not transcript.fallbacks
    assert base.transcribe(noise(3.0) * 0.0).text in ("", "you", "You")


@pytest.mark.weights
def test_int4_writes_the_words_and_doubled_scales_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(model_file("whisper-base"), quantize="int4") as llm:
        assert share_of_words(llm.transcribe(model_file("speech.wav")).text) >= 0.9
    raw = CTranslate2Folder.raw

    def doubled(self: CTranslate2Folder, name: str) -> np.ndarray:
        """Matrices that are twice as large have the same integers with doubled scales."""
        info, data = self.info(name), raw(self, name)
        inside = ".layers." in name and len(info.shape) == 2
        return (data.view(np.float16) * np.float16(2)).view(np.uint8) if inside else data

    monkeypatch.setattr(CTranslate2Folder, "raw", doubled)
    with LLM(model_file("whisper-base"), quantize="int4") as llm:
        assert share_of_words(llm.transcribe(model_file("speech.wav"), language="en").text) < 0.5


class SpeechEverywhere:
    """A detector that does not find silence."""

    name = "everywhere"

    def probabilities(self, samples: Samples) -> np.ndarray:
        return np.ones(-(-len(samples) // FRAME), np.float32)


@pytest.mark.weights
@pytest.mark.parametrize("long", ["sequential", "chunked"])
def test_silence_between_speech_gets_no_words(base: LLM, long: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """45 s of silence between two copies of a clip. Controls: no guards, and a detector that finds speech everywhere."""
    clip = samples_of(model_file("speech.wav"))[:]
    sound = np.concatenate([clip, np.zeros(45 * RATE, np.float32), clip])
    first, last = len(clip) / RATE, len(clip) / RATE + 45
    settings: dict[str, Any] = {"language": "en", "long": long}
    alone = base.transcribe(clip, **settings)

    def invented(transcript: Transcript) -> list[str]:
        """Segments that begin or end within the silence, more than a second from the speech."""
        inside = range(round(first) + 1, round(last) - 1)
        return [one.text for one in transcript.segments if any(one.start <= at < one.end for at in inside)]

    guarded = base.transcribe(sound, **settings)
    assert invented(guarded) == []
    assert guarded.text == f"{alone.text} {alone.text}"
    (silence,) = [one for one in guarded.skipped if one.reason == "silence"]
    assert (silence.start, silence.end) == (pytest.approx(first, abs=1.0), pytest.approx(last, abs=1.0))
    monkeypatch.setattr(transcription, "NO_SPEECH", 2.0)
    unguarded = base.transcribe(sound, **settings, vad=False, temperatures=(0.0,))
    assert invented(unguarded)
    monkeypatch.setattr("headrace.llm.voice_detector", SpeechEverywhere)
    assert invented(base.transcribe(sound, **settings, temperatures=(0.0,)))


def test_split_channels_are_merged_by_time(llm: LLM) -> None:
    file = io.BytesIO()
    left, right = noise(0.6, 1), noise(0.6, 2)
    with wave.open(file, "wb") as out:
        out.setparams((2, 2, 16_000, 0, "NONE", ""))
        out.writeframes(np.round(np.stack([left, right], 1) * 32767).astype("<i2").tobytes())
    settings: dict[str, Any] = {"language": "en", "temperatures": (1.0,)}
    alone = [llm.transcribe(np.round(one * 32767).astype(np.int16), **settings) for one in (left, right)]
    both = llm.transcribe(file.getvalue(), channels="split", **settings)
    assert {one.channel for one in both.segments} == {number for number, one in enumerate(alone, 1) if one.segments}
    assert [one.start for one in both.segments] == sorted(one.start for one in both.segments)
    for number, transcript in enumerate(alone, 1):
        made = [one.text for one in both.segments if one.channel == number]
        assert made == [one.text for one in transcript.segments]
    assert FORMATS["txt"](both).startswith(f"{both.segments[0].channel}: ")
    assert list(llm.transcribe_stream(file.getvalue(), channels="split", **settings)) == both.segments
    with pytest.raises(ValueError, match="mix or split"):
        llm.transcribe(file.getvalue(), channels="left")  # type: ignore[arg-type]


def test_a_cut_file_counts_on_demand(llm: LLM, tmp_path: Path) -> None:
    path = write_wav(tmp_path / "a.wav", noise(0.8))
    path.write_bytes(path.read_bytes()[:-8000])
    with pytest.raises(AudioError, match="is cut"):
        llm.transcribe(str(path), language="en", temperatures=(0.0,))
    assert llm.transcribe(str(path), language="en", temperatures=(0.0,), partial=True).duration == pytest.approx(0.55)
