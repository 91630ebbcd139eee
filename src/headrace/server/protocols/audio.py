"""/v1/audio/transcriptions and /v1/audio/translations: a sound file to text, as JSON, text, subtitles or events."""

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from headrace.audio import transcript as transcripts
from headrace.audio.text_formats import FORMATS
from headrace.audio.transcript import Segment, Transcript
from headrace.audio.transcription import MAX_BEAMS, SpeechSettings, most_hotwords
from headrace.audio.vad import SpeechBounds
from headrace.audio.vocabulary import LanguageError
from headrace.audio.wav import AudioError
from headrace.server.engines.models import Models, Service
from headrace.server.http.api_error import ApiError, bad
from headrace.server.http.body_limits import read_form
from headrace.server.http.forms import MultipartForm, receive_form
from headrace.server.http.limits_check import Deadline, Int32, Salt, StrictStruct, Word, Words
from headrace.server.protocols.logprobs import token_logprob
from headrace.server.protocols.models import use_model
from headrace.server.protocols.routes import Api, Call, as_response
from headrace.server.protocols.sampling import priority_of
from headrace.server.protocols.schemas import TRANSCRIPTION, form_content
from headrace.server.protocols.stream import sse_event, start_stream, unless_disconnected
from headrace.server.protocols.transcribing import (
    TOKENS_PER_SECOND,
    SoundMemory,
    SpeechRequest,
    audio_error,
    decode_file,
)

LONGEST_FIELD = 256 << 10  # bytes; the end of a longer prompt would not count anyway
LISTS = ("timestamp_granularities", "include", "keywords", "languages", "known_speaker_names", "known_speaker_references")
TEXT_FORMATS = {"srt": "srt", "vtt": "vtt"}
STREAMED = ("json", "text")
WITH_LOGPROBS = "json"  # format of answers that have log-probabilities
CLOSING: set[asyncio.Task[None]] = set()  # ends of streams
TRUNCATED = "x-headrace-truncated"  # names the fields of which a part was dropped
INCOMPLETE = "x-headrace-incomplete"  # why a part of the sound was not transcribed
# Fields that have no effect here, and why a value is refused.
UNSUPPORTED = {
    "known_speaker_names": "speakers are not told apart",
    "known_speaker_references": "speakers are not told apart",
}


class ServerVad(StrictStruct, kw_only=True):
    """Cut the sound in silences, and decode the windows together. threshold: probability of speech."""

    type: Literal["server_vad"]
    threshold: Annotated[float, Meta(ge=0, le=1)] = 0.5
    silence_duration_ms: Annotated[int, Meta(ge=0, le=10_000)] = 200
    prefix_padding_ms: Annotated[int, Meta(ge=0, le=10_000)] = 300

    @property
    def bounds(self) -> SpeechBounds:
        silence, before = self.silence_duration_ms / 1000, self.prefix_padding_ms / 1000
        return SpeechBounds(threshold=self.threshold, silence=silence, before=before)


class TranscriptionForm(StrictStruct, kw_only=True):
    """Fields of POST /v1/audio/transcriptions and /v1/audio/translations, next to the file."""

    model: Word
    language: Word | None = None
    prompt: Annotated[str, Meta(max_length=LONGEST_FIELD)] | None = None
    response_format: Literal["json", "text", "srt", "verbose_json", "vtt", "diarized_json"] = "json"
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    timestamp_granularities: list[Literal["segment", "word"]] | None = None
    stream: bool | None = None
    chunking_strategy: Literal["auto"] | ServerVad | None = None
    languages: Words | None = None
    keywords: Words | None = None
    include: list[Literal["logprobs"]] | None = None
    # of this server
    task: Literal["transcribe", "translate"] | None = None
    hotwords: Annotated[str, Meta(max_length=LONGEST_FIELD)] | None = None
    long: Literal["sequential", "chunked"] | None = None
    vad: bool | None = None
    beams: Annotated[int, Meta(ge=1, le=MAX_BEAMS)] | None = None
    multilingual: bool | None = None
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    deadline: Deadline | None = None
    priority: Int32 | None = None
    cache_salt: Salt | None = None
    # not supported, refused unless they have no effect
    known_speaker_names: Words | None = None
    known_speaker_references: Words | None = None


FORM = form_content(TranscriptionForm)
FIELDS = ("file", *TranscriptionForm.__struct_fields__)
# As clients send the object in a form.
VAD_FIELDS = {f"chunking_strategy[{name}]": name for name in ServerVad.__struct_fields__}


def add_audio(api: Api, models: Models) -> None:
    """/v1/audio."""
    memory = SoundMemory(models.settings.limits.audio_memory)
    for path, task in (("transcriptions", "transcribe"), ("translations", "translate")):
        api.post(f"/v1/audio/{path}", TRANSCRIPTION, form=FORM)(partial(_answer, models, memory, task))


async def _answer(models: Models, memory: SoundMemory, task: str, call: Call) -> Any:
    begun = time.monotonic()
    async with AsyncExitStack() as stack:
        share = stack.enter_context(memory.share())
        form = MultipartForm(
            call.http.headers.get("content-type"),
            (*FIELDS, *VAD_FIELDS),
            needs="file and model",
            lists=LISTS,
            longest=LONGEST_FIELD,
        )

        async def take(data: bytes) -> None:
            share.resize(share.size + len(data))
            form.write(data)

        await receive_form(call.http, form, take)
        body = read_form(_with_objects(form.given()), TranscriptionForm)
        _check(body, form, models, task)
        task = body.task or task
        service = await stack.enter_async_context(use_model(models, body.model, call.http, body.deadline, speech=True))
        seconds = service.deadline(body.deadline)
        ends = None if seconds is None else begun + seconds
        settings = _settings(body, task, service)
        try:
            samples = await unless_disconnected(call.http, decode_file(bytes(form.content), service.limits.audio_seconds))
        except AudioError as error:
            raise audio_error(error) from None
        form.content.clear()
        share.resize(samples.nbytes)
        salt, priority = (body.cache_salt or "").encode(), priority_of(body.priority, service.limits) or 0
        request = SpeechRequest(service, samples, settings, salt, priority, ends, seconds)
        response = await _respond(request, body, task, call.http, stack)
        if cut := await _cut_fields(service, settings, "hotwords" if body.hotwords else "keywords"):
            response.headers[TRUNCATED] = ", ".join(cut)
        return response


def _with_objects(given: dict[str, Any]) -> dict[str, Any]:
    """The fields of a form, with chunking_strategy as an object if it is one: fields `chunking_strategy[type]` and others, or
    JSON."""
    parts = {name: given.pop(field) for field, name in VAD_FIELDS.items() if field in given}
    text = given.get("chunking_strategy")
    if parts and text is not None:
        raise bad("chunking_strategy is given twice; give it once", "chunking_strategy")
    if parts:
        given["chunking_strategy"] = parts
    elif text is not None and text.startswith("{"):
        try:
            given["chunking_strategy"] = msgspec.json.decode(text)
        except msgspec.DecodeError:
            raise bad("chunking_strategy: is neither auto nor a JSON object", "chunking_strategy") from None
    return given


async def _respond(
    request: SpeechRequest, body: TranscriptionForm, task: str, http: Request, stack: AsyncExitStack
) -> Response:
    """The answer, streamed or complete. A stream takes over what is on the stack."""
    if not body.stream:
        wanted = tuple(body.timestamp_granularities or ("segment",))
        transcript = await unless_disconnected(http, _collect(request))
        response = _written(transcript, body.response_format, task, wanted, _logprobs(request, transcript.segments))
        if transcript.incomplete:
            response.headers[INCOMPLETE] = transcript.incomplete
        return response
    rest = stack.pop_all()
    events = _events(request)

    async def close() -> None:
        await events.aclose()
        await rest.aclose()

    return await start_stream(events, http, partial(_in_background, close))


async def _collect(request: SpeechRequest) -> Transcript:
    last: Any = None
    async for event in request.events():
        last = event
    assert isinstance(last, Transcript)
    return last


async def _events(request: SpeechRequest) -> AsyncGenerator[bytes, None]:
    """A delta for each segment, then the whole text."""
    first = True
    async for event in request.events():
        if isinstance(event, Segment):
            text = event.text.lstrip() if first else event.text
            first = False
            yield sse_event({"type": "transcript.text.delta", "delta": text, **_logprobs(request, [event])})
        else:
            more = {**_logprobs(request, event.segments), **_incomplete(event), "usage": _usage(event)}
            yield sse_event({"type": "transcript.text.done", "text": event.text, **more})


def _logprobs(request: SpeechRequest, segments: Iterable[Segment]) -> dict[str, Any]:
    """The log-probabilities of the text's tokens, without timestamps, if the request wants them."""
    llm = request.service.llm
    if not request.settings.logprobs or llm.speech is None:
        return {}
    tokenizer, end = llm.opened.tokenizer, llm.speech[1].end
    pairs = [pair for one in segments for pair in zip(one.tokens, one.logprobs or (), strict=True)]
    return {"logprobs": [token_logprob(tokenizer, token, logprob) for token, logprob in pairs if token < end]}


def _check(body: TranscriptionForm, form: MultipartForm, models: Models, task: str) -> None:
    """Raises ApiError for fields that contradict each other or the task of the route, or are not supported, and for a form
    without a file."""
    if form.filename is None:
        raise ApiError(400, "file is missing; give it", param="file", code="missing_field")
    if not form.content:
        raise bad("the file is empty; send a sound file", "file")
    for name, why in UNSUPPORTED.items():
        if getattr(body, name):
            raise ApiError(400, f"{name}: {why}; leave the field out", param=name, code="unsupported")
    if body.response_format == "diarized_json":
        why = "response_format: diarized_json needs speakers, which are not told apart; use verbose_json"
        raise ApiError(400, why, param="response_format", code="unsupported")
    if task == "translate" and body.task == "transcribe":
        raise bad("task: this route translates; send the file to /v1/audio/transcriptions", "task")
    if body.keywords and body.hotwords:
        raise bad("hotwords: keywords are the same as a list; give one of them", "hotwords")
    if body.chunking_strategy is not None and body.vad is False:
        raise bad("chunking_strategy cuts in silences, and vad is false; leave one of them out", "chunking_strategy")
    if body.chunking_strategy is not None and body.long == "sequential":
        raise bad("chunking_strategy cuts in silences, and long is sequential; leave one of them out", "long")
    if body.include and body.response_format != WITH_LOGPROBS:
        raise bad(f"include: log-probabilities go with response_format json, not {body.response_format}", "include")
    if body.include and (body.beams or 1) > 1:
        raise bad("include: beam search has no log-probabilities of tokens; leave beams or include out", "include")
    if body.stream and body.response_format not in STREAMED:
        raise bad(f"response_format: a stream has the format json or text, not {body.response_format}", "response_format")
    if body.timestamp_granularities and body.response_format != "verbose_json":
        raise bad("timestamp_granularities goes with response_format verbose_json", "timestamp_granularities")
    priority_of(body.priority, models.settings.limits)


def _settings(body: TranscriptionForm, task: str, service: Service) -> SpeechSettings:
    """How the file is transcribed. Raises ApiError for a language or task that the model does not have."""
    assert service.llm.speech is not None
    language = None if body.language in (None, "", "auto") else body.language
    given: dict[str, Any] = {"temperatures": (body.temperature,)} if body.temperature else {}
    given |= {"languages": tuple(body.languages or ()), "vad": body.vad is not False}
    given |= {"hotwords": body.hotwords or " ".join(body.keywords or ())}
    given |= {"multilingual": bool(body.multilingual), "beams": body.beams or 1}
    given |= {"long": body.long or ("sequential" if body.vad is False else "chunked"), "logprobs": bool(body.include)}
    if isinstance(body.chunking_strategy, ServerVad):
        given["bounds"] = body.chunking_strategy.bounds
    given["words"] = "word" in (body.timestamp_granularities or ())
    try:
        for one in (language, *given["languages"]):
            service.llm.speech[1].check(one, task)
        return SpeechSettings(language=language, task=task, prompt=body.prompt or "", seed=body.seed or 0, **given)
    except LanguageError as error:
        raise bad(str(error), "language" if "language" in str(error) else "model") from None
    except ValueError as error:
        raise bad(str(error), "languages") from None


async def _cut_fields(service: Service, settings: SpeechSettings, hotwords: str) -> list[str]:
    """Names of the fields whose text has more tokens than stand before a window. hotwords: the field that has them."""
    if service.llm.loaded is None:
        return []
    context, named = service.llm.loaded.max_model_len, await _count_tokens(service, settings.hotwords)
    room = context // 2 - 1 - min(named, most_hotwords(context))
    cut = ["prompt"] if await _count_tokens(service, settings.prompt) > room else []
    return [*cut, hotwords] if named > most_hotwords(context) else cut


async def _count_tokens(service: Service, text: str) -> int:
    if not text.strip():
        return 0
    return len(await service.llm.encode(f" {text.strip()}", add_special=False, parse_special=False, limited=False))


def _written(transcript: Transcript, form: str, task: str, wanted: Sequence[str], logprobs: dict[str, Any]) -> Response:
    """The complete answer. wanted: segments and words of verbose_json. logprobs: more fields of json."""
    if form == "text":
        return _text(transcript.text + "\n")
    if form in TEXT_FORMATS:
        return _text(FORMATS[TEXT_FORMATS[form]](transcript))
    usage = {"type": "duration", "seconds": round(transcript.duration, 3)}
    if form == "json":
        return as_response({"text": transcript.text, **logprobs, **_incomplete(transcript), "usage": usage})
    parts: dict[str, Any] = {}
    if "segment" in wanted:
        parts["segments"] = [_segment(one) for one in transcript.segments]
    if "word" in wanted:
        parts["words"] = [_word(word) for one in transcript.segments for word in one.words or ()]
    return as_response(
        {
            "task": task,
            "language": transcript.language,
            "language_probability": transcript.language_probability,
            "duration": round(transcript.duration, 3),
            "text": transcript.text,
            **parts,
            "skipped": transcript.skipped,
            "fallbacks": transcript.fallbacks,
            "resets": transcript.resets,
            **_incomplete(transcript),
            "usage": usage,
        }
    )


def _incomplete(transcript: Transcript) -> dict[str, Any]:
    """Field with the reason why a part of the sound was not transcribed, if there is one."""
    return {"incomplete": transcript.incomplete} if transcript.incomplete else {}


def _segment(segment: Segment) -> dict[str, Any]:
    """A segment of OpenAI's protocol. seek: hundredths of a second from the start of the file."""
    fields = {**msgspec.to_builtins(segment), "seek": round(100 * segment.start)}
    return {name: value for name, value in fields.items() if name != "words"}


def _word(word: transcripts.Word) -> dict[str, Any]:
    """A word of OpenAI's protocol, with its punctuation."""
    return {**msgspec.to_builtins(word), "word": word.word.strip()}


def _usage(transcript: Transcript) -> dict[str, Any]:
    """Usage of a stream, whose type in the protocol has tokens: those of the encoder, and those written."""
    heard, written = math.ceil(TOKENS_PER_SECOND * transcript.duration), sum(len(one.tokens) for one in transcript.segments)
    details = {"audio_tokens": heard, "text_tokens": 0}
    return {
        "type": "tokens",
        "input_tokens": heard,
        "output_tokens": written,
        "total_tokens": heard + written,
        "input_token_details": details,
    }


def _text(text: str) -> Response:
    return Response(text, media_type="text/plain; charset=utf-8")


def _in_background(close: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Close a stream whose sending has ended."""
    task = asyncio.get_running_loop().create_task(close())
    CLOSING.add(task)
    task.add_done_callback(CLOSING.discard)
