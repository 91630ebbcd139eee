"""One served model: its name, limits and metrics for handlers (`Service`), and its place in memory (`ServedModel`)."""

import asyncio
import enum
import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace import __version__, host
from headrace.data.params import SamplingParams
from headrace.server.engines.async_llm import AsyncLLM, State
from headrace.server.engines.inflight import TooLongError
from headrace.server.engines.metrics import ModelMetrics, ServerMetrics
from headrace.server.engines.room import Resident, turn_seconds
from headrace.server.http.api_error import ApiError
from headrace.server.settings import Limits, Mode, ServerSettings
from headrace.startup.adapters import named_adapters
from headrace.weights.defaults import Defaults

PAUSES = (2.0, 5.0, 15.0, 60.0)  # seconds after a failed load before the next one


class Residency(enum.StrEnum):
    """Whether a model is in memory."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"


@dataclass(eq=False, slots=True)
class Service:
    """One served model, or an adapter of it. `name`: its name for clients. `adapter`: the adapter's, empty for the base."""

    llm: AsyncLLM
    name: str
    settings: ServerSettings
    metrics: ModelMetrics
    adapter: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    def check_kind(self, speech: bool) -> None:
        """Raises ApiError (400) if this is known not to be a speech model, or to be one. Raises EngineDownError if `speech` is
        wanted of a model that is being loaded."""
        if (self.llm.speech is not None) == speech:
            return
        if speech:
            _ = self.llm.opened
            message = f"{self.name} reads no sound; use a speech model, such as Whisper"
        else:
            message = f"{self.name} transcribes sound and reads no text; send a file to /v1/audio/transcriptions"
        raise ApiError(400, message, param="model", code="unsupported")

    @property
    def adapters(self) -> list[str]:
        """Names of the model's adapters."""
        return list(named_adapters(self.llm.settings.get("adapter")))

    def with_adapter(self, params: SamplingParams) -> SamplingParams:
        """The parameters of a request to this model."""
        return params.replace(adapter=self.adapter) if self.adapter else params

    def deadline(self, asked: float | None) -> float | None:
        """Return the seconds after which a request ends: its own deadline, or the server's."""
        return self.limits.deadline if asked is None else asked

    @property
    def defaults(self) -> Defaults:
        """Sampling settings of requests without their own."""
        return {} if self.settings.sampling_defaults == "neutral" else self.llm.opened.defaults

    @property
    def limits(self) -> Limits:
        return self.settings.limits

    @property
    def fingerprint(self) -> str:
        """OpenAI's system_fingerprint. It changes with the version, the model and its number format."""
        note = "" if self.llm.loaded is None else self.llm.loaded.note
        return f"fp_{hashlib.sha256(f'{__version__} {self.name} {note}'.encode()).hexdigest()[:10]}"

    def check_room(self, prompts: Sequence[Sequence[int]], answer: int | None, what: str) -> None:
        """Raises TooLongError if the longest prompt and `answer` tokens exceed the context. `what` names the prompt."""
        if answer is None or self.llm.loaded is None:
            return
        context, prompt = self.llm.loaded.max_model_len, max(map(len, prompts), default=0)
        if prompt + answer > context:
            raise TooLongError(
                f"This model's maximum context length is {context} tokens. However, you requested {prompt + answer} tokens "
                f"({prompt} in the {what}, {answer} in the completion); lower max_tokens, or shorten the {what}"
            )


def make_service(llm: AsyncLLM, name: str, settings: ServerSettings, figures: ServerMetrics) -> Service:
    """Return a model with its metrics, ready to be served."""
    metrics = ModelMetrics(figures, name)
    llm.replicas.observe(metrics)
    return Service(llm, name, settings, metrics)


Ticket = asyncio.Future[None]  # of a request that waits for a model; its result counts the request as a user


@dataclass(eq=False, slots=True)
class ServedModel:
    """A model with its mode, size and use. `ModelLoader` loads and unloads it."""

    service: Service
    mode: Mode = Mode.PINNED
    preload: bool = True
    aliases: tuple[str, ...] = ()
    size: int = 0  # bytes: planned, or measured if that was more
    speech: bool = False  # a speech model by its files
    users: int = 0  # requests between arrival and response, or first event of a stream
    used: float = 0.0  # time of the last request
    tickets: list[Ticket] = field(default_factory=list)
    since: float = 0.0  # time of the first ticket
    yields: bool = False  # its turn has ended: it finishes its requests, new ones wait
    closing: bool = False  # it is being unloaded; new requests wait
    begun: float = 0.0  # time at which the last load began
    ready: float = 0.0  # time at which the model was loaded
    failures: int = 0  # failed loads in a row
    retry: float = 0.0  # time of the next load after a failure

    @property
    def name(self) -> str:
        return self.service.name

    @property
    def llm(self) -> AsyncLLM:
        return self.service.llm

    @property
    def transcribes(self) -> bool:
        """Whether this is a speech model; unknown ones count as others until they are loaded."""
        return self.speech or self.llm.speech is not None

    @property
    def in_memory(self) -> bool:
        return self.llm.running

    @property
    def busy(self) -> bool:
        return bool(self.users or self.llm.in_use)

    @property
    def residency(self) -> Residency:
        if not self.in_memory:
            return Residency.UNLOADED
        return Residency.LOADING if self.llm.state is State.LOADING else Residency.LOADED

    @property
    def answers(self) -> bool:
        """Whether a request needs to wait for no load."""
        return self.residency is Residency.LOADED and not self.yields and not self.closing

    @property
    def progress(self) -> float:
        """Loaded share of the planned bytes, 0 to 1; the resident bytes of the process stand for the loaded ones."""
        if self.residency is not Residency.LOADING:
            return float(self.in_memory)
        pid = self.llm.pid
        return min(0.99, host.held_memory(pid) / self.size) if pid is not None and self.size else 0.0

    @property
    def resident(self) -> Resident:
        """Its data for the choice of models that make room. A model that is being loaded has not begun its turn."""
        ends = self.ready + turn_seconds(self.ready - self.begun)
        return Resident(self.name, self.size, self.mode is Mode.PINNED, self.busy, self.used, ends)

    def admit(self) -> None:
        """Let the waiting requests go on, as users of the model."""
        tickets, self.tickets = self.tickets, []
        for ticket in tickets:
            if not ticket.done():
                self.users += 1
                ticket.set_result(None)

    def refuse(self, error: Exception) -> None:
        """Fail the waiting requests."""
        tickets, self.tickets = self.tickets, []
        for ticket in tickets:
            if not ticket.done():
                ticket.set_exception(error)

    def record_load(self) -> None:
        """Record that the model is loaded, and its measured size if that exceeds the plan."""
        self.ready = self.used = time.monotonic()
        self.failures, self.retry = 0, 0.0
        if self.llm.loaded is not None:
            self.size = max(self.size, self.llm.memory)

    def record_failure(self) -> float:
        """Record a failed load; returns the seconds until the next one."""
        pause = PAUSES[min(self.failures, len(PAUSES) - 1)]
        self.failures += 1
        self.retry = time.monotonic() + pause
        return pause
