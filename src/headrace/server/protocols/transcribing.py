"""Transcription of one uploaded file by a served speech model: decoding, windows, and the memory of all sounds."""

import asyncio
import contextlib
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headrace.audio import decode
from headrace.audio.mel import RATE
from headrace.audio.together import Running, next_events
from headrace.audio.transcript import Segment, Transcript
from headrace.audio.transcription import SpeechSettings, Transcription, Window
from headrace.audio.wav import AudioError
from headrace.confined.pool import OverrunError, shared_pool
from headrace.data.windows import WindowOutput
from headrace.server.access.principals import PRINCIPAL
from headrace.server.access.queueing import QueueFullError
from headrace.server.engines.inflight import DeadlineError, stream_deltas
from headrace.server.engines.models import Service
from headrace.server.http.api_error import ApiError

# Log-mel rows and segments are computed here, next to the event loop.
THREADS = ThreadPoolExecutor(2, "sound")
TOKENS_PER_SECOND = 50  # price of a second of sound in quotas: positions of the encoder
TOGETHER = 8  # windows of one file in the engine at a time
POLL_SECONDS = 0.02  # between two checks for room in the queue
RETRY_SECONDS = 5
DEADLINE = "deadline"  # why a transcript is incomplete


@dataclass(eq=False, slots=True)
class SoundMemory:
    """Bytes of the uploads and decoded sounds that requests hold, at most `most` together."""

    most: int
    _held: Counter[str] = field(default_factory=Counter)  # by principal

    @contextlib.contextmanager
    def share(self) -> Iterator["SoundShare"]:
        """The bytes of one request, freed at the end."""
        share = SoundShare(self, PRINCIPAL.get().name)
        try:
            yield share
        finally:
            share.resize(0)


@dataclass(eq=False, slots=True)
class SoundShare:
    """The part of one request in the memory of sounds."""

    _memory: SoundMemory
    _name: str
    size: int = 0

    def resize(self, size: int) -> None:
        """Hold this many bytes. Raises QueueFullError if there is no room for more."""
        held, more = self._memory._held, size - self.size
        if more > 0 and more > PRINCIPAL.get().room(self._memory.most, held.total(), held[self._name]):
            raise QueueFullError(f"{held.total()} bytes of sound are held and {self._memory.most} may be", RETRY_SECONDS)
        held[self._name] += more
        self.size = size
        if not held[self._name]:
            del held[self._name]


async def decode_file(data: bytes, most_seconds: int) -> np.ndarray:
    """Samples of an uploaded file, [n] int16 at 16 kHz, by a confined process. Raises AudioError, BusyError."""
    question = decode.encoded(decode.Question(data, most_seconds))
    try:
        (samples,) = decode.read_answer(await shared_pool().ask(decode.decoding_task(most_seconds), question))
    except OverrunError as error:
        raise decode.overrun(error, most_seconds) from None
    return samples


@dataclass(slots=True)
class SpeechRequest:
    """A file for a model, and how its windows run. ends: time.monotonic of its deadline."""

    service: Service
    samples: np.ndarray
    settings: SpeechSettings
    salt: bytes = b""
    priority: int = 0
    ends: float | None = None
    seconds: float | None = None  # of its deadline, for errors
    windows: int = 0  # requests of the engine so far
    late: DeadlineError | None = None  # the deadline passed

    async def events(self) -> AsyncIterator[Segment | Transcript]:
        """Each segment when it is final, then the transcript: of the segments that are ready if the deadline passes. Raises the
        errors that `as_api_error` knows; DeadlineError if no segment is ready."""
        service = self.service
        assert service.llm.speech is not None
        assert service.llm.loaded is not None
        audio, tokens = service.llm.speech
        duration = len(self.samples) / RATE
        PRINCIPAL.get().charge("tokens", math.ceil(TOKENS_PER_SECOND * duration))
        context, tokenizer = service.llm.loaded.max_model_len, service.llm.opened.tokenizer
        whole = Transcription(self.samples, None, tokens, tokenizer, audio, context, self.settings, service.llm.detector)
        ready = False
        async for event in self._start(whole):
            ready = True
            yield event
        if self.late is not None and not ready:
            raise self.late
        transcript = whole.transcript("" if self.late is None else DEADLINE)
        service.metrics.record_transcript(transcript, self.windows)
        yield transcript

    async def _start(self, whole: Transcription) -> AsyncIterator[Segment]:
        """Run the sections of a file side by side, and yield their segments in order."""
        jobs = await self._drive(whole.start(), asyncio.Queue())
        places = asyncio.Semaphore(TOGETHER)
        queues: list[asyncio.Queue[Segment | None]] = [asyncio.Queue() for _ in jobs]

        async def run(job: Running, queue: asyncio.Queue[Segment | None]) -> None:
            try:
                async with places:
                    if self.late is None:
                        await self._drive(job, queue)
            except DeadlineError as error:
                self.late = error
            finally:
                queue.put_nowait(None)

        tasks = [asyncio.create_task(run(job, queue)) for job, queue in zip(jobs, queues, strict=True)]
        try:
            for task, queue in zip(tasks, queues, strict=True):
                while (segment := await queue.get()) is not None:
                    yield segment
                await task
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _drive(self, running: Running, queue: "asyncio.Queue[Segment | None]") -> Any:
        """Run a generator of windows to its end. Its segments go to the queue. Returns its result."""
        output: WindowOutput | None = None
        loop = asyncio.get_running_loop()
        while True:
            *earlier, last = await loop.run_in_executor(THREADS, _next_events, running, output)
            for event in earlier:
                assert isinstance(event, Segment)
                queue.put_nowait(event)
            if isinstance(last, Exception):
                raise last
            if not isinstance(last, Window):
                return last
            output = await self._run(last)
            self.windows += 1

    async def _run(self, window: Window) -> WindowOutput:
        """Run one window in the engine."""
        llm, begun = self.service.llm, self.windows > 0
        late = DeadlineError(f"the request was not answered within its deadline of {self.seconds or 0:g} s")
        # A started file is not refused halfway.
        while begun and not llm.queue.has_room([len(window.prompt)]):
            if self.ends is not None and time.monotonic() > self.ends:
                raise late
            await asyncio.sleep(POLL_SECONDS)
        seconds = None if self.ends is None else max(0.0, self.ends - time.monotonic())
        params = window.params.replace(priority=self.priority)
        inflight = llm.submit(
            [window.prompt], params, salt=self.salt, deadline=seconds, begun=begun, source=window.source, align=window.align
        )
        written: dict[int, list[int]] = {}
        logprobs: dict[int, list[float]] = {}
        scores: dict[int, float] = {}  # of beam search
        try:
            async for _, delta in stream_deltas(inflight):
                written.setdefault(delta.index, []).extend(delta.token_ids)
                logprobs.setdefault(delta.index, []).extend(entry.logprob for entry in delta.logprobs)
                if delta.cumulative_logprob is not None:
                    scores[delta.index] = delta.cumulative_logprob
        except DeadlineError:
            raise late from None
        finally:
            llm.abort(inflight)
        order = sorted(written)
        choices = [(written[index], scores.get(index, sum(logprobs[index]))) for index in order]
        return WindowOutput(choices, [logprobs[index] for index in order], inflight[0].pooled)


def _next_events(running: Running, output: WindowOutput | None) -> list[Any]:
    return list(next_events(running, output))


def audio_error(error: AudioError) -> ApiError:
    """The error for a file that cannot be decoded."""
    return ApiError(400, str(error), param="file", code="invalid_audio")
