"""`AsyncLLM`: an engine for asyncio, in a process of its own that is restarted when it ends or hangs."""

import asyncio
import functools
import itertools
import logging
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from headrace.audio.vad import VoiceDetector
from headrace.audio.vocabulary import SpeechTokens
from headrace.data.config import Audio
from headrace.data.explicit import Prompt, as_prompt
from headrace.data.fields import PROMPT
from headrace.data.params import SamplingParams
from headrace.data.plan import Align, Threshold
from headrace.data.settings import ModelSettings, RoutePolicy
from headrace.data.sources import Frames
from headrace.data.types import Delta
from headrace.parallel.hosts.address import LOOPBACK
from headrace.server.access.principals import PRINCIPAL
from headrace.server.access.queueing import AdmissionQueue, QueueFullError
from headrace.server.engines import replay
from headrace.server.engines.engine_requests import BANNED, REPLAYED, EngineRequests
from headrace.server.engines.inflight import (
    DeadlineError,
    EngineDownError,
    InflightRequest,
    QuarantinedError,
    RequestFailedError,
    RequestRefusedError,
    TooLongError,
    WakeupEvent,
    stream_deltas,
)
from headrace.server.engines.messages import Grammar, Load, Loaded, PeerLink, Submit
from headrace.server.engines.quarantine import MOST_CRASHES, Quarantine
from headrace.server.engines.remote_engine import remote_addresses
from headrace.server.engines.replica import LoadError, Replica
from headrace.server.engines.replicas import Replicas
from headrace.server.engines.router import POLICIES
from headrace.server.engines.shared_weights import SharedWeights
from headrace.server.engines.supervision import State
from headrace.startup import classifier
from headrace.startup.bits import bits_digest
from headrace.startup.encoding import LONG, count_at_least, encode_long
from headrace.startup.opening import Opened, open_model
from headrace.startup.speech import speech_model, voice_detector
from headrace.weights.digest import files_digest

__all__ = ["AsyncLLM", "EngineDownError", "LoadError", "QueueFullError", "RequestFailedError", "RequestRefusedError", "State"]

log = logging.getLogger("headrace.server")

NOT_STARTED = "this LLM is not started; use `async with AsyncLLM(…) as llm:`, or await its start()"
CLOSED = "this LLM is closed; await its start() to load the model again"
# A text with more characters per token of the context is counted first, as it is probably too long.
CHARS_PER_TOKEN = 4
INLINE = 4096  # characters encoded on the event loop; longer texts go to a thread


class AsyncLLM:
    """A model ready to generate, behind a queue, in a process of its own.

    `settings`: arguments of `headrace.LLM`. `stuck_after`: seconds without a message after which the process is restarted;
    `load_timeout`: seconds until it must be ready. With `replicas` above 1 the model has several processes; `route` (affinity,
    least, round) chooses one for each request. `engines`: addresses (HOST:PORT) of engines that `headrace engine` runs, in
    place of processes on this host; `key_file` has the key of the links to them, and the engines have their own settings. With
    `kv_peers` a replica fetches the K/V of a prefix from the replica that has them. Use it as an async context manager, or call
    `start` and `close`.

        async with AsyncLLM("smollm2-135m") as llm:
            async for delta in llm.generate("The mill stands by", SamplingParams(max_tokens=32)):
                print(delta.text, end="")
    """

    def __init__(
        self,
        model: str | Path,
        *,
        max_queued_requests: int = 256,
        max_queued_tokens: int = 262_144,
        stuck_after: float = 60.0,
        load_timeout: float = 600.0,
        replicas: int = 1,
        route: RoutePolicy = "affinity",
        engines: Sequence[str] = (),
        key_file: str | Path | None = None,
        kv_peers: bool = False,
        **settings: Any,
    ) -> None:
        if replicas < 1:
            raise ValueError(f"replicas {replicas}: must be 1 or more")
        if route not in POLICIES:
            raise ValueError(f"route {route!r}: must be {', '.join(POLICIES)}")
        remote = remote_addresses(engines, key_file, staged=settings.get("stage_hosts") is not None)
        if remote and replicas > 1:
            raise ValueError(f"replicas {replicas}: engines on other hosts take the place of replicas; leave one of them out")
        if kv_peers and replicas == 1 and not remote:
            raise ValueError("kv_peers: there is one replica, so no other one has K/V; give replicas=2 or more, or engines")
        self.model = str(model)
        self.settings: Mapping[str, Any] = {"preset": "online", **settings}
        if key_file is not None:
            self.settings = {**self.settings, "key_file": str(key_file)}
        self.queue = AdmissionQueue(max_queued_requests, max_queued_tokens)
        self._undelivered: set[str] = set()  # ids of requests whose caller has not called `abort`
        self.quarantine = Quarantine()
        self.replicas = Replicas(
            replicas,
            stuck_after,
            load_timeout,
            open=self._open,
            quarantine=self.quarantine,
            route=route,
            remote=remote,
            peers=kv_peers,
        )
        self._peers = PeerLink(LOOPBACK, 0, secrets.token_bytes(32)) if kv_peers and not remote else None
        self.inflight = self.replicas.inflight
        self._weights: SharedWeights | None = None  # of several replicas
        self._opened: Opened | None = None
        self._files = ""  # digest of the model's files, for engines on other hosts
        self._opening = asyncio.Lock()
        self.classifier: classifier.Classifier | None = None  # once the model is open
        self.speech: tuple[Audio, SpeechTokens] | None = None  # of a speech model, once it is open
        self.detector: VoiceDetector | None = None  # of a speech model
        self._ids = itertools.count()
        self._run = secrets.token_hex(4)
        self._idle = NOT_STARTED  # why no engine runs; "" from `begin` to `close`

    def set_adapters(self, paths: Mapping[str, Path]) -> None:
        """Change the adapters of the next load. paths: by name."""
        setting = ",".join(f"{name}={path}" for name, path in paths.items())
        self.settings = {**self.settings, "adapter": setting or None}

    # -- public ----------------------------------------------------------------------------------------------
    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Load the model and wait until it is ready. Raises LoadError."""
        self.begin()
        await self.ready()

    def begin(self) -> None:
        """Start loading, and return at once."""
        self.replicas.begin()
        self._idle = ""

    async def ready(self) -> None:
        """Wait until requests can be served. Raises LoadError if the model cannot be loaded, or is not being loaded."""
        if self._idle:
            raise LoadError(self._idle)
        await self.replicas.ready()

    @property
    def requests(self) -> EngineRequests:
        """The first replica, with its requests."""
        return self.replicas.engines[0]

    @property
    def replica(self) -> Replica:
        """The first replica."""
        return self.requests.replica

    @property
    def state(self) -> State:
        return self.replicas.state

    @property
    def detail(self) -> str:
        """Why no engine is ready: one line."""
        return self.replicas.detail

    @property
    def restarts(self) -> int:
        return sum(engine.replica.supervision.restarts for engine in self.replicas.engines)

    @property
    def loaded(self) -> Loaded | None:
        """Sizes of the model, once it was loaded."""
        return self.replicas.loaded

    @property
    def memory(self) -> int:
        """Bytes of weights and K/V in this host's memory, of all replicas; 0 if unknown."""
        if self.replicas.remote:
            return 0
        loaded = [engine.replica.loaded for engine in self.replicas.engines]
        shared = 0 if self._weights is None else self._weights.bytes
        return sum(one.memory for one in loaded if one is not None) + shared

    @property
    def opened(self) -> Opened:
        """Tokenizer, chat template and settings of the model. Raises EngineDownError while it is being loaded."""
        if self._opened is None:
            raise self._refusal()
        return self._opened

    def _refusal(self) -> EngineDownError:
        """Return the error of requests in the current state."""
        return EngineDownError(self._idle) if self._idle else self.replicas.refusal()

    @property
    def running(self) -> bool:
        """Whether the model is in memory, being loaded, or being started again."""
        return self.replicas.running

    @property
    def in_use(self) -> bool:
        """Whether a caller still waits for a request or reads its answer, and so may need the tokenizer."""
        return bool(self._undelivered)

    @property
    def pid(self) -> int | None:
        """Id of the engine process of the first replica."""
        return self.replica.pid

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, salt: bytes = b""
    ) -> AsyncIterator[Delta]:
        """Yield the deltas of one prompt as they arrive. Ending the loop or cancelling the task aborts the request.

        Raises RequestRefusedError for an impossible request, RequestFailedError if this request fails, QueueFullError if the
        queue is full, EngineDownError if there is no engine, or if it ended and the request cannot go on in the next one.
        """
        plain = as_prompt(prompt)
        ids = await self.encode(plain) if isinstance(plain, str) else plain
        (request,) = self.submit([ids], params or SamplingParams(), salt=salt)
        try:
            async for _, delta in stream_deltas([request]):
                yield delta
        finally:
            self.abort([request])

    async def encode(
        self, text: str, *, add_special: bool = True, parse_special: bool = True, marked: bool = False, limited: bool = True
    ) -> list[int]:
        """Return the token ids of a text, as `Tokenizer.encode`. Long texts do not block the event loop. With `limited`, a text
        far longer than the context is not encoded to its end. Raises TokenizerError, BusyError, TooLongError."""
        options = {"add_special": add_special, "parse_special": parse_special, "marked": marked, "limited": limited}
        return (await self.encode_all([text], **options))[0]

    async def encode_all(
        self,
        texts: list[str],
        *,
        add_special: bool = True,
        parse_special: bool = True,
        marked: bool = False,
        limited: bool = True,
        writes: bool = True,
    ) -> list[list[int]]:
        """`encode` for several texts. `writes`: they are prompts, not texts to embed or classify."""
        opened, size = self.opened, sum(map(len, texts))
        encode = functools.partial(opened.tokenizer.encode, add_special=add_special, parse_special=parse_special, marked=marked)
        if limited and self.loaded is not None:
            context = self.loaded.max_model_len
            for text in texts:
                if len(text) <= max(INLINE, CHARS_PER_TOKEN * context):
                    continue
                if (count := await count_at_least(text, encode, context)) > context:
                    raise _too_long(context, f"at least {count}", writes)
        if size > LONG:
            return await encode_long(opened.path, texts, add_special, parse_special, marked)
        return [encode(text) for text in texts] if size <= INLINE else await asyncio.to_thread(lambda: list(map(encode, texts)))

    def submit(
        self,
        prompts: list[list[int]],
        params: SamplingParams,
        *,
        salt: bytes = b"",
        pool: str = "",
        rule: tuple[str, Threshold] | None = None,
        align: Align | None = None,
        deadline: float | None = None,
        begun: bool = False,
        grammar: Grammar | None = None,
        source: Frames | None = None,
    ) -> list[InflightRequest]:
        """Queue prompts, all or none; the caller must call `abort` in the end.

        pool: compute embeddings (first, last or mean). rule: classify, with this exit criterion and threshold. align: align
        prompts with the source. deadline: seconds after which an unfinished request fails with DeadlineError. begun: others of
        the same API request were accepted, so these are accepted while the server drains or the engine is started again, too.
        grammar: result of `compile_format` for structured outputs. source: a window of sound, for a speech model.

        Raises QueueFullError, EngineDownError, RequestRefusedError (QuarantinedError).
        """
        goes_on = begun and (self.state is State.DRAINING or self.state in REPLAYED)
        goes_on = goes_on or self.replicas.reconnecting
        if not (self.state is State.READY or goes_on) or self.loaded is None:
            raise self._refusal()
        context, writes = self.loaded.max_model_len, not pool and rule is None and align is None
        for ids in prompts:
            if len(ids) + writes > context:
                raise _too_long(context, str(len(ids)), writes)
        if len(prompts) > (most := self.queue.max_requests):
            raise RequestRefusedError(
                f"the prompt is a list of {len(prompts)} and the queue holds {most} (--max-queued-requests); send fewer", PROMPT
            )
        own = PRINCIPAL.get().salted(salt)
        more: dict[str, Any] = {"seed": replay.request_seed(params), "source": source, "align": align, "grammar": grammar}
        messages = [Submit(f"{self._run}-{next(self._ids)}", ids, params, own, pool, rule, **more) for ids in prompts]
        suspects = [self.quarantine.find(message) for message in messages]
        if any(suspect is not None and suspect.ends >= MOST_CRASHES for suspect in suspects):
            raise QuarantinedError(BANNED)
        self.queue.enter([len(ids) for ids in prompts])
        inflight = []
        wakeup = WakeupEvent()
        for message, suspect in zip(messages, suspects, strict=True):
            request = InflightRequest(message.request_id, message.prompt, params, self.queue, wakeup)
            request.message = message
            request.salted = bool(message.salt) and request.principal.private
            message.turn = request.turn
            self._undelivered.add(request.request_id)
            self.replicas.send(request, suspect)
            if deadline is not None:
                request.timer = asyncio.get_running_loop().call_later(deadline, self._expire, request, deadline)
            inflight.append(request)
        return inflight

    def abort(self, inflight: Sequence[InflightRequest]) -> None:
        """End requests whose caller is done with them; the engine frees the K/V blocks of those that run."""
        for request in inflight:
            self._undelivered.discard(request.request_id)
            self.replicas.abort(request)

    async def check(self) -> str:
        """Check the accounts of the engine's K/V cache. Returns the problem, one line, or "". Raises EngineDownError."""
        return await self.replicas.check()

    def use_engines(self, engines: Sequence[str]) -> None:
        """Use the engines at these addresses from now on, of an LLM that was made with `engines`. Requests go on."""
        self.replicas.use(remote_addresses(engines, self.settings.get("key_file")) if engines else ())

    def renew(self, grace: float) -> None:
        """Replace the engine processes one after the other, and return at once. grace: seconds for the requests of a process to
        end; those left go on elsewhere."""
        self.replicas.renew(grace)

    def _expire(self, request: InflightRequest, deadline: float) -> None:
        if request.request_id in self.inflight:
            request.fail(DeadlineError(f"the request was not answered within its deadline of {deadline:g} s"))
            self.abort([request])

    async def drain(self, grace: float) -> bool:
        """Accept no new requests and wait up to `grace` seconds for the open ones; returns whether all have ended."""
        self.replicas.drain()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + grace
        while self._undelivered and loop.time() < deadline:
            await asyncio.sleep(0.02)
        return not self.inflight

    async def close(self) -> None:
        """End the engine process; requests in flight fail. A second call does nothing; `start` loads the model again."""
        self._idle = CLOSED
        await self.replicas.close()
        self._weights = None
        if self._opened is not None:
            self._opened.source.close()
            self._opened = None

    # -- the engine process --------------------------------------------------------------------------------------------
    async def _open(self, engine: EngineRequests) -> Load:
        """Open the model's files in this process; returns the Load message of a replica. Raises LoadError."""
        async with self._opening:  # engines on other hosts all begin at once
            if self._opened is None:
                await self._open_files()
        load = Load(self.model, dict(self.settings), log.getEffectiveLevel(), engine.replica.beat)
        if self.replicas.remote:
            load.files = self._files
        elif engine.name:
            load.replica, load.processors = engine.name, self.replicas.processors(engine.number)
            load.weights = self._weights_file(self.opened)
            load.peers = self._peers
        return load

    async def _open_files(self) -> None:
        """Open tokenizer and template in this process. Raises LoadError."""
        try:
            trusts = bool(self.settings.get("parse_special"))
            opened = await asyncio.to_thread(open_model, self.model, parse_special=trusts)
            if (folder := self.settings.get("classifier")) is not None:
                self.classifier = await asyncio.to_thread(classifier.load, folder, opened)
            if opened.config.source is not None and opened.config.source.audio is not None:
                self.speech = await asyncio.to_thread(speech_model, opened)
                self.detector = await asyncio.to_thread(voice_detector)
            if self.replicas.remote:
                self._files = await asyncio.to_thread(files_digest, opened.path)
            self._opened = opened
        except (ValueError, OSError) as error:
            raise LoadError(" ".join(str(error).split())) from error

    def _weights_file(self, opened: Opened) -> int | None:
        """Return the descriptor of the file in memory for the weights of all replicas: a new one if the model has changed. None
        if the system has no such files."""
        bits = bits_digest(opened.path, ModelSettings(**self.settings), "")
        if self._weights is None or self._weights.bits != bits:
            self._weights = SharedWeights.make(bits)
        return None if self._weights is None else self._weights.descriptor


def _too_long(context: int, count: str, writes: bool) -> TooLongError:
    included, what = (", the answer included,", "prompt") if writes else ("", "text")
    return TooLongError(
        f"This model's maximum context length is {context} tokens{included} and the {what} has {count}; shorten the {what}"
    )
