"""Routes of audio: the openai client in each format, streams, fields, limits, keys, quotas, and files that are refused."""

import io
import itertools
import json
import wave
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai import BadRequestError
from openai.types.audio import (
    Transcription,
    TranscriptionTextDeltaEvent,
    TranscriptionTextDoneEvent,
    TranscriptionVerbose,
    Translation,
    TranslationVerbose,
)

from headrace import LLM
from headrace.audio import transcription
from headrace.audio.text_formats import FORMATS
from headrace.audio.transcript import Transcript
from headrace.audio.vad import SpeechBounds
from headrace.server.access.principals import Principal
from headrace.server.access.queueing import QueueFullError
from headrace.server.protocols import transcribing
from headrace.server.protocols.transcribing import SoundMemory
from headrace.server.settings import Limits
from tests.server.harness import ENGINE, PATIENCE, Running, in_thread, until
from tests.tiny_whisper import EOT, RATE, noise, write_folder

LIMITS = Limits(body_seconds=PATIENCE, header_seconds=PATIENCE, send_seconds=PATIENCE, audio_bytes=2 << 20, audio_seconds=40)
EVENTS = {"transcript.text.delta": TranscriptionTextDeltaEvent, "transcript.text.done": TranscriptionTextDoneEvent}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    with Running(folder, limits=LIMITS) as running:
        yield running


@pytest.fixture(scope="module")
def offline(folder: Path) -> Iterator[LLM]:
    with LLM(folder, **ENGINE) as llm:
        yield llm


def wav(samples: np.ndarray, rate: int = RATE) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setparams((1, 2, rate, 0, "NONE", ""))
        out.writeframes(np.round(samples * 32767).astype("<i2").tobytes())
    return file.getvalue()


SOUND = wav(noise(1.2))


def ask(server: Running, route: str = "transcriptions", **more: Any) -> Any:
    """A request of the openai client."""
    given = {"model": "tiny", "file": ("a.wav", SOUND), "temperature": 0.3, "language": "en", **more}
    return getattr(server.openai.audio, route).create(**{name: value for name, value in given.items() if value is not None})


@pytest.fixture(scope="module")
def expected(offline: LLM) -> Transcript:
    return offline.transcribe(SOUND, language="en", temperatures=(0.3,), long="chunked")


def test_each_format_is_the_offline_transcript(server: Running, expected: Transcript) -> None:
    assert expected.segments
    plain = ask(server)
    assert Transcription.model_validate(plain.to_dict(), strict=True).text == expected.text
    assert plain.usage.to_dict() == {"type": "duration", "seconds": 1.2}
    assert ask(server, response_format="text") == expected.text + "\n"
    assert ask(server, response_format="srt") == FORMATS["srt"](expected)
    assert ask(server, response_format="vtt") == FORMATS["vtt"](expected)
    verbose = ask(server, response_format="verbose_json", timestamp_granularities=["segment"])
    TranscriptionVerbose.model_validate_json(verbose.to_json())
    assert [(one.start, one.end, one.text, one.tokens) for one in verbose.segments] == [
        (one.start, one.end, one.text, one.tokens) for one in expected.segments
    ]
    assert (verbose.language, verbose.duration) == ("en", 1.2)


def test_a_field_chooses_beams(server: Running, offline: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transcription, "LOGPROB", -99.0)  # no fallback to temperatures above 0
    monkeypatch.setattr(transcription, "COMPRESSION", 99.0)
    expected = [offline.transcribe(SOUND, language="en", beams=beams, long="chunked") for beams in (1, 5)]
    assert expected[0].segments != expected[1].segments
    for beams, transcript in zip((1, 5), expected, strict=True):
        made = ask(server, temperature=0, response_format="verbose_json", extra_body={"beams": beams})
        assert [one.tokens for one in made.segments] == [one.tokens for one in transcript.segments]


def test_beams_of_a_low_score_are_decoded_again(server: Running, offline: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("COMPRESSION", 99.0), ("NO_SPEECH", 1.0), ("LOGPROB", 0.0)):  # the score alone decides
        monkeypatch.setattr(transcription, name, value)
    given: dict[str, Any] = {"language": "en", "beams": 5, "long": "chunked", "seed": 3}
    expected = offline.transcribe(SOUND, **given)
    assert expected.fallbacks
    assert {one.reason for one in expected.fallbacks} == {"avg_logprob"}
    body = {"beams": 5, "seed": 3}
    made = ask(server, temperature=0, response_format="verbose_json", extra_body=body).to_dict()
    assert [(one["reason"], one["temperature"]) for one in made["fallbacks"]] == [
        (one.reason, one.temperature) for one in expected.fallbacks
    ]
    assert [one["avg_logprob"] for one in made["segments"]] == pytest.approx([one.avg_logprob for one in expected.segments])


def test_logprobs_of_tokens(server: Running, offline: LLM) -> None:
    """Those of the offline transcript, without timestamps; the tokens' bytes are the text."""
    expected = offline.transcribe(SOUND, language="en", temperatures=(0.3,), long="chunked", logprobs=True)
    pairs = [pair for one in expected.segments for pair in zip(one.tokens, one.logprobs or (), strict=True)]
    values = [value for token, value in pairs if token < EOT]
    assert len(values) > 3
    assert all(value <= 0 for value in values)
    made = ask(server, include=["logprobs"])
    Transcription.model_validate_json(made.to_json())
    assert [one.logprob for one in made.logprobs] == pytest.approx(values)
    assert bytes(int(byte) for one in made.logprobs for byte in one.bytes).decode(errors="replace").strip() == expected.text
    events = list(ask(server, include=["logprobs"], stream=True))
    assert [one.logprob for event in events[:-1] for one in event.logprobs] == pytest.approx(values)
    assert [one.logprob for one in events[-1].logprobs] == pytest.approx(values)
    assert "logprobs" not in ask(server).to_dict()


def test_words_have_times(server: Running, offline: LLM) -> None:
    expected = offline.transcribe(SOUND, language="en", temperatures=(0.3,), words=True, long="chunked")
    words = [word for one in expected.segments for word in one.words or ()]
    made = ask(server, response_format="verbose_json", timestamp_granularities=["word", "segment"])
    TranscriptionVerbose.model_validate_json(made.to_json())
    assert words
    assert [(one.word, one.start, one.end) for one in made.words] == [(one.word.strip(), one.start, one.end) for one in words]
    assert [(one.start, one.end) for one in made.segments] == [(one.start, one.end) for one in expected.segments]
    alone = ask(server, response_format="verbose_json", timestamp_granularities=["word"]).to_dict()
    assert "segments" not in alone
    assert len(alone["words"]) == len(words)
    assert "words" not in ask(server, response_format="verbose_json").to_dict()


def test_a_stream_has_a_delta_for_each_segment(server: Running, expected: Transcript) -> None:
    with server.http.stream(
        "POST",
        "/v1/audio/transcriptions",
        files={"file": ("a.wav", SOUND)},
        data={"model": "tiny", "temperature": "0.3", "language": "en", "stream": "true"},
    ) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    events = [EVENTS[json.loads(line)["type"]].model_validate_json(line, strict=True) for line in lines]  # type: ignore[attr-defined]
    assert [type(one) for one in events] == [TranscriptionTextDeltaEvent] * len(expected.segments) + [
        TranscriptionTextDoneEvent
    ]
    assert "".join(one.delta for one in events[:-1]).strip() == expected.text == events[-1].text
    assert events[-1].usage.input_tokens == 60
    streamed = list(ask(server, stream=True))
    assert [one.type for one in streamed] == [one.type for one in events]


PARTS = np.concatenate([np.concatenate([noise(0.5, seed), np.zeros(4 * RATE, np.float32)]) for seed in range(3)])


def test_sound_is_cut_in_silences_and_decoded_together(server: Running, offline: LLM) -> None:
    sound = wav(PARTS)
    given: dict[str, Any] = {"language": "en", "temperatures": (0.3,), "long": "chunked"}
    expected = offline.transcribe(sound, **given)
    assert expected.way == "chunked"
    assert expected.text != offline.transcribe(sound, **given | {"long": "sequential"}).text
    submit = server.llm.submit
    open_windows: list[int] = []

    def watched(prompts: Any, *args: Any, **more: Any) -> Any:
        open_windows.append(len(server.llm.inflight))
        return submit(prompts, *args, **more)

    server.llm.submit = watched  # type: ignore[method-assign]
    try:
        made = ask(server, file=("a.wav", sound), chunking_strategy="auto", response_format="verbose_json")
    finally:
        server.llm.submit = submit  # type: ignore[method-assign]
    assert made.text == expected.text
    assert max(open_windows) >= 1  # another window was there
    assert [(one.start, one.tokens) for one in made.segments] == [(one.start, one.tokens) for one in expected.segments]
    streamed = [
        one.delta
        for one in ask(server, file=("a.wav", sound), chunking_strategy="auto", stream=True)
        if one.type.endswith("delta")
    ]
    assert "".join(streamed).strip() == expected.text


def test_windows_follow_each_other_if_the_request_says_so(server: Running, offline: LLM) -> None:
    """Without the field the sound is cut in silences, unless silence is not to be found."""
    sound = wav(PARTS)
    given: dict[str, Any] = {"language": "en", "temperatures": (0.3,)}
    expected = {way: offline.transcribe(sound, **given, long=way).text for way in ("sequential", "chunked")}
    assert expected["sequential"] != expected["chunked"]
    for way, text in expected.items():
        assert ask(server, file=("a.wav", sound), extra_body={"long": way}).text == text
    assert ask(server, file=("a.wav", sound)).text == expected["chunked"]
    whole = offline.transcribe(sound, **given, vad=False)
    assert whole.way == "sequential"
    assert ask(server, file=("a.wav", sound), extra_body={"vad": False}).text == whole.text


def test_server_vad_takes_the_bounds_of_speech(server: Running, offline: LLM) -> None:
    bounds = SpeechBounds(silence=5.0, before=0.1)
    given: dict[str, Any] = {"language": "en", "temperatures": (0.3,), "long": "chunked"}
    expected = offline.transcribe(wav(PARTS), **given, bounds=bounds)
    strategy = {"type": "server_vad", "silence_duration_ms": 5000, "prefix_padding_ms": 100}
    made = ask(server, file=("a.wav", wav(PARTS)), chunking_strategy=strategy, response_format="verbose_json").to_dict()
    assert made["text"] == expected.text
    assert made["text"] != offline.transcribe(wav(PARTS), **given).text
    form = {"model": "tiny", "temperature": "0.3", "language": "en", "chunking_strategy": json.dumps(strategy)}
    assert (
        server.http.post("/v1/audio/transcriptions", files={"file": ("a", wav(PARTS))}, data=form).json()["text"]
        == expected.text
    )


def test_languages_may_differ_by_segment(server: Running, offline: LLM) -> None:
    expected = offline.transcribe(SOUND, temperatures=(0.3,), multilingual=True, long="chunked")
    form = {"model": "tiny", "temperature": "0.3", "multilingual": "true", "response_format": "verbose_json"}
    made = server.http.post("/v1/audio/transcriptions", files={"file": ("a", SOUND)}, data=form).json()
    assert [one["language"] for one in made["segments"]] == [one.language for one in expected.segments]
    assert {one.language for one in expected.segments} <= {"en", "fr", "de"}


def test_translations(server: Running, offline: LLM) -> None:
    expected = offline.transcribe(SOUND, task="translate", temperatures=(0.3,), long="chunked")
    made = ask(server, "translations", language=None, response_format="verbose_json")
    TranslationVerbose.model_validate_json(made.to_json())
    assert made.text == expected.text
    assert made.to_dict()["task"] == "translate"


def test_translations_have_each_format(server: Running, offline: LLM) -> None:
    """Of both routes, also as events; control: a transcript has other text."""
    expected = offline.transcribe(SOUND, language="en", task="translate", temperatures=(0.3,), long="chunked")
    assert expected.text != ask(server).text
    body = {"language": "en"}
    routes: dict[str, dict[str, Any]] = {"translations": body, "transcriptions": {**body, "task": "translate"}}
    for route, given in routes.items():
        more: dict[str, Any] = {"language": None, "extra_body": given}
        plain = ask(server, route, **more)
        (Translation if route == "translations" else Transcription).model_validate_json(plain.to_json())
        assert plain.text == expected.text
        assert ask(server, route, response_format="text", **more) == expected.text + "\n"
        assert ask(server, route, response_format="srt", **more) == FORMATS["srt"](expected)
        assert ask(server, route, response_format="vtt", **more) == FORMATS["vtt"](expected)
        verbose = ask(server, route, response_format="verbose_json", **more).to_dict()
        assert verbose["task"] == "translate"
        assert [one["tokens"] for one in verbose["segments"]] == [one.tokens for one in expected.segments]
    form = {"model": "tiny", "temperature": "0.3", "language": "en", "stream": "true"}
    answer = server.http.post("/v1/audio/translations", files={"file": ("a.wav", SOUND)}, data=form)
    lines = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    assert "".join(one["delta"] for one in lines[:-1]).strip() == expected.text == lines[-1]["text"]


@contextmanager
def late_after(server: Running, count: int) -> Iterator[None]:
    """The deadline of requests passes after so many windows."""
    submit, submitted = server.llm.submit, itertools.count()

    def watched(*args: Any, **more: Any) -> Any:
        return submit(*args, **(more | {"deadline": 0.0} if next(submitted) >= count else more))

    server.llm.submit = watched  # type: ignore[method-assign]
    try:
        yield
    finally:
        server.llm.submit = submit  # type: ignore[method-assign]


@pytest.mark.parametrize("long", ["sequential", "chunked"])
def test_a_deadline_returns_the_segments_that_are_ready(
    server: Running, offline: LLM, long: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: without a deadline the whole text, without a mark."""
    monkeypatch.setattr(transcribing, "TOGETHER", 1)
    whole = offline.transcribe(wav(PARTS), language="en", temperatures=(0.3,), long=long)
    more: dict[str, Any] = {"file": ("a.wav", wav(PARTS)), "extra_body": {"long": long}}
    verbose: dict[str, Any] = {**more, "response_format": "verbose_json"}
    form = {"model": "tiny", "temperature": "0.3", "language": "en", "long": long, "response_format": "verbose_json"}
    cut = 0
    for count in range(0, 13, 2):
        with late_after(server, count):
            answer = server.http.post("/v1/audio/transcriptions", files={"file": ("a.wav", wav(PARTS))}, data=form)
        made = answer.json()
        if answer.status_code != 200:
            assert (answer.status_code, made["error"]["code"]) == (408, "deadline_exceeded")
            assert not cut
            continue
        ready = [one["tokens"] for one in made["segments"]]
        assert ready
        assert ready == [one.tokens for one in whole.segments][: len(ready)]
        rest = [one for one in made["skipped"] if one["reason"] == "deadline"]
        if made.get("incomplete"):
            cut += 1
            assert made["incomplete"] == "deadline"
            assert rest
            # The rest is all sound with speech after the windows that are ready.
            heard = [one for one in whole.segments[len(ready) :] if one.end > rest[0]["start"]]
            assert all(any(part["start"] <= one.start <= part["end"] for part in rest) for one in heard)
        else:
            assert not rest
            assert len(ready) == len(whole.segments)
    assert cut
    for kind in ("json", "text", "srt", "vtt"):
        with late_after(server, 6):
            files = {"file": ("a.wav", wav(PARTS))}
            answer = server.http.post("/v1/audio/transcriptions", files=files, data={**form, "response_format": kind})
        assert answer.headers["x-headrace-incomplete"] == "deadline"
        assert kind != "json" or answer.json()["incomplete"] == "deadline"
    with late_after(server, 6):
        events = [one.to_dict() for one in ask(server, stream=True, **more)]
    assert events[-1]["incomplete"] == "deadline"
    assert "".join(one["delta"] for one in events[:-1]).strip() == events[-1]["text"]
    assert whole.text.startswith(events[-1]["text"].rstrip("\ufffd"))
    assert events[-1]["text"] != whole.text
    made = ask(server, **verbose).to_dict()
    assert (made["text"], made.get("incomplete")) == (whole.text, None)


def test_a_language_is_detected_and_temperature_0_falls_back(server: Running, offline: LLM) -> None:
    sound = wav(noise(0.3))
    expected = offline.transcribe(sound, long="chunked")
    made = ask(server, file=("a.wav", sound), language=None, temperature=0, response_format="verbose_json").to_dict()
    assert made["text"] == expected.text
    assert made["language_probability"] == pytest.approx(expected.language_probability)
    assert len(made["fallbacks"]) == len(expected.fallbacks)
    assert expected.fallbacks


REFUSED: dict[str, dict[str, Any]] = {
    "file is missing": {"file": None},
    "the file is empty": {"file": ("a.wav", b"")},
    "the sound has an unknown format; send": {"file": ("a.wav", b"no sound at all")},
    "is cut": {"file": ("a.wav", SOUND[:1000])},
    "at most 40 s": {"file": ("a.wav", wav(np.zeros(41 * 8000), 8000))},
    "model is missing": {"model": None},
    "choose auto, en, fr, de": {"language": "xx"},
    "unknown field 'speed'": {"speed": "2"},
    "unknown field 'beam_size'": {"beam_size": "5"},
    "unknown field 'keyword[]'": {"keyword[]": "mill"},
    "hotwords: keywords are the same as a list": {"hotwords": "mill", "keywords[]": "mill"},
    "task: must be": {"task": "sing"},
    "prompt has more than 262,144 bytes": {"prompt": "x" * (300 << 10)},
    "beams: must be an integer, at most 16": {"beams": "17"},
    "temperature: must be a number, at most 2.0": {"temperature": "3"},
    "a stream has the format json or text": {"stream": "true", "response_format": "srt"},
    "goes with response_format verbose_json": {"timestamp_granularities[]": "segment"},
    "speakers, which are not told apart": {"response_format": "diarized_json"},
    "known_speaker_names: speakers are not told apart": {"known_speaker_names[]": "Ada"},
    "is given, so none is detected": {"language": "en", "languages[]": "fr"},
    "language 'yy'": {"languages[]": "yy"},
    "include: log-probabilities go with response_format json, not text": {"include[]": "logprobs", "response_format": "text"},
    "include: beam search": {"include[]": "logprobs", "beams": "5"},
    "include": {"include[]": "item"},
    "and long is sequential": {"chunking_strategy": "auto", "long": "sequential"},
    "long": {"long": "whole"},
    "chunking_strategy": {"chunking_strategy": "server_vad"},
    "chunking_strategy.threshold": {"chunking_strategy[type]": "server_vad", "chunking_strategy[threshold]": "2"},
    "is neither auto nor a JSON object": {"chunking_strategy": "{"},
    "is given twice": {"chunking_strategy": "auto", "chunking_strategy[type]": "server_vad"},
    "cuts in silences, and vad is false": {"chunking_strategy": "auto", "vad": "false"},
    "priority must be 0 or more": {"priority": "-1"},
}


@pytest.mark.parametrize("message", REFUSED)
def test_requests_that_are_refused(server: Running, message: str) -> None:
    given = {"model": "tiny", "file": ("a.wav", SOUND), **REFUSED[message]}
    parts = {name: value if name == "file" else (None, value) for name, value in given.items() if value is not None}
    answer = server.http.post("/v1/audio/transcriptions", files=parts)
    assert answer.status_code == 400, answer.text
    assert message in answer.json()["error"]["message"]


def test_fields_that_are_given_too_often_are_named(server: Running) -> None:
    parts = [("file", ("a.wav", SOUND)), ("model", (None, "tiny"))]
    languages, words = ("language", (None, "en")), ("keywords[]", (None, "a"))
    for more, message in (
        ([languages] * 2, "language is given twice"),
        ([parts[0]], "file is given twice"),
        ([words] * 65, "keywords is given more than 64 times"),
    ):
        answer = server.http.post("/v1/audio/transcriptions", files=[*parts, *more])
        assert answer.status_code == 400
        assert message in answer.json()["error"]["message"]


def test_the_route_of_translations_transcribes_nothing(server: Running) -> None:
    files = {"file": ("a.wav", SOUND)}
    answer = server.http.post("/v1/audio/translations", files=files, data={"model": "tiny", "task": "transcribe"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "task")


def test_bodies_that_are_no_forms_or_too_large(server: Running) -> None:
    assert server.http.post("/v1/audio/transcriptions", json={"model": "tiny"}).status_code == 400
    assert server.http.post("/v1/audio/transcriptions", content=b"x").status_code == 400
    large = {"file": ("a.wav", bytes(4 << 20))}
    assert server.http.post("/v1/audio/transcriptions", files=large, data={"model": "tiny"}).status_code == 413


def test_routes_of_texts_refuse_a_speech_model(server: Running) -> None:
    message = [{"role": "user", "content": "a"}]
    for path, body in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": message}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/classify", {"input": "a"}),
    ):
        answer = server.post(path, {"model": "tiny", **body})
        assert answer.status_code == 400
        assert "send a file to /v1/audio/transcriptions" in answer.json()["error"]["message"]
    assert server.post("/tokenize", {"model": "tiny", "prompt": "a"}).json()["count"] == 1
    (model,) = server.http.get("/v1/models").json()["data"]
    assert model["transcribes"] is True


def test_a_long_prompt_is_cut_and_reported(server: Running) -> None:
    for prompt, reported in (("The mill. " * 50, "prompt"), ("Mill.", None)):
        form = {"model": "tiny", "temperature": "0.3", "language": "en", "prompt": prompt}
        answer = server.http.post("/v1/audio/transcriptions", files={"file": ("a.wav", wav(noise(0.2)))}, data=form)
        assert answer.status_code == 200
        assert answer.headers.get("x-headrace-truncated") == reported


def test_a_client_that_leaves_ends_its_windows(server: Running) -> None:
    before = server.figure("audio_seconds_total")
    with server.http.stream(
        "POST",
        "/v1/audio/transcriptions",
        files={"file": ("a.wav", wav(noise(30.0)))},
        data={"model": "tiny", "temperature": "1", "language": "en", "stream": "true"},
    ) as answer:
        next(answer.iter_lines())
    until(lambda: not server.llm.in_use and not server.models.open and not server.models._using)
    assert server.figure("audio_seconds_total") == before
    assert ask(server).text


def test_files_run_side_by_side_and_are_counted(server: Running, expected: Transcript) -> None:
    before = server.figure("audio_seconds_total")
    answers = [in_thread(lambda: ask(server).text) for _ in range(2)]
    assert [one.result() for one in answers] == [expected.text] * 2
    assert server.figure("audio_seconds_total") == pytest.approx(before + 2 * 1.2)
    assert server.figure("audio_windows_total") > 0


def test_quotas_count_seconds_as_tokens(folder: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[ada]\nkey = "ada-key-of-test"\ntokens = 40\nwindow = 600.0\n')
    keys.chmod(0o600)
    with Running(folder, limits=LIMITS, keys=keys, wait=False) as server:
        headers = {"Authorization": "Bearer ada-key-of-test"}

        def post(path: str, **more: Any) -> Any:
            return server.http.post(path, headers=headers, **more)

        until(lambda: server.health()["status"] == "ready")
        form = {"model": "tiny", "temperature": "0.3", "language": "en"}
        assert server.http.post("/v1/audio/transcriptions", files={"file": ("a", SOUND)}, data=form).status_code == 401
        answer = post("/v1/audio/transcriptions", files={"file": ("a", SOUND)}, data=form)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "quota_exceeded"
        assert post("/v1/audio/transcriptions", files={"file": ("a", wav(noise(0.2)))}, data=form).status_code == 200


def test_the_memory_of_sounds_is_shared() -> None:
    memory = SoundMemory(100)
    with memory.share() as first, memory.share() as second:
        first.resize(60)
        second.resize(40)
        first.resize(50)
        with pytest.raises(QueueFullError, match="bytes of sound"):
            second.resize(51)
        second.resize(50)
    assert not memory._held
    assert Principal().room(100, 60, 60) == 40


def test_a_text_model_transcribes_nothing(tmp_path: Path) -> None:
    from tests.tiny_files import write_tiny_gguf

    with Running(write_tiny_gguf(tmp_path / "tiny.gguf")) as server, pytest.raises(BadRequestError, match="reads no sound"):
        ask(server)


def test_languages_to_choose_from_and_words_before_each_window(server: Running, offline: LLM) -> None:
    sound = wav(noise(0.3))
    chosen: dict[str, Any] = {"languages": ("de",), "hotwords": "mill wheel", "vad": False}
    expected = offline.transcribe(sound, temperatures=(0.3,), **chosen)
    form = {"model": "tiny", "temperature": "0.3", "languages[]": "de", "vad": "false", "response_format": "verbose_json"}
    files = [("file", ("a.wav", sound)), ("keywords[]", (None, "mill")), ("keywords[]", (None, "wheel"))]
    made = server.http.post("/v1/audio/transcriptions", files=files, data=form).json()
    assert (made["text"], made["language"]) == (expected.text, "de")
    same = ask(server, file=("a.wav", sound), language="de", extra_body={"vad": False, "hotwords": "mill wheel"})
    assert same.text == expected.text
    other = ask(server, file=("a.wav", sound), language="de", extra_body={"vad": False, "hotwords": "river"})
    assert other.text != expected.text


def test_long_hotwords_are_reported(server: Running) -> None:
    for hotwords, prompt, reported in (("a" * 100, "", "hotwords"), ("a" * 20, "b" * 40, "prompt"), ("a" * 9, "b" * 9, None)):
        form = {"model": "tiny", "temperature": "0.3", "language": "en", "hotwords": hotwords, "prompt": prompt}
        answer = server.http.post("/v1/audio/transcriptions", files={"file": ("a.wav", wav(noise(0.2)))}, data=form)
        assert answer.headers.get("x-headrace-truncated") == reported
